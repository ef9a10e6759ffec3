"""The energy that a run's GPU used, as its driver counts it (NVML, from Volta on).

The driver's library is called directly: its Python package would be one more dependency for three calls.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

from finetune.errors import MachineError
from finetune.storage.rundir import RunDirectory


@contextlib.contextmanager
def recorded(run: RunDirectory, device: torch.device) -> Iterator[None]:
    """Record what the GPU, whatever runs on it, uses in the block, if its driver says so: event `energy`, `joules`."""
    before = counted_joules(device)
    try:
        yield
    finally:
        after = counted_joules(device)
        if before is not None and after is not None and after >= before:  # a driver loaded again starts from 0
            with contextlib.suppress(MachineError):  # a full disk has an error of its own
                run.event("energy", joules=round(after - before))


def counted_joules(device: torch.device) -> float | None:
    """What the GPU has used since its driver was loaded; None where nothing counts it."""
    if device.type != "cuda":
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        failed = (
            nvml.nvmlInit_v2()
            or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
            or nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        )
    except (OSError, AttributeError):  # no such library, or one that is too old
        return None
    return None if failed else millijoules.value / 1000
