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
from torch.utils._pytree import tree_leaves

from finetune import kernels, objectives
from finetune.config import AdapterSection, Config, MemorySection
from finetune.data.batching import LargestBatch, per_step
from finetune.data.encoded import MEDIA
from finetune.data.media import TEXT_ALONE, Media
from finetune.errors import FinetuneError, ForecastError, first_line
from finetune.forecast import depth, device_paths, engines, fake_ranks
from finetune.forecast.device import Device
from finetune.forecast.extrapolate import NotAlike, Shortened, extrapolate, shorten, shorten_apart, whole
from finetune.forecast.fake_model import FakeModel, Shortening
from finetune.forecast.fake_values import Answers, KnownValues, Routing
from finetune.forecast.operator_costs import take_at_once
from finetune.forecast.trace import Trace, WholeBase
from finetune.forecast.trace_recorder import TracedMonitor, TraceRecorder
from finetune.forecast.traced_engine import Traced, TracedEngine
from finetune.model import build
from finetune.model.adapters import adapter
from finetune.model.attention import packing
from finetune.model.base import base_dtype
from finetune.model.distributed import context, optimizer_states
from finetune.model.distributed.placement import Placement
from finetune.model.probes.causality import needs_mask
from finetune.model.recompute import checkpointing
from finetune.model.skeleton import mixture
from finetune.model.structure import experts
from finetune.objectives import log_probs
from finetune.training import optimizers, reference_scores, strategies
from finetune.training.collator import Inputs, StepCollator, apart, for_model, micro_batching
from finetune.training.eval_loss import summed_loss
from finetune.training.noise import Noise, NoiseSpan
from finetune.training.step import Step

# bitsandbytes 0.50, `Optimizer8bit.get_state_buffer`: smaller tensors are not paged.
_PAGED_STATES, _PAGED_FROM = ("state1", "state2"), 100_000
# Up to this many tokens are one tile, whatever the config says (kernels/head.py takes at least as many at a time).
_ONE_TILE = 512


