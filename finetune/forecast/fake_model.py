"""A job's model on fake tensors: the base and the adapter as training builds them, with as few layers as suffice.

Its loading is recorded module by module, as the weights are read and quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from finetune.config import AdapterSection
from finetune.forecast import depth, fake
from finetune.forecast.extrapolate import Shortened
from finetune.forecast.trace_recorder import TraceRecorder
from finetune.model.build import Blueprint
from finetune.model.recompute import checkpointing
from finetune.model.source import prequantized
from finetune.model.structure import experts

Shortening = Callable[[Sequence[Hashable], Sequence[Hashable]], Shortened]
"""From the kinds and the forms of the layers to those that are kept."""


class FakeModel:
    """Base and adapter in `mode`, whose loading `recorder` records.

    `shortening` chooses the layers to keep; `whole` sees the base with all of them. `attach` puts the adapter on the
    shortened base, given the section with the names that modules have there.
    """

    def __init__(
        self, blueprint: Blueprint, adapter: AdapterSection, mode: FakeTensorMode, recorder: TraceRecorder,
        shortening: Shortening, attach: Callable[[Any, AdapterSection], Any],
        whole: Callable[[Any], None] = lambda base: None,
    ) -> None:  # fmt: skip
        self._blueprint, self._mode, self._recorder = blueprint, mode, recorder
        section, quantization = adapter, blueprint.quantization
        files = blueprint.model.weights == "pretrained"
        self._published = files and bool(prequantized.stated(blueprint.architecture, quantization))

        def shorten(base: Any) -> None:
            nonlocal section
            whole(base)
            named, adapted = depth.adapted(base, section)
            self.shortened = shortening(list(zip(depth.kinds(base), adapted, strict=True)), depth.forms(base))
            if len(self.shortened.layers) < len(adapted):
                depth.keep(base, self.shortened.layers)
                section = depth.renamed(section, base, named)

        self.base = blueprint.weightless(shorten)
        self.base_modules = list(self.base.modules())
        # An adapter's initial values change no size; PiSSA and LoftQ would need weights.
        self.model = attach(self.base, section.model_copy(update={"init": "default", "start_from": None}))
        self.layers = checkpointing.layers(self.base)
        self._layer_of = {id(module): number for number, layer in enumerate(self.layers) for module in layer.modules()}
        fake.fill(self.model, quantization, mode)

    def load(self, module: nn.Module) -> None:
        """Record that a module's own weights are read, quantized where training quantizes them, and kept."""
        # A weight that is tied to another is read once.
        new = (weight for weight in module.parameters(recurse=False) if self._recorder.block(weight) is None)
        quantized = [weight for weight in new if fake.is_quantized(weight)]
        if quantized and not self._published:
            self._recorder.layer, self._recorder.category = self._layer_of.get(id(module)), "workspace"
            with self._mode, self._recorder:
                full = [torch.empty(experts.shape(weight), dtype=self._blueprint.dtype) for weight in quantized]
                for values, weight in zip(full, quantized, strict=True):
                    fake.quantize(values, self._blueprint.quantization, weight)
                del values, full  # while it is still this layer's
        self.keep(module)

    def compute_buffers(self) -> None:
        """Record that models compute their buffers once all weights are loaded; GPTBigCode's is a square mask."""
        for inner in reversed(self.base_modules):
            if isinstance(inner, PreTrainedModel) and any(True for _ in inner.buffers(recurse=False)):
                self._recorder.layer, self._recorder.category = None, "workspace"
                with self._mode, self._recorder:
                    inner._init_weights(inner)  # noqa: SLF001 -- as `skeleton.random_base` and transformers do

    def keep(self, module: nn.Module) -> None:
        """Count a module's own weights and buffers, unless they are counted already."""
        recorder, layer = self._recorder, self._layer_of.get(id(module))
        for weight in module.parameters(recurse=False):
            for tensor in fake.quantization_state(weight):
                recorder.keep(tensor, "quantization_state", layer)
            recorder.keep(weight, "adapter" if weight.requires_grad else "base_weights", layer)
        for buffer in module.buffers(recurse=False):
            recorder.keep(buffer, "base_weights", layer)
