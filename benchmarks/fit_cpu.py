"""Whether `finetune fit` chooses well: its choice beside every other setting that fits, all of them really trained.

    python benchmarks/fit_cpu.py [--only tiny | --only 110m]

For the built-in base and for a model of 110 million random weights, on one CPU core: every setting of a small space
(micro-batch, checkpointed layers) is trained for some steps and timed, each in a process of its own, several times in
turn. Then `fit` is given memory budgets that let only some of the space fit, and its choice must run within the budget
and be no slower than the fastest of what fits, but for what repeated runs of one setting differ by.
"""

from __future__ import annotations

import argparse
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
from forecast_cpu import ALLOCATOR, ARCHITECTURES

ROWS_KEY, LAYERS_KEY = "training.micro_batch", "memory.checkpointing"


@dataclass(frozen=True)
class Space:
    """One job and the settings of it that are tried: micro-batches by checkpointed layers."""

    name: str
    rows: tuple[int, ...]
    layers: tuple[str | int, ...]
    overrides: tuple[str, ...]
    steps: int
    rounds: int


SPACES = (
    Space(
        "tiny",
        (2, 8, 16),
        ("none", 2, "all"),
        ("training.batch_size=16", "data.max_length=256"),
        steps=6,
        rounds=2,
    ),
    Space(
        "110m",
        (1, 4),
        ("none", 6, "all"),
        ("training.batch_size=4", "data.max_length=128", "training.precision=fp32", "optimizer.kind=adamw_8bit"),
        steps=3,
        rounds=2,
    ),
)
SHARES = (0.25, 0.5, 0.75)
"""Budgets: this far from what the smallest setting needs to what the largest does."""


def main() -> None:
    options = _options()
    spaces = [space for space in SPACES if options.only in (None, space.name)]
    result: dict[str, Any] = {
        "command": harness.command_line(), "environment": harness.environment(1), "spaces": {},
    }  # fmt: skip
    passed = True
    for space in spaces:
        with tempfile.TemporaryDirectory(prefix="fit-") as scratch:
            found = result["spaces"][space.name] = _space(space, Path(scratch))
        harness.write_result(options.output, result)
        passed &= all(fitted["passed"] for fitted in found["budgets"])
        print(_told(space, found), flush=True)
    sys.exit(0 if passed else 1)


def _space(space: Space, scratch: Path) -> dict[str, Any]:
    job = [str(_config(space, scratch)), *space.overrides, *_model(space, scratch)]
    settings = [(rows, layers) for rows in space.rows for layers in space.layers]
    runs: dict[tuple[int, str | int], list[dict[str, float]]] = {setting: [] for setting in settings}
    for turn in range(space.rounds):
        for setting in settings:
            runs[setting].append(_train(space, job, setting, scratch / f"{turn}-{setting[0]}-{setting[1]}"))
            print(f"{space.name} {setting}: {runs[setting][-1]['seconds_per_step']:.3f} s a step", flush=True)
    measured = {_name(setting): _summary(setting, runs[setting]) for setting in settings}
    needed = {_name(setting): _needed(job, setting) for setting in settings}
    least, most = min(needed.values()), max(needed.values())
    budgets = [_fitted(space, job, int(least + share * (most - least)), needed, measured) for share in SHARES]
    return {"measured": measured, "needed_bytes": needed, "budgets": budgets}


def _train(space: Space, job: Sequence[str], setting: tuple[int, str | int], run: Path) -> dict[str, float]:
    """Seconds a step (all but the first) and the resident peak of one real run."""
    done = harness.python(
        "-m", "finetune", "train", *job, f"{ROWS_KEY}={setting[0]}", f"{LAYERS_KEY}={setting[1]}",
        f"output.dir={run}", f"training.max_steps={space.steps}", "memory.check=off", "data.eval=none",
        "output.merge=false", threads=1, extra=ALLOCATOR,
    )  # fmt: skip
    harness.succeeded(done)
    steps = harness.steps(run)[1:]
    return {
        "seconds_per_step": statistics.median(step["tokens"] / step["tokens_per_second"] for step in steps),
        "resident_bytes": max(peak["resident_bytes"] for step in steps for peak in step["memory"].values()),
    }


