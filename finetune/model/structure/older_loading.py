"""What loading packed weights needs with older versions of transformers (5.17), which newer ones do by themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.base import HfQuantizer

from finetune.forms import packed

IS_OLDER = not hasattr(HfQuantizer, "get_load_operations")


def update_conversions(
    conversions: Sequence[Any], serialized: Mapping[str, Sequence[str]], operation: type[ConversionOps], quantizer: Any
) -> list[Any]:
    """`HfQuantizer.update_weight_conversions` of transformers 5.23, for modules without parameters for scales.

    `serialized`: the names in files by the name of a parameter. `$` ends each, as in older versions `weight` matches
    the start of `weight_scale` too.
    """
    updated = []
    for one in conversions:
        parameter = one.source_patterns[0].rpartition(".")[2]
        names = serialized.get(parameter, ())
        if isinstance(one, WeightConverter) and names and all(s.endswith(f".{parameter}") for s in one.source_patterns):
            sources = [re.sub(f"{parameter}$", f"{name}$", s) for s in one.source_patterns for name in names]
            scope = one.scope_prefix, one.base_model_prefix
            one = WeightConverter(sources, one.target_patterns, [operation(quantizer), *one.operations])
            one.scope_prefix, one.base_model_prefix = scope
        updated.append(one)
    for parameter, names in serialized.items():
        updated.append(WeightConverter([f"{name}$" for name in names], parameter, [operation(quantizer)]))
    return updated


def as_published(codes: torch.Tensor) -> torch.Tensor:
    """Codes of a float of 8 bits, which older versions read as the type of the values."""
    return codes.to(torch.float8_e4m3fn) if codes.is_floating_point() and codes.itemsize > 1 else codes


def give_types_of_values(model: Any) -> Any:
    """Let the state dict have packed weights in the type of their values; the handle of the hook.

    Older versions convert what they read to the type in the state dict before it is packed, which would be bytes.
    """

    def typed(_: Any, state: dict[str, torch.Tensor], *__: Any) -> None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if how := packed.packing_of(parameter):
                state[name] = torch.empty(how.shape, dtype=how.dtype, device="meta")

    return model.register_state_dict_post_hook(typed)
