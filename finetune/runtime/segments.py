"""Expandable segments: PyTorch's CUDA allocator grows a segment in place instead of adding another.

Free memory is then contiguous, and a step reserves little more than its tensors need. On by default if the driver
supports it; the user's own setting, in PYTORCH_ALLOC_CONF or otherwise, takes precedence.
"""

from __future__ import annotations

import functools
import os
import platform

import torch

from finetune.runtime import driver

# torch 2.13 has no public names for these; 2.11 has no getter.
_get, _set = (getattr(torch._C, f"_accelerator_{verb}AllocatorSettings", None) for verb in ("get", "set"))  # noqa: SLF001


def enable(gpu: int) -> None:
    """Turn on expandable segments; call before anything is allocated on GPU `gpu`."""
    if _set and not setting() and supported(gpu):
        _set("expandable_segments:True")


def grow(gpu: int) -> bool:
    """True if this GPU has expandable segments after `enable`."""
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
    (some virtual GPUs) the first allocation fails. Under WSL2 the driver claims support and fails in `cuMemSetAccess`
    (pytorch/pytorch#192330).
    """
    under_wsl = "microsoft" in platform.release().lower()
    return not under_wsl and driver.has(gpu, (driver.VIRTUAL_MEMORY_MANAGEMENT, driver.POSIX_FILE_DESCRIPTORS))
