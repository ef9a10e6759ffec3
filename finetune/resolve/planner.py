"""Forecasts variants of one job on one machine, and chooses between them: quantization, sharding, micro-batch, levels.

No weights are read, and no GPU is needed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from finetune.config import Config, contradictions
from finetune.config.field_types import LEVELS
from finetune.data import batching
from finetune.data.batching import LargestBatch, RowOrder, Sizes
from finetune.data.media import Media
from finetune.errors import ConfigError, ForecastError
from finetune.forecast import devices, image_memory, job_forecast
from finetune.forecast.forecaster import Forecaster, attention
from finetune.forecast.image_memory import ImageMemory
from finetune.forecast.job_forecast import Forecast
from finetune.forecast.levers import Lever, levers
from finetune.forecast.plan import Fitted, Limits
from finetune.forecast.traced_step import StepSetting, trace_step
from finetune.forms import LEAST_FIRST
from finetune.model import bounds
from finetune.model.recompute import checkpointing
from finetune.model.source import catalog
from finetune.model.structure.quantization import changes_to
from finetune.resolve import by_length
from finetune.resolve import fit as fitting
from finetune.resolve.fit import NothingFits
from finetune.training import strategies

# A lever that saves less than this share is not worth mentioning.
_LEAST_SAVED = 0.005
_TRACED_TOKENS = 16
# Rows and tokens above what any job needs.
_MOST = 2**20
# Rows of an epoch whose lengths decide whether recomputing less is worthwhile.
_ROWS_SEEN = 100_000


class Planner(Forecaster):
    """Chooses settings of one job on one device by forecasts of its variants."""

    def with_changes(self, changes: Mapping[str, Any]) -> Planner:
        """The planner of the job with these values. Rows longer than its `data.max_length` all count as that long."""
        config, data = self.config.changed(changes), self.data
        counts = [each for each in (data.train_counts, data.eval_counts) if each] if data else []
        whole = all(each.longest <= config.data.max_length for each in counts)
        return replace(self, config=config, data=data if whole else None, row_length=None, _known={}, _largest={})

    def levers(self, before: Forecast) -> list[tuple[Lever, Forecast]]:
        """Each lever that would reduce the forecast `before`, with the forecast after it is pulled."""
        # Against what the job itself takes: on a CPU the rest is whatever this process happens to hold.
        below = before.needed_bytes - before.peak_reserved_bytes * _LEAST_SAVED
        pulled: list[tuple[Lever, Forecast]] = []
        for lever in levers(self.config, self.gpus):
            with contextlib.suppress(ConfigError):  # a model that cannot be sharded
                pulled.append((lever, self.forecast_with(lever.changes)))
        return [(lever, after) for lever, after in pulled if after.needed_bytes < below]

    def least_quantized(self) -> tuple[str, str]:
        """The first kind of LEAST_FIRST with which the smallest step fits, else the last; and the reason."""
        needs = dict[str, str]()
        for kind in LEAST_FIRST:
            config = self.config.changed(changes_to(kind))
            if contradictions(config):
                continue
            smallest, chosen = self.variant(config).smallest(), kind
            needs[kind] = f"{smallest.needed_bytes / 2**30:.2f} {'unquantized' if kind == 'none' else f'in {kind}'}"
            if smallest.fits:
                break
        return (
            chosen,
            f"the smallest step takes {', '.join(needs.values())}, of {smallest.budget_bytes / 2**30:.2f} GiB",
        )

    def smallest(self) -> Forecast:
        """The forecast of the job with the least memory that its `auto` settings allow, nothing offloaded."""
        chosen: dict[str, Any] = {}
        if self.config.training.micro_batch == "auto":
            chosen["training.micro_batch"] = 1
        if self.config.memory.checkpointing == "auto":
            chosen["memory.checkpointing"] = "all"
        return self._shared(chosen).forecast_with(chosen)

    def resolve(self) -> tuple[Config, Fitted | None]:
        """The job with a value for all that is `auto`, and what was chosen; the least setting where nothing fits."""
        if self.config.fitted:
            return self._shared({}).config, None
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
        training, memory = self.config.training, self.config.memory
        compiled = self.config.kernels.compile == "layers"  # such a layer keeps all or nothing, and offloads nothing
        offloads = self.device.type == "cuda" and not compiled
        rows = fitting.divisors(self.step_rows) if training.micro_batch == "auto" else [training.rows]
        recomputed = None if memory.checkpointing == "auto" else memory.checkpointing
        shared = self._shared(fitting.least(memory, offloads=offloads, rows=rows, checkpointing=recomputed))
        fitted = fitting.fit(
            shared,
            self.architecture.get_text_config().num_hidden_layers,
            offloads=offloads,
            levels=("none", "all") if compiled else checkpointing.levels(self.architecture),
            rows=rows,
            checkpointing=recomputed,
        )
        if shared is self:
            return fitted
        copies = shared.config.distributed.kind == "ddp"
        why = {"distributed.kind": "a copy of the model fits each GPU" if copies else "copies of the model do not fit"}
        if not copies:
            why["distributed.stage"] = "the least sharding that fits"
        return replace(fitted, reasons={**why, **fitted.reasons})

    def by_length(self, fitted: Fitted) -> Fitted:
        """`fitted` with less recomputed in short micro-batches, where their lengths are known and it saves time.

        Micro-batches of equal size have nothing to gain. The ranks that hold a model in shards exchange them within the
        passes of a layer, so that all must recompute alike; compiled layers would be compiled for each level.
        """
        config, planner = fitted.config, self.variant(fitted.config)
        chosen, layers = config.memory.checkpointing, self.architecture.get_text_config().num_hidden_layers
        # The levels worth their bytes that recompute less than some layer of `fitted` does.
        least = min(map(LEVELS.index, checkpointing.pattern(chosen, layers)))
        levels = [level for level in fitted.levels if LEVELS.index(level) <= least and level != chosen]
        way, shares = planner.way, config.distributed
        in_parts = strategies.holds_parts(shares, self.gpus)
        plain = config.kernels.compile == config.memory.offload == "none"
        if not levels or self.data is None or way.tokens or in_parts or shares.context > 1 or not plain:
            return fitted
        sizes, training = Sizes.of(self.data.train, way), config.training
        order = RowOrder(sizes.lengths, training.batch_size, training.seed, training.group_by_length, sizes.areas)
        rows = itertools.islice(order, _ROWS_SEEN)
        seen = batching.epoch(sizes.lengths, rows, training.batch_size, way, sizes.areas)

        def at(level: str, most_tokens: int | None = None) -> Forecast:
            return planner.forecast_with({"memory.checkpointing": level}, most_tokens=most_tokens)

        shorter = by_length.find(fitted.forecast, {level: at(level) for level in levels}, map(max, seen), at)
        return replace(fitted, forecast=job_forecast.with_shorter(fitted.forecast, shorter))

    def _shared(self, least: Mapping[str, Any]) -> Planner:
        """The job with the least sharding with which its `least` setting fits, where the ranks' sharing is `auto`."""
        if self.gpus == 1 or self.config.distributed.kind != "auto":
            return self
        most = self
        for way in strategies.least_first(self.config):
            sharing = self.variant(self.config.changed(way))
            try:
                fits = sharing.forecast_with(least).fits
            except ConfigError:  # this model, or the optimizer's states of its weights, cannot be sharded so
                continue
            most = sharing
            if fits:
                break
        return most

    def images(self) -> ImageMemory | None:
        """What an image takes, and the largest that fits, one row at a time; None for rows of text."""
        data = self.data
        if data is None or not data.media:
            return None
        config = self.config.changed({"training.micro_batch": 1, "training.micro_batch_tokens": None})
        planner = self.variant(config)
        batch = max(planner.largest_batches()[0], key=lambda one: one.area)

        def forecast(one: LargestBatch, media: Media, pixels: int | None) -> Forecast:
            bounded = planner.variant(config.changed({"data.image_pixels": pixels or config.data.image_pixels}))
            return replace(bounded, data=replace(data, media=media)).kept_or_traced(one, None)

        return image_memory.of(batch, data.media, config.data.max_length, forecast)

    def limits(self) -> Limits:
        """The longest rows, most rows and highest rank that fit with every layer checkpointed."""
        positions = bounds.positions(self.architecture) or _MOST
        limits = fitting.limits(
            self.variant(self.config.changed({"training.micro_batch_tokens": None})),
            length=positions,
            rows=_MOST if self.data is None else len(self.data.train),
            rank=getattr(self.architecture.get_text_config(), "hidden_size", _MOST),  # the smaller side of most layers
        )
        return replace(limits, length=min(limits.length, positions))


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
    implementation = attention(config.model, config.data, config.training.precision, architecture, where)
    try:
        trace_step(StepSetting(config, architecture, batch, None, where, implementation))
    except ForecastError:
        if config.memory.check == "refuse":
            raise
