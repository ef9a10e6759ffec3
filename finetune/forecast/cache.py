"""Forecasts kept in this user's cache: tracing a step takes seconds, and the next start of a job asks for the same.

Each has a file, named by a hash of everything that a forecast depends on, except the memory that is free at the moment.
Deleting the folder only means tracing again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pydantic
import pydantic_core
import torch

from finetune.config import Config
from finetune.data.batching import LargestBatch
from finetune.forecast import file_sizes, job_forecast
from finetune.forecast.device import Device
from finetune.forecast.job_forecast import Forecast
from finetune.runtime import environment
from finetune.storage import private

_FOLDER = "forecasts"
_MOST_FILES = 500
# Keys of the course of a training, which do not change its memory. (The largest batches, which depend on the seed, are
# in the key.)
_COURSE = {"learning_rate", "schedule", "warmup", "epochs", "max_steps", "seed", "eval_every", "early_stopping"}
# Sections and keys that no forecast depends on: the course, where a job's files are, and trackers.
_IRRELEVANT: Any = {"tracking": True, "output": {"dir", "save_every"}, "data": {"train", "eval"}, "training": _COURSE}
_MEMORY = ("budget_bytes", "outside_bytes")


@dataclass(frozen=True)
class Kept:
    """The kept forecasts of a job on `gpus` devices of a kind, for the worst routing, or an even one (`evenly`)."""

    config: Config
    architecture: Any
    device: Device
    gpus: int
    evenly: bool = False

    def get(self, batches: Sequence[LargestBatch | None], trace: Callable[[], Forecast]) -> Forecast:
        """The kept forecast of a step on these `batches`, or the one that `trace` makes, which is then kept."""
        if self.config.model.trust_remote_code or self.config.adapter.start_from:
            return trace()  # depends on files that the key does not know
        file = private.cache_folder() / _FOLDER / f"{self._key(batches)}.json"
        if kept := self._read(file):
            return kept
        made = trace()
        memory = {name: getattr(made.device, name) for name in _MEMORY}
        values = _adapter().dump_python(made, mode="json", exclude={"device"})
        private.keep(file, pydantic_core.to_json({"memory": memory, **values}), _MOST_FILES)
        return made

    def _read(self, file: Path) -> Forecast | None:
        """The forecast in a file, on the device as it is now; None if it does not hold there."""
        if not (content := private.read(file)):
            return None
        try:
            values = pydantic_core.from_json(content)
            then = replace(self.device, **values.pop("memory"))
            forecast = _adapter().validate_python({**values, "device": then})
        except (ValueError, TypeError, AttributeError, LookupError):
            return None
        # With other memory free a forecast is the same, unless memory was or is short.
        room, peak, now = then.room_bytes, forecast.peak_reserved_bytes, self.device
        if now.type == "cpu" or room == now.room_bytes:
            holds = True
        elif peak > room:  # did not fit, even with idle segments given back
            holds = now.room_bytes < room
        else:
            holds = not forecast.returns_segments and peak <= now.room_bytes
        return job_forecast.on(forecast, now) if holds else None

    def _key(self, batches: Sequence[LargestBatch | None]) -> str:
        config = self.config
        varying = (*_MEMORY, *(["rates"] if self.device.type == "cpu" else []))  # a CPU's are measured each time
        parts = [
            config.model_dump_json(exclude=_IRRELEVANT),
            file_sizes.saves_between(config.output, config.training.max_steps),
            type(self.architecture).__name__,
            self.architecture.to_dict(),
            [batch and asdict(batch) for batch in batches],
            {key: value for key, value in asdict(self.device).items() if key not in varying},
            self.gpus,
            self.evenly,
            _software(),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@functools.cache
def _adapter() -> pydantic.TypeAdapter[Forecast]:
    return pydantic.TypeAdapter(Forecast)


@functools.cache
def _software() -> list[Any]:
    """Everything that decides which operators run and what they cost: versions, our own code, the processor."""
    processor = [platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    return [environment.packages(), environment.code_hash(), *processor]
