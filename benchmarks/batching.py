"""What padding costs: places computed for nothing, and the time of the same rows, batched in each way that there is.

    python benchmarks/batching.py

Two parts. Padding: the share of padded places over one epoch of 100,000 rows whose lengths are log-normal (a median
of 200 tokens, cut at 2,048), by the order and the micro-batches that train. Speed: `finetune train` on
rows of such lengths, the same rows in each way, in turn for several rounds; trained tokens and steps are the same, so
that the ratio of tokens a second to plain padding, that of rows in the order in which they come, is the speed-up.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

import harness

from finetune.data.batching import MicroBatching, RowOrder, micro_batches

ROWS, LONGEST, MEDIAN, SPREAD = 100_000, 2048, 200, 0.9
GOALS = {"grouped, by tokens": 0.02, "packed": 0.02}
"""Largest padding share that counts as passed (a fill of 98% when packed)."""

BATCH, TOKENS = 64, 4096
PLAIN = "plain"
WAYS: dict[str, tuple[bool, bool, bool]] = {
    PLAIN: (False, False, False),
    "sorted": (False, False, False),
    "grouped": (True, False, False),
    "by tokens": (False, True, False),
    "grouped, by tokens": (True, True, False),
    "packed": (False, True, True),
}
"""Name: whether rows are grouped by length, whether micro-batches (else 8 rows) have a token budget, and are packed.

Without a budget the rows of a step are sorted by length before they are cut, but for `plain`.
"""

SPEED_ROWS, SPEED_LONGEST, SPEED_MEDIAN, SPEED_TOKENS = 384, 512, 60, 1024


def main() -> None:
    parser = harness.parser(__doc__, "batching.json")
    parser.add_argument("--rounds", type=int, default=3, help="of training (default 3)")
    options = parser.parse_args()
    lengths = _lengths(ROWS, MEDIAN, LONGEST)
    padding = {name: _padding(lengths, name) for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="batching-") as scratch:
        speed = _speed(Path(scratch), options.rounds)
    result = {
        "lengths": {"rows": ROWS, "median": MEDIAN, "sigma": SPREAD, "longest": LONGEST},
        "batch_size": BATCH,
        "micro_batch_tokens": TOKENS,
        "padding": padding,
        "training": speed,
        "goal_padding_share": GOALS,
        "passed": all(padding[name]["padding_share"] <= goal for name, goal in GOALS.items()),
    }
    harness.save(options.output, result, threads=1)
    rows = [
        [
            way,
            f"{padding[way]['padding_share']:.2%}",
            f"{padding[way]['micro_batches']:,}",
            *([f"{speed[way]['padding_share']:.2%}", f"{speed[way]['speed_up']:.2f}"] if way in speed else ["", ""]),
        ]
        for way in WAYS
    ]
    print(harness.table(["", "padding, 100k rows", "passes", "padding, trained", "speed-up"], rows))
    sys.exit(0 if result["passed"] else 1)


def _lengths(rows: int, median: int, longest: int) -> list[int]:
    """Log-normal lengths in tokens, the same in each run."""
    generator = random.Random(0)
    return [min(longest, max(2, round(generator.lognormvariate(0, SPREAD) * median))) for _ in range(rows)]


def _padding(lengths: list[int], name: str) -> dict[str, Any]:
    """What the micro-batches of one epoch hold."""
    grouped, by_tokens, packed = WAYS[name]
    way = MicroBatching(1, TOKENS, packed) if by_tokens else MicroBatching(8)
    order = list(RowOrder(lengths, BATCH, 0, grouped))
    cut = harness.in_order if name == PLAIN else micro_batches
    places = passes = 0
    for start in range(0, len(order), BATCH):
        step = [lengths[row] for row in order[start : start + BATCH]]
        for part in cut(step, way):
            passes += 1
            rows = [step[row] for row in part]
            places += sum(rows) if packed else len(rows) * max(rows)
    return {
        "padding_share": round(1 - sum(lengths) / places, 5),
        "micro_batches": passes,
    }


# -- the speed of training ---------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: int) -> None:
    """Write so many rows of plain text, of those that are trained here."""
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "said", "no", "more", "of", "it"]
    generator = random.Random(1)
    with open(path, "w", encoding="utf-8") as file:
        for length in _lengths(rows, SPEED_MEDIAN, SPEED_LONGEST):
            file.write(json.dumps({"text": " ".join(generator.choice(words) for _ in range(length))}) + "\n")


def _speed(scratch: Path, rounds: int) -> dict[str, Any]:
    data = scratch / "rows.jsonl"
    write_rows(data, SPEED_ROWS)
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in WAYS:
            runs[way].append(_train(data, way, scratch / f"{turn}-{way}".replace(" ", "-")))
            print(f"{way}: {runs[way][-1]['tokens_per_second']:,.0f} tokens/s", flush=True)
    tokens = {run["tokens"] for each in runs.values() for run in each}
    assert len(tokens) == 1, "each way trains the same rows"
    found = {}
    for way, each in runs.items():
        ratios = [
            run["tokens_per_second"] / plain["tokens_per_second"] for run, plain in zip(each, runs[PLAIN], strict=True)
        ]
        found[way] = {
            "tokens_per_second": [round(run["tokens_per_second"], 1) for run in each],
            "padding_share": round(each[0]["padding_share"], 5),
            "speed_up": round(statistics.median(ratios), 3),
        }
    return found


def _train(data: Path, name: str, run: Path) -> dict[str, float]:
    """Tokens, tokens a second and padding share over one real run of an epoch."""
    grouped, by_tokens, packed = WAYS[name]
    command = [Path("benchmarks") / "scripts" / "train_in_order.py"] if name == PLAIN else ["-m", "finetune", "train"]
    way = {"training.group_by_length": grouped, "training.micro_batch": 8, "data.packing": packed}
    if by_tokens:
        way["training.micro_batch_tokens"] = SPEED_TOKENS
    harness.succeeded(harness.python(
        *command, harness.ROOT / "configs" / "tiny_cpu.yaml", f"data.train={data}",
        f"data.max_length={SPEED_LONGEST}", "training.max_steps=null", "training.epochs=1",
        f"training.batch_size={BATCH}",
        *(f"{key}={json.dumps(value)}" for key, value in way.items()), f"output.dir={run}",
        "data.eval=none", "training.eval_every=null", "output.merge=false", "memory.check=off", threads=1,
    ))  # fmt: skip
    steps = harness.steps(run)
    seconds = sum(map(harness.seconds, steps))
    places = sum(step["tokens"] / (1 - step["padding_share"]) for step in steps)
    tokens = sum(step["tokens"] for step in steps)
    return {"tokens": tokens, "tokens_per_second": tokens / seconds, "padding_share": 1 - tokens / places}


if __name__ == "__main__":
    main()
