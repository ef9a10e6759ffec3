"""transformers' quantizers, extended to experts, but excluding routers and weights that are read directly.

This module imports transformers, so import it only where weights are loaded.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import bitsandbytes as bnb
import torch
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import auto
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

from finetune.model.structure import eight_bit, experts, linear_layers
from finetune.runtime import libraries, patches


def used() -> contextlib.AbstractContextManager[None]:
    """In the block, transformers loads models with the quantizers of this module."""
    return patches.QUANTIZERS.by({**auto.AUTO_QUANTIZER_MAPPING, **_QUANTIZERS})


def prepare(model: Any, config: Any) -> None:
    """Replace layers of a model on the meta device as a BitsAndBytesConfig says, like transformers before loading."""
    model.hf_quantizer = _QUANTIZERS["bitsandbytes_4bit" if config.load_in_4bit else "bitsandbytes_8bit"](
        config, pre_quantized=False
    )
    model.hf_quantizer.preprocess_model(model, device_map=None)
    model.hf_quantizer.postprocess_model(model)


def kept_modules(model: Any) -> list[str]:
    """Modules that stay in 16 bit: the output head (as in the QLoRA paper and in transformers), routers, and layers
    whose weight the model's code reads directly.
    """
    return [*get_keys_to_not_convert(model), *experts.routers(model), *linear_layers.read_directly(model)]


@dataclass(frozen=True)
class Rounding:
    """How a weight of a quantized base is rounded.

    `parameter` is that of the base on the meta device. `transposed`: the file has it as GPT-2's layers do (inputs,
    outputs), and it is transposed before it is quantized.
    """

    parameter: torch.Tensor
    transposed: bool

    def trained_against(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` quantized and dequantized again, in its own type: what an adapter on it is trained against."""
        if self.transposed:
            return replace(self, transposed=False).trained_against(weight.T.contiguous()).T.contiguous()
        if isinstance(self.parameter, bnb.nn.Int8Params):
            return eight_bit.dequantized(*eight_bit.quantize(weight), weight.dtype)
        libraries.correct_dequantization()
        kind: Any = type(self.parameter)
        packed = kind(weight, requires_grad=False, **self.parameter.__dict__).to(weight.device)
        return bnb.functional.dequantize_4bit(packed.data, packed.quant_state)


def roundings(model: Any) -> dict[str, Rounding]:
    """How each quantized parameter of a base on the meta device is rounded, by its name."""
    kinds = (bnb.nn.Params4bit, bnb.nn.Int8Params)
    return {
        f"{path}.{name}".removeprefix("."): Rounding(parameter, getattr(module, "source_cls", None) is Conv1D)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, kinds)
    }


class _Quantizer:
    @staticmethod
    def get_modules_to_not_convert(model: Any, *arguments: Any, **named: Any) -> list[str]:
        known = Bnb4BitHfQuantizer.get_modules_to_not_convert(model, *arguments, **named)
        return [*known, *kept_modules(model)]

    def preprocess_model(self, model: Any, **named: Any) -> None:
        super().preprocess_model(model, **named)  # type: ignore[misc]
        experts.quantize(model, self.quantization_config)  # type: ignore[attr-defined]
        eight_bit.weight_only(model)


class _FourBit(_Quantizer, Bnb4BitHfQuantizer):
    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return isinstance(model.get_parameter_or_buffer(param_name), bnb.nn.Params4bit)

    def dequantize(self, model: Any, dtype: Any = None) -> Any:
        model = super().dequantize(model, dtype)
        experts.dequantize(model, dtype)
        return model


class _EightBit(_Quantizer, Bnb8BitHfQuantizer):
    pass


_QUANTIZERS: dict[str, Any] = {"bitsandbytes_4bit": _FourBit, "bitsandbytes_8bit": _EightBit}
