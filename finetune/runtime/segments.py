"""Expandable segments: PyTorch's CUDA allocator grows a segment in place instead of adding another.

Free memory is then contiguous, and a step reserves little more than its tensors need. On by default if the driver
supports it; the user's own setting, in PYTORCH_ALLOC_CONF or otherwise, takes precedence.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from typing import Any

import torch

from finetune.runtime import driver

# torch 2.13 has no public names for these; 2.11 has no getter.
_get, _set = (getattr(torch._C, f"_accelerator_{verb}AllocatorSettings", None) for verb in ("get", "set"))  # noqa: SLF001
_disabled = False  # since `disable`; torch 2.11 does not tell

_TRIED_BYTES = 2 * 2**21
"""What `trial` maps: two of the allocator's small pieces, of 2 MiB, which is also the granularity of every GPU."""


def enable(gpu: int) -> None:
    """Turn on expandable segments; call before anything is allocated on GPU `gpu`."""
    if _set and not setting() and supported(gpu):
        _set("expandable_segments:True")


def disable() -> None:
    """Turn off expandable segments for what is allocated from now on."""
    global _disabled
    if _set:
        _set("expandable_segments:False")
        _disabled = True


def grow(gpu: int) -> bool:
    """True if this GPU has expandable segments after `enable`, and no `disable`."""
    if _disabled:
        return False
    return _is_on(setting()) if setting() else supported(gpu)


def grow_elsewhere() -> bool:
    """Whether to assume expandable segments on a GPU of another machine: as this process is set, by default True."""
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
    (WSL, some virtual GPUs) the first allocation fails. The driver's own answer is not enough: under WSL2 it claims
    support and fails in `cuMemSetAccess` (pytorch/pytorch#192330), so a small segment is tried.
    """
    return driver.has(gpu, (driver.VIRTUAL_MEMORY_MANAGEMENT, driver.POSIX_FILE_DESCRIPTORS)) and trial(gpu)


class _MemoryLocation(ctypes.Structure):
    """cuda.h, CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProperties(ctypes.Structure):
    """cuda.h, CUmemAllocationProp, with CUmemAllocationProp.allocFlags as its last four fields."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _MemoryLocation),
        ("windows", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _MemoryAccess(ctypes.Structure):
    """cuda.h, CUmemAccessDesc."""

    _fields_ = (("location", _MemoryLocation), ("flags", ctypes.c_int))


_PINNED, _ON_DEVICE, _FILE_DESCRIPTOR, _READ_AND_WRITE = 1, 1, 1, 3


class _DriverRefused(Exception):
    """The driver refused a call."""


def _check(result: int) -> None:
    if result:
        raise _DriverRefused(result)


def trial(gpu: int) -> bool:
    """Map 4 MiB on GPU `gpu` as a segment, and return whether the driver did it; afterwards it is free again.

    The calls and flags of torch 2.13 (CUDACachingAllocator.cpp, `ExpandableSegment::map`), in the context that torch
    uses itself. No kernel runs, so that a failure leaves the context as it was.
    """
    library = driver.library()
    if library is None or (device := driver.device_of(library, gpu)) is None:
        return False
    context = ctypes.c_void_p()
    if library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) or library.cuCtxPushCurrent_v2(context):
        return False
    try:
        _map_segment(library, device, rdma=driver.has(gpu, (driver.GPU_DIRECT_RDMA_WITH_VMM,)))
    except _DriverRefused:
        return False
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(context))
    return True


def _map_segment(library: Any, device: ctypes.c_int, *, rdma: bool) -> None:
    """Reserve, create, map and make accessible, and undo it; raise `_DriverRefused` where the driver does not."""
    location, size = _MemoryLocation(_ON_DEVICE, device.value), ctypes.c_size_t(_TRIED_BYTES)
    address, handle = ctypes.c_uint64(), ctypes.c_uint64()
    nowhere = ctypes.c_uint64(0)
    allocation = _AllocationProperties(_PINNED, _FILE_DESCRIPTOR, location, None, 0, int(rdma))
    access = _MemoryAccess(location, _READ_AND_WRITE)
    with contextlib.ExitStack() as undone:
        _check(library.cuMemAddressReserve(ctypes.byref(address), size, ctypes.c_size_t(0), nowhere, nowhere))
        undone.callback(library.cuMemAddressFree, address, size)
        _check(library.cuMemCreate(ctypes.byref(handle), size, ctypes.byref(allocation), nowhere))
        undone.callback(library.cuMemRelease, handle)
        _check(library.cuMemMap(address, size, ctypes.c_size_t(0), handle, nowhere))
        undone.callback(library.cuMemUnmap, address, size)
        _check(library.cuMemSetAccess(address, size, ctypes.byref(access), ctypes.c_size_t(1)))
