"""An adapter's config whose targets PEFT alone, without this package, resolves to the same layers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any


def settings(adapted: Any) -> Any:
    """The LoraConfig from which PEFT puts the adapter of `adapted` on the same layers again.

    Layers that it would mistake (see `mistaken`) are named by their weights, which PEFT can adapt too: the tensors have
    the same names and shapes, and W + BA is the same. PEFT has no dropout there, nor on experts, which only training
    needs. On a quantized base it treats such a name like any other target.
    """
    from peft.tuners.lora import LoraLayer, ParamWrapper

    config = copy.deepcopy(adapted.peft_config["default"])
    layers = [
        name.removeprefix("base_model.model.")
        for name, module in adapted.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper)
    ]
    if weights := [f"{name}.weight" for name in mistaken(adapted.get_base_model(), layers)]:
        taken = _taken(adapted.get_base_model(), config.target_modules)
        config.target_modules = {target for target in config.target_modules if target not in taken}
        config.target_parameters = sorted([*(config.target_parameters or []), *weights])
    if config.target_parameters:
        config.lora_dropout = 0.0
    return config


def mistaken(base: Any, layers: Iterable[str]) -> list[str]:
    """The linear `layers` (full names) that PEFT mistakes for transformers 4's experts of the same names.

    In a mixture, peft 0.21 (`convert_peft_config_for_transformers`) moves a target such as `gate_proj` to the fused
    experts, also where dense layers or shared experts have linear layers of that name, and so leaves their tensors
    unread (https://github.com/huggingface/peft/issues/3711). It does so for any list or pattern of modules.
    """
    layers = list(layers)
    taken = _taken(base, {name.rpartition(".")[2] for name in layers})
    return [name for name in layers if name.rpartition(".")[2] in taken]


def _taken(base: Any, targets: Iterable[str]) -> set[str]:
    """The target names that PEFT replaces by others when it reads them in a config."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    replaced = set()
    for target in targets:
        config = LoraConfig(target_modules=[target])
        try:
            convert_peft_config_for_transformers(config, base, None)
        except ValueError:  # only together with another one
            replaced.add(target)
        else:
            replaced |= {target} - set(config.target_modules)
    return replaced
