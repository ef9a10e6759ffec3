"""Trace a step: run it on fake tensors and record everything it allocates.

Nothing here describes a step. The base, the adapter, the checkpointing, and the step with its objective and optimizer
are those of training; only the weights and the batch are fake.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from bitsandbytes.optim.optimizer import Optimizer8bit
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from finetune import kernels
from finetune.config import Config
from finetune.data.batching import Batch, MicroBatching, per_step
from finetune.errors import FinetuneError, ForecastError, first_line
from finetune.forecast import depth, fake, fake_ranks, patches
from finetune.forecast.devices import Device
from finetune.forecast.extrapolate import NotAlike, Shortened, extrapolate, shorten, whole
from finetune.forecast.fake_shards import FakeSharded
from finetune.forecast.fake_zero import FakeZero
from finetune.forecast.trace import Answers, Recorder, Trace, TracedMonitor
from finetune.forecast.traced_engine import Traced, TracedEngine
from finetune.model import build
from finetune.model.adapters import adapter
from finetune.model.attention import packing
from finetune.model.base import base_dtype
from finetune.model.distributed import context, optimizer_states
from finetune.model.distributed.placement import Placement, held
from finetune.model.probes.causality import needs_mask
from finetune.model.recompute import checkpointing
from finetune.model.skeleton import mixture
from finetune.model.structure import experts
from finetune.objectives import OBJECTIVES, log_probs
from finetune.training import optimizers, strategies
from finetune.training.collator import Inputs, MicroBatches, for_model
from finetune.training.eval_loss import summed_loss
from finetune.training.noise import Noise, Row
from finetune.training.step import Step

# bitsandbytes 0.50, `Optimizer8bit.get_state_buffer`: smaller tensors are not paged.
_PAGED_STATES, _PAGED_FROM = ("state1", "state2"), 100_000
# So many tokens are one tile, whatever more the config allows (kernels/head.py takes no fewer at a time).
_ONE_TILE = 512


ENGINES: dict[str, type[TracedEngine]] = {"fsdp": FakeSharded, "deepspeed": FakeZero}
"""The engine that takes the place of a strategy's in a trace; of others it is TracedEngine."""

Shortening = Callable[[Sequence[Hashable]], Shortened]
"""From the kinds of the layers to those that are traced."""

_Job = tuple[str, str]
"""What decides a model and its optimizer: the config but for what `Models` names, and the attention."""


@dataclass
class Models:
    """Models of one architecture on one device that were traced, ready for another step, and the traces.

    One serves all settings that differ in the micro-batch, the tiles of the loss, and what like layers recompute.
    """

    kinds: dict[_Job, Sequence[Hashable]] = field(default_factory=dict)
    ready: dict[Hashable, _TracedStep] = field(default_factory=dict)
    """By job and the kinds of the layers that are kept."""
    traces: dict[Hashable, Trace] = field(default_factory=dict)
    """By that, what those layers recompute, and the rest of the setting; not yet extrapolated."""


def trace_step(
    config: Config, architecture: Any, train: Batch, evaluation: Batch | None, device: Device, attention: str,
    world_size: int = 1, models: Models | None = None,
) -> Trace:  # fmt: skip
    """Run one optimizer step in its steady state, then an evaluation, on fake tensors; of `world_size` ranks, rank 0's.

    Steady state: optimizer states exist, and with accumulation so do the gradients of the micro-batches before. With
    `models`, those are used again; the trace is the same.
    """
    settings = (config, architecture, train, evaluation, device, attention)
    try:
        return _trace_step(*settings, shorten, world_size, models)
    except (NotAlike, depth.Scattered):
        return _trace_step(*settings, lambda kinds: whole(len(kinds)), world_size, models)
    except FinetuneError:
        raise
    except Exception as error:
        # Foreign code on fake tensors: what it may raise has no bounds.
        raise ForecastError(
            f"`model.name`: `{config.model.name}` ({architecture.model_type}) with `optimizer.kind: "
            f"{config.optimizer.kind}` and `training.objective: {config.training.objective}` cannot be forecast (a "
            f"training step fails while it is traced: {type(error).__name__}: {first_line(error)}). `finetune train` "
            "with `memory.check: off` trains without a forecast"
        ) from error


