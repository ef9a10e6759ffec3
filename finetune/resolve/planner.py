"""Forecasts variants of one job on one machine, and chooses between them: quantization, sharding, micro-batch, levels.

No weights are read, and no GPU is needed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from finetune import objectives
from finetune.config import Config, contradictions
from finetune.config.field_types import LEVELS
from finetune.data import batching
from finetune.data.batching import LargestBatch, MicroBatching, RowOrder, Sizes
from finetune.data.media import TEXT_ALONE, Media
from finetune.data.prepare import Prepared
from finetune.errors import ConfigError, ForecastError
from finetune.forecast import devices, file_sizes, image_memory, job_forecast
from finetune.forecast.cache import Kept
from finetune.forecast.devices import Device
from finetune.forecast.image_memory import ImageMemory
from finetune.forecast.job_forecast import Forecast
from finetune.forecast.levers import Lever, levers
from finetune.forecast.plan import Fitted, Limits
from finetune.forecast.replay import Ranks, RunSetting
from finetune.forecast.traced_step import Models, StepSetting, trace_step
from finetune.model import bounds
from finetune.model.attention import backends, packing
from finetune.model.recompute import checkpointing
from finetune.model.source import catalog
from finetune.model.structure.quantization import LEAST_FIRST, changes_to
from finetune.resolve import by_length
from finetune.resolve import fit as fitting
from finetune.resolve.fit import NothingFits
from finetune.training import reference_scores, strategies
from finetune.training.collator import micro_batching

# A lever that saves less than this share is not worth mentioning.
_LEAST_SAVED = 0.005
_TRACED_TOKENS = 16
# Rows and tokens above what any job needs.
_MOST = 2**20
# Rows of an epoch whose lengths decide whether recomputing less is worthwhile.
_ROWS_SEEN = 100_000


@dataclass(frozen=True)
class Planner:
    """Forecasts variants of one job on one device.

    `data` gives the lengths of the rows; without it every row counts as `data.max_length` long. `gpus` of that kind
    share each step, one to a rank; every forecast is that of rank 0.
    """

    job: Config
    architecture: Any
    device: Device
    data: Prepared | None
    gpus: int = 1
    _known: dict[tuple[str, bool, tuple[LargestBatch, ...]], Forecast] = field(default_factory=dict)
    _models: Models = field(default_factory=Models)
    _largest_scored: dict[tuple[MicroBatching, int], LargestBatch | None] = field(default_factory=dict)
    _largest: dict[tuple[MicroBatching, int, int | None, bool], tuple[list[LargestBatch], LargestBatch | None]] = field(
        default_factory=dict
    )

    def forecast(
        self, config: Config | None = None, *, evaluates: bool = True, most_tokens: int | None = None
    ) -> Forecast:
        """The forecast of `config`, by default the job itself; without `evaluates`, leaving out the evaluation.

        With `most_tokens`, that of the largest micro-batch of rows up to that length.
        """
        config = config or self.job
        batches, evaluation = self._largest_batches(config, most_tokens)
        key = config.model_dump_json(), evaluates, tuple(batches)
        if key not in self._known:
            each = [self._kept_or_traced(config, batch, evaluation if evaluates else None) for batch in batches]
            self._known[key] = max(each, key=lambda one: one.needed_bytes)
        return self._known[key]

    def forecast_with(self, changes: Mapping[str, Any], *, evaluates: bool = True) -> Forecast:
        """The forecast of the job with these values of some `section.key`."""
        return self.forecast(self.job.changed(changes), evaluates=evaluates)

    def with_changes(self, changes: Mapping[str, Any]) -> Planner:
        """The planner of the job with these values. Rows longer than its `data.max_length` all count as that long."""
        job, data = self.job.changed(changes), self.data
        counts = [each for each in (data.train_counts, data.eval_counts) if each] if data else []
        whole = all(each.longest <= job.data.max_length for each in counts)
        return replace(self, job=job, data=data if whole else None, _known={}, _largest={})

    def _kept_or_traced(
        self, config: Config, batch: LargestBatch, evaluation: LargestBatch | None, evenly: bool = False
    ) -> Forecast:  # fmt: skip
        kept = Kept(self.architecture, self._device(config), self.gpus, evenly)
        reference = self._scored(config)
        return kept.get(
            config, [batch, evaluation, reference], lambda: self._forecast(config, batch, evaluation, reference, evenly)
        )

    def _device(self, config: Config) -> Device:
        """The device as one of the ranks uses it, with the rate of the job's precision."""
        section, device = config.distributed, self.device
        if config.training.precision == "fp32":
            device = device.in_float32()
        return devices.of_ranks(device, strategies.groups(section, self.gpus), section.context)

    def _forecast(
        self, config: Config, batch: LargestBatch, evaluation: LargestBatch | None,
        reference: LargestBatch | None = None, evenly: bool = False,
    ) -> Forecast:  # fmt: skip
        device = self._device(config)
        if config.training.deterministic:
            device = device.deterministic()
        implementation = attention(config, self.architecture, device)
        capability = device.capability if device.type == "cuda" else None
        flash = backends.has_flash(config.training.precision, capability)
        if not batch.padded and not flash and backends.shares_keys(self.architecture):
            # Without flash attention, heads that share keys take PyTorch's plain products, scores and all.
            implementation = packing.eager_like(implementation)
        section, adapts = config.distributed, config.adapter.kind == "lora"
        setting = StepSetting(
            config, self.architecture, batch, evaluation, device, implementation, self.gpus, reference, evenly,
            self.data.media if self.data else TEXT_ALONE,
        )  # fmt: skip
        trace = trace_step(setting, self._models)
        way = micro_batching(config, self.architecture)
        per_rank = batching.per_step(config.training.batch_size, way, batch) // section.shares(self.gpus)
        run = RunSetting(
            micro_batches=max(1, per_rank),
            pixel_bytes=setting.media.nbytes(batch.images),
            merge_bytes=file_sizes.merge_bytes(trace) if adapts else 0,
            disk_bytes=file_sizes.disk_bytes(config.output, trace, adapts=adapts),
            checkpoint_bytes=file_sizes.checkpoint_bytes(trace),
            merges=config.output.merge,
            saves_between=file_sizes.saves_between(config.output, config.training.max_steps),
            from_files=config.model.weights != "random" and not strategies.loads_parts(section, self.gpus),
            ranks=Ranks(
                self.gpus,
                section.model_dump() if strategies.applies(section, self.gpus) else None,
                copied=strategies.replicates(section, self.gpus),
            ),
        )
        return job_forecast.make(trace, device, batch, implementation, run)

    def with_reference(self, config: Config, forecast: Forecast) -> Forecast:
        """`forecast` with the seconds of the pass that scores the reference, if there is one."""
        shares, data = config.distributed.shares(self.gpus), self.data
        if forecast.reference is None or data is None:
            return job_forecast.with_reference(forecast, shares, None, 0, 0)
        way = micro_batching(config, self.architecture)
        batches = reference_scores.positions(way, data, self._share(config)) / forecast.batch.positions
        rows = len(data.train) + len(data.eval or ())
        in_step = reference_scores.in_step_share(config.training, data)
        return job_forecast.with_reference(forecast, shares, rows, batches, in_step)

    def with_routing(self, config: Config, forecast: Forecast) -> Forecast:
        """`forecast`, with what is needed if experts get equally many tokens, where that is less."""
        if not forecast.experts.routed:
            return forecast
        evaluation = self._largest_batches(config)[1]
        evenly = self._kept_or_traced(config, forecast.batch, evaluation, evenly=True).needed_bytes
        if evenly >= forecast.needed_bytes:
            return forecast
        return replace(forecast, experts=replace(forecast.experts, evenly_routed_bytes=evenly))

    def levers(self, config: Config, before: Forecast) -> list[tuple[Lever, Forecast]]:
        """Each lever that would reduce the forecast `before`, with the forecast after it is pulled."""
        # Against what the job itself takes: on a CPU the rest is whatever this process happens to hold.
        below = before.needed_bytes - before.peak_reserved_bytes * _LEAST_SAVED
        pulled: list[tuple[Lever, Forecast]] = []
        for lever in levers(config, self.gpus):
            with contextlib.suppress(ConfigError):  # a model that cannot be sharded
                pulled.append((lever, self.forecast(config.changed(lever.changes))))
        return [(lever, after) for lever, after in pulled if after.needed_bytes < below]

    def least_quantized(self) -> tuple[str, str]:
        """The first kind of LEAST_FIRST with which the smallest step fits, else the last; and the reason."""
        needs = dict[str, str]()
        for kind in LEAST_FIRST:
            job = self.job.changed(changes_to(kind))
            if contradictions(job):
                continue
            smallest, chosen = replace(self, job=job)._smallest(), kind  # noqa: SLF001
            needs[kind] = f"{smallest.needed_bytes / 2**30:.2f} {'unquantized' if kind == 'none' else f'in {kind}'}"
            if smallest.fits:
                break
        return (
            chosen,
            f"the smallest step takes {', '.join(needs.values())}, of {smallest.budget_bytes / 2**30:.2f} GiB",
        )

    def _smallest(self) -> Forecast:
        """The forecast of the job with the least memory that its `auto` settings allow, nothing offloaded."""
        chosen: dict[str, Any] = {}
        if self.job.training.micro_batch == "auto":
            chosen["training.micro_batch"] = 1
        if self.job.memory.checkpointing == "auto":
            chosen["memory.checkpointing"] = "all"
        return self.forecast(self._shared(lambda way: way.changed(chosen)).changed(chosen))

    def resolve(self) -> tuple[Config, Fitted | None]:
        """The job with a value for all that is `auto`, and what was chosen; the least setting where nothing fits."""
        if self.job.fitted:
            return self._shared(lambda config: config), None
        try:
            fitted = self.fit()
        except NothingFits as least:
            return least.config, None
        with contextlib.suppress(ForecastError):  # short rows then recompute what the longest do
            fitted = self.by_length(fitted)
        return fitted.config, fitted

    def fit(self) -> Fitted:
        """The fastest setting that fits, with the least sharding. Raises OutOfMemoryError when none does.

        Sharding, micro-batch and checkpointing are chosen where the job says `auto`.
        """
        training, memory = self.job.training, self.job.memory
        compiled = self.job.kernels.compile == "layers"  # such a layer keeps all or nothing, and offloads nothing
        offloads = self.device.type == "cuda" and not compiled
        each = self._share(self.job)
        rows = fitting.divisors(each) if training.micro_batch == "auto" else [training.rows]
        recomputed = None if memory.checkpointing == "auto" else memory.checkpointing
        least = functools.partial(fitting.least, offloads=offloads, rows=rows, checkpointing=recomputed)
        shared = self._shared(least)
        fitted = fitting.fit(
            shared,
            self.architecture.get_text_config().num_hidden_layers,
            self.forecast,
            offloads=offloads,
            levels=("none", "all") if compiled else checkpointing.levels(self.architecture),
            rows=rows,
            checkpointing=recomputed,
        )
        if shared is self.job:
            return fitted
        copies = shared.distributed.kind == "ddp"
        why = {"distributed.kind": "a copy of the model fits each GPU" if copies else "copies of the model do not fit"}
        if not copies:
            why["distributed.stage"] = "the least sharding that fits"
        return replace(fitted, reasons={**why, **fitted.reasons})

    def by_length(self, fitted: Fitted) -> Fitted:
        """`fitted` with less recomputed in short micro-batches, where their lengths are known and it saves time.

        Micro-batches of equal size have nothing to gain. The ranks that hold a model in shards exchange them within the
        passes of a layer, so that all must recompute alike; compiled layers would be compiled for each level.
        """
        config = fitted.config
        levels = _less_recomputed(fitted, self.architecture.get_text_config().num_hidden_layers)
        way, shares = micro_batching(config, self.architecture), config.distributed
        in_parts = strategies.holds_parts(shares, self.gpus)
        plain = config.kernels.compile == config.memory.offload == "none"
        if not levels or self.data is None or way.tokens or in_parts or shares.context > 1 or not plain:
            return fitted
        sizes, training = Sizes.of(self.data.train, way), config.training
        order = RowOrder(sizes.lengths, training.batch_size, training.seed, training.group_by_length, sizes.areas)
        rows = itertools.islice(order, _ROWS_SEEN)
        seen = batching.epoch(sizes.lengths, rows, training.batch_size, way, sizes.areas)

        def at(level: str, most_tokens: int | None = None) -> Forecast:
            return self.forecast(config.changed({"memory.checkpointing": level}), most_tokens=most_tokens)

        shorter = by_length.find(fitted.forecast, {level: at(level) for level in levels}, map(max, seen), at)
        return replace(fitted, forecast=job_forecast.with_shorter(fitted.forecast, shorter))

    def _shared(self, least: Callable[[Config], Config]) -> Config:
        """The job with the least sharding that lets `least` of it fit, where the ranks' sharing is `auto`."""
        if self.gpus == 1 or self.job.distributed.kind != "auto":
            return self.job
        most = self.job
        for way in map(self.job.changed, strategies.least_first(self.job)):
            try:
                fits = self.forecast(least(way)).fits
            except ConfigError:  # this model, or the optimizer's states of its weights, cannot be sharded so
                continue
            most = way
            if fits:
                break
        return most

    def images(self, config: Config) -> ImageMemory | None:
        """What an image takes, and the largest that fits, one row at a time; None for rows of text."""
        data = self.data
        if data is None or not data.media:
            return None
        config = config.changed({"training.micro_batch": 1, "training.micro_batch_tokens": None})
        batch = max(self._largest_batches(config)[0], key=lambda one: one.area)

        def forecast(one: LargestBatch, media: Media, pixels: int | None) -> Forecast:
            planner = replace(self, data=replace(data, media=media))
            bounded = config.changed({"data.image_pixels": pixels or config.data.image_pixels})
            return planner._kept_or_traced(bounded, one, None)  # noqa: SLF001

        return image_memory.of(batch, data.media, config.data.max_length, forecast)

    def limits(self, config: Config) -> Limits:
        """The longest rows, most rows and highest rank that fit with every layer checkpointed."""
        config = config.changed({"training.micro_batch_tokens": None})
        positions = bounds.positions(self.architecture) or _MOST
        limits = fitting.limits(
            config,
            lambda variant: self.forecast(variant, evaluates=False),
            length=positions,
            rows=_MOST if self.data is None else len(self.data.train),
            rank=getattr(self.architecture.get_text_config(), "hidden_size", _MOST),  # the smaller side of most layers
        )
        return replace(limits, length=min(limits.length, positions))

    def _share(self, config: Config) -> int:
        """Rows of a step that one rank computes, alone or with the others of its group."""
        return max(1, config.training.batch_size // config.distributed.shares(self.gpus))

    def _scored(self, config: Config) -> LargestBatch | None:
        """The largest batch in which the reference is scored; None without a reference or without data."""
        if not (config.caches_reference and objectives.of(config).reference):
            return None
        if self.data is None or config.data.max_length != self.job.data.max_length:
            return None
        key = micro_batching(config, self.architecture), self._share(config)
        if key not in self._largest_scored:
            self._largest_scored[key] = reference_scores.largest_batch(key[0], self.data, key[1])
        return self._largest_scored[key]

    def _largest_batches(
        self, config: Config, most_tokens: int | None = None
    ) -> tuple[list[LargestBatch], LargestBatch | None]:
        """The largest training micro-batches that data and sampler can produce, and that of the evaluation set.

        Training rows are at most `most_tokens` long. Without data, and with a `data.max_length` other than the job's,
        all rows are assumed to be as long as that.
        """
        way, step_rows = micro_batching(config, self.architecture), self._share(config)
        if config.model.vision != "none" and self.data is None:
            raise ForecastError(
                "`data.train`: a forecast with images needs the rows and the processor of the base on this machine; "
                "copy them here, or set `model.vision: none` for one of text"
            )
        longer = config.data.max_length > self.job.data.max_length
        shorter = config.data.max_length < self.job.data.max_length
        if shorter and self.data and self.data.media:  # rows with images are dropped, not cut
            most_tokens = min(most_tokens or config.data.max_length, config.data.max_length)
        elif self.data is None or shorter or longer:
            longest = batching.longest_batches(way, step_rows, config.data.max_length)
            if self.data and self.data.media:
                longest = [batching.with_most_images(Sizes.of(self.data.train, way), batch) for batch in longest]
            return longest, None if config.data.eval == "none" else longest[0]
        key = way, step_rows, most_tokens, shorter
        if key not in self._largest:
            self._largest[key] = (
                _largest_of(self.data.train, way, step_rows, most_tokens),
                _largest_of_eval(self.data, way, step_rows, most_tokens if shorter else None),
            )
        return self._largest[key]


def _largest_of(rows: Any, way: MicroBatching, step_rows: int, most_tokens: int | None) -> list[LargestBatch]:
    """The largest micro-batches of the rows of at most `most_tokens` (None: of all)."""
    return batching.worst_batches(Sizes.of(rows, way).no_longer(most_tokens), way, step_rows, "the data's rows")


def _largest_of_eval(
    data: Prepared, way: MicroBatching, step_rows: int, most_tokens: int | None
) -> LargestBatch | None:
    """One micro-batch of the evaluation set that takes as much as any, as `_largest_of`; None without that set."""
    if data.eval is None:
        return None
    batches = _largest_of(data.eval, way, step_rows, most_tokens)
    largest = max(batches, key=lambda batch: batch.positions + batch.area)
    most = max(batch.trained_tokens for batch in batches)  # perhaps those of rows with fewer images
    return replace(largest, trained_tokens=min(most, largest.positions))


def _less_recomputed(fitted: Fitted, layers: int) -> list[str]:
    """The levels worth their bytes that recompute less than some layer of `fitted` does."""
    least = min(LEVELS.index(level) for level in checkpointing.pattern(fitted.config.memory.checkpointing, layers))
    return [
        level for level in fitted.levels if LEVELS.index(level) <= least and level != fitted.config.memory.checkpointing
    ]


def attention(config: Config, architecture: Any, device: Device) -> str:
    """The implementation of attention that training would choose on a device."""
    return backends.planned(
        config.model.attention, architecture, device.type, config.training.precision,
        capability=device.capability if device.type == "cuda" else None,
        packed=config.data.packing, longest=config.data.max_length,
    )  # fmt: skip


def check_traceable(config: Config, architecture: Any, device: torch.device) -> None:
    """Trace a step with one short row, for an architecture that the catalog does not know.

    Raises ForecastError where that fails and `memory.check` is `refuse`, ConfigError for a setting that the model does
    not have.
    """
    if config.memory.check == "off" or architecture.model_type in catalog.families():
        return
    chosen = config.memory.checkpointing
    config = config.changed(
        {
            "training.micro_batch": 1,
            "training.micro_batch_tokens": None,
            "memory.checkpointing": "none" if chosen == "auto" else chosen,
        }
    )
    tokens = min(_TRACED_TOKENS, bounds.positions(architecture) or _TRACED_TOKENS)
    rows = (tokens // 2,) * 2 if config.data.packing else ()
    batch = LargestBatch(rows=1, tokens=tokens, padded=False, trained_tokens=tokens - max(1, len(rows)), packed=rows)
    where = devices.here(device, config.memory)
    try:
        trace_step(StepSetting(config, architecture, batch, None, where, attention(config, architecture, where)))
    except ForecastError:
        if config.memory.check == "refuse":
            raise
