"""What config.json says of weights in a form of compressed-tensors (0.20, `compressors/`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def stated(name: str, group: int, **weights: Any) -> Callable[[list[str]], dict[str, Any]]:
    """The entry for weights in 4 bit that are quantized alone, so that activations stay as they are; it is made from
    the names of the modules that stay in 16 bit.
    """

    def entry(kept: list[str]) -> dict[str, Any]:
        scheme = {"num_bits": 4, "symmetric": True, "group_size": group, "dynamic": False, **weights}
        return {
            "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed", "ignore": kept,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None,
                    "format": name,
                }
            },
        }  # fmt: skip

    return entry
