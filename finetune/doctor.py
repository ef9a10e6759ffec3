"""What is wrong with a machine, before a job is started on it, or with a run directory, before it is relied on.

Looks and tells; nothing is connected to, changed or repaired. Each finding says what to do.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import locale
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import psutil
import torch

from finetune import libraries, weight_files
from finetune.checkpoint import problems_of
from finetune.config import Config, OptimizerSection
from finetune.data import fingerprint
from finetune.errors import ArtifactError, ConfigError, FinetuneError, MachineError
from finetune.memory import device as devices
from finetune.model import adapter, attention
from finetune.model.tokenizer import load_tokenizer
from finetune.report import words
from finetune.rundir import RunDirectory, checkpoint_step
from finetune.settings import load_config
from finetune.training import optimizers

Status = Literal["ok", "warning", "error"]

# A 7B model in 16 bit has 13 GiB, and merging writes it once more.
_LITTLE_DISK = 16 * 2**30
# Weights read at a time while they are searched for what is not finite.
_SLICE = 2**24


@dataclass(frozen=True)
class Finding:
    """One thing looked at: how it is, and what to do where it is not well."""

    about: str
    status: Status
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class Examination:
    """All findings, and the exit code that they stand for: 0, or that of the error with which a job would end."""

    findings: list[Finding]
    fails_with: int

    @property
    def exit_code(self) -> int:
        return self.fails_with if any(found.status == "error" for found in self.findings) else 0

    def as_dict(self) -> dict[str, Any]:
        """The findings as JSON values."""
        return {"sound": self.exit_code == 0, "findings": [asdict(found) for found in self.findings]}


# -- a machine ---------------------------------------------------------------------------------------------------------


def examine_machine() -> Examination:
    """What a job would find here: versions, devices, memory, disks, and what would be used of what there is."""
    libraries.quiet()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Examination(
        [
            *_versions(),
            *(_cards() if device == "cuda" else _no_card()),
            _host_memory(),
            *_disks(),
            _attention(device),
            _optimizer(device),
            _bitsandbytes(device),
            _hub(),
            _threads(),
            _text(),
        ],
        MachineError.exit_code,
    )


def _versions() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    yield Finding("python", "ok", platform.python_version())  # pip refuses to install this program on an older one
    for text in importlib.metadata.requires("finetune") or []:
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


def _cards() -> Iterator[Finding]:
    driver = torch._C._cuda_getDriverVersion()
    yield Finding("CUDA", "ok", f"torch is built for {torch.version.cuda}, the driver takes up to {_cuda(driver)}")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            free, total = torch.cuda.mem_get_info()
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        told = (
            f"{properties.name}, {words.size(free)} of {words.size(total)} free, compute capability "
            f"{properties.major}.{properties.minor}, {'bf16' if bf16 else 'no bf16: set `training.precision: fp16`'}"
        )
        crowded = free < total / 2
        yield Finding(
            f"GPU {index}",
            "warning" if crowded or not bf16 else "ok",
            told,
            "other processes hold more than half of it: stop them, or set `memory.budget`" if crowded else "",
        )


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _no_card() -> Iterator[Finding]:
    if not any(Path(place).exists() for place in ("/dev/nvidia0", "/proc/driver/nvidia/version")):
        yield Finding("GPU", "warning", "none: jobs run on the CPU", "enough for small models; use a machine with one")
    elif torch.version.cuda is None:
        yield Finding(
            "GPU", "error", "there is one, and this torch has no CUDA", "install torch with CUDA (pytorch.org)"
        )
    else:
        yield Finding(
            "GPU",
            "error",
            f"there is one, and torch for CUDA {torch.version.cuda} cannot use it",
            "update the driver, or give this container or job the device (nvidia-smi, CUDA_VISIBLE_DEVICES)",
        )


def _host_memory() -> Finding:
    memory = psutil.virtual_memory()
    left = devices.left_by_control_groups()
    told = f"{words.size(memory.available)} of {words.size(memory.total)} free"
    if left < memory.available:
        told += f", of which this container or batch job may take {words.size(int(left))}"
    return Finding("host memory", "ok", told)


def _disks() -> Iterator[Finding]:
    from datasets.config import HF_DATASETS_CACHE
    from huggingface_hub.constants import HF_HUB_CACHE

    places = {"runs": Path("runs"), "model cache": Path(HF_HUB_CACHE), "data cache": Path(HF_DATASETS_CACHE)}
    for name, place in places.items():
        folder = next(found for found in (place.absolute(), *place.absolute().parents) if found.is_dir())
        free = shutil.disk_usage(folder).free
        move = "set `output.dir`" if name == "runs" else f"set {'HF_HOME' if name[0] == 'm' else 'HF_DATASETS_CACHE'}"
        if not os.access(folder, os.W_OK | os.X_OK):
            yield Finding(name, "error", f"{place}: {folder} cannot be written to", f"{move} to a folder of your own")
        elif free < _LITTLE_DISK:
            little = f"{place}: {words.size(free)} free; a 7B model in 16 bit has 13 GiB"
            yield Finding(name, "warning", little, f"make room, or {move} to a larger disk")
        else:
            yield Finding(name, "ok", f"{place}: {words.size(free)} free")


def _attention(device: str) -> Finding:
    # What a model without peculiarities gets; one that caps its logits (Gemma 2) gets eager.
    chosen, reason = attention.choose("auto", SimpleNamespace(), device, _precision(device))
    return Finding("attention", "ok", f"{chosen} ({reason})")


def _precision(device: str) -> str:
    return "bf16" if device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _optimizer(device: str) -> Finding:
    name, replaced = optimizers.choose(OptimizerSection(), device)
    return Finding("optimizer", "ok", replaced or f"{name}, the default")


def _bitsandbytes(device: str) -> Finding:
    """Whether its compiled part is here: without it there is no quantized base and no 8-bit optimizer."""
    try:
        from bitsandbytes.cextension import lib
    except Exception as error:  # of whatever kind a broken installation raises
        return Finding("bitsandbytes library", "error", f"cannot be imported: {error}", "install bitsandbytes again")
    compiled = type(lib).__name__
    if compiled == "ErrorHandlerMockBNBNativeLibrary":
        remedy = f"install a bitsandbytes that is built for CUDA {torch.version.cuda}, or set BNB_CUDA_VERSION"
        return Finding("bitsandbytes library", "error", "no compiled library for this machine", remedy)
    if device == "cuda" and not lib.compiled_with_cuda:
        remedy = f"install a bitsandbytes that is built for CUDA {torch.version.cuda}"
        return Finding("bitsandbytes library", "error", "here for the CPU only, and there is a GPU", remedy)
    return Finding("bitsandbytes library", "ok", f"here, for {'CUDA' if lib.compiled_with_cuda else 'the CPU'}")


def _hub() -> Finding:
    """What the settings say; nothing is connected to, and no token is shown."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        return Finding("hub", "ok", "offline by HF_HUB_OFFLINE: local directories and what is in the cache")
    token = "with a token" if get_token() else "without a token: gated models are refused"
    elsewhere = ", at another address (HF_ENDPOINT)" if "HF_ENDPOINT" in os.environ else ""
    return Finding("hub", "ok", f"asked for what a config names and the cache lacks{elsewhere}, {token}; not tried now")


