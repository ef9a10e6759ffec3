"""What padding costs: places computed for nothing, and the time of the same rows, batched in each way that there is.

    python benchmarks/batching.py

Two parts. Padding: the share of padded places over one epoch of 100,000 rows whose lengths are log-normal (a median
of 200 tokens, cut at 2,048), by the order and the micro-batches that train. Speed: `finetune train` on rows of such
lengths, the same rows in each way, in turn for several rounds; trained tokens and steps are the same, so that the
ratio of tokens a second to plain padding is the speed-up.
"""

from __future__ import annotations

import argparse
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

from finetune.config import TrainingSection
from finetune.data.batching import RowOrder, micro_batches

ROWS, LONGEST, MEDIAN, SPREAD = 100_000, 2048, 200, 0.9
GOAL = 0.02
"""Largest padding share of token-budget batches that counts as passed."""

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"group_by_length": False, "micro_batch": 8},
    "grouped": {"group_by_length": True, "micro_batch": 8},
    "by tokens": {"group_by_length": False, "micro_batch_tokens": 4096},
    "grouped, by tokens": {"group_by_length": True, "micro_batch_tokens": 4096},
}
"""By name: what of the training section differs. The global batch is 64 rows in each."""

SPEED_ROWS, SPEED_LONGEST, SPEED_MEDIAN, SPEED_TOKENS = 384, 512, 60, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=harness.RESULTS / "batching.json")
    options = parser.parse_args()
    lengths = _lengths(ROWS, MEDIAN, LONGEST)
    padding = {way: _padding_share(lengths, TrainingSection(batch_size=64, **WAYS[way])) for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="batching-") as scratch:
        speed = _speed(Path(scratch), options.rounds)
    result = {
        "command": harness.command_line(),
        "environment": harness.environment(1),
        "lengths": {"rows": ROWS, "median": MEDIAN, "sigma": SPREAD, "longest": LONGEST},
        "padding_share": padding,
        "training": speed,
        "goal_padding_share": GOAL,
        "passed": padding["grouped, by tokens"] <= GOAL,
    }
    harness.write_result(options.output, result)
    rows = [
        [way, f"{padding[way]:.2%}", f"{speed[way]['padding_share']:.2%}", f"{speed[way]['speed_up']:.2f}"]
        for way in WAYS
    ]
    print(harness.table(["", "padding, 100k rows", "padding, trained", "speed-up"], rows))
    sys.exit(0 if result["passed"] else 1)


def _lengths(rows: int, median: int, longest: int) -> list[int]:
    """Log-normal lengths in tokens, the same in each run."""
    generator = random.Random(0)
    return [min(longest, max(2, round(generator.lognormvariate(0, SPREAD) * median))) for _ in range(rows)]


def _padding_share(lengths: list[int], training: TrainingSection) -> float:
    """Share of the places of one epoch that hold padding."""
    order = list(RowOrder(lengths, training.batch_size, training.seed, training.group_by_length))
    places = 0
    for start in range(0, len(order), training.batch_size):
        step = [lengths[row] for row in order[start : start + training.batch_size]]
        for part in micro_batches(step, training):
            places += len(part) * max(step[row] for row in part)
    return round(1 - sum(lengths) / places, 5)


# -- the speed of training ---------------------------------------------------------------------------------------------


def _speed(scratch: Path, rounds: int) -> dict[str, Any]:
    data = scratch / "rows.jsonl"
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "said", "no", "more", "of", "it"]
    generator = random.Random(1)
    with open(data, "w", encoding="utf-8") as file:
        for length in _lengths(SPEED_ROWS, SPEED_MEDIAN, SPEED_LONGEST):
            file.write(json.dumps({"text": " ".join(generator.choice(words) for _ in range(length))}) + "\n")
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in WAYS:
            runs[way].append(_train(data, WAYS[way], scratch / f"{turn}-{way}".replace(" ", "-")))
            print(f"{way}: {runs[way][-1]['tokens_per_second']:,.0f} tokens/s", flush=True)
    tokens = {run["tokens"] for each in runs.values() for run in each}
    assert len(tokens) == 1, "each way trains the same rows"
    found = {}
    for way, each in runs.items():
        ratios = [
            run["tokens_per_second"] / plain["tokens_per_second"]
            for run, plain in zip(each, runs["plain"], strict=True)
        ]
        found[way] = {
            "tokens_per_second": [round(run["tokens_per_second"], 1) for run in each],
            "padding_share": round(each[0]["padding_share"], 5),
            "speed_up": round(statistics.median(ratios), 3),
        }
    return found


def _train(data: Path, way: dict[str, Any], run: Path) -> dict[str, float]:
    """Tokens, tokens a second and padding share over one real run of an epoch."""
    settings = {**way, "micro_batch_tokens": SPEED_TOKENS} if "micro_batch_tokens" in way else way
    done = harness.python(
        "-m", "finetune", "train", harness.ROOT / "configs" / "tiny_cpu.yaml", f"data.train={data}",
        f"data.max_length={SPEED_LONGEST}", "training.max_steps=null", "training.epochs=1", "training.batch_size=64",
        *(f"training.{key}={json.dumps(value)}" for key, value in settings.items()), f"output.dir={run}",
        "data.eval=none", "training.eval_every=null", "output.merge=false", "memory.check=off", threads=1,
    )  # fmt: skip
    harness.succeeded(done)
    steps = harness.steps(run)
    seconds = sum(step["tokens"] / step["tokens_per_second"] for step in steps)
    places = sum(step["tokens"] / (1 - step["padding_share"]) for step in steps)
    tokens = sum(step["tokens"] for step in steps)
    return {"tokens": tokens, "tokens_per_second": tokens / seconds, "padding_share": 1 - tokens / places}


if __name__ == "__main__":
    main()
