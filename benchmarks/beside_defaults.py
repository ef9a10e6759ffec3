"""LoRA by finetune and by a plain TRL script on a CPU, each with its defaults, as whole processes from start to exit.

    python benchmarks/beside_defaults.py [--job NAME]

The job of beside_peers.py, at three sizes, in float32 and of more steps. Ours has no key that decides speed or memory:
kernels, what is recomputed and the tiles of logits are chosen by the run, which also forecasts its memory first,
answers questions before and after, and writes plot and report; what it keeps in caches is removed before. TRL
recomputes everything, its default. Both sides see the same rows in the same order with the same initial adapter, padded
alike. Each run of TRL is followed by one of ours, and ratios are taken within these pairs.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import beside_dpo
import beside_peers
import harness
import overhead

SIDES = {"trl": ["--checkpointing=all"]}
QUESTIONS = ("fast", "equal")
"""Asked of each job; not whether it is small, as a run keeps what fits the machine instead of computing it again."""


@dataclasses.dataclass(frozen=True)
class Job(overhead.Job):
    """A job of the overhead benchmark that leaves to the run what is recomputed."""

    @property
    def settings(self) -> list[str]:
        return [setting for setting in super().settings if not setting.startswith("memory.")]


# No row of the built-in data has more than 160 tokens: one that is cut is cut in another way by TRL.
JOBS = {
    "2M": Job(steps=150, threads=1),
    "25M": Job(steps=60, threads=1, batch=8, tokens=160),
    "125M": Job(steps=100, threads=1, batch=4, tokens=160),
}
ARCHITECTURES = {"25M": beside_peers.ARCHITECTURES["25M"], "125M": beside_peers.ARCHITECTURES["110M"]}
"""Of random weights, the larger with embeddings apart from the head; the other job has the built-in base."""


def main() -> None:
    parser = harness.parser(__doc__, "beside_defaults.json")
    parser.add_argument("--job", action="append", choices=JOBS, help="only this job (may be repeated)")
    parser.add_argument("--rounds", type=int, default=1, help="pairs of runs (default 1)")
    parser.add_argument("--steps", type=int, help="instead of the job's own")
    options = parser.parse_args()
    # Some jobs are measured again beside what stands in the file of the others.
    jobs = harness.saved(options.output, "jobs") if options.job else {}
    for name in options.job or JOBS:
        job = dataclasses.replace(JOBS[name], steps=options.steps or JOBS[name].steps)
        with tempfile.TemporaryDirectory(prefix="beside-") as scratch:
            jobs[name] = _job(job, ARCHITECTURES.get(name), options.rounds, Path(scratch))
        harness.save(options.output, {"bounds": beside_dpo.BOUNDS, "jobs": jobs}, job.threads)
        print(f"{name}\n{beside_dpo.table(jobs[name]['beside'])}", flush=True)
    sys.exit(0 if all(job["beside"]["trl"][question] for job in jobs.values() for question in QUESTIONS) else 1)


def _job(job: Job, architecture: Mapping[str, Any] | None, rounds: int, scratch: Path) -> dict[str, Any]:
    bench = overhead.Bench(scratch, beside_peers.of_random_weights(job, architecture, scratch))
    bench.allocator = harness.ALLOCATOR  # memory that is freed is given back at once, so that peaks are what is used
    runs = [beside_dpo.one_round(bench, SIDES) for _ in range(rounds)]
    return {
        "steps": job.steps,
        "settings": list(map(harness.without_paths, job.settings)),
        "beside": {side: beside_dpo.beside(runs, runs[-1], side) for side in SIDES},
        "runs": beside_dpo.seconds(runs),
    }


if __name__ == "__main__":
    main()
