"""Adapters in PEFT's format: written for the plain base, and proven by loading them with PEFT alone."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.config import AdapterSection
from finetune.errors import ArtifactError, ConfigError, first_line
from finetune.model.adapters import adapter, adapter_files, plain_peft
from finetune.storage import weight_files

AdapterTensors = Mapping[str, torch.Tensor]


def write(tensors: AdapterTensors, config: Any, folder: Path) -> None:
    """Write the adapter with these tensors and this LoraConfig in PEFT's format."""
    config.inference_mode = True
    config.save_pretrained(str(folder))
    if len(config.rank_pattern) > 1:  # PEFT writes sorted keys (peft 0.21), but takes the first that matches a layer
        file = folder / adapter_files.CONFIG
        values = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**values, "rank_pattern": config.rank_pattern}, indent=2), encoding="utf-8")
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # aligned in the file
    layout = weight_files.FileLayout({name: (tensor.dtype, tensor.shape) for name, tensor in ordered})
    weight_files.write(folder / adapter_files.WEIGHTS, layout, (tensor for _, tensor in ordered))


def for_plain_base(
    tensors: AdapterTensors, initial: AdapterTensors, config: Any, section: AdapterSection
) -> tuple[dict[str, torch.Tensor], Any]:
    """The adapter of the plain base that equals one trained with PiSSA on its residual, and its LoraConfig.

    W = residual + s B0 A0, so the update of W is s (BA - B0 A0): of twice the rank (PiSSA, section 3.3). DoRA's
    magnitudes are those of W with the update, and stay as they are.
    """
    joined = dict(tensors)
    for name, tensor in tensors.items():
        if ".lora_A." in name:
            joined[name] = torch.cat([tensor.detach().cpu(), initial[name]])
        elif ".lora_B." in name:
            joined[name] = torch.cat([tensor.detach().cpu(), -initial[name]], dim=1)
    plain = adapter_files.published(section)
    config.init_lora_weights, config.r, config.lora_alpha = True, plain.rank, plain.alpha
    config.rank_pattern = dict(plain.ranks)
    return joined, config


def check(base: Any, skeleton: Callable[[], Any], section: AdapterSection) -> None:
    """Raise ConfigError for an adapter that PEFT could not read as it will be published; no weights are needed.

    `base` is the job's, `skeleton` makes it unquantized, both on the meta device. Where transformers renames the
    weights of a base while it loads them, PEFT (0.21) renames an adapter's, too, sometimes those that have the new
    names already.
    """
    from peft import get_peft_model, set_peft_model_state_dict
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    if section.kind == "none" or not get_checkpoint_conversion_mapping(base.config.model_type):
        return
    _refuse_on_mistaken(base, section)
    adapted = adapter.adapted(skeleton(), adapter_files.published(section), low_cpu_mem_usage=True)
    tensors = {name: _without_memory(weight) for name, weight in adapter_files.weights(adapted).items()}
    settings = plain_peft.settings(adapted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the comparison below finds what they warn of
        read = get_peft_model(_hollow(adapted.unload()), settings, low_cpu_mem_usage=True)
        set_peft_model_state_dict(read, tensors, low_cpu_mem_usage=True)
    if different := _different(read, tensors):
        layers = sorted({*map(adapter_files.layer_of, different)})
        raise ConfigError(
            f"`adapter.targets`: PEFT renames the tensors of {len(layers)} layers of {base.config.model_type} when it "
            f"reads them, such as `{layers[0]}`, and so loses them; list other layers"
        )


def _refuse_on_mistaken(base: Any, section: AdapterSection) -> None:
    """Raise ConfigError for options that layers named by their weights (`plain_peft.settings`) cannot have."""
    if not (section.dora or section.ranks):
        return
    ranks = adapter.ranks(base, section)
    layers = plain_peft.mistaken(base, ranks)
    wrong = ["dora"] if section.dora else []
    wrong += ["ranks"] if any(ranks[name] != section.rank for name in layers) else []
    if layers and wrong:
        named = ", ".join(f"`{name}`" for name in sorted({name.rpartition(".")[2] for name in layers}))
        raise ConfigError(
            f"`adapter.{wrong[0]}`: PEFT takes {named} of {base.config.model_type} for its experts, and cannot read "
            f"{'DoRA' if section.dora else 'another rank than `adapter.rank`'} there; remove it, or list other layers "
            "in `adapter.targets`"
        )


def prove(base: Any, folder: Path, tensors: AdapterTensors, scaling: Mapping[str, float]) -> None:
    """Load the adapter in `folder` with PEFT alone, and compare every tensor with those that were trained.

    `base` is on the meta device; its weights are replaced by ones without memory, so this needs only the memory of the
    adapter. `scaling` is each layer's scale by its name in PEFT's model. Raises ArtifactError unless PEFT reads every
    tensor, has no other one, and adds them at the same scale.
    """
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the comparison below finds what they warn of
            read = PeftModel.from_pretrained(_hollow(base), str(folder), low_cpu_mem_usage=True)
    except Exception as error:
        raise _unproven(f"cannot load it ({first_line(error)})") from error
    if different := _different(read, tensors):
        raise _unproven(f"reads {len(different)} tensors otherwise, such as `{different[0]}`")
    scales = adapter_files.scales(read)
    if scales.keys() != scaling.keys() or not all(math.isclose(scales[name], scaling[name]) for name in scaling):
        raise _unproven("scales its layers otherwise")


def _hollow(base: Any) -> Any:
    """`base` with weights without memory on a CPU instead of the meta device, where PEFT would put the adapter too."""
    for module in base.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(_without_memory(weight), requires_grad=False))
    return base


def _without_memory(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=weight.dtype).expand(weight.shape)


def _different(read: Any, tensors: AdapterTensors) -> list[str]:
    """Names of the tensors that differ between `tensors` and an adapter read by PEFT, or exist in only one of them."""
    loaded = adapter_files.weights(read)
    return sorted(
        name
        for name in loaded.keys() | tensors.keys()
        if name not in loaded
        or name not in tensors
        or loaded[name].is_meta
        or not torch.equal(loaded[name].float(), tensors[name].detach().float().cpu())
    )


def _unproven(why: str) -> ArtifactError:
    return ArtifactError(
        f"adapter/ is not what was trained: PEFT {why}. Nothing was published; the trained weights are in the run's "
        "last checkpoint"
    )
