"""One fine-tuning job by finetune and by TRL on a CPU: speed, peaks and losses. On a GPU: `beside-...` of gpu_check.py.

    python benchmarks/beside_peers.py [--job NAME]

LoRA on chats beside the plain TRL script of overhead.py, which recomputes everything (TRL's default)
or nothing. Ours has that run's resident peak as its `memory.budget`, and `memory.checkpointing: auto` recomputes no
more than it must within that. Each round runs the four in turn, and ratios are taken within it. A step trains the same
rows on both sides: ours without padding, which TRL can leave out with FlashAttention alone, with fused kernels and
small tiles of logits. In float32 both sides multiply alike; in bf16, on a CPU without a unit for it, fused kernels
multiply in float32 instead, so that job stands for itself. TRL imports DeepSpeed where it is installed, which takes
memory: measure in an environment without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forecast_cpu
import gpu_jobs
import harness
import overhead

from finetune import load_config

BOUNDS = {"trl": 0.7, "trl-kept": 0.85}
"""Largest share of the training time of TRL with everything recomputed (its default) and with nothing."""
RECOMPUTED = {"trl": "all", "trl-kept": "none"}
OURS = {"trl": "finetune", "trl-kept": "finetune-kept"}
"""Our side of each comparison, within the memory of TRL's."""
SETTINGS = ("kernels.fused=on", "data.packing=true", "memory.loss_tokens=64")
"""Of our sides, beside those of the job."""
EQUAL = 1e-3
"""How far losses may differ in float32, in nats per token."""

QUESTIONS = ("fast", "equal", "small")
"""Asked of each job: whether its time, losses and resident peak are within their bounds."""

JOBS = {
    "tiny": overhead.Job(steps=20, threads=1),
    "25M": overhead.Job(steps=4, threads=1, batch=8, tokens=128, logged=1),
    "110M": overhead.Job(steps=3, threads=1, batch=4, tokens=128, logged=1),
    "tiny, bf16": overhead.Job(steps=10, threads=1, precision="bf16"),
}
Round = Mapping[str, dict[str, Any]]
"""What each side's run measured, by side."""


ARCHITECTURES = {
    "25M": forecast_cpu.config_json("llama", 512, 8, (8, 4), 2048),
    "110M": forecast_cpu.ARCHITECTURES["llama-110m"],
}
"""Of random weights; the other jobs have the built-in base."""


def main() -> None:
    """Run the jobs and write after each; those in float32 must keep their bounds."""
    options = _options()
    # Some jobs are measured again beside what stands in the file of the others.
    jobs = harness.saved(options.output, "jobs") if options.job else {}
    for name in options.job or JOBS:
        with tempfile.TemporaryDirectory(prefix="beside-") as scratch:
            jobs[name] = _job(JOBS[name], ARCHITECTURES.get(name), options.rounds, Path(scratch))
        harness.save(options.output, {"bounds": {**BOUNDS, "losses": EQUAL}, "jobs": jobs}, threads=1)
        print(f"\n{name}\n{_table(jobs[name])}", flush=True)
    compared = [one for name, job in jobs.items() if JOBS[name].precision == "fp32" for one in job["beside"].values()]
    sys.exit(0 if all(one[question] for one in compared for question in QUESTIONS) else 1)


def _job(job: overhead.Job, architecture: Mapping[str, Any] | None, rounds: int, scratch: Path) -> dict[str, Any]:
    bench = overhead.Bench(scratch, of_random_weights(job, architecture, scratch))
    # The first round is the warm-up (page cache, byte code), and shows memory: what is freed is given back at once.
    bench.allocator = harness.ALLOCATOR
    memory, chosen = _within_memory(bench)
    bench.allocator = overhead.ALLOCATORS["kept"]
    runs = [_round(bench, chosen) for _ in range(rounds)]
    return {
        "settings": list(map(harness.without_paths, [*job.settings, *SETTINGS])),
        "checkpointing": {**RECOMPUTED, **chosen},
        "resident_bytes": {name: side["resident_bytes"] for name, side in memory.items()},
        "beside": {name: beside_trl(runs, memory, name, bound) for name, bound in BOUNDS.items()},
        "losses": {name: side["losses"] for name, side in runs[-1].items()},
        "runs": [{name: overhead.seconds(side) for name, side in run.items()} for run in runs],
    }


def of_random_weights(job: overhead.Job, architecture: Mapping[str, Any] | None, scratch: Path) -> overhead.Job:
    """The job with random weights of an `architecture`, made below `scratch`; without one, as it is."""
    if not architecture:
        return job
    (scratch / "model").mkdir()
    values = {**architecture, "architectures": ["LlamaForCausalLM"]}
    (scratch / "model" / "config.json").write_text(json.dumps(values))
    weights, _ = gpu_jobs.saved_weights(scratch / "weights", str(scratch / "model"), "cpu")
    return dataclasses.replace(job, model=weights)


def _within_memory(bench: overhead.Bench) -> tuple[Round, dict[str, Any]]:
    """TRL's sides, each followed by ours with its peak for a budget; and what each of ours then recomputes."""
    memory, chosen = {}, {}
    for trl, recomputed in RECOMPUTED.items():
        ours = OURS[trl]
        memory[trl] = bench.plain(f"--checkpointing={recomputed}")
        budget = f"memory.budget={memory[trl]['resident_bytes']}"
        memory[ours] = bench.finetune(*SETTINGS, "memory.checkpointing=auto", budget)
        chosen[ours] = load_config(bench.scratch / "finetune" / "config.yaml").memory.checkpointing
    return memory, chosen


def _round(bench: overhead.Bench, chosen: Mapping[str, Any]) -> Round:
    measured = {}
    for trl, recomputed in RECOMPUTED.items():
        measured[trl] = bench.plain(f"--checkpointing={recomputed}")
        measured[OURS[trl]] = bench.finetune(*SETTINGS, f"memory.checkpointing={json.dumps(chosen[OURS[trl]])}")
    return measured


def beside_trl(runs: Sequence[Round], memory: Round, name: str, bound: float) -> dict[str, Any]:
    """Time, losses and resident peak of finetune beside those of one of TRL's settings."""
    ours = OURS[name]
    found = overhead.summary([{"finetune": run[ours], "plain": run[name]} for run in runs])
    apart = overhead.loss_difference(runs[-1][ours], runs[-1][name])
    return {
        **found,
        "largest_loss_difference": apart,
        "fast": found["ratios"]["loop_seconds"]["median"] <= bound,
        "equal": apart <= EQUAL,
        "small": memory[ours]["resident_bytes"] <= memory[name]["resident_bytes"],
    }


def _table(found: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            *(f"{one['ratios'][measure]['median']:.3f}" for measure in ("loop_seconds", "process_seconds")),
            f"{one['ratios']['loop_seconds']['least']:.3f} to {one['ratios']['loop_seconds']['largest']:.3f}",
            " / ".join(harness.mib(found["resident_bytes"][side]) for side in (OURS[name], name)),
            f"{one['largest_loss_difference']:.1e}",
            *("yes" if one[question] else "NO" for question in QUESTIONS),
        )
        for name, one in found["beside"].items()
    ]
    header = ("finetune beside", "loop", "process", "of the rounds", "MiB", "losses apart", *QUESTIONS)
    return harness.table(header, rows)


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__, "beside_peers_cpu.json")
    parser.add_argument("--job", action="append", choices=JOBS, help="only this job (may be repeated)")
    parser.add_argument("--rounds", type=int, default=3, help="after a warm-up (default 3)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