def _trace_step(
    config: Config, architecture: Any, train: Batch, evaluation: Batch | None, device: Device, attention: str,
    shortening: Shortening, world_size: int = 1, models: Models | None = None,
) -> Trace:  # fmt: skip
    models = models or Models()
    left_out = {"memory": {"checkpointing", "loss_tokens"}, "training": {"micro_batch"}}
    job = config.model_dump_json(exclude=left_out), attention
    places = max(batch.rows * batch.tokens for batch in (train, evaluation) if batch)
    tile = min(config.memory.loss_tokens, _ONE_TILE) if places <= _ONE_TILE else config.memory.loss_tokens
    setting = config.training.micro_batch, tile, train, evaluation
    traced = None
    if kinds := models.kinds.get(job):
        short = _Short.of(kinds, config, shortening)
        if found := models.traces.get((job, short.kinds, short.levels, setting)):
            return extrapolate(found, short.shortened)
        traced = models.ready.pop((job, short.kinds), None)
    rows = max(1, config.training.batch_size // config.distributed.shares(world_size))  # of a step, on one rank
    tiles = log_probs.tiles(config.memory.loss_tokens, fused=config.kernels.fused != "off")
    answers = Answers(uneven=False, trained_tokens=0)
    recorder = traced.recorder if traced else Recorder(device.kernels, answers, device.flops / device.bandwidth_bytes)
    with (
        fake_ranks.placing(config.distributed, world_size) as placement,
        fake_ranks.splitting(config.distributed, world_size) as group,
        patches.undisturbed(),
        tiles,
        patches.like(device, recorder, traced.mode if traced else None) as mode,
        _engine_of(config, world_size).around(recorder),
    ):
        if traced:
            traced.take(config, short)
        else:
            traced = _TracedStep(
                config, architecture, mode, recorder, device, attention, shortening, rows, world_size, placement
            )
            traced.load()
            traced.make_step()
            with traced.splitting(group), traced.engine.passes():
                traced.make_optimizer_states()
            traced.begin()
        with traced.splitting(group), traced.engine.passes():
            traced.step(train)
            if evaluation:
                traced.evaluate(evaluation, train)
        found = replace(
            recorder.trace(),
            parameters=traced.parameters,
            largest_weight=traced.largest_weight,
            largest_part=traced.largest_part,
            mixture=traced.mixture,
            trained_share=traced.trained_share,
            saved_bytes=traced.engine.saved_bytes(),
        )
        short = traced.short
        if not group and traced.engine.reusable and traced.rewound():
            models.kinds[job] = traced.kinds
            models.ready[job, short.kinds] = traced
            models.traces[job, short.kinds, short.levels, setting] = found
        return extrapolate(found, short.shortened)


def _engine_of(config: Config, world_size: int) -> type[TracedEngine]:
    shared = strategies.applies(config.distributed, world_size)
    return ENGINES.get(config.distributed.kind, TracedEngine) if shared else TracedEngine


@dataclass(frozen=True)
class _Short:
    """The layers that are kept of a model, with their kinds and what they recompute."""

    shortened: Shortened
    kinds: tuple[Hashable, ...]
    levels: tuple[str, ...]

    @classmethod
    def of(cls, kinds: Sequence[Hashable], config: Config, shortening: Shortening) -> _Short:
        levels = checkpointing.pattern(config.memory.checkpointing, len(kinds))
        found = shortening(list(zip(kinds, levels, strict=True)))
        kept = found.layers
        return cls(found, tuple(kinds[number] for number in kept), tuple(levels[number] for number in kept))


class _TracedStep:
    def __init__(
        self,
        config: Config,
        architecture: Any,
        mode: FakeTensorMode,
        recorder: Recorder,
        device: Device,
        attention: str,
        shortening: Shortening,
        rows: int,
        world_size: int,
        placement: Placement | None,
    ) -> None:
        self._configure(config)
        config = self._config
        self.mode = mode
        self._device = device
        self.recorder = recorder
        self._shortening = shortening
        self._rows = rows
        self._world_size = world_size
        self._placement = placement
        recorder.slices_on_host = bool(placement and placement.offload and device.type == "cuda")
        # Every fused attention kernel keeps the same for backward: the output and one number per row.
        attention = attention if attention.startswith(("eager", "packed", packing.WINDOWED)) else "sdpa"
        self._adapter = config.adapter
        base = build.blueprint(config, architecture, attention).weightless(self._shorten)
        self._loaded = list(base.modules())
        # An adapter's initial values change no size; PiSSA and LoftQ would need weights.
        start = self._adapter.model_copy(update={"init": "default", "start_from": None})
        memory = config.memory  # with checkpointing switched on, for other settings; what is recomputed is chosen below
        if memory.checkpointing in ("none", 0) and base.supports_gradient_checkpointing:
            memory = memory.model_copy(update={"checkpointing": "all"})
        self._model = build.trainable(
            base, config.model, start, memory, seed=config.training.seed, device_type=device.type
        )
        checkpointing.choose(base, self.short.levels)
        self._layers = checkpointing.layers(base)
        fake.fill(self._model, config.quantization, mode)
        self._base = base
        self._repeatable: dict[Hashable, Trace] = {}
        self._computed_last: Inputs | None = None

    def _configure(self, config: Config) -> None:
        if config.training.precision == "fp16":
            # Sizes are those of bfloat16, and there is no loss scaling on a CPU, where this runs.
            config = config.model_copy(update={"training": config.training.model_copy(update={"precision": "bf16"})})
        self._config = config
        self._way = MicroBatching.of(config.training, config.data)
        self._collator = MicroBatches(self._way, pad_token_id=0, context=config.distributed.context)

    def take(self, config: Config, short: _Short) -> None:
        """Be the model of another setting, whose layers are of the same kinds."""
        self._configure(config)
        self.short = short
        checkpointing.choose(self._base, short.levels)

    def begin(self) -> None:
        """Each step that is traced begins here."""
        self._start = self.recorder.state()

    def rewound(self) -> bool:
        """Whether another step can be traced: forget this one, if it left the model as it was."""
        self.recorder.phase = "after"
        self._computed_last = None
        return self.recorder.rewind(self._start)

    def _once(self, what: Hashable, record: Callable[[], None]) -> None:
        """Record what depends on `what` alone, in a phase that it begins; the second time without running it."""
        if what in self._repeatable:
            self.recorder.repeat(self._repeatable[what])
            return
        start = self.recorder.state()
        record()
        if recorded := self.recorder.since(start):
            self._repeatable[what] = recorded

    def _shorten(self, base: Any) -> None:
        self.parameters = sum(weight.numel() for weight in base.parameters())
        head = base.get_output_embeddings()
        linear = [
            module.weight.numel()
            for module in base.modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        ]
        targets = self._config.adapter.targets
        fused = [
            getattr(module, name).numel()
            for path, module, name in experts.weights(base)
            if path.endswith(tuple(f".{target}" for target in targets if targets != "all-linear"))
        ]
        self.largest_weight = max(linear + fused, default=0)
        layers = checkpointing.layers(base)
        parts = [head, *layers]
        self.largest_part = max(sum(weight.numel() for weight in part.parameters()) for part in parts)
        self.mixture = mixture(base, self._config.quantization)
        kinds = depth.kinds(base)
        named, adapted = depth.adapted(base, self._adapter)
        self.kinds: list[Hashable] = list(zip(kinds, adapted, strict=True))
        self.short = _Short.of(self.kinds, self._config, self._shortening)
        if len(self.short.kinds) < len(kinds):
            depth.keep(base, self.short.shortened.layers)
            self._adapter = depth.renamed(self._adapter, base, named)

    def make_step(self) -> None:
        """The step, as `training.assembly` makes it."""
        config, card = self._config, self._device
        log_probs.attach(self._model)
        kernels.attach(self._model, config.kernels.fused, triton=card.type != "cuda" or card.triton)
        name, _ = optimizers.choose(config.optimizer, "cpu" if self.recorder.slices_on_host else card.type)
        with warnings.catch_warnings():
            # bitsandbytes looks embeddings up by their addresses, which fake ones have not.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            optimizer = optimizers.make(name, config.optimizer, 1e-4, self._model)
        self.engine = self._make_engine(optimizer)
        capability = card.capability if card.type == "cuda" else None
        self._step = Step(
            engine=self.engine,
            objective=OBJECTIVES[config.training.objective],
            precision=config.training.precision,
            max_grad_norm=config.training.max_grad_norm,
            masked=needs_mask(self._model.config, config.training.precision, capability),
            device=torch.device("cpu"),
            monitor=TracedMonitor(self.recorder),
            noise=_TracedNoise(self._model, alpha, 0) if (alpha := config.training.neftune_noise_alpha) else None,
        )
        self._watch()

    def _make_engine(self, optimizer: torch.optim.Optimizer) -> TracedEngine:
        layer_of = {weight: number for number, layer in enumerate(self._layers) for weight in layer.parameters()}

        def whole(weights: Sequence[torch.Tensor]) -> list[int]:
            units = [
                None if (layer := layer_of.get(one)) is None else self.short.shortened.unit[layer] for one in weights
            ]
            found: list[int] = []
            for unit, members in itertools.groupby(zip(units, weights, strict=True), key=lambda pair: pair[0]):
                times = 1 if unit is None else self.short.shortened.repeats[unit]
                found += [weight.numel() for _, weight in members] * times
            return found

        engine = _engine_of(self._config, self._world_size)(
            Traced(
                self._model, self._base, optimizer, self._config.distributed, self._world_size, self.recorder,
                layer_of.get, whole, on_gpu=self._device.type == "cuda",
            )
        )  # fmt: skip
        if self._attaches:
            self.recorder.phase = "attach"
            with self._recording():
                engine.attach()
        return engine

    @property
    def _attaches(self) -> bool:
        """Whether ranks share the model in parts, which are made after the weights are loaded."""
        return strategies.holds_parts(self._config.distributed, self._world_size)

    def splitting(self, group: dist.ProcessGroup | None) -> contextlib.AbstractContextManager[None]:
        """A context in which rows are split over `group`, as in training."""
        return context.split(self._model, group)

    # -- which layer an allocation belongs to ----------------------------------------------------------------------

    def _watch(self) -> None:
        """Follow the pass through the layers: forward by hooks on modules, backward by hooks on what they hand on."""
        recorder = self.recorder
        for number, layer in enumerate(self._layers):
            # Before a sharded layer's own hooks, which gather its weights.
            layer.register_forward_pre_hook(self._enters(number), with_kwargs=True, prepend=True)
            layer.register_forward_hook(self._leaves(number), prepend=True)

        def entered(module: Any, args: Any) -> None:
            recorder.category = "activations"

        def left(module: Any, args: Any, output: Any) -> None:
            recorder.category = "loss"
            self._on_gradient(output[0], None)

        self._base.base_model.register_forward_pre_hook(entered)
        self._base.base_model.register_forward_hook(left)

    def _enters(self, number: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            if self._placement and number == 0:  # once they have this gradient, the layers have reduced theirs
                self._on_gradient(hidden, None)
            self.recorder.layer = number
            if module.gradient_checkpointing and module.training:
                self.recorder.mark(hidden, "layer_inputs")

        return hook

    def _leaves(self, number: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            if number == len(self._layers) - 1:
                self.recorder.layer = None
            self._on_gradient(output[0] if isinstance(output, tuple) else output, number)

        return hook

    def _on_gradient(self, hidden: torch.Tensor, layer: int | None) -> None:
        def hook(gradient: torch.Tensor) -> None:
            self.recorder.layer, self.recorder.category = layer, "activations"

        if hidden.requires_grad:
            hidden.register_hook(hook)

    # -- the phases ------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Make and quantize the weights of the base module by module, then add the adapter.

        Weights are loaded one by one, so that no more than one is there in 16 bit, or the experts of one layer.
        """
        owner = {id(module): number for number, layer in enumerate(self._layers) for module in layer.modules()}
        for module in self._loaded:
            layer = owner.get(id(module))
            quantized = [weight for weight in module.parameters(recurse=False) if fake.is_quantized(weight)]
            if quantized:
                self._quantize(quantized, layer)
            self._keep(module, layer)
            if self._placement:
                with self._placing():
                    self._placement.keep_part(self._base, module)
                for weight in filter(self._placement.is_part, module.parameters(recurse=False)):
                    self.recorder.mark(weight, "base_weights", managed=self.recorder.slices_on_host)
        self.recorder.phase = "attach" if self._attaches else "optimizer"
        for module in self._model.modules():
            self._keep(module, owner.get(id(module)))
        self.recorder.layer = None
        if self._placement:
            with self._placing():
                self._placement.apply(self._model)
            for weight in self._model.parameters():
                category = "adapter" if weight.requires_grad else "base_weights"
                self.recorder.mark(held(weight), category, managed=self.recorder.slices_on_host)
        trained = [weight for weight in self._model.parameters() if weight.requires_grad]
        self.trained_share = sum(held(weight).numel() for weight in trained) / sum(map(torch.Tensor.numel, trained))

    @contextlib.contextmanager
    def _placing(self) -> Iterator[None]:
        """Record what dividing the model allocates; it goes from weight to weight."""
        with self._recording(), self.recorder.follow_layers():
            self.recorder.category = "base_weights"
            yield

    def _quantize(self, weights: list[torch.nn.Parameter], layer: int | None) -> None:
        dtype = base_dtype(self._config.adapter, self._config.training)
        with self._recording():
            self.recorder.layer, self.recorder.category = layer, "workspace"
            whole = [torch.empty(fake.shape(weight), dtype=dtype) for weight in weights]
            for full in whole:
                fake.quantize(full, self._config.quantization)
            del full, whole  # while it is still this layer's

    def _keep(self, module: torch.nn.Module, layer: int | None) -> None:
        """Count a module's own weights and buffers, if they are not counted yet."""
        for parameter in module.parameters(recurse=False):
            for tensor in fake.quantization_state(parameter):
                self.recorder.keep(tensor, "quantization_state", layer)
            self.recorder.keep(parameter, "adapter" if parameter.requires_grad else "base_weights", layer)
        for buffer in module.buffers(recurse=False):
            self.recorder.keep(buffer, "base_weights", layer)

    def make_optimizer_states(self) -> None:
        """The optimizer's first step, on gradients of zeros, as `training.largest_batch` takes it.

        There weights have a gradient that no loss reaches, such as an adapter on an indexer of sparse attention.
        """
        self.recorder.phase = "optimizer"
        optimizer = self.engine.optimizer
        if self._device.type == "cpu":  # on a card they are made on the host, and moved with the first 8-bit state
            for code in getattr(optimizer, "name2qmap", {}).values():
                self.recorder.keep(code, "optimizer_states")
        start = self._random_state()  # of the warm-up
        if self.engine.updates_weights:
            if isinstance(optimizer, Optimizer8bit):
                with self._recording(), self.recorder.follow_layers():
                    optimizer_states.make_empty(optimizer)
            self._make_gradients()
        self._update()
        self._model.zero_grad(set_to_none=True)
        del start

    def step(self, batch: Batch) -> None:
        """Forward, backward and update in the steady state."""
        self.recorder.phase = "forward"
        micro_batches = per_step(self._rows, self._way, batch)
        if micro_batches > 1:
            with self._recording():
                self.engine.accumulate()
            if self.engine.keeps_gradients:
                self._make_gradients()
        inputs = self._inputs(batch)
        others = self._on_host(inputs, micro_batches - 1)
        start, retry = self._random_state(), self._random_state()  # of the warm-up, and of each step in it
        with self._recording():
            self._step.forward_backward([inputs], batch.trained_tokens)
        del retry
        self._mark_gradients()
        blocks = [self.recorder.block(held(one.grad)) for one, _ in self._trained() if one.grad is not None]
        self._once(tuple(block and (block.bytes, block.layer) for block in blocks), self._update)
        self._model.zero_grad(set_to_none=True)
        del start
        self.recorder.phase = "save"  # the loop still holds the step's micro-batches then
        self._computed_last = inputs  # so that an evaluation counts this one twice
        del inputs, others

    def _on_host(self, inputs: Inputs, count: int) -> list[torch.Tensor]:
        """So many more micro-batches, which wait in host memory; on a CPU that is what is forecast."""
        if self._device.type != "cpu":
            return []
        with self.mode:
            values = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
            made = [torch.empty_like(value) for _ in range(count) for value in values]
        for value in made:
            self.recorder.keep(value, "activations")
        return made

    def _random_state(self) -> torch.Tensor | None:
        """A `RandomState` that the loop keeps to put back: in host memory as well."""
        if self._device.type != "cpu":
            return None
        with self.mode:
            state = torch.empty_like(torch.get_rng_state())
        self.recorder.keep(state, "activations")
        return state

    def evaluate(self, batch: Batch, train: Batch) -> None:
        """The held-out loss of one batch, beside the micro-batches of the step `train`, which the loop still holds."""
        count = per_step(self._rows, self._way, train)
        layers = tuple(level != "none" for level in self.short.levels)
        what = (batch, train, count, self._config.memory.loss_tokens, layers)
        self._once(what, functools.partial(self._evaluate, batch, train, count))

    def _evaluate(self, batch: Batch, train: Batch, count: int) -> None:
        self.recorder.phase = "evaluation"
        held = self._on_host(self._inputs(train), count)
        start = self._random_state()
        inputs = self._inputs(batch)
        with self._recording():
            summed_loss(self._model, [[inputs]], precision=self._config.training.precision, masked=self._step.masked)
        del held, start

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        self.recorder.category = "activations"
        casting = adapter.casts_by_autocast(self._model, self._config.adapter, self._config.training.precision)
        with casting, self.mode, self.recorder:
            yield
        self.recorder.layer = None

    def _make_gradients(self) -> None:
        for parameter, layer in self._trained():
            with self.mode:
                parameter.grad = torch.empty_like(parameter)
            self.recorder.keep(held(parameter.grad), "gradients", layer)
        self.recorder.layer = None
        self._mark_gradients()

    def _mark_gradients(self) -> None:
        for parameter, _ in self._trained():
            if parameter.grad is not None:  # as DeepSpeed leaves none
                self.recorder.mark(held(parameter.grad), "gradients", managed=self.recorder.slices_on_host)

    def _update(self) -> None:
        """Clipping and the update."""
        self.recorder.phase, self.recorder.managed = "optimizer", self.recorder.slices_on_host
        with self._recording(), self.recorder.follow_layers():
            self._step.clip()
            self._step.update()
        self.recorder.managed = False
        optimizer = self.engine.optimizer
        paged = self._device.type == "cuda" and getattr(optimizer, "is_paged", False)
        for parameter, state in optimizer.state.items():
            for name, tensor in state.items():
                if isinstance(tensor, torch.Tensor):
                    managed = paged and name in _PAGED_STATES and parameter.numel() >= _PAGED_FROM
                    self.recorder.mark(tensor, "optimizer_states", managed=managed or self.recorder.slices_on_host)

    def _trained(self) -> Iterator[tuple[torch.nn.Parameter, int | None]]:
        """Each trained weight and its layer."""
        layer_of = {parameter: number for number, layer in enumerate(self._layers) for parameter in layer.parameters()}
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                yield parameter, layer_of.get(parameter)

    def _inputs(self, batch: Batch) -> Inputs:
        """A batch as the collator makes it. Where packed rows begin is known, which decides what attention takes."""
        # With a mask transformers looks for padding in it; without one, whether positions start anew, as packed.
        uneven = (batch.padded and self._step.masked) or len(batch.packed) > 1
        self.recorder.answers = Answers(uneven, batch.trained_tokens, batch.rows * batch.tokens)
        rows = batch.packed or (batch.tokens,) * batch.rows
        inputs = self._collator.micro_batch([{"input_ids": [0] * length, "labels": [0] * length} for length in rows])
        with self.mode:
            found = {
                name: torch.ones_like(value) if isinstance(value, torch.Tensor) and value.dim() > 1 else value
                for name, value in inputs.items()
            }
        moved = found if self._device.type == "cpu" else for_model(found, masked=self._step.masked)
        for value in moved.values():
            if isinstance(value, torch.Tensor):
                self.recorder.keep(value, "activations")
        return found


class _TracedNoise(Noise):
    """For a micro-batch without values: which tokens are padding is not known there."""

    def rows(self, inputs: Inputs, step: int) -> list[Row]:
        rows, tokens = inputs["input_ids"].shape
        packed = inputs.get("cu_seq_lens_q")
        starts = range(0, (rows + 1) * tokens, tokens) if packed is None else packed.tolist()
        return [Row(start, end - start, 0) for start, end in itertools.pairwise(starts)]
