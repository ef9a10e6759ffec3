"""The energy that a run's GPU used, as its driver counts it (NVML, from Volta on), if `nvidia-ml-py` is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from finetune.errors import MachineError
from finetune.runtime import driver
from finetune.storage.rundir import RunDirectory


@contextlib.contextmanager
def recorded(run: RunDirectory, device: torch.device) -> Iterator[None]:
    """Record as the event `energy` the joules that the GPU uses during the block, whatever runs on it."""
    before = counted_joules(device)
    try:
        yield
    finally:
        after = counted_joules(device)
        if before is not None and after is not None and after >= before:  # the count restarts from 0 with the driver
            with contextlib.suppress(MachineError):  # a full disk is reported elsewhere
                run.event("energy", joules=round(after - before))


def counted_joules(device: torch.device) -> float | None:
    """The energy that the GPU has used since its driver was loaded; None if that is unknown."""
    if device.type != "cuda":
        return None
    millijoules: int | None = driver.by_nvml(
        device, lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    )
    return None if millijoules is None else millijoules / 1000
