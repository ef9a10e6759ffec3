"""The plan of a job, and what a fit chose for it, as values that views show and commands print as JSON."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from finetune.config import Config
from finetune.forecast.image_memory import ImageMemory
from finetune.forecast.job_forecast import Forecast
from finetune.forecast.levers import Lever

CHOSEN = ("training.micro_batch", "memory.checkpointing", "memory.offload", "memory.loss_tokens")
"""The keys that every fit chooses."""


@dataclass(frozen=True)
class Fitted:
    """The chosen config, its forecast, and the reason for each value.

    `tried` is the number of settings that were forecast, and `find_everything` finds `everything`. `levels` are the
    levels worth their bytes, from nothing recomputed to everything; empty if checkpointing was not to be chosen.
    """

    config: Config
    forecast: Forecast
    reasons: Mapping[str, str]
    tried: int
    find_everything: Callable[[], Forecast]
    levels: tuple[str, ...] = ()

    @functools.cached_property
    def everything(self) -> Forecast:
        """The fastest setting that fits with every layer recomputed; may take another forecast."""
        return self.find_everything()

    @property
    def speed_up(self) -> float:
        """Predicted speed over the fastest setting that fits with every layer checkpointed."""
        return self.everything.seconds / self.forecast.seconds

    def value(self, key: str) -> Any:
        """The chosen value of `section.key`."""
        return self.config.value(key)

    def text(self, key: str) -> str:
        """The chosen value of `section.key`, as in a config file."""
        return str(self.value(key)).replace("'", "")

    def as_dict(self) -> dict[str, Any]:
        """The choice as JSON values."""
        others = ["distributed.kind", "distributed.stage"] if self.forecast.gpus > 1 else []
        others += [
            key for key in ("training.learning_rate", "training.precision", "quantization.kind") if key in self.reasons
        ]
        return {
            "chosen": {key: self.value(key) for key in (*CHOSEN, *others)},
            "reasons": dict(self.reasons),
            "forecast": self.forecast.as_dict(),
            "checkpoint_everything": self.everything.as_dict(),
            "predicted_speed_up": round(self.speed_up, 4),
            "tried": self.tried,
        }


@dataclass(frozen=True)
class Limits:
    """The largest values that fit with every layer checkpointed, each changed by itself; 0 where the least does not.

    `smallest_card` is the smallest GPU of the table that holds one row with every layer checkpointed, or None.
    """

    length: int
    micro_batch: int
    rank: int
    smallest_card: str | None

    def as_dict(self) -> dict[str, Any]:
        """The limits as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """A job's forecast and, if it does not fit, the forecast with each lever."""

    config: Config
    forecast: Forecast
    levers: tuple[tuple[Lever, Forecast], ...]
    fitted: Fitted | None = None
    """What was chosen where the job says `auto`; None where nothing was, or nothing fits."""
    why_quantized: str | None = None
    """The reason for the kind of quantization, where the job says `auto`."""
    why_precision: str | None = None
    """The reason for the precision, where the job says `auto`."""
    images: ImageMemory | None = None
    """What an image takes, where rows have images."""
    evidence: str | None = None
    """The learning rate that `auto` is and what it comes from, or what speaks against the job's own settings."""

    def as_dict(self) -> dict[str, Any]:
        levers = [
            {
                "changes": dict(lever.changes),
                "cost": lever.cost,
                "needed_bytes": after.needed_bytes,
                "saved_bytes": self.forecast.needed_bytes - after.needed_bytes,
                "fits": after.fits,
            }
            for lever, after in self.levers
        ]
        images = {"images": self.images.as_dict()} if self.images else {}
        chosen = {
            "quantization": self.config.quantization.kind,
            "precision": self.config.training.precision,
            "learning_rate": self.config.training.learning_rate,
            "evidence": self.evidence,
        }
        return {**self.forecast.as_dict(), **chosen, **images, "levers": levers}