def _threads() -> Finding:
    threads, cores = torch.get_num_threads(), len(psutil.Process().cpu_affinity() or [])
    told = f"{threads} threads of torch on {cores} cores"
    if threads > cores:
        return Finding("threads", "warning", told, f"set OMP_NUM_THREADS={cores}")
    return Finding("threads", "ok", told)


def _text() -> Finding:
    encoding = locale.getpreferredencoding(False)
    if encoding.lower().replace("-", "") == "utf8":
        return Finding("text", "ok", encoding)
    return Finding("text", "warning", f"{encoding}: what is no ASCII prints as ?", "set LC_ALL=C.UTF-8")


# -- a run directory ---------------------------------------------------------------------------------------------------


def examine_run(path: Path) -> Examination:
    """Whether what a run directory holds can be relied on. Raises ArtifactError for what is no run directory."""
    libraries.quiet()
    run = RunDirectory(path)
    if not run.config_file.is_file() and not run.events_file.is_file():
        RunDirectory.open(path)  # says so
    findings = list(_run_findings(run))
    return Examination(findings, ArtifactError.exit_code)


def _run_findings(run: RunDirectory) -> Iterator[Finding]:
    yield from _links(run)
    config = None
    try:
        config = load_config(run.config_file)
    except ConfigError as error:
        yield Finding(
            "config.yaml", "error", str(error), "mend the line, or copy the config that the run was started with"
        )
    else:
        yield Finding("config.yaml", "ok", f"{config.model.name}, {config.adapter.kind}")
    yield from _lines(run)
    yield from _records(run)
    yield _lock(run)
    yield from _checkpoints(run)
    if run.adapter.exists():
        yield from _folder(run.adapter, adapter.check_files, "train again, or restore the folder from a copy")
    if run.merged.exists():
        yield from _folder(run.merged, _check_model, f"delete it and run `finetune merge {run.path}`")
    if config:
        yield _tokenizer(run, config)
    yield from _leftovers(run)


def _links(run: RunDirectory) -> Iterator[Finding]:
    try:
        run.refuse_links_out()
    except ArtifactError as error:
        yield Finding("links", "error", str(error), "remove the link")


def _lines(run: RunDirectory) -> Iterator[Finding]:
    """The files of JSON lines: each line an object with the key that readers look for."""
    for file, key, kind in (
        (run.events_file, "event", str),
        (run.metrics_file, "step", int),
        (run.data_file, "place", str),
    ):
        if not file.exists():
            if file == run.events_file:
                yield Finding(
                    file.name, "error", "missing: whether the run has finished cannot be told", "start it again"
                )
            continue
        try:
            *whole, last = file.read_bytes().split(b"\n")
        except OSError as error:
            yield Finding(file.name, "error", f"cannot be read: {error.strerror}", "give yourself the right to")
            continue
        wrong = [number for number, line in enumerate(whole, start=1) if not _is_line(line, key, kind)]
        if wrong:
            told = f"line {wrong[0]} is no JSON object with `{key}`" + (
                f", and {len(wrong) - 1} more" if wrong[1:] else ""
            )
            yield Finding(file.name, "error", told, "remove the damaged lines")
        elif last and not _is_line(last, key, kind):
            told = f"{len(whole)} lines, and a last one that was cut off when the process ended; it is left out"
            yield Finding(file.name, "warning", told)
        else:
            yield Finding(file.name, "ok", f"{len(whole)} lines")


