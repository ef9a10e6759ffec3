"""What finetune costs over a plain TRL script: the same job by both, as whole processes, in turn.

Both sides see the same rows in the same order, with the same settings and the same initial adapter, so that their
losses agree and each step is the same arithmetic. Two times are taken of each run:

- the loop: `train_runtime`, which transformers measures around the optimizer steps. This is the comparison; ours has
  the measured phases, one metrics line a step and the checkpoint by fsync and rename inside it.
- the process: start to exit. Ours also answers three held-out questions before and after, and writes plot and report,
  which the plain script does not do.

Both sides run under two settings of the C library's allocator. By default glibc gives freed memory back to the system
and faults it in again, more or less often by the luck of what lies at the top of the heap, so that a
line that does nothing can change the time of the whole program. With fixed thresholds it keeps the memory, and what
is left is the work itself; the verdict is taken there, and the default stands beside it.

Runs alternate (plain, finetune, plain, ...), and the ratio is taken within each pair, so that a slow drift of a
shared machine falls on both. CPU seconds stand beside wall seconds for the same reason.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness

BOUND = 1.02
"""Largest wall time of the loop, over the plain script's, that counts as passed."""

# Memory up to 128 MiB is kept for the next use (mallopt(3): M_TRIM_THRESHOLD, M_MMAP_THRESHOLD).
ALLOCATORS = {
    "kept": {"MALLOC_TRIM_THRESHOLD_": str(128 * 2**20), "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20)},
    "default": {},
}

MEASURES = ("loop_seconds", "loop_cpu_seconds", "process_seconds", "process_cpu_seconds")


@dataclass(frozen=True)
class Job:
    """What both sides train: rows of the built-in data, in two micro-batches a step, over `threads` CPU threads.

    Losses are compared as means over `logged` steps.
    """

    steps: int
    threads: int
    model: Path = harness.ROOT / "data" / "tiny-llama"
    batch: int = 16
    tokens: int = 256
    precision: str = "fp32"
    logged: int = 10

    @property
    def settings(self) -> list[str]:
        """finetune's."""
        return [
            f"model.name={self.model}",
            "quantization.kind=none",
            "data.train=builtin:python_docs",
            "data.eval=none",
            f"data.max_length={self.tokens}",
            f"training.batch_size={self.batch}",
            f"training.micro_batch={self.batch // 2}",
            f"training.precision={self.precision}",
            "training.group_by_length=false",
            "training.learning_rate=2e-4",  # transformers' and TRL's in the scripts
            "training.warmup=0",  # transformers' begins at a rate of 0, ours at its first fraction
            f"training.max_steps={self.steps}",
            "optimizer.kind=adamw_torch_fused",
            # Without recomputation a step is shorter, so that a fixed cost beside it weighs more.
            "memory.checkpointing=none",
        ]

    @property
    def options(self) -> list[str]:
        """The plain script's."""
        named = {
            "model": self.model, "max-steps": self.steps, "logging-steps": self.logged, "batch-size": self.batch,
            "max-length": self.tokens, "precision": self.precision,
        }  # fmt: skip
        return [f"--{name}={value}" for name, value in named.items()]


# Writes the rows that finetune keeps, in the order in which it will visit them.
_EXPORT = """
import json, sys
from finetune.config import DataSection, ModelSection
from finetune.data import sources
from finetune.data.batching import RowOrder
from finetune.data.prepare import prepare
from finetune.model.source.tokenizer import load_tokenizer

path, batch, tokens = sys.argv[1], *map(int, sys.argv[2:])
section = DataSection(train="builtin:python_docs", eval="none", max_length=tokens)
prepared = prepare(section, load_tokenizer(ModelSection()))
dropped = set(prepared.train_counts.places(what="dropped"))
rows = [row.fields for row in sources.rows(section.train) if row.location not in dropped]
with open(path, "w", encoding="utf-8") as file:
    for index in RowOrder(prepared.train["length"], batch, 42, False):
        file.write(json.dumps({"messages": rows[index]["messages"]}) + "\\n")
"""


def main() -> None:
    options = _options()
    found, job = {}, Job(steps=60, threads=1)
    with tempfile.TemporaryDirectory(prefix="overhead-") as scratch:
        bench = Bench(Path(scratch), job)
        bench.plain(), bench.finetune()  # warm-up: page cache and byte code
        for name, allocator in ALLOCATORS.items():
            bench.allocator = allocator
            runs = [{"plain": bench.plain(), "finetune": bench.finetune()} for _ in range(options.pairs)]
            found[name] = {
                **summary(runs),
                "largest_loss_difference": loss_difference(*runs[-1].values()),
                "runs": [{side: seconds(measured) for side, measured in pair.items()} for pair in runs],
            }
    settings = list(map(harness.without_paths, job.settings))
    described = {"steps": job.steps, "threads": job.threads, "settings": settings}
    harness.save(options.output, {"job": described, "bound": BOUND, "allocators": found}, job.threads)
    for name, measured in found.items():
        print(f"\nfreed memory {name}\n{_table(measured)}")
    sys.exit(0 if found["kept"]["ratios"]["loop_seconds"]["median"] <= BOUND else 1)


class Bench:
    """Runs either side of the comparison in a fresh process and a fresh directory."""

    def __init__(self, scratch: Path, job: Job) -> None:
        self.scratch, self.job = scratch, job
        self.allocator: dict[str, str] = {}
        self.rows = scratch / "messages.jsonl"
        self.config = scratch / "overhead.yaml"
        self.config.write_text("")
        self._export()

    def _export(self) -> None:
        harness.succeeded(harness.python("-c", _EXPORT, self.rows, str(self.job.batch), str(self.job.tokens)))

    def plain(self, *changes: str) -> dict[str, Any]:
        output = f"--output={self._directory('plain')}"
        return self._measure("plain_trl.py", *self.job.options, f"--data={self.rows}", output, *changes)

    def finetune(self, *changes: str) -> dict[str, Any]:
        run, logged = self._directory("finetune"), self.job.logged
        measured = self._measure("timed_train.py", self.config, *self.job.settings, f"output.dir={run}", *changes)
        losses = [line["loss"] for line in harness.steps(run)]
        peaks = harness.peaks(run)
        return {
            **measured,
            "losses": [statistics.fmean(losses[at : at + logged]) for at in range(0, len(losses), logged)],
            "resident_bytes": max(peak["resident_bytes"] for peak in peaks.values()),
        }

    def _directory(self, side: str) -> Path:
        return self.scratch / side

    def _measure(self, script: str, *arguments: str | Path) -> dict[str, Any]:
        side = "plain" if script.startswith("plain") else "finetune"
        shutil.rmtree(self._directory(side), ignore_errors=True)
        # A tokenized data set left by the run before would spare the plain script its work.
        cache = self.scratch / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        extra = {"HF_DATASETS_CACHE": str(cache), **self.allocator}
        command = [Path("benchmarks") / "scripts" / script, *arguments]
        done = harness.succeeded(harness.python(*command, threads=self.job.threads, extra=extra))
        loop = json.loads((self._directory(side) / "loop.json").read_text())
        measured = {
            "loop_seconds": loop["train_runtime"],
            "loop_cpu_seconds": loop["train_cpu_seconds"],
            "process_seconds": done.wall_seconds,
            "process_cpu_seconds": done.cpu_seconds,
        }
        print(f"{side}: " + ", ".join(f"{name} {value:.2f}" for name, value in measured.items()), flush=True)
        return {**measured, "losses": loop.get("losses", []), "resident_bytes": loop.get("resident_bytes")}


def summary(runs: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians of each side, and median, least and largest of the ratio finetune / plain within each pair."""
    ratios = {name: [pair["finetune"][name] / pair["plain"][name] for pair in runs] for name in MEASURES}
    return {
        "medians": {
            side: {name: round(statistics.median(pair[side][name] for pair in runs), 3) for name in MEASURES}
            for side in ("plain", "finetune")
        },
        "ratios": {
            name: {
                "median": round(statistics.median(found), 4),
                "least": round(min(found), 4),
                "largest": round(max(found), 4),
            }
            for name, found in ratios.items()
        },
    }


def loss_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest difference of two sides' mean losses over the logged steps, in nats per token."""
    return max(abs(first - second) for first, second in zip(one["losses"], other["losses"], strict=True))


def seconds(measured: dict[str, Any]) -> dict[str, float]:
    return {name: round(measured[name], 3) for name in MEASURES}


def _table(result: dict[str, Any]) -> str:
    medians, ratios = result["medians"], result["ratios"]
    rows = [
        (
            name.removesuffix("_seconds").replace("_", " "),
            f"{medians['plain'][name]:.2f}",
            f"{medians['finetune'][name]:.2f}",
            f"{ratios[name]['median']:.3f}",
            f"{ratios[name]['least']:.3f} to {ratios[name]['largest']:.3f}",
        )
        for name in MEASURES
    ]
    verdict = "within" if ratios["loop_seconds"]["median"] <= BOUND else "over"
    difference = result["largest_loss_difference"]
    return (
        harness.table(("seconds (medians)", "plain TRL", "finetune", "ratio", "of the pairs"), rows)
        + f"\nthe loop's ratio is {verdict} {BOUND}; the losses differ by at most {difference:.1e}"
    )


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__, "overhead.json")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs after the warm-up (default 5)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
