"""The memory of inference: weights, KV cache, and what reading a prompt and generating a token take besides.

As for a training step, the base, the adapter and the KV cache are those of `finetune generate`, on fake tensors. The
prompt is as long as the context allows, which is the most that its pass can take.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from transformers import DynamicCache

from finetune.config import AdapterSection, Config
from finetune.errors import ConfigError, FinetuneError, ForecastError, MachineError, first_line
from finetune.forecast import depth, device_paths
from finetune.forecast.device import Device
from finetune.forecast.extrapolate import NotAlike, extrapolate, shorten, shorten_apart, whole
from finetune.forecast.fake_model import FakeModel, Shortening
from finetune.forecast.fake_values import Answers
from finetune.forecast.job_forecast import KV_CACHE, DeviceMemory
from finetune.forecast.replay import Replay, replayed
from finetune.forecast.trace import CATEGORIES, Trace
from finetune.forecast.trace_recorder import TraceRecorder
from finetune.generation import caches
from finetune.model import bounds, build
from finetune.model.adapters.adapter import attach
from finetune.model.attention import backends

PHASES = ("load", "prompt", "decoding")


@dataclass(frozen=True, kw_only=True)
class Serving(DeviceMemory):
    """Memory to answer `rows` prompts at a time, with up to `context` tokens of prompt and answer each. In bytes.

    `cache_bytes` are those of the complete KV cache, of the kind `cache`. `caches` gives them for every kind that the
    model can have, if asked for.
    """

    rows: int
    context: int
    cache: str
    cache_bytes: int
    caches: dict[str, int] = field(default_factory=dict)
    gpus: ClassVar[int] = 1

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
    config: Config, architecture: Any, device: Device, *, rows: int = 1, context: int | None = None,
    cache: str = "dynamic",
) -> Serving:  # fmt: skip
    """Forecast what `finetune generate` takes with the job's base and adapter, `rows` prompts at a time.

    `context` is by default `data.max_length`; `cache` is a key of `caches.CACHES`. Raises ConfigError for an unknown KV
    cache, or a context beyond the model's positions, and ForecastError for a model that cannot be traced.
    """
    known = bounds.positions(architecture)
    context = context or min(config.data.max_length, known or config.data.max_length)
    if known and context > known:
        raise ConfigError(f"--context: {context} is more than the {known} positions of `{config.model.name}`")
    inference = Inference(config, architecture, device, rows, context, cache)
    serving, sizes = inference.forecast(), {}
    for kind in caches.CACHES:
        with contextlib.suppress(ConfigError, MachineError):
            caches.make(kind, architecture, context)
            one = serving if kind == cache else replace(inference, cache=kind).forecast()
            sizes[kind] = one.cache_bytes
    return replace(serving, caches=sizes)


@dataclass(frozen=True)
class Inference:
    """Reading the longest prompts and generating their last token, with a KV cache of the kind `cache`."""

    config: Config
    architecture: Any
    device: Device
    rows: int
    context: int
    cache: str = "dynamic"

    def forecast(self) -> Serving:
        """The memory that it takes, without the sizes of other KV caches. Raises as `forecast` does."""
        caches.make(self.cache, self.architecture, self.context)
        attention, trace = self.attention, self._whole_trace()

        def answer(replay: Replay) -> None:
            loaded = replay.load(from_files=self.config.model.weights != "random")
            replay.play(trace.stretches[loaded:])

        replay = replayed(trace, self.device, answer, (*CATEGORIES, KV_CACHE))
        return Serving(
            device=self.device, attention=attention, peak_allocated_bytes=replay.peak_allocated_bytes,
            peak_reserved_bytes=replay.peak_reserved_bytes, host_bytes=replay.managed_peak_bytes, phases=replay.phases,
            categories=replay.at_peak(), returns_segments=replay.is_limited,
            rows=self.rows, context=self.context, cache=self.cache,
            cache_bytes=sum(sign * block.bytes for _, block, sign in trace.timeline() if block.category == KV_CACHE),
        )  # fmt: skip

    @functools.cached_property
    def attention(self) -> str:
        """The attention implementation: several rows need a mask for their padding, a single one does not."""
        asked, precision = self.config.model.attention, self.config.training.precision
        implementation = backends.planned(asked, self.architecture, self.device.type, precision)
        capability = self.device.capability if self.device.type == "cuda" else None
        flash = backends.has_flash(precision, capability)
        if self.rows == 1 and backends.shares_keys(self.architecture) and not flash:
            return "eager"  # PyTorch's plain products, scores and all
        return implementation if implementation.startswith("eager") else "sdpa"

    def _whole_trace(self) -> Trace:
        try:
            # Layers may refer to one another by their number, or differ: then the whole model is traced.
            for shortening in (shorten, shorten_apart):
                with contextlib.suppress(NotAlike, depth.Scattered, LookupError):
                    return self._trace(shortening)
            return self._trace(whole)
        except FinetuneError:
            raise
        except Exception as error:
            # Foreign code on fake tensors may raise anything.
            raise ForecastError(
                f"`model.name`: inference with `{self.config.model.name}` ({self.architecture.model_type}) cannot be "
                f"forecast (it fails while it is traced: {type(error).__name__}: {first_line(error)})"
            ) from error

    def _trace(self, shortening: Shortening) -> Trace:
        device = self.device
        answers = Answers(uneven=self.rows > 1, trained_tokens=0)
        recorder = TraceRecorder(device.operators, answers, device.rates.flops_per_byte)
        with device_paths.undisturbed(), device_paths.like(device, recorder) as mode, torch.no_grad():
            traced = _TracedInference(self, mode, recorder, shortening)
            cache = traced.make_cache()
            traced.step("prompt", self.context - 1, self.context - 1, cache)
            traced.step("decoding", 1, self.context, cache)
            # A copy, as the memory of the model and of the cache is freed from here on.
            trace = recorder.trace()
            stretches = [replace(stretch, events=[*stretch.events]) for stretch in trace.stretches]
            return extrapolate(replace(trace, stretches=stretches), traced.fake.shortened)


class _TracedInference:
    """The model of an inference on fake tensors, whose loading is recorded, and the passes that are recorded on it."""

    def __init__(self, job: Inference, mode: Any, recorder: TraceRecorder, shortening: Shortening) -> None:
        self._job, self._mode, self._recorder = job, mode, recorder
        base = build.blueprint(job.config, job.architecture, job.attention)
        self.fake = FakeModel(base, job.config.adapter, mode, recorder, shortening, self._attach)
        layers = self.fake.layers
        for number, layer in enumerate(layers):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):  # its index in the KV cache, which has as few layers as the model
                    module.layer_idx = number
            layer.register_forward_pre_hook(lambda *_, number=number: setattr(recorder, "layer", number))
        layers[-1].register_forward_hook(lambda *_: setattr(recorder, "layer", None))
        # The weights, quantized module by module, and the adapter.
        for module in (*self.fake.base_modules, *self.fake.model.modules()):
            self.fake.load(module)
        recorder.layer = None

    def _attach(self, base: Any, section: AdapterSection) -> Any:
        self._parameters = inspect.signature(base.forward).parameters
        if "cache" not in self._parameters:
            raise ConfigError(f"`model.name`: {type(base).__name__} has states of its own and no KV cache to forecast")
        config = self._job.config
        return attach(base, section, config.model.name, config.training.seed, config.model.revision).eval()

    def make_cache(self) -> Any:
        """Make the empty KV cache."""
        job = self._job
        with self._mode:
            if job.cache == "offloaded" and job.device.type == "cuda":
                return _Offloaded(self.fake.base.config, self._recorder)
            # A fake CPU has no host to offload to.
            kind = "dynamic" if job.cache == "offloaded" else job.cache
            return caches.make(kind, self.fake.base.config, job.context)

    def step(self, phase: str, tokens: int, length: int, cache: Any) -> None:
        """Run `tokens` new tokens of each row, `length` with those in the cache, and choose the next token."""
        recorder, rows = self._recorder, self._job.rows
        recorder.phase, recorder.category = phase, "activations"
        with self._mode:
            inputs = {
                "input_ids": torch.ones(rows, tokens, dtype=torch.long),
                "position_ids": torch.ones(rows, tokens, dtype=torch.long),
                "attention_mask": torch.ones(rows, length, dtype=torch.long),
            }
        if rows == 1:
            del inputs["attention_mask"]  # `generate` passes no mask without padding
        inputs = {name: value for name, value in inputs.items() if name in self._parameters}
        for value in inputs.values():
            recorder.keep(value, "activations")
        # Like `generate`, ask for the logits of the last position only if the model can limit them.
        last = {"logits_to_keep": 1} if "logits_to_keep" in self._parameters else {}
        with self._mode, recorder:
            output = self.fake.model(**inputs, **last, cache=cache, use_cache=True)
            scores = output.logits[:, -1].to(copy=True, dtype=torch.float32)
            del output
            scores.argmax(-1)
            del scores
        for number, tensor in caches.tensors(cache):
            recorder.layer = number
            recorder.mark(tensor, KV_CACHE, managed=isinstance(cache, _Offloaded))
        recorder.layer = None


class _Offloaded(DynamicCache):
    """transformers' offloaded cache, with copies that the recorder can tell from the device's tensors."""

    def __init__(self, architecture: Any, recorder: TraceRecorder) -> None:
        super().__init__(config=architecture)
        self._recorder = recorder

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *rest: Any, **named: Any) -> Any:
        self._move((layer_idx + 1) % len(self.layers), managed=False)
        updated = super().update(key_states, value_states, layer_idx, *rest, **named)
        self._move(layer_idx, managed=True)
        return updated

    def _move(self, number: int, *, managed: bool) -> None:
        layer: Any = self.layers[number]
        if layer.is_initialized:
            copied = functools.partial(self._recorder.copied, category=KV_CACHE, managed=managed)
            layer.keys, layer.values = copied(layer.keys), copied(layer.values)
