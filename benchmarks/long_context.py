"""How long a row can be: memory by what is done for long rows, on a card by forecast and on a CPU by measurement.

    python benchmarks/long_context.py

- `forecast`: configs/llama3_8b_131k.yaml (Llama-3.1-8B, rank 32, one row of 131,072 tokens) on a 24 GB card: what the
  peak is made of, and the longest row that fits, with and without fused kernels, tiles of the MLP, and layer inputs on
  the host. No GPU, no weights. Also draws docs/llama8b_131k.png.
- `resident`: what training a small model adds to a process, by the length of its row. A row of 32,768 tokens would have
  4 GiB of scores a head; memory that grows in proportion has none, nor any mask or table like them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import harness

CONFIG, CARD = "configs/llama3_8b_131k.yaml", "RTX 4090"
PICTURE = harness.ROOT / "docs" / "llama8b_131k.png"
GRAIN = 1024
"""Lengths are found to so many tokens."""

WAYS: dict[str, tuple[dict[str, str], bool]] = {
    "fused kernels, tiles, inputs on the host": ({}, True),
    "inputs on the card": ({"memory.offload": "none"}, True),
    "no tiles": ({}, False),
    "PEFT's modules, tiles": ({"kernels.fused": "off"}, True),
    "PEFT's modules": ({"kernels.fused": "off"}, False),
}
"""The config, and it without one of the means each: what is changed in it, and whether the MLP takes tiles."""

LENGTHS = (4096, 8192, 16384, 32768)
SMALL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": LENGTHS[-1],
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip


# -- on a card, by forecast --------------------------------------------------------------------------------------------


def forecast() -> dict[str, Any]:
    """By way: the peak of the whole row by category in bytes, and the longest row that fits."""
    import finetune
    from finetune.resolve import planning

    found: dict[str, Any] = {}
    for name, (changes, tiled) in WAYS.items():
        config = finetune.load_config(harness.ROOT / CONFIG, ["data.eval=none", "training.precision=bf16"]).changed(
            changes
        )
        with _tiles(tiled):
            planner = planning.planner_for(config, CARD)
            whole = planner.forecast()
            longest = _longest(planner, whole)
        found[name] = {
            "fits": whole.fits,
            "needed_bytes": whole.needed_bytes,
            "host_bytes": whole.host_bytes,
            "seconds_a_row": round(whole.seconds / config.training.batch_size, 1),
            "longest_row": longest,
            "categories": whole.categories,
        }
        print(f"{name}: {harness.gib(whole.needed_bytes)} GiB for the whole row, longest {longest:,}", flush=True)
    return {"config": CONFIG, "card": CARD, "budget_bytes": whole.budget_bytes, "ways": found}


@contextlib.contextmanager
def _tiles(tiled: bool) -> Iterator[None]:
    """Within the block an MLP takes a long input in tiles, or none."""
    from finetune.kernels import mlp

    with harness.nothing_kept(), contextlib.nullcontext() if tiled else mock.patch.object(mlp, "_MANY", sys.maxsize):
        yield


def _longest(planner: Any, whole: Any) -> int:
    """The longest row that fits, in whole GRAINs, up to that of the config."""
    if whole.fits:
        return planner.config.data.max_length
    low, high = 0, planner.config.data.max_length // GRAIN
    while high - low > 1:
        middle = (low + high) // 2
        fits = planner.forecast_with({"data.max_length": middle * GRAIN}).fits
        low, high = (middle, high) if fits else (low, middle)
    return low * GRAIN


# -- on a CPU, measured ------------------------------------------------------------------------------------------------


def resident() -> dict[str, Any]:
    """By length: what two steps of one row add to the resident size of a process, at its peak."""
    found = {}
    for tokens in LENGTHS:
        job = {
            "architecture": SMALL, "rows": [[tokens, tokens]],
            "config": {
                "data.eval": "none", "data.max_length": tokens, "training.micro_batch": 1, "training.batch_size": 1,
                "kernels.fused": "on", "memory.loss_tokens": 512, "training.precision": "fp32",
            },
        }  # fmt: skip
        command = [harness.ROOT / "benchmarks" / "measured_step.py", json.dumps(job), "--resident"]
        done = harness.succeeded(harness.python(*command, threads=1, extra=harness.ALLOCATOR))
        found[str(tokens)] = json.loads(done.output.splitlines()[-1])["resident_bytes"]
        print(f"{tokens:,} tokens: {harness.mib(found[str(tokens)])} MiB", flush=True)
    measured = itertools.pairwise(zip(LENGTHS, found.values(), strict=True))
    grown = [round((more - less) / (longer - shorter)) for (shorter, less), (longer, more) in measured]
    return {"resident_bytes": found, "bytes_a_further_token": grown}


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    options = harness.parser(__doc__, "long_context.json").parse_args()
    found = {"forecast": forecast(), "resident": resident()}
    harness.finetune("plan", CONFIG, "--gpu", CARD, "--picture", PICTURE)
    harness.save(options.output, found, threads=1)


if __name__ == "__main__":
    main()
