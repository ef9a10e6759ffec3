"""Publishes an adapter: written for the plain base, and proven by loading it with PEFT alone."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.config import AdapterSection
from finetune.errors import ArtifactError, first_line
from finetune.model import adapter_files
from finetune.storage import weight_files

Tensors = Mapping[str, torch.Tensor]


def write(tensors: Tensors, config: Any, folder: Path) -> None:
    """Write the adapter with these tensors and this LoraConfig in PEFT's format."""
    config.inference_mode = True
    config.save_pretrained(str(folder))
    if len(config.rank_pattern) > 1:  # PEFT writes sorted keys (peft 0.21), but takes the first that matches a layer
        file = folder / adapter_files.CONFIG
        values = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**values, "rank_pattern": config.rank_pattern}, indent=2), encoding="utf-8")
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # aligned in the file
    layout = weight_files.Layout({name: (tensor.dtype, tensor.shape) for name, tensor in ordered})
    weight_files.write(folder / adapter_files.WEIGHTS, layout, (tensor for _, tensor in ordered))


def for_plain_base(
    tensors: Tensors, initial: Tensors, config: Any, section: AdapterSection
) -> tuple[dict[str, torch.Tensor], Any]:
    """The adapter of the plain base that equals one trained with PiSSA on its residual, and its LoraConfig.

    W = residual + s B0 A0, so the update of W is s (BA - B0 A0): of twice the rank (PiSSA, section 3.3). DoRA's
    magnitudes are those of W with the update, and stay as they are.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        if ".lora_A." in name:
            found[name] = torch.cat([tensor.detach().cpu(), initial[name]])
        elif ".lora_B." in name:
            found[name] = torch.cat([tensor.detach().cpu(), -initial[name]], dim=1)
    plain = adapter_files.published(section)
    config.init_lora_weights, config.r, config.lora_alpha = True, plain.rank, plain.alpha
    config.rank_pattern = dict(plain.ranks)
    return found, config


def prove(base: Any, folder: Path, tensors: Tensors, scaling: Mapping[str, float]) -> None:
    """Load the adapter in `folder` with PEFT alone, and compare every tensor with those that were trained.

    `base` is on the meta device; PEFT gets weights that take no memory in its place, so that this needs the memory of
    the adapter alone. `scaling` is that of each layer by its name in PEFT's model. Raises ArtifactError unless PEFT
    reads every tensor, has no other one, and adds them at the same scale.
    """
    from peft import PeftModel

    for module in base.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            hollow = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            setattr(module, name, nn.Parameter(hollow, requires_grad=False))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they would say is compared below
            read = PeftModel.from_pretrained(base, str(folder), low_cpu_mem_usage=True)
    except Exception as error:
        raise _unproven(f"cannot load it ({first_line(error)})") from error
    found = adapter_files.weights(read)
    different = [
        name
        for name in found.keys() | tensors.keys()
        if name not in found
        or name not in tensors
        or found[name].is_meta
        or not torch.equal(found[name].float(), tensors[name].detach().float().cpu())
    ]
    if different:
        raise _unproven(f"reads {len(different)} tensors otherwise, such as `{sorted(different)[0]}`")
    scales = adapter_files.scales(read)
    if scales.keys() != scaling.keys() or not all(math.isclose(scales[name], scaling[name]) for name in scaling):
        raise _unproven("scales its layers otherwise")


def _unproven(why: str) -> ArtifactError:
    return ArtifactError(
        f"adapter/ is not what was trained: PEFT {why}. Nothing was published; the trained weights are in the run's "
        "last checkpoint"
    )
