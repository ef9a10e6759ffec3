"""The machine that a job is resolved for: this one, which trains it, or a card that need not be here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from finetune.config import MemorySection
from finetune.model import precision
from finetune.model.precision import Arithmetic
from finetune.runtime import ranks
from finetune.runtime.device import this_device

if TYPE_CHECKING:  # a look at the data imports no forecast
    from finetune.forecast.device import Device


@dataclass(frozen=True)
class ThisMachine:
    """The machine of this process; all ranks ask alike."""

    given: torch.device | None = None

    trains: ClassVar = True
    """The job is trained here, so that all it needs is here."""

    @cached_property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.given or this_device()

    @property
    def gpus(self) -> int:
        return ranks.world_size()

    @cached_property
    def arithmetic(self) -> Sequence[Arithmetic]:
        return ranks.gathered(precision.of_device(self.device))

    def card(self, memory: MemorySection) -> Device:
        """The device as a forecast takes it, with the memory that is free now."""
        from finetune.forecast import devices

        return devices.here(self.device, memory)


@dataclass(frozen=True)
class NamedMachine:
    """Several GPUs of one kind, or a CPU, by what `finetune plan --gpu` takes."""

    device: Device
    gpus: int = 1

    trains: ClassVar = False
    """A plan does with what is at hand."""

    @property
    def arithmetic(self) -> Sequence[Arithmetic]:
        return [self.device.arithmetic]

    def card(self, memory: MemorySection) -> Device:
        """The device; a CPU as it is now, since this process may have come to hold more."""
        from finetune.forecast import devices

        return devices.find("cpu", memory) if self.device.type == "cpu" else self.device


Machine = ThisMachine | NamedMachine
