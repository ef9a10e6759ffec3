"""Describes the environment of a run: versions, device, source revision. No names, paths or secrets."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the versions of a kept plan are compared without it
    import torch

_PACKAGES = (
    "finetune", "torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate", "datasets", "tokenizers",
    "safetensors", "numpy",
)  # fmt: skip


def describe(device: torch.device) -> dict[str, Any]:
    """The facts that a result depends on, as JSON values."""
    import torch

    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": packages(),
        "device": _device(device),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "source_revision": _revision(),
    }


def packages() -> dict[str, str | None]:
    """The versions of this package and of the libraries that its results depend on; None for one that is missing."""
    return {name: version_of(name) for name in _PACKAGES}


@functools.cache
def code_hash() -> str:
    """A hash (sha256, hex) of this package's own files, which may be edited without a new version."""
    digest, root = hashlib.sha256(), Path(__file__).resolve().parents[1]
    for file in sorted(file for file in root.rglob("*") if file.suffix in (".py", ".json", ".jinja")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"type": "cpu"}
    import torch

    from finetune.runtime import segments

    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "total_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "expandable_segments": segments.grow(torch.cuda.current_device() if device.index is None else device.index),
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """The kind of a device and its driver, as JSON values: what kernels do depends on them."""
    import torch

    from finetune.runtime import driver

    if device.type != "cuda":
        return {"name": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "total_bytes": properties.total_memory,
        "driver": driver.version(),
        "cuda": torch.version.cuda,
    }


def version_of(package: str) -> str | None:
    """The installed version of a package; None if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The git commit of this package's own checkout, if it runs from one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