def _summary(setting: tuple[int, str | int], runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    seconds = [run["seconds_per_step"] for run in runs]
    return {
        ROWS_KEY: setting[0],
        LAYERS_KEY: setting[1],
        "seconds_per_step": min(seconds),
        "spread": max(seconds) / min(seconds) - 1,
        "resident_bytes": max(run["resident_bytes"] for run in runs),
    }


def _needed(job: Sequence[str], setting: tuple[int, str | int]) -> int:
    forecast = _json("plan", *job, f"{ROWS_KEY}={setting[0]}", f"{LAYERS_KEY}={setting[1]}", "data.eval=none")
    return forecast["needed_bytes"]


def _fitted(
    space: Space, job: Sequence[str], budget: int, needed: dict[str, int], measured: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The choice under one budget, really trained, beside the fastest of the space that is forecast to fit."""
    with tempfile.TemporaryDirectory(prefix="fit-") as scratch:
        chosen = _fit([*job[1:], f"memory.budget={budget}B", "data.eval=none"], job[0])
        setting = (chosen[ROWS_KEY], chosen[LAYERS_KEY])
        tile = [f"memory.loss_tokens={chosen['memory.loss_tokens']}"]
        runs = [_train(space, [*job, *tile], setting, Path(scratch) / str(turn)) for turn in range(space.rounds)]
    own = _summary(setting, runs)
    fitting = {name: found for name, found in measured.items() if needed[name] <= budget}
    fastest = min(fitting, key=lambda name: fitting[name]["seconds_per_step"])
    noise = statistics.median(found["spread"] for found in measured.values())
    slower = own["seconds_per_step"] / fitting[fastest]["seconds_per_step"] - 1
    return {
        "budget_bytes": budget,
        "chosen": chosen,
        "measured": own,
        "settings_that_fit": len(fitting),
        "fastest_that_fits": fastest,
        "slower_than_it": round(slower, 4),
        "noise": round(noise, 4),
        "within_budget": own["resident_bytes"] <= budget,
        "passed": own["resident_bytes"] <= budget and slower <= noise,
    }


def _json(*arguments: str) -> dict[str, Any]:
    command, job, *rest = arguments
    done = harness.python("-m", "finetune", command, job, *rest, "--gpu", "cpu", "--json", threads=1)
    return json.loads(harness.succeeded(done).output)


def _fit(overrides: Sequence[str], config: str) -> dict[str, Any]:
    """What `finetune.fit` chooses, without the further questions that the command answers."""
    code = (
        "import finetune, json, sys\n"
        "fitted = finetune.fit(finetune.load_config(sys.argv[1], sys.argv[2:]), 'cpu')\n"
        "print(json.dumps(fitted.as_dict()['chosen']))"
    )
    return json.loads(harness.succeeded(harness.python("-c", code, config, *overrides, threads=1)).output)


def _config(space: Space, scratch: Path) -> Path:
    return harness.ROOT / "configs" / "tiny_cpu.yaml"


def _model(space: Space, scratch: Path) -> list[str]:
    if space.name == "tiny":
        return []
    folder = scratch / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(ARCHITECTURES["llama-110m"] | {"architectures": ["LlamaForCausalLM"]})
    )
    rows = scratch / "rows.jsonl"
    harness.write_long_rows(rows, rows=64, tokens=128)
    return [
        f"model.name={folder}", "model.weights=random", "model.tokenizer=builtin:tiny-llama", f"data.train={rows}",
    ]  # fmt: skip


def _name(setting: tuple[int, str | int]) -> str:
    return f"{setting[0]} rows, {setting[1]} checkpointed"


def _told(space: Space, found: dict[str, Any]) -> str:
    header = ("setting", "needed MiB", "resident MiB", "s/step", "spread")
    lines = [
        (name, harness.mib(found["needed_bytes"][name]), harness.mib(row["resident_bytes"]),
         f"{row['seconds_per_step']:.3f}", f"{row['spread']:.1%}")
        for name, row in found["measured"].items()
    ]  # fmt: skip
    verdicts = [
        f"budget {harness.mib(fitted['budget_bytes'])} MiB: chose {fitted['chosen']}, "
        f"{fitted['measured']['seconds_per_step']:.3f} s/step; "
        f"{fitted['slower_than_it']:+.1%} beside {fitted['fastest_that_fits']} (noise {fitted['noise']:.1%}): "
        f"{'passed' if fitted['passed'] else 'FAILED'}"
        for fitted in found["budgets"]
    ]
    return harness.table(header, lines) + "\n" + "\n".join(verdicts)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[space.name for space in SPACES], help="only this job")
    parser.add_argument("--output", type=Path, default=harness.RESULTS / "fit_cpu.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
