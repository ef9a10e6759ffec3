"""Expandable segments: PyTorch's CUDA allocator grows a segment in place instead of adding another.

Free memory is then contiguous, and a step reserves little more than its tensors need. On by default if the driver
supports it; the user's own setting, in PYTORCH_ALLOC_CONF or otherwise, takes precedence.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

import torch

# cuda.h, CUdevice_attribute: VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED and HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED.
_NEEDED_ATTRIBUTES = (102, 103)
# torch 2.13 has no public names for these; 2.11 has no getter.
_get, _set = (getattr(torch._C, f"_accelerator_{verb}AllocatorSettings", None) for verb in ("get", "set"))  # noqa: SLF001


def enable(gpu: int) -> None:
    """Turn on expandable segments; call before anything is allocated on GPU `gpu`."""
    if _set and not setting() and supported(gpu):
        _set("expandable_segments:True")


def disable() -> None:
    """Turn off expandable segments for what is allocated from now on."""
    if _set:
        _set("expandable_segments:False")


def grow(gpu: int) -> bool:
    """True if this GPU has expandable segments after `enable`."""
    return _is_on(setting()) if setting() else supported(gpu)


def grow_elsewhere() -> bool:
    """The assumption for a GPU of another machine: the setting of this process, by default True."""
    return _is_on(setting()) if setting() else True


def setting() -> str:
    """The allocator's settings, from torch or, if it has no getter, from the environment; empty if there are none."""
    if _get:
        return str(_get())
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def _is_on(settings: str) -> bool:
    return "expandable_segments:true" in settings.lower().replace(" ", "")


@functools.cache
def supported(gpu: int) -> bool:
    """True if torch and the driver of this GPU support expandable segments.

    torch itself does not check: without support in its build (Windows) it warns, and without support in the driver
    (WSL, some virtual GPUs) the first allocation fails (CUDACachingAllocator.cpp, `ExpandableSegment::map`, which
    creates memory that can be exported to a file descriptor). So the driver is queried here.
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
