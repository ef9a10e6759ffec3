"""The time of a loss without full logits: our tiled log-probabilities beside TRL's public function.

    python benchmarks/log_probs.py

Forward and backward pass of the same states, head and labels in float32, in one process and in turn, by both functions
with tiles of the same size. `frozen` is the head of a LoRA job, by the recomputed gradient and by the one computed
ahead; `trained` has a gradient of the head as well; `capped` is a soft cap, as Gemma 2's. Ratios are of each pair's
seconds, ours over TRL's, of which the median counts.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

import harness
import torch
from trl.kernels import ChunkedLogProbFunction

from finetune.kernels.head import Logits, Tile, log_probs

TOKENS, WIDTH = 256, 256
COLUMNS = 32768
CASES: dict[str, tuple[int, Logits, Tile, bool]] = {
    "2,048 words, frozen": (2048, Logits(), Tile(), False),
    "2,048 words, frozen, ahead": (2048, Logits(), Tile(ahead=True), False),
    "32,000 words, frozen": (32000, Logits(), Tile(), False),
    "32,000 words, frozen, ahead": (32000, Logits(), Tile(ahead=True), False),
    "32,000 words, trained": (32000, Logits(), Tile(), True),
    "50,257 words, capped": (50257, Logits(softcap=30.0), Tile(), False),
}
"""The vocabulary, the logits, our tile, and whether the head is trained."""


def main() -> None:
    parser = harness.parser(__doc__, "log_probs.json")
    parser.add_argument("--pairs", type=int, default=7, help="of passes of each case (default 7)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = {name: case(*given, pairs=options.pairs) for name, given in CASES.items()}
    found = {
        "tokens": TOKENS, "width": WIDTH, "cases": cases, "passed": all(one["ratio"] <= 1 for one in cases.values())
    }  # fmt: skip
    harness.save(options.output, found, threads=1)
    rows = [(name, one["trl_seconds"], one["seconds"], one["ratio"]) for name, one in cases.items()]
    print(harness.table(("case", "TRL, s", "ours, s", "ratio"), rows))
    sys.exit(0 if found["passed"] else 1)


def case(words: int, logits: Logits, tile: Tile, trained: bool, pairs: int) -> dict[str, Any]:
    """Median seconds of both, and the median ratio, after a pass of each to warm up."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = (torch.randn(words, WIDTH, generator=generator) / WIDTH**0.5).requires_grad_(trained)
    labels = torch.randint(words, (TOKENS,), generator=generator)
    constants = logits.temperature, COLUMNS, logits.softcap, logits.scale, ("log_probs",)

    def theirs() -> torch.Tensor:
        found: torch.Tensor = ChunkedLogProbFunction.apply(hidden, weight, None, labels, *constants)[0]
        return found

    def seconds(function: Callable[[], torch.Tensor]) -> float:
        start = time.perf_counter()
        torch.autograd.grad(function().sum(), [hidden, weight] if trained else [hidden])
        return time.perf_counter() - start

    def ours() -> torch.Tensor:
        return log_probs(hidden, weight, None, labels, logits, tile)

    times = [(seconds(theirs), seconds(ours)) for _ in range(pairs + 1)][1:]
    trl, own = (statistics.median(each) for each in zip(*times, strict=True))
    return {
        "trl_seconds": round(trl, 4), "seconds": round(own, 4),
        "ratio": round(statistics.median(one / other for other, one in times), 3),
    }  # fmt: skip


if __name__ == "__main__":
    main()
