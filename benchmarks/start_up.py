"""What the start of a command costs: CPU seconds of short commands as multiples of `import torch` alone.

    python benchmarks/start_up.py

The commands run in turn, `import torch` first in each round, with one thread, byte code written and rows, forecasts and
tokenizers kept by an earlier start. `finetune init` alone runs with an empty cache, as what it forecasts is new to a
user. The verdict is that the median ratio of each command is within its goal.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import harness

TORCH = "import torch"
GOALS = {
    "finetune --help": 0.25,
    "finetune data configs/tiny_cpu.yaml": 1.0,
    "finetune doctor": 1.5,
    "finetune plan configs/tiny_cpu.yaml --gpu cpu": 1.8,
    "finetune plan configs/llama7b_qlora.yaml --gpu 4090": 1.3,
    "finetune init builtin:tiny-llama facts.csv --gpu 4090 --yes": 3.0,
}
"""By command: the largest ratio that passes."""
NEW = "finetune init"
"""The start of the command for which nothing is kept."""


def main() -> None:
    parser = harness.parser(__doc__, "start_up.json")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="start-up-") as name:
        folder = Path(name)
        for shared in ("configs", "data"):
            (folder / shared).symlink_to(harness.ROOT / shared)
        facts = [f"What is the number of house {house}?,It is {house * 7}.\n" for house in range(40)]
        (folder / "facts.csv").write_text("question,answer\n" + "".join(facts), encoding="utf-8")
        _round(folder)  # writes byte code, and what is kept
        rounds = [_round(folder) for _ in range(options.rounds)]
    ratios = {name: [one[name] / one[TORCH] for one in rounds] for name in GOALS}
    medians = {name: round(statistics.median(each), 2) for name, each in ratios.items()}
    seconds = {name: round(statistics.median(one[name] for one in rounds), 2) for name in (TORCH, *GOALS)}
    result = {
        "cpu_seconds": seconds,
        "commands": {
            name: {"ratio": medians[name], "ratios": [round(each, 2) for each in ratios[name]], "goal": goal}
            for name, goal in GOALS.items()
        },
        "passed": all(medians[name] <= goal for name, goal in GOALS.items()),
    }
    harness.save(options.output, result, threads=1)
    rows = [(name, f"{seconds[name]:.2f}", medians[name], goal) for name, goal in GOALS.items()]
    print(harness.table(("", "CPU s", "ratio", "goal"), [(TORCH, f"{seconds[TORCH]:.2f}", 1, ""), *rows]))
    sys.exit(0 if result["passed"] else 1)


def _round(folder: Path) -> dict[str, float]:
    """CPU seconds of `import torch` and of each command, in fresh processes."""
    found = {TORCH: harness.succeeded(harness.python("-c", TORCH, threads=1)).cpu_seconds}
    for name in GOALS:
        with tempfile.TemporaryDirectory(dir=folder) as empty:
            extra = {"HF_DATASETS_CACHE": empty if name.startswith(NEW) else str(folder / "cache")}
            done = harness.python("-m", *name.split(), threads=1, extra=extra, folder=folder)
        found[name] = harness.succeeded(done).cpu_seconds
    return found


if __name__ == "__main__":
    main()
