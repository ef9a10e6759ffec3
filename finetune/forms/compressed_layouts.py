"""How vLLM, SGLang and transformers name the tensors of a quantized weight, and what config.json says of them.

FP8 is in the layout of DeepSeek V3, MXFP4 of experts in that of gpt-oss, and everything else in those of
compressed-tensors (0.20, `compressors/`). A new form is one entry in LAYOUTS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from finetune.errors import ConfigError
from finetune.forms import float_blocks, packed

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class WrittenForm:
    """How a packed weight (rows, columns) is written.

    `write` returns its tensors, by what their names have after the weight's, from its bytes, scales and shape; `read`
    the bytes and scales from these. `stated` is the entry in config.json, given the modules that stay in 16 bit.
    """

    write: Callable[[torch.Tensor, torch.Tensor, torch.Size], Tensors]
    read: Callable[[Tensors], tuple[torch.Tensor, torch.Tensor]]
    stated: Callable[[list[str]], dict[str, Any]]
    columns: int


def _compressed(name: str, group: int, **weights: Any) -> Callable[[list[str]], dict[str, Any]]:
    """What compressed-tensors writes for weights that are quantized alone, so that activations stay as they are."""

    def stated(kept: list[str]) -> dict[str, Any]:
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

    return stated


# -- FP8 ---------------------------------------------------------------------------------------------------------------


def _write_fp8(codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size) -> Tensors:
    return {"": codes.view(torch.float8_e4m3fn), "_scale_inv": scales}


def _read_fp8(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    return tensors[""].view(torch.uint8), tensors["_scale_inv"]


def _state_fp8(kept: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": kept,
    }  # fmt: skip


# -- NVFP4 -------------------------------------------------------------------------------------------------------------


def _write_nvfp4(codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size) -> Tensors:
    factors = float_blocks.factors(scales)
    if not scales.is_meta and ((factors != factors[:1]).any() or factors[0, 0] != 1):
        raise ConfigError("rows of a matrix in NVFP4 have different factors, of which a file has one divisor a matrix")
    return {
        "_packed": codes,
        "_scale": scales[..., float_blocks.FACTOR_BYTES :].contiguous().view(torch.float8_e4m3fn),
        "_global_scale": factors[0, 1:].clone(),  # the reciprocal of what ModelOpt writes
    }


def _read_nvfp4(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    [layout] = [one for one in packed.FORMS["nvfp4"].layouts if one.endings[-1] == "_global_scale"]
    return tensors["_packed"], layout.scales(tensors["_packed"], tensors["_scale"], tensors["_global_scale"])


# -- MXFP4 and INT4 ----------------------------------------------------------------------------------------------------


def _write_experts(codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size) -> Tensors:
    """Codes (experts, rows, bytes) as (experts, rows, blocks, bytes), a block of 32 values each."""
    return {"_blocks": codes.view(*scales.shape, -1), "_scales": scales}


def _write_int4(codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size) -> Tensors:
    """Eight codes in each integer of 32 bits, the first in the lowest; scales are numbers in bfloat16."""
    return {
        "_packed": codes.contiguous().view(torch.int32),
        "_scale": scales.bfloat16(),
        "_shape": torch.tensor(shape, dtype=torch.int64),
    }


def _read_int4(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    return tensors["_packed"].view(torch.uint8), tensors["_scale"].float()


LAYOUTS: dict[str, WrittenForm] = {
    "fp8": WrittenForm(_write_fp8, _read_fp8, _state_fp8, 128),
    "nvfp4": WrittenForm(
        _write_nvfp4, _read_nvfp4,
        _compressed("nvfp4-pack-quantized", 16, type="float", strategy="tensor_group"), 16,
    ),
    "mxfp4": WrittenForm(
        lambda codes, scales, shape: {"_packed": codes, "_scale": scales},
        lambda tensors: (tensors["_packed"], tensors["_scale"]),
        _compressed("mxfp4-pack-quantized", 32, type="float", strategy="group", scale_dtype="torch.uint8"), 32,
    ),
    "int4": WrittenForm(
        _write_int4, _read_int4, _compressed("pack-quantized", 128, type="int", strategy="group"), 128
    ),
}  # fmt: skip
"""Layouts by the form of the weights, a key of `packed.FORMS`."""
EXPERTS = WrittenForm(
    _write_experts, lambda tensors: (tensors["_blocks"].flatten(-2), tensors["_scales"]),
    lambda kept: {"quant_method": "mxfp4", "modules_to_not_convert": kept}, 32,
)  # fmt: skip
"""That of experts in MXFP4 whose values the model reads transposed (gpt-oss)."""
