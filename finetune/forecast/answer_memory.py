"""The memory of inference: weights, KV cache, and what reading a prompt and generating a token take besides.

As for a training step, the base, the adapter and the KV cache are those of `finetune generate`, on fake tensors. The
prompt is as long as the context allows, which is the most that its pass can take.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from transformers import DynamicCache

from finetune.config import Config
from finetune.errors import ConfigError, FinetuneError, ForecastError, MachineError, first_line
from finetune.forecast import depth, device_paths, devices, fake
from finetune.forecast.devices import Device
from finetune.forecast.extrapolate import NotAlike, Shortened, extrapolate, shorten, whole
from finetune.forecast.replay import Replay, replayed
from finetune.forecast.trace import CATEGORIES, Answers, Recorder, Trace
from finetune.model import bounds, build
from finetune.model.adapters.adapter import attach
from finetune.model.attention import backends, caches
from finetune.model.base import base_dtype, load_architecture
from finetune.model.probes.causality import has_flash
from finetune.model.recompute import checkpointing
from finetune.runtime import libraries

KV_CACHE = "kv_cache"
PHASES = ("load", "prompt", "decoding")


@dataclass(frozen=True)
class Serving:
    """What answering `rows` prompts at a time takes, with up to `context` tokens of prompt and answer each. In bytes.

    `phases` gives allocated and reserved bytes (on a CPU the same) without the device's context; `categories` add up,
    at the peak, to what is compared with the budget. `cache_bytes` are those of the complete KV cache, `host_bytes`
    those in host memory beside a card. `caches` gives the former for every kind that the model can have, if asked for.
    """

    device: Device
    attention: str
    rows: int
    context: int
    cache: str
    cache_bytes: int
    host_bytes: int
    phases: dict[str, dict[str, int]]
    categories: dict[str, int]
    caches: dict[str, int] = field(default_factory=dict)
    gpus: ClassVar[int] = 1

    @property
    def needed_bytes(self) -> int:
        """What must be there: reserved memory and what lies outside the allocator."""
        return max(phase["reserved_bytes"] for phase in self.phases.values()) + self.device.outside_bytes

    @property
    def budget_bytes(self) -> int:
        return self.device.budget_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.budget_bytes

    def as_dict(self) -> dict[str, Any]:
        """The forecast as JSON values."""
        own = ("rows", "context", "cache", "cache_bytes", "host_bytes", "caches", "phases", "categories", "attention")
        return {
            "fits": self.fits,
            "device": self.device.name,
            "budget_bytes": self.budget_bytes,
            "needed_bytes": self.needed_bytes,
            **{name: getattr(self, name) for name in own},
        }


def forecast(
    config: Config, gpu: str | None = None, *, rows: int = 1, context: int | None = None, cache: str = "dynamic"
) -> Serving:
    """What `finetune generate` will take with the job's base and adapter, `rows` prompts at a time.

    `context` is by default `data.max_length`; `cache` is a key of `caches.CACHES`, `gpu` as for a plan. Raises
    ConfigError for an unknown model, GPU or KV cache, or a context beyond the model's positions, and ForecastError for
    a model that cannot be traced.
    """
    libraries.quiet()
    device = devices.find(gpu or ("auto" if torch.cuda.is_available() else "cpu"), config.memory)
    name = config.model.name
    architecture = load_architecture(config.model, listed=True)
    known = bounds.positions(architecture)
    context = context or min(config.data.max_length, known or config.data.max_length)
    if known and context > known:
        raise ConfigError(f"--context: {context} is more than the {known} positions of `{name}`")
    found = of(config, architecture, device, rows=rows, context=context, cache=cache)
    sizes = {}
    for kind in caches.CACHES:
        with contextlib.suppress(ConfigError, MachineError):
            caches.make(kind, architecture, context)
            one = found if kind == cache else of(config, architecture, device, rows=rows, context=context, cache=kind)
            sizes[kind] = one.cache_bytes
    return replace(found, caches=sizes)


def of(config: Config, architecture: Any, device: Device, *, rows: int, context: int, cache: str) -> Serving:
    """`forecast` of one KV cache, for a transformers config and a device."""
    caches.make(cache, architecture, context)
    job = _Job(config, architecture, device, _attention(config, architecture, device, rows), rows, context)
    trace = job.trace(cache)

    def answer(replay: Replay) -> None:
        loaded = replay.load(from_files=config.model.weights != "random")
        replay.play(trace.runs[loaded:])

    replay = replayed(trace, device, answer, (*CATEGORIES, KV_CACHE))
    return Serving(
        device=device, attention=job.attention, rows=rows, context=context, cache=cache,
        cache_bytes=sum(sign * block.bytes for _, block, sign in trace.timeline() if block.category == KV_CACHE),
        host_bytes=replay.managed_peak_bytes, phases=replay.phases, categories=replay.at_peak(),
    )  # fmt: skip


def _attention(config: Config, architecture: Any, device: Device, rows: int) -> str:
    """The implementation; rows of other lengths need a mask, and one alone does not."""
    implementation = backends.planned(config.model.attention, architecture, device.type, config.training.precision)
    capability = device.capability if device.type == "cuda" else None
    if rows == 1 and backends.shares_keys(architecture) and not has_flash(config.training.precision, capability):
        return "eager"  # PyTorch's plain products, scores and all
    return implementation if implementation.startswith("eager") else "sdpa"


@dataclass(frozen=True)
class _Job:
    config: Config
    architecture: Any
    device: Device
    attention: str
    rows: int
    context: int

    def trace(self, cache: str) -> Trace:
        """Load the model, read the longest prompts and generate the last token, with a KV cache of that kind."""
        try:
            # Layers may refer to one another by their number, or differ: then the whole model is traced.
            with contextlib.suppress(NotAlike, depth.Scattered, LookupError):
                return self._trace(cache, shorten)
            return self._trace(cache, lambda kinds: whole(len(kinds)))
        except FinetuneError:
            raise
        except Exception as error:
            # Foreign code on fake tensors: what it may raise has no bounds.
            raise ForecastError(
                f"`model.name`: inference with `{self.config.model.name}` ({self.architecture.model_type}) cannot be "
                f"forecast (it fails while it is traced: {type(error).__name__}: {first_line(error)})"
            ) from error

    def _trace(self, cache: str, shortening: Callable[[Sequence[Hashable]], Shortened]) -> Trace:
        device = self.device
        answers = Answers(uneven=self.rows > 1, trained_tokens=0)
        recorder = Recorder(device.kernels, answers, device.flops / device.bandwidth_bytes)
        with device_paths.undisturbed(), device_paths.like(device, recorder) as mode, torch.no_grad():
            model = _Model(self.config, self.architecture, self.attention, mode, recorder, shortening)
            model.load()
            with mode:
                if cache == "offloaded" and device.type == "cuda":
                    held: Any = _Offloaded(model.base.config, recorder)
                else:
                    # On a fake CPU, where there is nothing to offload to.
                    held = caches.make("dynamic" if cache == "offloaded" else cache, model.base.config, self.context)
            model.step("prompt", self.rows, self.context - 1, self.context - 1, held)
            model.step("decoding", self.rows, 1, self.context, held)
            # A copy, as what the model and the cache hold is freed from here on.
            trace = recorder.trace()
            runs = [replace(run, events=[*run.events]) for run in trace.runs]
            return extrapolate(replace(trace, runs=runs), model.shortened)


class _Model:
    """Base and adapter on fake tensors."""

    def __init__(
        self, config: Config, architecture: Any, implementation: str, mode: Any, recorder: Recorder,
        shortening: Callable[[Sequence[Hashable]], Shortened],
    ) -> None:  # fmt: skip
        self._config, self._mode, self._recorder = config, mode, recorder
        section = config.adapter

        def shortened(base: Any) -> None:
            nonlocal section
            named, adapted = depth.adapted(base, section)
            self.shortened = shortening(list(zip(depth.kinds(base), adapted, strict=True)))
            if len(self.shortened.layers) < len(adapted):
                depth.keep(base, self.shortened.layers)
                section = depth.renamed(section, base, named)

        self.base = build.blueprint(config, architecture, implementation).weightless(shortened)
        taken = inspect.signature(self.base.forward).parameters
        if "past_key_values" not in taken:
            raise ConfigError(
                f"`model.name`: {type(self.base).__name__} has states of its own and no KV cache to forecast"
            )
        # As `generate`: logits of the last position alone, where the model can do so.
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self._takes = taken
        self._modules = list(self.base.modules())
        # An adapter's initial values change no size; PiSSA and LoftQ would need weights.
        start = section.model_copy(update={"init": "default"})
        self._model = attach(self.base, start, config.model.name, config.training.seed, config.model.revision).eval()
        self._layers = checkpointing.layers(self.base)
        fake.fill(self._model, config.quantization, mode)
        for number, layer in enumerate(self._layers):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):  # its place in the KV cache, which is as short as the model
                    module.layer_idx = number
            layer.register_forward_pre_hook(lambda *_, number=number: setattr(recorder, "layer", number))
        self._layers[-1].register_forward_hook(lambda *_: setattr(recorder, "layer", None))

    def load(self) -> None:
        """The weights, quantized module by module, and the adapter."""
        recorder = self._recorder
        owner = {id(module): number for number, layer in enumerate(self._layers) for module in layer.modules()}
        dtype = base_dtype(self._config.adapter, self._config.training)
        for module in (*self._modules, *self._model.modules()):
            layer, own = owner.get(id(module)), list(module.parameters(recurse=False))
            if quantized := [weight for weight in own if fake.is_quantized(weight)]:
                recorder.layer, recorder.category = layer, "workspace"
                with self._mode, recorder:
                    full = [torch.empty(fake.shape(weight), dtype=dtype) for weight in quantized]
                    for weight in full:
                        fake.quantize(weight, self._config.quantization)
                    del weight, full
            for weight in own:
                for tensor in fake.quantization_state(weight):
                    recorder.keep(tensor, "quantization_state", layer)
                recorder.keep(weight, "adapter" if weight.requires_grad else "base_weights", layer)
            for buffer in module.buffers(recurse=False):
                recorder.keep(buffer, "base_weights", layer)
        recorder.layer = None

    def step(self, phase: str, rows: int, tokens: int, length: int, cache: Any) -> None:
        """A pass over `tokens` new tokens of each row, `length` with those in the cache, and the choice of the next."""
        recorder = self._recorder
        recorder.phase, recorder.category = phase, "activations"
        with self._mode:
            inputs = {
                "input_ids": torch.ones(rows, tokens, dtype=torch.long),
                "position_ids": torch.ones(rows, tokens, dtype=torch.long),
                "attention_mask": torch.ones(rows, length, dtype=torch.long),
            }
        if rows == 1:
            del inputs["attention_mask"]  # as `generate` does without padding
        inputs = {name: value for name, value in inputs.items() if name in self._takes}
        for value in inputs.values():
            recorder.keep(value, "activations")
        with self._mode, recorder:
            output = self._model(**inputs, **self._last, past_key_values=cache, use_cache=True)
            scores = output.logits[:, -1].to(copy=True, dtype=torch.float32)
            del output
            scores.argmax(-1)
            del scores
        for number, tensor in caches.tensors(cache):
            recorder.layer = number
            recorder.mark(tensor, KV_CACHE, managed=isinstance(cache, _Offloaded))
        recorder.layer = None


class _Offloaded(DynamicCache):
    """transformers' offloaded cache, whose host memory a fake CPU tensor does not tell from the device's."""

    def __init__(self, architecture: Any, recorder: Recorder) -> None:
        super().__init__(config=architecture)
        self._recorder = recorder

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *rest: Any, **named: Any) -> Any:
        self._move((layer_idx + 1) % len(self.layers), managed=False)
        found = super().update(key_states, value_states, layer_idx, *rest, **named)
        self._move(layer_idx, managed=True)
        return found

    def _move(self, number: int, *, managed: bool) -> None:
        layer: Any = self.layers[number]
        if layer.is_initialized:
            layer.keys, layer.values = (self._copied(tensor, managed) for tensor in (layer.keys, layer.values))

    def _copied(self, source: torch.Tensor, managed: bool) -> torch.Tensor:
        target = torch.empty_like(source)
        self._recorder.mark(target, KV_CACHE, managed=managed)
        self._recorder.copies(source)
        return target