@dataclass(frozen=True)
class StepSetting:
    """A step to trace: a job on a device, its largest micro-batches, and the number of ranks; rank 0 is traced.

    `attention` is the name of the implementation. Without an `evaluation` batch no evaluation is traced; the reference
    is scored in batches like `train` if its own largest one, `reference`, is unknown. `evenly`: each expert gets as
    many tokens as every other, instead of one expert all of them. `media` makes what rows of a batch show.
    """

    config: Config
    architecture: Any
    train: LargestBatch
    evaluation: LargestBatch | None
    device: Device
    attention: str
    world_size: int = 1
    reference: LargestBatch | None = None
    evenly: bool = False
    media: Media = TEXT_ALONE

    @property
    def job(self) -> Hashable:
        """The key of a model and its optimizer: the config without what `step` has, the attention, and the routing."""
        left_out = {
            "memory": {"checkpointing", "loss_tokens"}, "training": {"micro_batch"}, "data": {"image_pixels"},
        }  # fmt: skip
        return self.config.model_dump_json(exclude=left_out), self.attention, self.evenly

    @property
    def step(self) -> Hashable:
        """The key of a step of that model, except what its layers recompute."""
        tile = self.config.memory.loss_tokens
        if max(batch.positions for batch in (self.train, self.evaluation, self.reference) if batch) <= _ONE_TILE:
            tile = min(tile, _ONE_TILE)
        return self.config.training.micro_batch, tile, self.train, self.evaluation, self.reference

    @property
    def rows(self) -> int:
        """The rows of a step that one rank computes."""
        return max(1, self.config.training.batch_size // self.config.distributed.shares(self.world_size))

    @property
    def engine(self) -> type[TracedEngine]:
        """The engine of the step."""
        return engines.of(self.config.distributed, self.world_size)

    @property
    def in_parts(self) -> bool:
        """Whether each rank holds only parts of the model, which are made after the weights are loaded."""
        return strategies.holds_parts(self.config.distributed, self.world_size)


Kind = tuple[Hashable, Hashable]
"""The kind and the forms of a layer."""


@dataclass(frozen=True)
class _KeptLayers:
    """The layers that are kept of a model, with their kinds and forms, and what they recompute."""

    shortened: Shortened
    kinds: tuple[Kind, ...]
    levels: tuple[str, ...]

    @classmethod
    def of(cls, kinds: Sequence[Kind], memory: MemorySection, shortening: Shortening) -> _KeptLayers:
        levels = checkpointing.pattern(memory.checkpointing, len(kinds))
        own = [(kind, level) for (kind, _), level in zip(kinds, levels, strict=True)]
        shortened = shortening(own, [forms for _, forms in kinds])
        kept = shortened.layers
        return cls(shortened, tuple(kinds[number] for number in kept), tuple(levels[number] for number in kept))


@dataclass
class Models:
    """Traced models of one architecture on one device, ready for another step, and the traces.

    One model serves all settings that differ in the micro-batch, the tiles of the loss, and what like layers recompute.
    """

    kinds: dict[Hashable, Sequence[Kind]] = field(default_factory=dict)
    """By job."""
    ready: dict[Hashable, _TracedStep] = field(default_factory=dict)
    """By job and the kinds of the layers that are kept."""
    traces: dict[Hashable, Trace] = field(default_factory=dict)
    """By setting, and the kinds and levels of the layers that are kept, however many layers each stands for; not yet
    extrapolated.
    """


def trace_step(setting: StepSetting, models: Models | None = None) -> Trace:
    """Run one optimizer step in its steady state, then an evaluation, on fake tensors.

    In the steady state the optimizer's states exist, and with accumulation so do gradients of earlier micro-batches.
    The models in `models` are used again, and the trace is the same as without them.
    """
    models, config = models or Models(), setting.config
    try:
        for shortening in (shorten, shorten_apart):
            with contextlib.suppress(NotAlike, depth.Scattered):
                return _trace_step(setting, shortening, models)
        return _trace_step(setting, whole, models)
    except FinetuneError:
        raise
    except Exception as error:
        # Foreign code on fake tensors may raise anything.
        raise ForecastError(
            f"`model.name`: `{config.model.name}` ({setting.architecture.model_type}) with `optimizer.kind: "
            f"{config.optimizer.kind}` and `training.objective: {config.training.objective}` cannot be forecast (a "
            f"training step fails while it is traced: {type(error).__name__}: {first_line(error)}). `finetune train` "
            "with `memory.check: off` trains without a forecast"
        ) from error


def _trace_step(setting: StepSetting, shortening: Shortening, models: Models) -> Trace:
    """Look the trace up, or run the step on a model that is ready or made for it, and keep both."""
    config, device, ready = setting.config, setting.device, None
    if kinds := models.kinds.get(setting.job):
        kept = _KeptLayers.of(kinds, config.memory, shortening)
        if trace := models.traces.get((setting.job, setting.step, kept.kinds, kept.levels)):
            return extrapolate(trace, kept.shortened)
        ready = models.ready.pop((setting.job, kept.kinds), None)
    answers = Answers(uneven=False, trained_tokens=0)
    recorder = ready.recorder if ready else TraceRecorder(device.operators, answers, device.rates.flops_per_byte)
    with (
        fake_ranks.placing(config.distributed, setting.world_size) as placement,
        fake_ranks.splitting(config.distributed, setting.world_size) as group,
        device_paths.undisturbed(),
        log_probs.tiles(
            config.memory.loss_tokens, fused=config.fused != "off" and "loss" not in device.software.kernels_off
        ),
        device_paths.like(device, recorder, ready.mode if ready else None) as mode,
        setting.engine.around(recorder),
    ):
        if ready:
            traced = ready
            traced.change(setting, kept)
        else:
            traced = _TracedStep(setting, mode, recorder, shortening, placement)
            traced.prepare(setting, group)
        trace = traced.run(setting, group)
        if not group and traced.engine.reusable and traced.rewound():
            kept = traced.kept
            models.kinds[setting.job] = traced.kinds
            models.ready[setting.job, kept.kinds] = traced
            models.traces[setting.job, setting.step, kept.kinds, kept.levels] = trace
        return extrapolate(trace, traced.kept.shortened)


class _TracedStep:
    """A job's model and optimizer on fake tensors, on which the phases of a step are run and recorded."""

    def __init__(
        self, setting: StepSetting, mode: FakeTensorMode, recorder: TraceRecorder, shortening: Shortening,
        placement: Placement | None,
    ) -> None:  # fmt: skip
        self._serve(setting)
        self.mode, self.recorder = mode, recorder
        self._device, self._rows, self._placement = setting.device, setting.rows, placement
        self._held, self._routing = setting.engine.held, Routing(setting.evenly)
        recorder.shards_on_host = bool(placement and placement.offload and self._device.type == "cuda")
        # Every fused attention kernel keeps the same for backward: the output and one number per row.
        fused = not setting.attention.startswith(("eager", "packed", packing.WINDOWED))

        def keep_layers(kinds: Sequence[Hashable], forms: Sequence[Hashable]) -> Shortened:
            self.kinds = list(zip(kinds, forms, strict=True))
            self.kept = _KeptLayers.of(self.kinds, self._config.memory, shortening)
            return self.kept.shortened

        attention = "sdpa" if fused else setting.attention
        config = self._config
        dtype = base_dtype(config.adapter, self._precision)
        blueprint = build.Blueprint(config.model, config.quantization, setting.architecture, attention, dtype)
        self._fake = FakeModel(blueprint, config.adapter, mode, recorder, keep_layers, self._attach, self._measure)
        self._base, self._model, self._layers = self._fake.base, self._fake.model, self._fake.layers
        checkpointing.choose(self._base, self.kept.levels)
        self._repeatable: dict[Hashable, Trace] = {}
        self._computed_last: Inputs | None = None

    def _serve(self, setting: StepSetting) -> None:
        """Take what may differ between the settings that one model serves."""
        self._config = config = setting.config
        self._media = setting.media
        # Sizes in float16 are those of bfloat16, and the CPU, on which this runs, has no loss scaling.
        self._precision = "bf16" if config.training.precision == "fp16" else config.training.precision
        self._way = micro_batching(config, setting.architecture)
        self._collator = StepCollator(
            self._way, pad_token_id=0, context=config.distributed.context, media=self._media.white()
        )

    def _measure(self, base: Any) -> None:
        """Count the parameters of the whole base, before it is shortened."""
        head, adapted = base.get_output_embeddings(), adapter.adapted_experts(base, self._config.adapter)
        linear = [
            module.weight.numel()
            for module in base.modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        ]
        fused = [
            getattr(module, name).numel()
            for path, module, name in experts.weights(base)
            if path.endswith(tuple(adapted))
        ]
        parts = [head, *checkpointing.layers(base)]
        self._whole = WholeBase(
            parameters=sum(weight.numel() for weight in base.parameters()),
            largest_weight=max(linear + fused, default=0),
            largest_part=max(sum(weight.numel() for weight in part.parameters()) for part in parts),
            mixture=mixture(base, self._config.quantization),
        )

    def _attach(self, base: Any, section: AdapterSection) -> Any:
        config, memory = self._config, self._config.memory
        # Other settings may recompute, so checkpointing is switched on; what is recomputed is chosen later.
        if memory.checkpointing in ("none", 0) and base.supports_gradient_checkpointing:
            memory = memory.model_copy(update={"checkpointing": "all"})
        return build.trainable(
            base, config.model, section, memory, seed=config.training.seed, device_type=self._device.type,
            copies_to_host=device_paths.TracedCopies(self.recorder),
        )  # fmt: skip

    def prepare(self, setting: StepSetting, group: dist.ProcessGroup | None) -> None:
        """Everything before the first step: load, make the step, and the optimizer's states."""
        self.load("attach" if setting.in_parts else "adapter")
        self.make_step(setting)
        with context.split(self._model, group), self.engine.passes():
            self.make_optimizer_states()
        self._start = self.recorder.state()  # each step that is traced begins here

    def run(self, setting: StepSetting, group: dist.ProcessGroup | None) -> Trace:
        """The trace of a step and an evaluation."""
        with context.split(self._model, group), self.engine.passes():
            self.step(setting.train)
            if setting.evaluation:
                self.evaluate(setting.evaluation, setting.train)
            if self._step.objective.reference and self._config.caches_reference:
                self.score(setting.reference or setting.train)
        return replace(
            self.recorder.trace(), base=self._whole, routed=self._routing.matters, trained_share=self.trained_share,
            saved_bytes=self.engine.saved_bytes(),
        )  # fmt: skip

    def change(self, setting: StepSetting, kept: _KeptLayers) -> None:
        """Serve another setting, whose layers are of the same kinds."""
        self._serve(setting)
        self.kept = kept
        checkpointing.choose(self._base, kept.levels)

    def rewound(self) -> bool:
        """Forget the step, so that another can be traced; False if the step did not leave the model as it was."""
        self.recorder.phase = "after"
        self._computed_last = None
        for module in self._model.modules():
            if "rope_deltas" in vars(module):  # models with vision keep it from the last batch, for generation
                module.rope_deltas = None
        return self.recorder.rewind(self._start)

    def make_step(self, setting: StepSetting) -> None:
        """The step, as `training.assembly` makes it."""
        config, card = self._config, self._device
        log_probs.attach(self._model)
        triton = card.type != "cuda" or card.software.triton
        kernels.attach(self._model, config.fused, triton=triton, without=card.software.kernels_off)
        updated_on = "cpu" if self.recorder.shards_on_host else card.type
        name, _ = optimizers.choose(config.optimizer, updated_on, managed_memory=card.software.managed_memory)
        with warnings.catch_warnings():
            # bitsandbytes looks embeddings up by their addresses, and fake ones have none.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            optimizer = optimizers.make(name, config.optimizer, 1e-4, self._model)

        layer_of = {weight: number for number, layer in enumerate(self._layers) for weight in layer.parameters()}

        def whole(weights: Sequence[torch.Tensor]) -> list[int]:
            units = [
                None if (layer := layer_of.get(one)) is None else self.kept.shortened.unit[layer] for one in weights
            ]
            numbers: list[int] = []
            for unit, members in itertools.groupby(zip(units, weights, strict=True), key=lambda pair: pair[0]):
                times = 1 if unit is None else self.kept.shortened.repeats[unit]
                numbers += [weight.numel() for _, weight in members] * times
            return numbers

        self.engine = setting.engine(
            Traced(
                self._model, self._base, optimizer, config.distributed, setting.world_size, self.recorder,
                layer_of.get, whole, on_gpu=card.type == "cuda",
            )
        )  # fmt: skip
        if setting.in_parts:
            self.recorder.phase = "attach"
        with self._recording():
            self.engine.attach()
        if card.type == "cuda":
            take_at_once(optimizer)

        capability = card.capability if card.type == "cuda" else None
        self._step = Step(
            engine=self.engine,
            objective=objectives.of(config),
            precision=self._precision,
            max_grad_norm=config.training.max_grad_norm,
            masked=needs_mask(self._model.config, self._precision, capability),
            device=torch.device("cpu"),
            monitor=TracedMonitor(self.recorder),
            noise=_TracedNoise(self._model, alpha, 0) if (alpha := config.training.neftune_noise_alpha) else None,
        )
        self._follow_passes()

    def _follow_passes(self) -> None:
        """Tell the recorder a pass's layer: forward by hooks on modules, backward by hooks on their outputs."""
        recorder = self.recorder

        def on_gradient(hidden: torch.Tensor, layer: int | None) -> None:
            def arrived(gradient: torch.Tensor) -> None:
                recorder.layer, recorder.category = layer, "activations"

            if hidden.requires_grad:
                hidden.register_hook(arrived)

        def enters_layer(number: int, layer: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            if self._placement and number == 0:  # when this gradient arrives, all layers have reduced theirs
                on_gradient(hidden, None)
            recorder.layer = number
            if layer.gradient_checkpointing and layer.training:
                recorder.mark(hidden, "layer_inputs")

        def leaves_layer(number: int, layer: Any, args: Any, output: Any) -> None:
            if number == len(self._layers) - 1:
                recorder.layer = None
            on_gradient(output[0] if isinstance(output, tuple) else output, number)

        def enters_base(base: Any, args: Any) -> None:
            recorder.category = "activations"

        def leaves_base(base: Any, args: Any, output: Any) -> None:
            recorder.category = "loss"
            on_gradient(output[0], None)

        for number, layer in enumerate(self._layers):
            # `prepend`: before a sharded layer's own hooks, which gather its weights.
            enters, leaves = functools.partial(enters_layer, number), functools.partial(leaves_layer, number)
            layer.register_forward_pre_hook(enters, with_kwargs=True, prepend=True)
            layer.register_forward_hook(leaves, prepend=True)
        self._base.base_model.register_forward_pre_hook(enters_base)
        self._base.base_model.register_forward_hook(leaves_base)

    # -- the phases ------------------------------------------------------------------------------------------------

    def load(self, then: str) -> None:
        """Make and quantize the base's weights module by module, then add the adapter in the phase `then`.

        Weights are loaded one at a time, so that only one, or the experts of one layer, exists in 16 bit.
        """
        for module in self._fake.base_modules:
            self._fake.load(module)
            if self._placement:
                with self._placing():
                    self._placement.keep_part(self._base, module)
                for weight in filter(self._placement.is_part, module.parameters(recurse=False)):
                    self.recorder.mark(weight, "base_weights", managed=self.recorder.shards_on_host)
        self._fake.compute_buffers()
        self.recorder.phase = then
        for module in self._model.modules():
            self._fake.keep(module)
        self.recorder.layer = None
        if self._placement:
            with self._placing():
                self._placement.apply(self._model)
            for weight in self._model.parameters():
                category = "adapter" if weight.requires_grad else "base_weights"
                self.recorder.mark(self._held(weight), category, managed=self.recorder.shards_on_host)
        trained = [weight for weight in self._model.parameters() if weight.requires_grad]
        self.trained_share = sum(self._held(weight).numel() for weight in trained) / sum(
            map(torch.Tensor.numel, trained)
        )

    @contextlib.contextmanager
    def _placing(self) -> Iterator[None]:
        """Record what dividing the model allocates, weight by weight."""
        with self._recording(), self.recorder.follow_layers():
            self.recorder.category = "base_weights"
            yield

    def make_optimizer_states(self) -> None:
        """Take the optimizer's first step, on gradients of zeros, as `training.largest_batch` does.

        There, weights that no loss reaches have a gradient too, such as an adapter on an indexer of sparse attention.
        """
        self.recorder.phase = "optimizer"
        optimizer = self.engine.optimizer
        if self._device.type == "cpu":  # on a GPU they start on the host, and are moved with the first 8-bit state
            for code in getattr(optimizer, "name2qmap", {}).values():
                self.recorder.keep(code, "optimizer_states")
        start = self._random_state()  # kept by the warm-up
        if self.engine.updates_weights:
            if isinstance(optimizer, Optimizer8bit):
                with self._recording(), self.recorder.follow_layers():
                    optimizer_states.make_empty(optimizer)
            self._make_gradients()
        self._update()
        self._model.zero_grad(set_to_none=True)
        del start

    def step(self, batch: LargestBatch) -> None:
        """Run forward, backward and update in the steady state."""
        self.recorder.phase = "forward"
        micro_batches = per_step(self._rows, self._way, batch)
        if micro_batches > 1:
            with self._recording():
                self.engine.accumulate()
            if self.engine.keeps_gradients:
                self._make_gradients()
        inputs = self._inputs(batch)
        others = self._on_host(inputs, micro_batches - 1)
        # Kept by the warm-up, and by the retries of each of its steps.
        start, retry = self._random_state(), self._random_state()
        with self._recording():
            if self._step.objective.step_mean:
                self._step.take_mean(self._step.sum_before([inputs]))
            self._step.forward_backward([inputs], batch.trained_tokens)
        del retry
        self._mark_gradients()
        blocks = [self.recorder.block(self._held(one.grad)) for one, _ in self._trained() if one.grad is not None]
        self._once(tuple(block and (block.bytes, block.layer) for block in blocks), self._update)
        self._model.zero_grad(set_to_none=True)
        del start
        self.recorder.phase = "save"  # the loop still holds the step's micro-batches then
        self._computed_last = inputs  # so that an evaluation counts this one twice
        del inputs, others

    def _on_host(self, inputs: Any, count: int) -> list[torch.Tensor]:
        """Make `count` more micro-batches, which wait in host memory; that is forecast on a CPU only."""
        if self._device.type != "cpu":
            return []
        with self.mode:
            made = [torch.empty_like(value) for _ in range(count) for value in _tensors(inputs)]
        for value in made:
            self.recorder.keep(value, "activations")
        return made

    def _random_state(self) -> torch.Tensor | None:
        """Make a `RandomState` that the loop keeps to restore, which also lies in host memory."""
        if self._device.type != "cpu":
            return None
        with self.mode:
            state = torch.empty_like(torch.get_rng_state())
        self.recorder.keep(state, "activations")
        return state

    def evaluate(self, batch: LargestBatch, train: LargestBatch) -> None:
        """Evaluate one batch, beside the micro-batches of the step `train` that the loop still holds."""
        count = per_step(self._rows, self._way, train)
        summed = functools.partial(summed_loss, self._model, precision=self._precision, masked=self._step.masked)

        def record() -> None:
            self.recorder.phase = "evaluation"
            held = self._inputs(train)
            # The images of one of the step's micro-batches are still there.
            waiting = self._on_host({name: value for name, value in held.items() if name != MEDIA}, count)
            waiting += self._on_host(held.get(MEDIA, {}), count - 1)
            del held
            start = self._random_state()
            inputs, objective = self._inputs(batch), self._step.objective
            with self._recording():
                mean = None
                if objective.step_mean:
                    mean = summed([[apart(inputs)]], loss=objective.step_mean)[0]
                summed([[inputs]], loss=objective.evaluated, step_mean=mean)
            del waiting, start

        self._once((batch, train, count, *self._computed_alike()), record)

    def score(self, batch: LargestBatch) -> None:
        """Score the reference for the largest batch of that pass."""

        def record() -> None:
            self.recorder.phase = "reference"
            start = self._random_state()
            inputs = self._inputs(batch)
            with self._recording(), reference_scores.starting(self._model, self._config.adapter):
                summed_loss(
                    self._model, [[inputs]], precision=self._precision, masked=self._step.masked,
                    loss=reference_scores.scoring([]),
                )  # fmt: skip
            del start

        for _ in range(1 + self._way.layout.apart):  # segments that are scored apart are as many and as long
            self._once(("reference", batch, *self._computed_alike()), record)

    def _once(self, what: Hashable, record: Callable[[], None]) -> None:
        """Record work that depends only on `what`, in a phase of its own; later calls repeat the recording."""
        if what in self._repeatable:
            self.recorder.repeat(self._repeatable[what])
            return
        start = self.recorder.state()
        record()
        if recorded := self.recorder.since(start):
            self._repeatable[what] = recorded

    def _computed_alike(self) -> tuple[Hashable, ...]:
        """The part of the setting that a pass without gradients depends on, besides its batch."""
        return self._config.memory.loss_tokens, tuple(level != "none" for level in self.kept.levels)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        self.recorder.category = "activations"
        casting = adapter.casts_by_autocast(self._model, self._config.adapter, self._precision)
        with casting, self.mode, self.recorder:
            yield
        self.recorder.layer = None

    def _make_gradients(self) -> None:
        for parameter, layer in self._trained():
            with self.mode:
                parameter.grad = torch.empty_like(parameter)
            self.recorder.keep(self._held(parameter.grad), "gradients", layer)
        self.recorder.layer = None
        self._mark_gradients()

    def _mark_gradients(self) -> None:
        for parameter, _ in self._trained():
            if parameter.grad is not None:  # an engine may leave none
                self.recorder.mark(self._held(parameter.grad), "gradients", managed=self.recorder.shards_on_host)

    def _update(self) -> None:
        """Clipping and the update."""
        self.recorder.phase, self.recorder.managed = "optimizer", self.recorder.shards_on_host
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
                    self.recorder.mark(tensor, "optimizer_states", managed=managed or self.recorder.shards_on_host)

    def _trained(self) -> Iterator[tuple[torch.nn.Parameter, int | None]]:
        """Each trained weight and its layer."""
        layer_of = {parameter: number for number, layer in enumerate(self._layers) for parameter in layer.parameters()}
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                yield parameter, layer_of.get(parameter)

    def _inputs(self, batch: LargestBatch) -> Inputs:
        """A batch as the collator makes it. Where packed rows begin has values, which decide what attention takes."""
        # transformers looks for padding in a mask and, without one, for positions that restart as in packed rows.
        uneven = (batch.padded and self._step.masked) or len(batch.packed) > 1
        known = KnownValues() if batch.area else None
        # For a batch with images, the padding mask is known, and the masks of pixels leave nothing out.
        self.recorder.answers = Answers(
            uneven and not known, batch.trained_tokens, batch.positions, self._routing, known
        )
        rows = [
            self._collator.row(own, shared=shared)
            for own, shared in zip(batch.by_row, batch.shared_by_row, strict=True)
        ]
        if batch.area:
            rows = [self._media.showing(row, seen) for row, seen in zip(rows, batch.images, strict=True)]
        inputs = self._collator.micro_batch(rows)
        with self.mode:
            plain = _without_values(inputs)
        if known:  # the values of all inputs but labels; where rows are padded, the last one ends with a padding token
            if batch.padded:
                inputs["attention_mask"][-1, -1] = 0
            pairs = [(plain[name], value) for name, value in inputs.items() if name not in (MEDIA, "labels")]
            for made, row in zip(plain[MEDIA], inputs[MEDIA], strict=True):
                pairs += [(made[name], value) for name, value in row.items() if not value.is_meta]
            for one, value in pairs:
                known.know(one, value)
        # With a GPU the images of the rows are joined on the host, and the tensor recorded as joined is their copy on
        # the GPU.
        here = {name: value for name, value in plain.items() if name != MEDIA}
        moved = plain if self._device.type == "cpu" else for_model(here, masked=self._step.masked)
        for value in _tensors(moved):
            self.recorder.keep(value, "activations")
        return plain


def _without_values(inputs: Inputs) -> Inputs:
    """Inputs whose tokens and masks are ones, as fake tensors have no values."""
    made: Inputs = {}
    for name, value in inputs.items():
        if isinstance(value, dict):
            made[name] = _without_values(value)
        elif name == MEDIA:
            made[name] = [{key: torch.ones(one.shape, dtype=one.dtype) for key, one in row.items()} for row in value]
        elif isinstance(value, torch.Tensor) and value.dim() > 1:
            made[name] = torch.ones_like(value)
        else:
            made[name] = value
    return made


def _tensors(inputs: Any) -> list[torch.Tensor]:
    """The tensors of inputs, those of segments that are scored apart included."""
    return [each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor)]


class _TracedNoise(Noise):
    """Noise for a micro-batch without values, whose padding is unknown."""

    def rows(self, inputs: Inputs, step: int) -> list[NoiseSpan]:
        rows, tokens = inputs["input_ids"].shape
        packed = inputs.get("cu_seq_lens_q")
        starts = range(0, (rows + 1) * tokens, tokens) if packed is None else packed.tolist()
        return [NoiseSpan(start, end - start, 0) for start, end in itertools.pairwise(starts)]
