"""What the runs of a sweep keep in memory: the frozen base, runs that are paused, and what the largest batch took."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from finetune.config import Config
from finetune.measure.monitor import Peak
from finetune.model.resident import ResidentBase
from finetune.training.step import Step

PAUSED = ("adapter", "optimizer_states")
"""The categories of a forecast that stay in memory while a run is paused."""


@dataclass(frozen=True)
class Paused:
    """A run that a callback ended: its completed model with its optimizer, and the kernels that this model rules out.

    Its checkpoint is on disk as well, and is what the run goes on from.
    """

    config: Config
    step: Step
    kernels_off: frozenset[str]

    def tensors(self) -> list[torch.Tensor]:
        """What it alone holds: the trained weights and the optimizer's states."""
        states = self.step.engine.optimizer.state.values()
        values = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
        return [*self.step.trained(), *values]


class Residents(ResidentBase):
    """A base, and the runs on it that are paused, by directory.

    `largest_batch` has the peaks of the warm-up with the largest batch by the settings that they follow from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paused: dict[Path, Paused] = {}
        self.largest_batch: dict[str, dict[str, Peak]] = {}

    def take(self, run: Path, config: Config) -> Paused | None:
        """The paused `run`, which is not kept any more; None if it has to be built, as for another `config`."""
        paused = self.paused.pop(run, None)
        return paused if paused and paused.config == config else None

    def tensors(self, run: Path) -> list[torch.Tensor]:
        """What is in memory and belongs to `run`."""
        return [*self.weights(), *(self.paused[run].tensors() if run in self.paused else [])]


def memory_settings(config: Config) -> str:
    """What decides how much memory a step of `config` takes."""
    return config.model_dump_json(exclude={"training": {"learning_rate", "seed"}, "output": True, "tracking": True})
