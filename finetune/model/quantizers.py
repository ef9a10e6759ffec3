"""What transformers quantizes while it loads: the experts of a mixture as well, no router, and no weight read directly.

transformers is imported here with this module, so this module is imported where weights are loaded.
"""

from __future__ import annotations

import contextlib
from typing import Any

import bitsandbytes as bnb
from transformers.quantizers import auto
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

from finetune.config import QuantizationSection
from finetune.model import direct_reads, eight_bit, experts
from finetune.runtime.libraries import replaced


def used(section: QuantizationSection) -> contextlib.AbstractContextManager[None]:
    """Let transformers load with the quantizers of this module, within the block."""

    class FourBit(_SomeKept, Bnb4BitHfQuantizer):
        def _process_model_before_weight_loading(self, model: Any, device_map: Any, **kwargs: Any) -> None:
            super()._process_model_before_weight_loading(model, device_map, **kwargs)
            experts.quantize(model, section)

        def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
            return isinstance(model.get_parameter_or_buffer(param_name), bnb.nn.Params4bit)

        def _dequantize(self, model: Any, dtype: Any = None) -> Any:
            model = super()._dequantize(model, dtype)
            experts.dequantize(model, dtype)
            return model

    quantizers = {"bitsandbytes_4bit": FourBit, "bitsandbytes_8bit": _EightBit}
    return replaced(auto, "AUTO_QUANTIZER_MAPPING", {**auto.AUTO_QUANTIZER_MAPPING, **quantizers})


class _SomeKept:
    @staticmethod
    def get_modules_to_not_convert(model: Any, *arguments: Any, **named: Any) -> list[str]:
        known = Bnb4BitHfQuantizer.get_modules_to_not_convert(model, *arguments, **named)
        return [*known, *experts.routers(model), *direct_reads.names(model)]


class _EightBit(_SomeKept, Bnb8BitHfQuantizer):
    def _process_model_before_weight_loading(self, model: Any, device_map: Any, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, device_map, **kwargs)
        eight_bit.weight_only(model)
