"""Adapters on the experts of a mixture in the two forms of vLLM, by its class for the base (`plain_form`).

Fused, where the class says `is_3d_moe_weight`: PEFT's tensors for all experts of a layer, those of `gate_up_proj` named
`experts.base_layer` and those of `down_proj` `experts`. Separate, elsewhere: a pair for each projection of each expert,
by the names in the base's files, such as `experts.7.up_proj`; gate and up have the A of `gate_up_proj`, and each its
rows of B. Both need all projections of a layer, and take the rank from the tensors' shapes.

Read at vllm-project/vllm: lora/model_manager.py (01533aa, `_stack_moe_lora_weights`), lora/lora_model.py (0306474),
lora/layers/fused_moe.py (0002540), lora/lora_weights.py (`pack_moe`), and of the classes below `SupportsLoRA`,
`is_3d_moe_weight` and `get_expert_mapping`, in part from excerpts; vLLM was not run. SGLang's rules were not read.

    E experts, r rank; a pair is A (E, r, in) and B (E, out, r), of scale 1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from peft.tuners.lora import ParamWrapper

from finetune.errors import ConfigError
from finetune.model.adapters.plain_form import FUSED
from finetune.model.structure import experts
from finetune.model.structure.streamed import ConversionGroup

Pair = tuple[torch.Tensor, torch.Tensor]


class Experts:
    """The adapters on experts of a PeftModel, by the names of their layers in its base, and their names for vLLM.

    Raises ConfigError if vLLM could not read them.
    """

    def __init__(self, adapted: Any, groups: Iterable[ConversionGroup], model_type: str) -> None:
        sources = {target: group for group in groups for target in group.targets}
        self._pairs: dict[str, Pair] = {}
        self._names: dict[str, list[list[str]]] = {}
        for name, layer in adapted.get_base_model().named_modules():
            if isinstance(layer, ParamWrapper):
                path = ".".join(part for part in name.split(".") if part != "base_layer")
                parameter = f"{path}.{layer.parameter_name}"
                # PEFT 0.21 assumes the order of sides that most models have: weights (experts, out, in).
                transposed = getattr(layer.get_base_layer(), "is_transposed", None)
                if transposed is None or not (transposed or len(experts.shape(layer.get_param())) == 3):
                    raise ConfigError(
                        f"PEFT confuses the sides of `{parameter}`, which vLLM would not; export `merged` instead"
                    )
                down, up = (matrix["default"].weight.detach().float().cpu() for matrix in (layer.lora_A, layer.lora_B))
                self._pairs[name] = (
                    down.reshape(layer.num_experts, -1, down.shape[1]),
                    up.reshape(up.shape[0], -1, layer.num_experts).permute(2, 0, 1) * layer.scaling["default"],
                )
                self._names[name] = _names(parameter, sources[parameter], model_type)
        self.rank = max((down.shape[1] for down, _ in self._pairs.values()), default=0)

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def as_in_peft(self) -> bool:
        """Whether the names for vLLM are those of PEFT's layers."""
        return all(names == [[name]] for name, names in self._names.items())

    def tensors(self) -> dict[str, Pair]:
        """The pairs of matrices that vLLM reads, by their names for it."""
        found: dict[str, Pair] = {}
        for layer, names in self._names.items():
            down, up = self._pairs[layer]
            if len(names[0]) < len(down):
                found[names[0][0]] = _as_in_peft(down, up)
                continue
            for rows, of_part in zip(up.chunk(len(names), dim=1), names, strict=True):
                for expert, name in enumerate(of_part):
                    found[name] = down[expert].clone(), rows[expert].contiguous()
        return found

    def joined(self, layer: str, stored: Mapping[str, Pair]) -> Pair:
        """PEFT's matrices of a layer from those that were written for vLLM; the inverse of `tensors`."""
        names = self._names[layer]
        if len(names[0]) == 1:
            return stored[names[0][0]]
        down = torch.stack([stored[name][0] for name in names[0]])
        parts = [torch.stack([stored[name][1] for name in part]) for part in names]
        return _as_in_peft(down, torch.cat(parts, dim=1))


def _names(parameter: str, group: ConversionGroup, model_type: str) -> list[list[str]]:
    """The names of the pairs into which that of `parameter`, made of the tensors of `group`, is divided.

    A list for each part of B's rows, with a name for each expert; in the fused form one name for all.
    """
    if model_type in FUSED:
        path = group.sources[0].partition(".experts.")[0] + ".experts"
        return [[path if parameter.endswith("down_proj") else f"{path}.base_layer"]]
    if group.converter is None:
        raise ConfigError(
            f"the adapter has no form for vLLM: the base's files hold all experts of `{parameter}` in one tensor, and "
            f"vLLM reads adapters on experts of `{model_type}` one by one; export `merged` instead"
        )
    sources = list(zip(group.sources, group.patterns, strict=True))
    return [
        [source.removesuffix(".weight") for source, each in sources if each == pattern]
        for pattern in group.converter.source_patterns
    ]


def _as_in_peft(down: torch.Tensor, up: torch.Tensor) -> Pair:
    """A (E r, in) and B (out, r E)."""
    return down.flatten(0, 1).contiguous(), up.permute(1, 2, 0).flatten(1).contiguous()
