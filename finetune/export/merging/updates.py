"""Merges an adapter into single weights with PEFT's own layers, so that every variant merges as in PEFT."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.model.adapters import adapter_files, new_rows


class Updates:
    """The adapter in `directory` on a base, weight by weight.

    `adapted` is the base with the adapter, both on the meta device (`adapter_files.weightless_adapter`). Names are
    those of weights in the base.
    """

    def __init__(self, adapted: Any, directory: Path, device: torch.device) -> None:
        from peft.tuners.lora import LoraLayer, ParamWrapper
        from peft.utils import ModulesToSaveWrapper

        self._stored, self._device = adapter_files.StoredAdapter(directory), device
        self._layers: dict[str, tuple[str, Any, str]] = {}
        self.replaced: dict[str, str] = {}
        """Weights that were trained in full, and their names in the adapter's file."""
        self._rows: dict[str, tuple[list[int], str]] = {}
        for path, wrapper in new_rows.wrappers(adapted):
            stored = self._stored.name(f"{path}.token_adapter{new_rows.TRAINED}")
            self._rows[f"{base_name(path)}.weight"] = wrapper.token_adapter.token_indices["default"], stored
        for path, module in adapted.named_modules():
            if isinstance(module, LoraLayer):
                part = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
                self._layers[f"{base_name(path)}.{part}"] = path, module, part
            elif isinstance(module, ModulesToSaveWrapper):
                for name, _ in module.original_module.named_parameters():
                    full = f"{path}.modules_to_save.default.{name}"
                    self.replaced[f"{base_name(path)}.{name}"] = self._stored.name(full)

    def __contains__(self, name: str) -> bool:
        return name in self._layers or name in self.replaced or name in self._rows

    def apply(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The merged weight in float32 on the device; `weight` itself where the adapter does not touch it."""
        if name in self.replaced:
            return self._stored.read(self.replaced[name])
        if name in self._rows:
            numbers, stored = self._rows[name]
            return weight.float().index_copy(0, torch.tensor(numbers), self._stored.read(stored).float())
        if name not in self._layers:
            return weight
        path, layer, part = self._layers[name]
        # A throwaway layer with weights of its own.
        layer = copy.deepcopy(layer)
        setattr(layer.get_base_layer(), part, self._parameter(weight))
        for own, _ in list(layer.named_parameters()):
            if ".default." in own and not own.startswith("base_layer."):
                owner, _, last = own.rpartition(".")
                trained = self._stored.read(self._stored.name(f"{path}.{own}"))
                setattr(layer.get_submodule(owner), last, self._parameter(trained))
        layer.merge()
        return getattr(layer.get_base_layer(), part).data

    def fetch(self, name: str) -> torch.Tensor | None:
        """The adapter's own weight of this name in the PeftModel; None for a weight of the base."""
        trained = ".default." in name or name.endswith(new_rows.TRAINED)
        return self._stored.read(self._stored.name(name)) if trained else None

    def _parameter(self, tensor: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(tensor.to(self._device, torch.float32, copy=True), requires_grad=False)


def base_name(name: str) -> str:
    """The name in the base of a module or weight of a PeftModel."""
    return re.sub(r"\.(token_adapter|base_layer|original_module)(?=\.|$)", "", name).removeprefix("base_model.model.")
