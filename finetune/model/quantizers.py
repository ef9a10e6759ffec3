"""transformers' quantizers, extended to experts, but excluding routers and weights that are read directly.

This module imports transformers, so import it only where weights are loaded.
"""

from __future__ import annotations

import contextlib
from typing import Any

import bitsandbytes as bnb
import torch
from transformers.quantizers import auto
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

from finetune.model import eight_bit, experts, linear_layers
from finetune.runtime import libraries


def used() -> contextlib.AbstractContextManager[None]:
    """In the block, transformers loads models with the quantizers of this module."""
    return libraries.replaced(auto, "AUTO_QUANTIZER_MAPPING", {**auto.AUTO_QUANTIZER_MAPPING, **_QUANTIZERS})


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


def trained_against(weight: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    """`weight` quantized and dequantized again, in its own type: what an adapter on it is trained against.

    `quantized` is that parameter of the quantized base on the meta device.
    """
    if isinstance(quantized, bnb.nn.Int8Params):
        return eight_bit.dequantized(*eight_bit.quantize(weight), weight.dtype)
    libraries.correct_dequantization()
    packed = type(quantized)(weight, requires_grad=False, **quantized.__dict__).to(weight.device)
    return bnb.functional.dequantize_4bit(packed.data, packed.quant_state)


def quantized_weights(model: Any) -> dict[str, torch.Tensor]:
    """The quantized parameters of a base, by name."""
    kinds = (bnb.nn.Params4bit, bnb.nn.Int8Params)
    return {name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, kinds)}


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
