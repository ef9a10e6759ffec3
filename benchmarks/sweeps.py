"""A sweep of eight learning rates beside eight lone runs and eight plain TRL scripts: time, memory, and the winner.

    python benchmarks/sweeps.py [--only JOB/SIDE] [--steps N] [--folder DISK]

On the built-in base and on one of 125M weights grown from it, in float32 on one thread. Every lone run and every script
is a process of its own, from start to exit; a sweep is one, once with all members trained to the end and once with
successive halving. Rows and steps are the same on all sides; the scripts evaluate nothing. Each side of a job is
written as it ends, in a few minutes on an idle machine, and ratios are taken of those that are there; an interrupted
side is done anew, but for lone runs and scripts that ended.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import harness
import overhead

RATES = ("1e-4", "3e-4", "1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2", "3e-2")
JOBS = {"2M": overhead.Job(steps=40, threads=1), "125M": overhead.Job(steps=16, threads=1, batch=4, tokens=160)}
HELD_OUT = {"2M": 64, "125M": 16}
"""Rows to evaluate on, fewer than the members are trained on."""
# Writes rows to train on and to evaluate on.
_ROWS = """
import json, sys
from finetune.data import sources

rows = [json.dumps(row.fields) for row in sources.rows("builtin:python_docs")]
for path, part in zip(sys.argv[2:], (rows[int(sys.argv[1]):], rows[:int(sys.argv[1])])):
    open(path, "w", encoding="utf-8").write("\\n".join(part) + "\\n")
