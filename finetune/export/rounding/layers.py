"""Rounds a model whose weights stay in files, with one decoder layer at a time on the device.

    embeddings ─▶ layer: rows pass ─▶ Hessians ─▶ weights rounded ─▶ rows pass again ─▶ next layer ─▶ ... ─▶ head

Each layer's Hessians are of what the rounded layers before it compute.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.export.rounding.inputs import InputSums
from finetune.export.rounding.matrices import rounded
from finetune.export.rounding.part_files import PartFiles, RoundedPart, parts_of
from finetune.forms import packed
from finetune.model.recompute import checkpointing
from finetune.model.structure import streamed
from finetune.runtime import libraries, patches

TOKENS_AT_ONCE = 2048
"""Tokens that pass through a layer at a time."""


class LayerRounding:
    """The rounding of `model` (on the meta device, with buffers) to `forms` (keys of FORMS, by weight).

    `weights` has its values; `rows` are token ids (rows, tokens); `folder` keeps what is rounded, layer by layer.
    """

    def __init__(
        self, model: Any, weights: Mapping[str, torch.Tensor], forms: Mapping[str, str], rows: torch.Tensor,
        folder: Path, device: torch.device,
    ) -> None:  # fmt: skip
        self.model, self.rows, self.device, self._weights = model, rows.to(device), device, weights
        self.parts, self.kept = parts_of(model, forms), PartFiles(model, folder)

    def complete(self, started: Callable[[RoundedPart], None] = lambda part: None) -> None:
        """Round what is not kept yet; `started` is told each part. Raises ArtifactError for inputs that are not finite,
        OSError for a failed write.
        """
        if self.is_complete:
            return
        beside, *layers, head = self.parts
        if not self.kept.has(beside):
            started(beside)
            self.kept.write(
                beside, rounded(beside.forms, {name: self._weights[name].to(self.device) for name in beside.forms})
            )
        given = self.kept.read(beside)
        if hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")  # one product for each expert

        def fetch(name: str) -> torch.Tensor | None:
            return packed.values(given[name]) if name in given else self._weights.get(name)

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(libraries.without_cudnn_attention())
            for layer, part in zip(checkpointing.layers(self.model), layers, strict=True):
                if part.forms:
                    forward = _rounding_forward(self, layer, part, started)
                    stack.enter_context(patches.MODULE_FORWARD.by(forward, layer))
            stack.enter_context(streamed.running(self.model, fetch, self.device))
            output = self.model.base_model(input_ids=self.rows, use_cache=False)
        if not self.kept.has(head):
            started(head)
            [name] = head.forms
            inputs = InputSums({})
            for some in output.last_hidden_state.flatten(0, 1).split(TOKENS_AT_ONCE):
                inputs.add((name, 0), some)
            self.kept.write(head, rounded(head.forms, {name: self._weights[name].to(self.device)}, inputs))

    @property
    def is_complete(self) -> bool:
        """Whether all parts are kept."""
        return all(map(self.kept.has, self.parts))

    def packed(self) -> dict[str, nn.Parameter]:
        """The packed weights, by their names in the model."""
        return {name: one for part in self.parts for name, one in self.kept.read(part).items()}

    def plain(self) -> dict[str, int]:
        """How many matrices of each weight of layers and head were rounded by themselves, of those with any."""
        return {name: count for part in self.parts[1:] for name, count in self.kept.plain(part).items()}


def _rounding_forward(
    rounding: LayerRounding, layer: Any, part: RoundedPart, started: Callable[[RoundedPart], None]
) -> Callable[..., Any]:
    """Another forward pass of a decoder layer, which rounds it before it computes."""
    kept, computed, (count, tokens) = rounding.kept, layer.forward, rounding.rows.shape
    path = next(path for path, module in rounding.model.named_modules() if module is layer)
    own = {name: name.removeprefix(f"{path}.") for name in part.forms}

    def in_parts(arguments: Any, named: Any) -> Iterator[tuple[slice, Any]]:
        """Which rows, and what the layer computes of them: a tensor, or a tuple that begins with one."""
        each = max(TOKENS_AT_ONCE // tokens, 1)
        for start in range(0, count, each):
            rows = slice(start, start + each)
            yield rows, computed(*_of_rows(arguments, rows, count), **_of_rows(named, rows, count))

    def forward(*arguments: Any, **named: Any) -> Any:
        if not kept.has(part):
            started(part)
            weights = {name: layer.get_parameter(own[name]).data for name in own}
            inputs = InputSums(weights)
            with inputs:
                for _ in in_parts(arguments, named):
                    pass
            inputs.release()
            rows_first = {name: one.mT if name in kept.transposed else one for name, one in weights.items()}
            kept.write(part, rounded(part.forms, rows_first, inputs))
            del weights, inputs, rows_first

        for name, one in kept.read(part).items():
            parameter, how = layer.get_parameter(own[name]), packed.known_packing(one)
            how = dataclasses.replace(how, scales=how.scales.to(parameter.device))
            parameter.data = how.decoded(one.data.to(parameter.device), parameter.dtype)
        whole: torch.Tensor | None = None
        for rows, output in in_parts(arguments, named):
            first = output[0] if isinstance(output, tuple) else output
            if whole is None:
                whole = first.new_empty(count, *first.shape[1:])
            whole[rows] = first
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    return forward


def _of_rows(value: Any, rows: slice, count: int) -> Any:
    """`value` with the tensors in it that have `count` rows cut to `rows`; others are of all rows."""
    if isinstance(value, torch.Tensor):
        return value[rows] if value.dim() > 1 and len(value) == count else value
    if isinstance(value, dict):
        return {key: _of_rows(one, rows, count) for key, one in value.items()}
    return type(value)(_of_rows(one, rows, count) for one in value) if type(value) in (tuple, list) else value
