"""What the runs of a sweep keep in memory: the frozen base, runs that are paused, and what the largest batch took."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.config import Config
from finetune.measure.monitor import Peak
from finetune.model.resident import ResidentBase
from finetune.runtime import libraries
from finetune.training.step import Step


@dataclass(frozen=True)
class Paused:
    """A run that a callback ended: its completed model with its optimizer, and the kernels that this model rules out.

    The run goes on from its checkpoint, whose weights and states replace these.
    """

    config: Config
    step: Step
    kernels_off: frozenset[str]

    def tensors(self) -> list[torch.Tensor]:
        """What it alone holds: the trained weights and the optimizer's states."""
        states = self.step.engine.optimizer.state.values()
        values = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
        return [*self.step.trained(), *values]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


class Residents(ResidentBase):
    """A base, and the runs on it that are paused, by directory.

    `largest_batch` has the peaks of the warm-up with the largest batch by the settings that they follow from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paused: dict[Path, Paused] = {}
        self.largest_batch: dict[str, dict[str, Peak]] = {}

    def take(self, run: Path, config: Config, *, resumed: bool) -> Paused | None:
        """The paused `run`, which is not kept any more; None if it has to be built, as for another `config`, or
        without a checkpoint to replace its weights.
        """
        paused = self.paused.pop(run, None)
        return paused if paused and resumed and paused.config == config else None

    def make_room(self, free_bytes: int) -> None:
        """Drop paused runs, the last ones first, until they fit into what another run leaves of the memory."""
        while self.paused and sum(each.size_bytes for each in self.paused.values()) > free_bytes:
            self.paused.popitem()
            libraries.return_freed_memory()

    def _release(self) -> None:
        super()._release()
        self.paused.clear()  # they would keep their base in memory beside the next one

    def tensors(self, run: Path) -> list[torch.Tensor]:
        """What is in memory and belongs to `run`."""
        return [*self.weights(), *(self.paused[run].tensors() if run in self.paused else [])]


def untrained_settings(config: Config, provenance: dict[str, Any], kernels_off: frozenset[str]) -> str:
    """What the evaluation loss of a run before its first step follows from, besides the base in memory."""
    own = config.model_dump_json(
        exclude={"training": {"learning_rate"}, "optimizer": True, "output": True, "tracking": True}
    )
    rest = {part: value for part, value in provenance.items() if part != "config"}
    return json.dumps([own, rest, sorted(kernels_off)])


def memory_settings(config: Config) -> str:
    """What decides how much memory a step of `config` takes."""
    return config.model_dump_json(exclude={"training": {"learning_rate", "seed"}, "output": True, "tracking": True})
