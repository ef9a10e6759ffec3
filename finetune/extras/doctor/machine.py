"""Checks what a job needs from this machine. Opens no connection and writes nothing except Triton's kernel cache."""

from __future__ import annotations

import importlib.metadata
import locale
import os
import platform
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from finetune.config import OptimizerSection
from finetune.errors import MachineError
from finetune.extras.doctor.findings import Examination, Finding
from finetune.model import precision
from finetune.model.attention import backends
from finetune.model.probes import marker
from finetune.report import words
from finetune.runtime import control_groups, driver, libraries
from finetune.storage.private import data_cache
from finetune.training import optimizers

# A 7B model in 16 bit has 13 GiB, and merging writes it once more.
_LITTLE_DISK = 16 * 2**30


def examine() -> Examination:
    """Check versions, devices, memory and disks, and what a job would choose on this machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Examination(
        [
            *_versions(),
            *_gpus(device),
            *_memory_and_disks(),
            *_choices(device),
            _bitsandbytes(device),
            *_kernels(device),
            *_environment(),
        ],
        MachineError.exit_code,
    )


def _versions() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    yield Finding("python", "ok", platform.python_version())  # pip refuses to install this program on an older one
    try:
        requirements = importlib.metadata.requires("finetune") or []
    except importlib.metadata.PackageNotFoundError:
        state = "runs from a folder without being installed, so the versions it needs are unknown"
        yield Finding("finetune", "warning", state, "pip install . in its folder")
        return
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        supported = ",".join(sorted(map(str, wanted.specifier), reverse=True))
        install = f"pip install '{wanted.name}{supported}'"
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(wanted.name, "error", f"not installed; {supported} is needed", install)
            continue
        if wanted.specifier.contains(version, prereleases=True):
            yield Finding(wanted.name, "ok", f"{version} (of {supported})")
        else:
            yield Finding(wanted.name, "warning", f"{version}, outside of {supported}", install)


def _gpus(device: str) -> Iterator[Finding]:
    if device == "cpu":
        if unused := driver.unused_gpu():
            reason, remedy = unused
            yield Finding("GPU", "error", f"there is one, but {reason}", remedy)
        else:
            state = f"none: jobs run on the CPU, in {_precision(torch.device('cpu'))}"
            yield Finding("GPU", "warning", state, "enough for small models; use a machine with one")
        return
    version = None  # of the driver, for which torch has no function
    if driver.VERSION_FILE.is_file():
        version = re.search(r"Kernel Module.*?(\d+(?:\.\d+)+)", driver.VERSION_FILE.read_text())
    of_driver = f", driver {version[1]}" if version else ""
    yield Finding("CUDA", "ok", f"torch is built for {torch.version.cuda}{of_driver}")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            free, total = torch.cuda.mem_get_info()
        state = (
            f"{properties.name}, {words.size(free)} of {words.size(total)} free, compute capability "
            f"{properties.major}.{properties.minor}, trains in {_precision(torch.device('cuda', index))}"
        )
        crowded = free < total / 2
        remedy = "other processes use more than half of it: stop them, or set `memory.budget`" if crowded else ""
        yield Finding(f"GPU {index}", "warning" if crowded else "ok", state, remedy)


def _memory_and_disks() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    memory = psutil.virtual_memory()
    left = control_groups.left_bytes()
    state = f"{words.size(memory.available)} of {words.size(memory.total)} free"
    if left < memory.available:
        state += f", of which this container or batch job may use {words.size(int(left))}"
    yield Finding("host memory", "ok", state)
    folders = {"runs": Path("runs"), "model cache": Path(HF_HUB_CACHE), "data cache": data_cache()}
    for name, path in folders.items():
        folder = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.is_dir())
        free = shutil.disk_usage(folder).free
        move = "set `output.dir`" if name == "runs" else f"set {'HF_HOME' if name[0] == 'm' else 'HF_DATASETS_CACHE'}"
        if not os.access(folder, os.W_OK | os.X_OK):
            yield Finding(name, "error", f"{path}: {folder} cannot be written to", f"{move} to a folder of your own")
        elif free < _LITTLE_DISK:
            little = f"{path}: {words.size(free)} free; a 7B model in 16 bit takes 13 GiB"
            yield Finding(name, "warning", little, f"free some space, or {move} to a larger disk")
        else:
            yield Finding(name, "ok", f"{path}: {words.size(free)} free")


def _choices(device: str) -> Iterator[Finding]:
    """What a job with the default settings chooses here."""
    # For an ordinary model; one that caps its logits (Gemma 2) gets eager attention.
    chosen, reason = backends.choose("auto", None, device, _precision(torch.device(device)))
    yield Finding("attention", "ok", f"{chosen} ({reason})")
    managed = device == "cuda" and driver.shares_managed_memory(torch.cuda.current_device())
    name, replaced = optimizers.choose(OptimizerSection(), device, managed_memory=managed)
    yield Finding("optimizer", "ok", replaced or f"{name}, the default")


def _precision(device: torch.device) -> str:
    """What `training.precision: auto` is on a device, unless other keys rule it out."""
    return precision.of_device(device).native[0]


def _bitsandbytes(device: str) -> Finding:
    """Check the native library, which quantized bases and 8-bit optimizers need."""
    about, built = "bitsandbytes library", f"install a bitsandbytes built for CUDA {torch.version.cuda}"
    try:
        libraries.import_bitsandbytes()
        from bitsandbytes.cextension import lib
    except Exception as error:  # a broken installation may raise anything
        return Finding(about, "error", f"cannot be imported: {error}", "install bitsandbytes again")
    if type(lib).__name__ == "ErrorHandlerMockBNBNativeLibrary":
        return Finding(about, "error", "no compiled library for this machine", f"{built}, or set BNB_CUDA_VERSION")
    if device == "cuda" and not lib.compiled_with_cuda:
        return Finding(about, "error", "built for the CPU only, but there is a GPU", built)
    return Finding(about, "ok", f"built for {'CUDA' if lib.compiled_with_cuda else 'the CPU'}")


def _kernels(device: str) -> Iterator[Finding]:
    """Whether kernels can be built, and what jobs leave out here because a process ended while it was tried."""
    if device == "cuda":  # the package includes neither a C compiler nor Python's headers
        if (obstacle := libraries.triton_obstacle()) is None:
            yield Finding("Triton", "ok", "builds and runs kernels")
        else:
            state = f"cannot run its kernels ({obstacle}): the loss takes more time and memory"
            remedy = (
                "install Triton, a C compiler and Python's headers (Debian, Ubuntu: apt install gcc python3-dev), or "
                "set CC"
            )
            yield Finding("Triton", "warning", state, remedy)
    if left := marker.left_behind(torch.device(device)):
        ended = ", ".join(f"`{name}`" for name in sorted({*left.values()}))
        again = " ".join(shlex.quote(str(path)) for path in left)
        again = f"to try again before a new driver or version does: rm {again}"
        yield Finding("kernels", "warning", f"a process ended while {ended} was tried: jobs leave that out", again)
    else:
        yield Finding("kernels", "ok", "none is off: each run tests them on its model before the first step")


def _environment() -> Iterator[Finding]:
    """What environment variables decide: the hub, threads, and text. Opens no connection and shows no token."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", "ok", "offline (HF_HUB_OFFLINE): only local directories and cached files")
    else:
        token = "with a token" if get_token() else "without a token: gated models are refused"
        elsewhere = ", at another address (HF_ENDPOINT)" if "HF_ENDPOINT" in os.environ else ""
        yield Finding("hub", "ok", f"used for files that are not cached{elsewhere}, {token}; not contacted")
    threads, cores = torch.get_num_threads(), len(psutil.Process().cpu_affinity() or [])
    state = f"torch uses {threads} on {cores} cores"
    if threads > cores:
        yield Finding("threads", "warning", state, f"set OMP_NUM_THREADS={cores}")
    else:
        yield Finding("threads", "ok", state)
    encoding = locale.getpreferredencoding(False)
    if encoding.lower().replace("-", "") == "utf8":
        yield Finding("text", "ok", encoding)
    else:
        yield Finding("text", "warning", f"{encoding}: non-ASCII characters print as ?", "set LC_ALL=C.UTF-8")
