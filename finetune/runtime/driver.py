"""Asks NVIDIA's driver about GPUs what torch has no function for."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# cuda.h, CUdevice_attribute
MANAGED_MEMORY, CONCURRENT_MANAGED_ACCESS = 83, 89
VIRTUAL_MEMORY_MANAGEMENT, POSIX_FILE_DESCRIPTORS = 102, 103

VERSION_FILE = Path("/proc/driver/nvidia/version")
"""Exists where the driver is loaded, but not under WSL2."""
_DEVICE_FILE = Path("/dev/nvidia0")
_VERSION_BYTES = 80  # nvml.h, NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE


def unused_gpu() -> tuple[str, str] | None:
    """Why torch cannot use the GPU of this machine, and what to do; None if there is no GPU, or torch can use it."""
    if torch.cuda.is_available() or not (_DEVICE_FILE.exists() or VERSION_FILE.exists()):
        return None
    if torch.version.cuda is None:
        return "this torch was built without CUDA", "install torch with CUDA (pytorch.org)"
    return (
        f"torch for CUDA {torch.version.cuda} cannot use it",
        "update the driver, or give this container or job the device (nvidia-smi, CUDA_VISIBLE_DEVICES)",
    )


def version() -> str:
    """The driver's version, from the file that Linux has, or else (WSL2) from NVML; empty if neither is there."""
    if VERSION_FILE.is_file():
        return VERSION_FILE.read_text().splitlines()[0]
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    text = ctypes.create_string_buffer(_VERSION_BYTES)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, _VERSION_BYTES):
        return ""
    return text.value.decode()


def by_nvml(device: torch.device, read: Callable[[Any, Any], T]) -> T | None:
    """Call `read` with the module `pynvml` and its handle of a GPU; None without that module or an answer."""
    try:
        import pynvml
    except ImportError:  # nvidia-ml-py, which is optional
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        pynvml.nvmlInit()
        return read(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError:
        return None


def is_hidden() -> bool:
    """Whether the user has hidden all GPUs from this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def has(gpu: int, attributes: Sequence[int]) -> bool:
    """Whether the driver answers that GPU `gpu` has all of these attributes."""
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
        for attribute in attributes
    )


@functools.cache
def shares_managed_memory(gpu: int) -> bool:
    """Whether host and GPU `gpu` may use managed memory in turn, while the GPU works, as paged optimizer states need.

    Without attribute 89 (WSL2, Windows) the host must not touch any managed memory while a kernel runs (CUDA C++
    programming guide, "Unified memory on Windows, WSL, and Tegra"). Without attribute 83 (some virtual GPUs) there is
    none, and bitsandbytes 0.50 ends the process where it cannot be allocated.
    """
    return has(gpu, (MANAGED_MEMORY, CONCURRENT_MANAGED_ACCESS))
