"""Forecasts a training step of a config on a device: its largest micro-batches are looked up or traced."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from finetune import objectives
from finetune.config import Config
from finetune.data import batching
from finetune.data.batching import LargestBatch, MicroBatching, Sizes
from finetune.data.media import TEXT_ALONE
from finetune.data.prepare import Prepared
from finetune.errors import ForecastError
from finetune.forecast import devices, file_sizes, job_forecast
from finetune.forecast.cache import Kept
from finetune.forecast.devices import Device
from finetune.forecast.job_forecast import Forecast
from finetune.forecast.replay import Ranks, RunSetting
from finetune.forecast.traced_step import Models, StepSetting, trace_step
from finetune.model.attention import backends, packing
from finetune.training import reference_scores, strategies
from finetune.training.collator import micro_batching


@dataclass(frozen=True)
class Forecaster:
    """Forecasts configs that vary one job, on one device.

    `config` is the job's own. `data` gives the lengths of the rows; without it every row counts as `data.max_length`
    long. `gpus` of that kind share each step, one to a rank; every forecast is that of rank 0.
    """

    config: Config
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
        config = config or self.config
        batches, evaluation = self._largest_batches(config, most_tokens)
        key = config.model_dump_json(), evaluates, tuple(batches)
        if key not in self._known:
            each = [self.kept_or_traced(config, batch, evaluation if evaluates else None) for batch in batches]
            self._known[key] = max(each, key=lambda one: one.needed_bytes)
        return self._known[key]

    def kept_or_traced(
        self, config: Config, batch: LargestBatch, evaluation: LargestBatch | None, evenly: bool = False
    ) -> Forecast:  # fmt: skip
        """The forecast of these batches: one that was kept, or else a traced one."""
        kept = Kept(config, self.architecture, self._device(config), self.gpus, evenly)
        reference = self._scored(config)
        return kept.get(
            [batch, evaluation, reference], lambda: self._forecast(config, batch, evaluation, reference, evenly)
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
        evenly = self.kept_or_traced(config, forecast.batch, evaluation, evenly=True).needed_bytes
        if evenly >= forecast.needed_bytes:
            return forecast
        return replace(forecast, experts=replace(forecast.experts, evenly_routed_bytes=evenly))

    def _share(self, config: Config) -> int:
        """Rows of a step that one rank computes, alone or with the others of its group."""
        return max(1, config.training.batch_size // config.distributed.shares(self.gpus))

    def _scored(self, config: Config) -> LargestBatch | None:
        """The largest batch in which the reference is scored; None without a reference or without data."""
        if not (config.caches_reference and objectives.of(config).reference):
            return None
        if self.data is None or config.data.max_length != self.config.data.max_length:
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
        longer = config.data.max_length > self.config.data.max_length
        shorter = config.data.max_length < self.config.data.max_length
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


def attention(config: Config, architecture: Any, device: Device) -> str:
    """The implementation of attention that training would choose on a device."""
    return backends.planned(
        config.model.attention, architecture, device.type, config.training.precision,
        capability=device.capability if device.type == "cuda" else None,
        packed=config.data.packing, longest=config.data.max_length,
    )  # fmt: skip
