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
from pathlib import Path
from typing import Any

import harness

BOUND = 1.05
"""Largest wall time of the loop, over the plain script's, that counts as passed."""

# Memory up to 128 MiB is kept for the next use (mallopt(3): M_TRIM_THRESHOLD, M_MMAP_THRESHOLD).
ALLOCATORS = {
    "kept": {"MALLOC_TRIM_THRESHOLD_": str(128 * 2**20), "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20)},
    "default": {},
}

MEASURES = ("loop_seconds", "loop_cpu_seconds", "process_seconds", "process_cpu_seconds")

SETTINGS = (
    "model.name=builtin:tiny-llama",
    "quantization.kind=none",
    "data.train=builtin:python_docs",
    "data.eval=none",
    "data.max_length=256",
    "training.batch_size=16",
    "training.micro_batch=8",
    "training.precision=fp32",
    "training.group_by_length=false",
    "training.warmup=0",  # transformers' begins at a rate of 0, ours at its first fraction
    "optimizer.kind=adamw_torch_fused",
    # Without recomputation a step is shorter, so that a fixed cost beside it weighs more.
    "memory.checkpointing=none",
)

# Writes the rows that finetune keeps, in the order in which it will visit them.
_EXPORT = """
import json, sys
from finetune.config import DataSection, ModelSection
from finetune.data import sources
from finetune.data.batching import RowOrder
from finetune.data.prepare import prepare
from finetune.model.tokenizer import load_tokenizer

section = DataSection(train="builtin:python_docs", eval="none", max_length=256)
prepared = prepare(section, load_tokenizer(ModelSection()))
dropped = set(prepared.train_counts.dropped_places)
rows = [row.fields for row in sources.rows(section.train) if row.place not in dropped]
with open(sys.argv[1], "w", encoding="utf-8") as file:
    for index in RowOrder(prepared.train["length"], 16, 42, False):
        file.write(json.dumps({"messages": rows[index]["messages"]}) + "\\n")
"""


def main() -> None:
    options = _options()
    found = {}
    with tempfile.TemporaryDirectory(prefix="overhead-") as scratch:
        bench = _Bench(Path(scratch), options.steps, options.threads)
        bench.plain(), bench.finetune()  # warm-up: page cache and byte code
        for name, allocator in ALLOCATORS.items():
            bench.allocator = allocator
            runs = [{"plain": bench.plain(), "finetune": bench.finetune()} for _ in range(options.pairs)]
            found[name] = {
                **summary(runs),
                "largest_loss_difference": _loss_difference(runs[-1]),
                "runs": [{side: _without_losses(measured) for side, measured in pair.items()} for pair in runs],
            }
    result = {
        "command": harness.command_line(),
        "environment": harness.environment(options.threads),
        "job": {"steps": options.steps, "threads": options.threads, "settings": list(SETTINGS)},
        "bound": BOUND,
        "allocators": found,
    }
    harness.write_result(options.output, result)
    for name, measured in found.items():
        print(f"\nfreed memory {name}\n{_table(measured)}")
    sys.exit(0 if found["kept"]["ratios"]["loop_seconds"]["median"] <= BOUND else 1)


class _Bench:
    """Runs either side of the comparison in a fresh process and a fresh directory."""

    def __init__(self, scratch: Path, steps: int, threads: int) -> None:
        self.scratch, self.steps, self.threads = scratch, steps, threads
        self.allocator: dict[str, str] = {}
        self.rows = scratch / "messages.jsonl"
        self.config = scratch / "overhead.yaml"
        self.config.write_text("")
        harness.succeeded(harness.python("-c", _EXPORT, self.rows))

    def plain(self) -> dict[str, Any]:
        return self._measure(
            "plain_trl.py", "--model", harness.ROOT / "data" / "tiny-llama", "--data", self.rows,
            "--output", self._directory("plain"), "--max-steps", str(self.steps),
        )  # fmt: skip

    def finetune(self) -> dict[str, Any]:
        own = (f"training.max_steps={self.steps}", f"output.dir={self._directory('finetune')}")
        measured = self._measure("timed_train.py", self.config, *SETTINGS, *own)
        losses = [line["loss"] for line in harness.steps(self._directory("finetune"))]
        return {**measured, "losses": [statistics.fmean(losses[at : at + 10]) for at in range(0, len(losses), 10)]}

    def _directory(self, side: str) -> Path:
        return self.scratch / side

    def _measure(self, script: str, *arguments: str | Path) -> dict[str, Any]:
        side = "plain" if script.startswith("plain") else "finetune"
        shutil.rmtree(self._directory(side), ignore_errors=True)
        # A tokenized data set left by the run before would spare the plain script its work.
        cache = self.scratch / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        done = harness.succeeded(
            harness.python(
                Path("benchmarks") / "scripts" / script,
                *arguments,
                threads=self.threads,
                extra={"HF_DATASETS_CACHE": str(cache), **self.allocator},
            )
        )
        loop = json.loads((self._directory(side) / "loop.json").read_text())
        measured = {
            "loop_seconds": loop["train_runtime"],
            "loop_cpu_seconds": loop["train_cpu_seconds"],
            "process_seconds": done.wall_seconds,
            "process_cpu_seconds": done.cpu_seconds,
        }
        print(f"{side}: " + ", ".join(f"{name} {value:.2f}" for name, value in measured.items()), flush=True)
        return {**measured, "losses": loop.get("losses", [])}


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


def _loss_difference(pair: dict[str, dict[str, Any]]) -> float:
    """Largest difference of the two sides' mean losses over ten steps, in nats per token."""
    return max(
        abs(ours - plain) for ours, plain in zip(pair["finetune"]["losses"], pair["plain"]["losses"], strict=True)
    )


def _without_losses(measured: dict[str, Any]) -> dict[str, float]:
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps, a multiple of 10 (default 60)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs after the warm-up (default 5)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for arithmetic (default 1)")
    parser.add_argument("--output", type=Path, default=harness.RESULTS / "overhead.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
