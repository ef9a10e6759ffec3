"""Forecasts a training step of a job on a device: its largest micro-batches are looked up or traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from finetune import objectives
from finetune.config import Config, DataSection, ModelSection
from finetune.data import batching
from finetune.data.batching import LargestBatch, MicroBatching, Sizes
from finetune.data.media import TEXT_ALONE
from finetune.data.prepare import Prepared
from finetune.errors import ForecastError
from finetune.forecast import devices, file_sizes, job_forecast
from finetune.forecast.cache import Kept
from finetune.forecast.device import Device
from finetune.forecast.job_forecast import Forecast
from finetune.forecast.replay import Ranks, RunSetting
from finetune.forecast.traced_step import Models, StepSetting, trace_step
from finetune.model.attention import backends, packing
from finetune.training import reference_scores, strategies
from finetune.training.collator import micro_batching


@dataclass(frozen=True)
class Forecaster:
    """Forecasts one config on one device, and its variants, which share what was traced.

    `data` gives the lengths of the rows, which were prepared for a `data.max_length` of `row_length`, by default that
    of the config; without it every row counts as `data.max_length` long. `gpus` of that kind share each step, one to a
    rank; every forecast is that of rank 0.
    """

    config: Config
    architecture: Any
    device: Device
    data: Prepared | None
    gpus: int = 1
    row_length: int | None = None
    _known: dict[tuple[str, bool, tuple[LargestBatch, ...]], Forecast] = field(default_factory=dict)
    _models: Models = field(default_factory=Models)
    _largest_scored: dict[tuple[MicroBatching, int], LargestBatch | None] = field(default_factory=dict)
    _largest: dict[tuple[MicroBatching, int, int | None, bool], tuple[list[LargestBatch], LargestBatch | None]] = field(
        default_factory=dict
    )

    def variant(self, config: Config) -> Self:
        """The forecaster of another config of this job, with the same rows and what was traced so far."""
        return replace(self, config=config, row_length=self.row_length or self.config.data.max_length)

    def forecast_with(
        self, changes: Mapping[str, Any], *, evaluates: bool = True, most_tokens: int | None = None
    ) -> Forecast:
        """The forecast of the config with these values of some `section.key`."""
        return self.variant(self.config.changed(changes)).forecast(evaluates=evaluates, most_tokens=most_tokens)

    def forecast(self, *, evaluates: bool = True, most_tokens: int | None = None) -> Forecast:
        """The forecast of the config; without `evaluates`, leaving out the evaluation.

        With `most_tokens`, that of the largest micro-batch of rows up to that length.
        """
        batches, evaluation = self.largest_batches(most_tokens)
        key = self.config.model_dump_json(), evaluates, tuple(batches)
        if key not in self._known:
            each = [self.kept_or_traced(batch, evaluation if evaluates else None) for batch in batches]
            self._known[key] = max(each, key=lambda one: one.needed_bytes)
        return self._known[key]

    def kept_or_traced(self, batch: LargestBatch, evaluation: LargestBatch | None, evenly: bool = False) -> Forecast:
        """The forecast of these batches: one that was kept, or else a traced one."""
        kept = Kept(self.config, self.architecture, self._device(), self.gpus, evenly)
        reference = self._scored()
        return kept.get([batch, evaluation, reference], lambda: self._traced(batch, evaluation, reference, evenly))

    def _device(self) -> Device:
        """The device as one of the ranks uses it, with the rate of the job's precision."""
        section, device = self.config.distributed, self.device
        if self.config.training.precision == "fp32":
            device = device.in_float32()
        return devices.of_ranks(device, strategies.groups(section, self.gpus), section.context)

    def _traced(
        self, batch: LargestBatch, evaluation: LargestBatch | None, reference: LargestBatch | None = None,
        evenly: bool = False,
    ) -> Forecast:  # fmt: skip
        """The forecast of these batches by a trace of their step."""
        config, device = self.config, self._device()
        if config.training.deterministic:
            device = device.deterministic()
        implementation = attention(config.model, config.data, config.training.precision, self.architecture, device)
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
        per_rank = batching.per_step(config.training.batch_size, self.way, batch) // section.shares(self.gpus)
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

    def with_reference(self, forecast: Forecast) -> Forecast:
        """`forecast` with the seconds of the pass that scores the reference, if there is one."""
        shares, data = self.config.distributed.shares(self.gpus), self.data
        if forecast.reference is None or data is None:
            return job_forecast.with_reference(forecast, shares, None, 0, 0)
        batches = reference_scores.positions(self.way, data, self.step_rows) / forecast.batch.positions
        rows = len(data.train) + len(data.eval or ())
        in_step = reference_scores.in_step_share(self.config.training, data)
        return job_forecast.with_reference(forecast, shares, rows, batches, in_step)

    def with_routing(self, forecast: Forecast) -> Forecast:
        """`forecast`, with what is needed if experts get equally many tokens, where that is less."""
        if not forecast.experts.routed:
            return forecast
        evaluation = self.largest_batches()[1]
        evenly = self.kept_or_traced(forecast.batch, evaluation, evenly=True).needed_bytes
        if evenly >= forecast.needed_bytes:
            return forecast
        return replace(forecast, experts=replace(forecast.experts, evenly_routed_bytes=evenly))

    @cached_property
    def way(self) -> MicroBatching:
        """How a step is divided into micro-batches."""
        return micro_batching(self.config, self.architecture)

    @property
    def step_rows(self) -> int:
        """Rows of a step that one rank computes, alone or with the others of its group."""
        return max(1, self.config.training.batch_size // self.config.distributed.shares(self.gpus))

    def _scored(self) -> LargestBatch | None:
        """The largest batch in which the reference is scored; None without a reference or without data."""
        if not (self.config.caches_reference and objectives.of(self.config).reference):
            return None
        if self.data is None or self.row_length not in (None, self.config.data.max_length):
            return None
        key = self.way, self.step_rows
        if key not in self._largest_scored:
            self._largest_scored[key] = reference_scores.largest_batch(self.way, self.data, self.step_rows)
        return self._largest_scored[key]

    def largest_batches(self, most_tokens: int | None = None) -> tuple[list[LargestBatch], LargestBatch | None]:
        """The largest training micro-batches that data and sampler can produce, and that of the evaluation set.

        Training rows are at most `most_tokens` long. Without data, and with a `data.max_length` other than the rows
        were prepared for, all rows are assumed to be as long as that.
        """
        way, step_rows, max_length = self.way, self.step_rows, self.config.data.max_length
        if self.config.model.vision != "none" and self.data is None:
            raise ForecastError(
                "`data.train`: a forecast with images needs the rows and the processor of the base on this machine; "
                "copy them here, or set `model.vision: none` for one of text"
            )
        row_length = self.row_length or max_length
        shorter = max_length < row_length
        if shorter and self.data and self.data.media:  # rows with images are dropped, not cut
            most_tokens = min(most_tokens or max_length, max_length)
        elif self.data is None or max_length != row_length:
            longest = batching.longest_batches(way, step_rows, max_length)
            if self.data and self.data.media:
                longest = [batching.with_most_images(Sizes.of(self.data.train, way), batch) for batch in longest]
            return longest, None if self.config.data.eval == "none" else longest[0]
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


def attention(model: ModelSection, data: DataSection, precision: str, architecture: Any, device: Device) -> str:
    """The implementation of attention that training would choose on a device."""
    capability = device.capability if device.type == "cuda" else None
    return backends.planned(
        model.attention, architecture, device.type, precision, capability=capability, packed=data.packing,
        longest=data.max_length,
    )  # fmt: skip
