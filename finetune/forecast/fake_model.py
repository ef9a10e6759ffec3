"""A job's model on fake tensors: the base and the adapter as training builds them, with as few layers as suffice.

Its loading is recorded module by module, as the weights are read and quantized. A fake tensor has the shape and type of
the real one, and no data. bitsandbytes' parameter classes cannot hold a fake tensor, and PEFT cannot move modules
inside the fake mode. So the model and its adapter are first built on the meta device, and each parameter is then
replaced by a fake one with the attributes that bitsandbytes' layers read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from finetune.config import AdapterSection, QuantizationSection
from finetune.forecast import depth
from finetune.forecast.extrapolate import Shortened
from finetune.forecast.trace_recorder import TraceRecorder
from finetune.forms import packed
from finetune.forms.packed import packing_of
from finetune.model import skeleton
from finetune.model.build import Blueprint
from finetune.model.recompute import checkpointing
from finetune.model.source import prequantized
from finetune.model.structure import experts
from finetune.runtime import patches

# bitsandbytes 0.50, `functional.quantize_4bit` and `functional.quantize_blockwise`: values under one absolute maximum
# in the weights, and absolute maxima under one in double quantization.
_BLOCK = 64
_NESTED_BLOCK = 256

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
        fill(self.model, quantization, mode)

    def load(self, module: nn.Module) -> None:
        """Record that a module's own weights are read, quantized where training quantizes them, and kept."""
        # A weight that is tied to another is read once.
        new = (weight for weight in module.parameters(recurse=False) if self._recorder.block(weight) is None)
        quantized = [weight for weight in new if is_quantized(weight)]
        if quantized and not self._published:
            self._recorder.layer, self._recorder.category = self._layer_of.get(id(module)), "workspace"
            with self._mode, self._recorder:
                full = [torch.empty(experts.shape(weight), dtype=self._blueprint.dtype) for weight in quantized]
                for values, weight in zip(full, quantized, strict=True):
                    quantize(values, self._blueprint.quantization, weight)
                del values, full  # while it is still this layer's
        self.keep(module)

    def compute_buffers(self) -> None:
        """Record that models compute their buffers once all weights are loaded; GPTBigCode's is a square mask."""
        for inner in reversed(self.base_modules):
            if isinstance(inner, PreTrainedModel) and any(True for _ in inner.buffers(recurse=False)):
                self._recorder.layer, self._recorder.category = None, "workspace"
                with self._mode, self._recorder:
                    skeleton.initialise(inner, inner)

    def keep(self, module: nn.Module) -> None:
        """Count a module's own weights and buffers, unless they are counted already."""
        recorder, layer = self._recorder, self._layer_of.get(id(module))
        for weight in module.parameters(recurse=False):
            for tensor in quantization_state(weight):
                recorder.keep(tensor, "quantization_state", layer)
            recorder.keep(weight, "adapter" if weight.requires_grad else "base_weights", layer)
        for buffer in module.buffers(recurse=False):
            recorder.keep(buffer, "base_weights", layer)


def fill(model: nn.Module, section: QuantizationSection, mode: FakeTensorMode) -> None:
    """Replace every meta parameter and buffer of `model` by a fake one on the CPU; tied weights stay tied."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    with mode:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if id(parameter) not in made:
                    made[id(parameter)] = parameter, _fake(parameter, section)
                setattr(module, name, made[id(parameter)][1])
            if state := getattr(getattr(module, "weight", None), "quant_state", None):
                module.quant_state = state  # bitsandbytes' layers keep it there too
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def quantization_state(parameter: nn.Parameter) -> Iterator[torch.Tensor]:
    """The tensors beside a quantized weight that dequantize it."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        yield from (state.absmax, state.code)
        if state.nested:
            yield from (state.offset, state.state2.absmax, state.state2.code)
    if getattr(parameter, "SCB", None) is not None:
        yield parameter.SCB
    if how := packing_of(parameter):
        yield how.scales


def _fake(parameter: Any, section: QuantizationSection) -> nn.Parameter:
    import bitsandbytes as bnb
    from bitsandbytes.functional import QuantState

    if how := packing_of(parameter):
        scales = torch.empty(how.scales.shape, dtype=how.scales.dtype)
        return packed.packed(torch.empty(parameter.shape, dtype=torch.uint8), replace(how, scales=scales))
    if isinstance(parameter, bnb.nn.Int8Params):
        weight: Any = nn.Parameter(torch.empty(parameter.shape, dtype=torch.int8), requires_grad=False)
        weight.SCB = torch.empty(parameter.shape[0])
        return weight
    if not isinstance(parameter, bnb.nn.Params4bit):
        return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad)

    values = parameter.numel()
    blocks = -(-values // _BLOCK)
    weight = nn.Parameter(torch.empty((values + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
    nested: dict[str, Any] = {}
    if section.double:
        absmax = torch.empty(blocks, dtype=torch.uint8)
        over = QuantState(
            absmax=torch.empty(-(-blocks // _NESTED_BLOCK)), code=torch.empty(256), blocksize=_NESTED_BLOCK,
            dtype=torch.float32,
        )  # fmt: skip
        nested = {"offset": torch.empty(()), "state2": over}
    else:
        absmax = torch.empty(blocks)
    weight.quant_state = QuantState(
        absmax=absmax, shape=parameter.shape, dtype=parameter.dtype, blocksize=_BLOCK, code=torch.empty(16),
        quant_type=section.kind, **nested,
    )  # fmt: skip
    weight.bnb_quantized = True
    weight.quant_storage = torch.uint8
    weight.quant_type = section.kind
    return weight


def is_quantized(weight: Any) -> bool:
    """Whether `fill` quantized a weight."""
    states = (getattr(weight, "quant_state", None), getattr(weight, "SCB", None), packing_of(weight))
    return any(state is not None for state in states)


def quantize(full: torch.Tensor, section: QuantizationSection, weight: Any) -> None:
    """Quantize `full` like `weight`, so that the memory which this takes is recorded; the result is discarded."""
    from bitsandbytes import functional

    if how := packing_of(weight):
        packed.pack(how.form, full, transposed=how.transposed)
    elif section.kind == "int8":
        functional.int8_vectorwise_quant(full.to(torch.float16))
    else:
        torch.ops.bitsandbytes.quantize_4bit.default(full, _BLOCK, section.kind, torch.uint8)


@contextlib.contextmanager
def for_dora() -> Iterator[None]:
    """Make DoRA's magnitudes (one a row) without their weight's norms, and let PEFT dequantize fake weights.

    PEFT recognises a quantized weight by the name of its class, and a fake one has another.
    """
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
    from peft.tuners.lora import dora

    plain = dora.dequantize_module_weight

    def update_layer(self: Any, *, base_layer: Any, lora_A: Any, lora_B: Any, scaling: Any, **_: Any) -> None:
        self.weight = nn.Parameter(torch.empty(lora_B.shape[0], device="meta"), requires_grad=True)

    def dequantize(module: Any) -> torch.Tensor:
        weight = module.weight
        if (state := getattr(weight, "quant_state", None)) is not None:
            return dequantize_4bit(weight.data, state)
        if packing_of(weight):
            return packed.values(weight)
        if (scales := getattr(weight, "SCB", None)) is not None:
            return int8_vectorwise_dequant(weight.data, scales)
        return plain(module)

    with patches.DORA_UPDATE_LAYER.by(update_layer), patches.DORA_DEQUANTIZE.by(dequantize):
        yield
