"""The parts of a rounded model in files: each is written once it is complete, and a rounding goes on after the last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from finetune.export.rounding.matrices import RoundedWeight
from finetune.forms import FORMS, packed
from finetune.model.recompute import checkpointing
from finetune.model.structure import experts
from finetune.storage import weight_files


@dataclass(frozen=True)
class RoundedPart:
    """Weights that are rounded together and kept in one file: their `forms` by name."""

    file: str
    forms: dict[str, str]


def parts_of(model: Any, forms: Mapping[str, str]) -> list[RoundedPart]:
    """What is rounded of `model`, in order: what is beside the layers, each layer, and the head unless it is tied."""
    names = {module: name for name, module in model.named_modules()}
    layers = [f"{names[layer]}." for layer in checkpointing.layers(model)]
    tied = model.all_tied_weights_keys
    forms = {name: form for name, form in forms.items() if name not in tied}
    head = f"{names.get(model.get_output_embeddings())}.weight"
    last = {head: forms[head]} if head in forms and head not in tied.values() else {}
    beside = {name: form for name, form in forms.items() if not name.startswith(tuple(layers)) and name not in last}
    each = [
        RoundedPart(f"layer-{number:05d}", {name: form for name, form in forms.items() if name.startswith(layer)})
        for number, layer in enumerate(layers)
    ]
    return [RoundedPart("beside", beside), *each, RoundedPart("head", last)]


class PartFiles:
    """The packed weights of `model` (on the meta device) in `folder`."""

    def __init__(self, model: Any, folder: Path) -> None:
        self._model, self._folder = model, folder
        self.transposed = {
            name for name, module, _ in experts.weights(model) if getattr(module, "is_transposed", False)
        }
        """Weights of experts that are (experts, columns, rows)."""

    def has(self, part: RoundedPart) -> bool:
        """Whether the file of a part is complete."""
        return not part.forms or weight_files.is_written(self._path(part), self._layout(part))

    def write(self, part: RoundedPart, weights: Mapping[str, RoundedWeight]) -> None:
        """Write the file of a part. Raises OSError."""
        tensors: dict[str, torch.Tensor] = {}
        for name, one in weights.items():
            tensors |= {name: one.codes, _scales_of(name): one.scales, f"{name}.compensated": one.compensated}
        layout = self._layout(part)
        weight_files.write(self._path(part), layout, (tensors[name] for name in layout.tensors))

    def read(self, part: RoundedPart) -> dict[str, nn.Parameter]:
        """The packed weights of a part, by their names in the model."""
        weights = {}
        for name, form in part.forms.items():
            own = self._model.get_parameter(name)
            how = packed.Packing(
                form, self._stored(part, _scales_of(name)), own.shape, own.dtype, name in self.transposed
            )
            weights[name] = packed.packed(self._stored(part, name), how)
        return weights

    def plain(self, part: RoundedPart) -> dict[str, int]:
        """How many matrices of each weight were rounded by themselves, of those with any."""
        counts = {name: int((~self._stored(part, f"{name}.compensated")).sum()) for name in part.forms}
        return {name: count for name, count in counts.items() if count}

    def _stored(self, part: RoundedPart, name: str) -> torch.Tensor:
        with safe_open(self._path(part), framework="pt") as stored:
            tensor: torch.Tensor = stored.get_tensor(name)
        return tensor

    def _path(self, part: RoundedPart) -> Path:
        return self._folder / f"{part.file}{weight_files.SUFFIX}"

    def _layout(self, part: RoundedPart) -> weight_files.FileLayout:
        tensors: dict[str, tuple[torch.dtype, torch.Size]] = {}
        for name, form in part.forms.items():
            shape = self._model.get_parameter(name).shape
            if name in self.transposed:
                shape = torch.Size((*shape[:-2], shape[-1], shape[-2]))
            codec = FORMS[form].codec
            codes, scales = codec.shapes(shape)
            matrices = shape[0] if len(shape) == 3 else 1
            tensors |= {
                name: (torch.uint8, codes),
                _scales_of(name): (codec.blocks.scale_dtype, scales),
                f"{name}.compensated": (torch.bool, torch.Size([matrices])),
            }
        return weight_files.FileLayout(dict(sorted(tensors.items(), key=lambda item: -item[1][0].itemsize)))


def _scales_of(name: str) -> str:
    """The name of the scales of a weight."""
    return f"{name}.scales"
