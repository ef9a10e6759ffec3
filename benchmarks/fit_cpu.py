"""Whether `finetune fit` chooses well: its choice beside every other setting that fits, all of them really trained.

    python benchmarks/fit_cpu.py

For a model of 110 million random weights, on one CPU core: every setting of a small space (micro-batch, checkpointed
layers) is trained for some steps and timed, each in a process of its own, several times in turn; among them what `fit`
chooses under memory budgets that let only some of the space fit. Its choice must run within the budget and be no slower
than the fastest of what fits, but for what the two best runs of one setting differ by. The model is not smaller, as the
resident sizes of equal processes differ by some 60 MiB.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

import harness
from forecast_cpu import ARCHITECTURES

ROWS_KEY, LAYERS_KEY, TILE_KEY = "training.micro_batch", "memory.checkpointing", "memory.loss_tokens"


@dataclass(frozen=True)
class Setting:
    """What `fit` chooses on a CPU: micro-batch, checkpointed layers, and the tile of logits (4,096 by default)."""

    rows: int = 1
    layers: str | int = "all"
    tile: int = 4096

    @property
    def overrides(self) -> list[str]:
        return [f"{ROWS_KEY}={self.rows}", f"{LAYERS_KEY}={self.layers}", f"{TILE_KEY}={self.tile}"]

    def __str__(self) -> str:
        tile = "" if self.tile == Setting.tile else f", {self.tile} logits at a time"
        return f"{self.rows} rows, {self.layers} checkpointed{tile}"


ROWS, LAYERS, STEPS = (1, 4), ("none", 6, "all"), 2
JOB = (
    "training.batch_size=4", "data.max_length=256", "training.precision=fp32", "optimizer.kind=adamw_8bit",
    "training.micro_batch=1",
)  # fmt: skip
FIXED = ("data.eval=none", "output.merge=false")
ROUNDS = 2
SHARES = (0.25, 0.5, 0.75)
"""Budgets: this far from what the smallest setting needs to what the largest does."""


def main() -> None:
    options = harness.parser(__doc__, "fit_cpu.json").parse_args()
    with tempfile.TemporaryDirectory(prefix="fit-") as scratch:
        found = _compared(Path(scratch))
    harness.save(options.output, found, threads=1)
    print(_told(found), flush=True)
    sys.exit(0 if all(one["passed"] for one in found["budgets"]) else 1)


def _compared(scratch: Path) -> dict[str, Any]:
    job = [str(harness.ROOT / "configs" / "tiny_cpu.yaml"), *JOB, *_model(scratch)]
    settings = [Setting(rows, layers) for rows in ROWS for layers in LAYERS]
    needed = {setting: _needed(job, setting) for setting in settings}
    least, most = min(needed.values()), max(needed.values())
    chosen = {int(least + share * (most - least)): Setting() for share in SHARES}
    for budget in chosen:
        chosen[budget] = _fit([*job[1:], f"memory.budget={budget}B", *FIXED], job[0])
        print(f"budget {harness.mib(budget)} MiB: {chosen[budget]}", flush=True)
    runs: dict[Setting, list[dict[str, float]]] = {setting: [] for setting in (*settings, *chosen.values())}
    for turn in range(ROUNDS):
        for number, setting in enumerate(runs):
            runs[setting].append(_train(job, setting, scratch / f"{turn}-{number}"))
            print(f"{setting}: {runs[setting][-1]['seconds_per_step']:.3f} s a step", flush=True)
    measured = {setting: _summary(found) for setting, found in runs.items()}
    noise = statistics.median(found["spread"] for found in measured.values())
    return {
        "measured": {str(setting): found for setting, found in measured.items()},
        "needed_bytes": {str(setting): size for setting, size in needed.items()},
        "noise": round(noise, 4),
        "budgets": [_verdict(budget, setting, needed, measured, noise) for budget, setting in chosen.items()],
    }


def _train(job: Sequence[str], setting: Setting, run: Path) -> dict[str, float]:
    """Seconds a step (all but the first) and the resident peak of one real run."""
    harness.finetune(
        "train", *job, *setting.overrides, f"output.dir={run}", f"training.max_steps={STEPS}",
        "memory.check=off", *FIXED, threads=1, extra=harness.ALLOCATOR,
    )  # fmt: skip
    steps = harness.steps(run)[1:]
    return {
        "seconds_per_step": statistics.median(map(harness.seconds, steps)),
        "resident_bytes": harness.resident_peak(steps),
    }


def _summary(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The fastest run's time, and how far the next is from it: what one setting differs from itself."""
    fastest, next_fastest, *_ = sorted(run["seconds_per_step"] for run in runs)
    return {
        "seconds_per_step": round(fastest, 4),
        "spread": round(next_fastest / fastest - 1, 4),
        "resident_bytes": max(run["resident_bytes"] for run in runs),
    }


