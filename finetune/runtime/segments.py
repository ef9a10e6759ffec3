"""Expandable segments: PyTorch's CUDA allocator grows a segment in place instead of adding one beside it.

Then memory that is free lies together, and a step reserves little more than its tensors take. On by default where the
card's driver can do it; what the user has set, in PYTORCH_ALLOC_CONF or otherwise, stays.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

import torch

# cuda.h, CUdevice_attribute: VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED and HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED.
_NEEDED_ATTRIBUTES = (102, 103)
# torch 2.13 names neither in public; 2.11 has no getter.
_get, _set = (getattr(torch._C, f"_accelerator_{verb}AllocatorSettings", None) for verb in ("get", "set"))  # noqa: SLF001


def settle(gpu: int) -> None:
    """Let segments grow from now on; to be called before anything is allocated on the GPU with this number."""
    if _set and not asked() and supported(gpu):
        _set("expandable_segments:True")


def grow(gpu: int) -> bool:
    """Whether segments grow on this GPU once `settle` was called."""
    return _says(asked()) if asked() else supported(gpu)


def grow_elsewhere() -> bool:
    """Whether to assume growing segments on a card that is not in this machine: as set here, by default yes."""
    return _says(asked()) if asked() else True


def asked() -> str:
    """The allocator's settings, from the environment or, where torch can be asked, from a call; empty without any."""
    if _get:
        return str(_get())
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def _says(settings: str) -> bool:
    return "expandable_segments:true" in settings.lower().replace(" ", "")


@functools.cache
def supported(gpu: int) -> bool:
    """Whether torch and the driver of this GPU have what expandable segments need.

    torch itself does not ask: where its build lacks them (Windows) it warns, and where the driver does (WSL, some
    virtual GPUs) the first allocation fails (CUDACachingAllocator.cpp, `ExpandableSegment::map`, which creates memory
    that can be exported to a file descriptor). So the driver is asked here.
    """
    if sys.platform != "linux" or torch.version.cuda is None:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), gpu):
        return False
    return all(
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) == 0 and value.value != 0
        for attribute in _NEEDED_ATTRIBUTES
    )