"""


def main() -> None:
    parser = harness.parser(__doc__, "sweeps.json")
    parts = [f"{job}/{side}" for job in JOBS for side in SIDES]
    parser.add_argument("--only", action="append", choices=parts, help="only this side of a job (may be repeated)")
    parser.add_argument("--folder", type=Path, help="where the grown base is kept; by default it is made anew")
    parser.add_argument("--steps", type=int, help="of each run, instead of the job's own")
    options = parser.parse_args()
    jobs = harness.saved(options.output, "jobs")
    for part in options.only or parts:
        print(part, file=sys.stderr, flush=True)
        name, _, side = part.partition("/")
        into = jobs.setdefault(name, {"sides": {}})
        steps = options.steps or JOBS[name].steps
        unfinished = into.setdefault("unfinished", {}).setdefault(f"{side}, {steps} steps", {})
        save = functools.partial(harness.save, options.output, {"rates": RATES, "jobs": jobs}, threads=1)
        with tempfile.TemporaryDirectory(prefix="sweeps-") as scratch:
            job = _on_base(name, options.folder or Path(scratch))
            bench = Bench(Path(scratch), job, HELD_OUT[name], steps, unfinished, save)
            measured = SIDES[side](bench)
        into["sides"][side] = measured
        del into["unfinished"][f"{side}, {steps} steps"]
        into |= {"settings": bench.described, "beside": beside(into["sides"])}
        save()
        print(json.dumps({part: measured, "beside": into["beside"]}), flush=True)


def _on_base(name: str, folder: Path) -> overhead.Job:
    """A job with its base, which is in `folder` if it is not the built-in one."""
    if name == "2M":
        return JOBS[name]
    if not (folder / "base/config.json").is_file():
        import grown_base

        grown_base.write(folder / "base")
    return dataclasses.replace(JOBS[name], model=folder / "base")


class Bench:
    """Runs the sides of a job, each process in a fresh directory.

    `measured`: what was measured by `measure` in an earlier start, to which it adds, calling `save`.
    """

    def __init__(
        self, scratch: Path, job: overhead.Job, held_out: int, steps: int, measured: dict[str, Any],
        save: Callable[[], None],
    ) -> None:  # fmt: skip
        self.scratch, self.job, self.steps, self.measured, self.save = scratch, job, steps, measured, save
        self.rows, self.held_out = scratch / "rows.jsonl", scratch / "held_out.jsonl"
        harness.succeeded(harness.python("-c", _ROWS, str(held_out), self.rows, self.held_out))
        (scratch / "job.yaml").write_text("")

    @property
    def settings(self) -> list[str]:
        job = self.job
        return [
            f"model.name={job.model}", "quantization.kind=none", f"data.train={self.rows}",
            f"data.eval={self.held_out}", f"data.max_length={job.tokens}", f"training.batch_size={job.batch}",
            f"training.max_steps={self.steps}", "training.precision=fp32", "training.eval_every=null",
            "output.merge=false",
        ]  # fmt: skip

    @property
    def described(self) -> list[str]:
        return list(map(harness.without_paths, self.settings))

    def measure(self, one: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
        """What `one` measures of each rate, saved as it ends."""
        for rate in RATES:
            if (name := f"learning_rate={rate}") not in self.measured:
                self.measured[name] = one(rate)
                self.save()
                print(f"{name}: {self.measured[name]['seconds']:.0f} s", file=sys.stderr, flush=True)
        return {**self.measured}

    def run(self, *command: str | Path) -> dict[str, float]:
        """Run a process to its end; its wall and CPU seconds."""
        extra = {**harness.ALLOCATOR, "HF_DATASETS_CACHE": str(self.scratch / "cache")}
        done = harness.succeeded(harness.python(*command, threads=self.job.threads, extra=extra))
        return {"seconds": done.wall_seconds, "cpu_seconds": done.cpu_seconds}

    def finetune(self, command: str, folder: Path, *arguments: str) -> dict[str, float]:
        return self.run(
            "-m", "finetune", command, self.scratch / "job.yaml", *self.settings, f"output.dir={folder}", *arguments
        )


def lone(bench: Bench) -> dict[str, Any]:
    """A run for each rate."""

    def one(rate: str) -> dict[str, Any]:
        run = bench.scratch / rate
        spent = bench.finetune("train", run, f"training.learning_rate={rate}")
        losses = [line["eval_loss"] for line in harness.read_lines(run / "metrics.jsonl") if "eval_loss" in line]
        return {**spent, "resident_bytes": _resident(run), "eval_loss": losses[-1]}

    runs = bench.measure(one)
    return {**_summed(runs), "winner": min(runs, key=lambda rate: runs[rate]["eval_loss"] or float("inf"))}


def trl(bench: Bench) -> dict[str, Any]:
    """A plain TRL script for each rate, which recomputes all, its default."""

    def one(rate: str) -> dict[str, Any]:
        output, script = bench.scratch / rate, Path("benchmarks/scripts/plain_trl.py")
        own = {"data": bench.rows, "output": output, "learning-rate": rate, "max-steps": bench.steps}
        options = [f"--{name}={value}" for name, value in own.items()]
        spent = bench.run(script, *bench.job.options, *options, "--checkpointing=all")
        return {**spent, "resident_bytes": json.loads((output / "loop.json").read_text())["resident_bytes"]}

    return _summed(bench.measure(one))


def full(bench: Bench) -> dict[str, Any]:
    """A sweep whose members are all trained to the end."""
    return _swept(bench, "--full")


def halved(bench: Bench) -> dict[str, Any]:
    """A sweep that stops members early."""
    return _swept(bench)


SIDES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "lone": lone, "full": full, "halved": halved, "trl": trl
}  # fmt: skip


def _swept(bench: Bench, *options: str) -> dict[str, Any]:
    folder = bench.scratch / "sweep"
    spent = bench.finetune("sweep", folder, f"training.learning_rate={','.join(RATES)}", *options)
    table = json.loads((folder / "sweep.json").read_text())
    return {
        **{name: round(value, 1) for name, value in spent.items()},
        "resident_bytes": max(_resident(Path(run)) for each in table["settings"] for run in each["runs"]),
        "winner": table["winner"],
        "undecided": table["undecided"],
        "settings": [{key: each[key] for key in ("setting", "state", "share", "loss")} for each in table["settings"]],
    }


def _resident(run: Path) -> int:
    return max(peak["resident_bytes"] for peak in harness.peaks(run).values())


def _summed(runs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The seconds of all processes, the largest peak, and what each measured."""
    return {
        **{key: round(sum(run[key] for run in runs.values()), 1) for key in ("seconds", "cpu_seconds")},
        "resident_bytes": max(run["resident_bytes"] for run in runs.values()),
        "runs": {
            name: {key: round(value, 4) if isinstance(value, float) else value for key, value in run.items()}
            for name, run in runs.items()
        },
    }


def beside(sides: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Time and memory of each sweep over those of the lone runs, and over the scripts'."""
    keys = ("seconds", "cpu_seconds", "resident_bytes")
    return {
        f"{ours}/{other}": {key: round(sides[ours][key] / sides[other][key], 3) for key in keys}
        for ours in ("full", "halved")
        for other in ("lone", "trl")
        if ours in sides and other in sides
    }


if __name__ == "__main__":
    main()