def _needed(job: Sequence[str], setting: Setting) -> int:
    plan = harness.finetune("plan", *job, *setting.overrides, *FIXED, "--gpu", "cpu", "--json", threads=1)
    return json.loads(plan)["needed_bytes"]


def _verdict(
    budget: int, chosen: Setting, needed: dict[Setting, int], measured: dict[Setting, dict[str, Any]], noise: float
) -> dict[str, Any]:
    """The choice under one budget beside the fastest of the space that is forecast to fit."""
    fitting = [setting for setting, size in needed.items() if size <= budget]
    fastest = min(fitting, key=lambda setting: measured[setting]["seconds_per_step"])
    own = measured[chosen]
    slower = own["seconds_per_step"] / measured[fastest]["seconds_per_step"] - 1
    return {
        "budget_bytes": budget,
        "chosen": str(chosen),
        "settings_that_fit": len(fitting),
        "fastest_that_fits": str(fastest),
        "slower_than_it": round(slower, 4),
        "within_budget": own["resident_bytes"] <= budget,
        "passed": own["resident_bytes"] <= budget and slower <= noise,
    }


def _fit(overrides: Sequence[str], config: str) -> Setting:
    """What `finetune.fit` chooses, without the further questions that the command answers."""
    code = (
        "import finetune, json, sys\n"
        "fitted = finetune.fit(finetune.load_config(sys.argv[1], sys.argv[2:]), 'cpu')\n"
        "print(json.dumps(fitted.as_dict()['chosen']))"
    )
    chosen = json.loads(harness.succeeded(harness.python("-c", code, config, *overrides, threads=1)).output)
    layers = chosen[LAYERS_KEY]
    return Setting(chosen[ROWS_KEY], json.dumps(layers) if isinstance(layers, dict) else layers, chosen[TILE_KEY])


def _model(scratch: Path) -> list[str]:
    folder = scratch / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(ARCHITECTURES["llama-110m"] | {"architectures": ["LlamaForCausalLM"]})
    )
    rows = scratch / "rows.jsonl"
    harness.write_long_rows(rows, rows=64, tokens=256)
    return [
        f"model.name={folder}", "model.weights=random", "model.tokenizer=builtin:tiny-llama", f"data.train={rows}",
    ]  # fmt: skip


def _told(found: dict[str, Any]) -> str:
    header = ("setting", "needed MiB", "resident MiB", "s/step", "spread")
    lines = [
        (name, harness.mib(found["needed_bytes"][name]) if name in found["needed_bytes"] else "",
         harness.mib(row["resident_bytes"]), f"{row['seconds_per_step']:.3f}", f"{row['spread']:.1%}")
        for name, row in found["measured"].items()
    ]  # fmt: skip
    verdicts = [
        f"budget {harness.mib(fitted['budget_bytes'])} MiB: chose {fitted['chosen']}; {fitted['slower_than_it']:+.1%} "
        f"beside {fitted['fastest_that_fits']} (noise {found['noise']:.1%}): "
        f"{'passed' if fitted['passed'] else 'FAILED'}"
        for fitted in found["budgets"]
    ]
    return harness.table(header, lines) + "\n" + "\n".join(verdicts)


if __name__ == "__main__":
    main()