def _is_line(line: bytes, key: str, kind: type) -> bool:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and isinstance(value.get(key), kind)


def _records(run: RunDirectory) -> Iterator[Finding]:
    for file in (run.environment_file, run.forecast_file, run.answers_file):
        if not file.exists():
            continue
        try:
            json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            yield Finding(file.name, "error", f"damaged: {error}", "delete it; the next start writes it again")


def _lock(run: RunDirectory) -> Finding:
    file = run.path / "lock"
    if not file.is_file():
        return Finding("lock", "ok", "no process trains here")
    with open(file, encoding="utf-8", errors="replace") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            told = f"process {opened.read(20).strip()} trains here now, so what it writes may look unfinished"
            return Finding("lock", "warning", told, "look again when it has ended")
        except OSError:
            return Finding("lock", "warning", "this file system has no locks", "start one process at a time")
    return Finding("lock", "ok", "no process trains here")


def _checkpoints(run: RunDirectory) -> Iterator[Finding]:
    sound = []
    for checkpoint in run.complete_checkpoints():
        name = f"checkpoints/{checkpoint.name}"
        if problems := problems_of(checkpoint):
            yield Finding(name, "error", "; ".join(problems), "delete it; the next start goes on from an older one")
        else:
            sound.append(checkpoint)
            yield Finding(name, "ok", "whole")
    if run.events_file.is_file() and not _damaged(run.events_file):
        if run.finished:
            yield Finding("state", "ok", f"finished, {run.steps_done} steps")
        elif sound:
            yield Finding(
                "state", "ok", f"not finished; `finetune train` goes on from step {checkpoint_step(sound[-1])}"
            )
        else:
            yield Finding("state", "ok", "not finished, and no checkpoint; `finetune train` begins anew")


def _damaged(file: Path) -> bool:
    try:
        return any(not _is_line(line, "event", str) for line in file.read_bytes().split(b"\n")[:-1])
    except OSError:
        return True


def _folder(folder: Path, check: Callable[[Path], None], remedy: str) -> Iterator[Finding]:
    """One finding for a folder of weights that is sound, or one for each thing wrong in it."""
    wrong = []
    try:
        check(folder)
    except ArtifactError as error:
        wrong.append(str(error))
    for file in sorted(folder.glob("*" + weight_files.SUFFIX)):
        wrong += _problems_of_weights(file)
    for problem in dict.fromkeys(wrong):  # both look at the headers
        yield Finding(folder.name, "error", problem, remedy)
    if not wrong:
        yield Finding(folder.name, "ok", "whole, weights finite")


def _problems_of_weights(file: Path) -> list[str]:
    from safetensors import safe_open

    try:
        weight_files.check(file)
    except ArtifactError as error:
        return [str(error)]
    with safe_open(file, framework="pt") as stored:
        broken = [name for name in stored.keys() if not _is_finite(stored.get_tensor(name))]  # noqa: SIM118
    return [f"{file}: `{name}` has values that are not finite" for name in broken]


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    return all(bool(part.float().isfinite().all()) for part in tensor.reshape(-1).split(_SLICE))


def _check_model(folder: Path) -> None:
    """A model in Hugging Face format: its config, and every file that its index names."""
    index = folder / "model.safetensors.index.json"
    try:
        dict(json.loads((folder / "config.json").read_bytes()))
        named = set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"{folder}: config.json or the index is missing or damaged: {error}") from None
    for name in sorted(named):
        weight_files.check(folder / name)


def _tokenizer(run: RunDirectory, config: Config) -> Finding:
    """Whether the tokenizer that the config names is still the one that the weights were trained with."""
    folder = run.adapter if run.adapter.exists() else run.merged
    try:
        tokenizer = load_tokenizer(config.model, run.chat_template)
        fingerprint.check(tokenizer, folder)
    except MachineError as error:
        return Finding("tokenizer", "warning", str(error), "look again where the base is at hand")
    except FinetuneError as error:
        return Finding("tokenizer", "error", str(error), "put the base back where `model.name` points")
    return Finding("tokenizer", "ok", f"as in training, from {config.model.tokenizer or config.model.name}")


def _leftovers(run: RunDirectory) -> Iterator[Finding]:
    for path in sorted([*run.path.rglob("*.incomplete"), *run.path.rglob("*.replaced")]):
        name = str(path.relative_to(run.path))
        if path.suffix == ".replaced" and not path.with_suffix("").exists():
            told = f"{path.stem} was being replaced when the process ended"
            yield Finding(name, "error", told, f"rename it to {path.stem}")
        else:
            yield Finding(name, "warning", "left by a write that was interrupted", "delete it")
