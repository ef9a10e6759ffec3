"""Checkpoints on disk: a kill at any moment leaves the newest complete one usable, and none is loaded unverified.

A checkpoint is a directory of safetensors and JSON files, without pickles, and a manifest of their sizes and hashes,
written last. The directory is written under a temporary name, fsynced, read back and renamed atomically; only then is
`latest` updated and an older checkpoint removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from finetune.errors import ArtifactError, MachineError, NumbersError
from finetune.storage import records, weight_files
from finetune.storage.files import cause, dispose, remedy, staged, write_text
from finetune.storage.rundir import RunDirectory, checkpoint_step

MANIFEST = "manifest.json"
LATEST = "latest"
DAMAGED = ".damaged"

_FORMAT = 1
_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
_PART_BYTES = 2**20
# Allowance for the JSON files, the manifest and the directory itself, a few KiB.
_SMALL_FILES_BYTES = 2**20


@dataclass(frozen=True)
class Contents:
    """Contents of a checkpoint: `tensors` and `values` by file name, in host memory, and their provenance."""

    step: int
    tensors: dict[str, dict[str, torch.Tensor]]
    values: dict[str, Any]
    provenance: dict[str, Any]

    @property
    def bytes(self) -> int:
        """Disk space the checkpoint needs."""
        sizes = (tensor.nbytes for tensors in self.tensors.values() for tensor in tensors.values())
        return sum(sizes) + _SMALL_FILES_BYTES


def write(run: RunDirectory, contents: Contents) -> Path:
    """Write, verify and publish a checkpoint; returns its directory.

    Raises NumbersError for non-finite weights, MachineError if writing fails or the data reads back differently.
    A failure leaves earlier checkpoints untouched.
    """
    target = run.checkpoint(contents.step)
    for name, tensors in contents.tensors.items():
        for key, tensor in tensors.items():
            if not weight_files.is_finite(tensor):
                raise NumbersError(
                    f"`{key}` is not finite at step {contents.step}, so {name} is not saved; earlier checkpoints are "
                    "intact. Lower `training.learning_rate`, lengthen `training.warmup`, or use bf16 instead of fp16"
                )
    try:
        run.checkpoints.mkdir(exist_ok=True)
        free = shutil.disk_usage(run.checkpoints).free
        if free < contents.bytes:
            raise OSError(None, "not enough disk space")
        with staged(target) as folder:
            files = {}
            for name, tensors in contents.tensors.items():
                # Buffers that share memory with the tensors: two copies may not fit in memory. The library copies, and
                # holds the GIL meanwhile (safetensors 0.8, `serialize`). Each is aligned to its item size.
                held = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
                layout = weight_files.FileLayout({name: (tensor.dtype, tensor.shape) for name, tensor in held})
                buffers = (memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for _, tensor in held)
                files[name] = _write(folder / name, [layout.header, *buffers])
            for name, value in contents.values.items():
                # In the order given: of an adapter's `rank_pattern`, PEFT takes the first that matches.
                files[name] = _write(folder / name, [json.dumps(value, indent=1).encode()])
            manifest = {"format": _FORMAT, "step": contents.step, "files": files, "made_with": contents.provenance}
            _write(folder / MANIFEST, [_json({**manifest, "sha256": _sha256(_json(manifest))})])
        write_text(run.checkpoints / LATEST, target.name + "\n")
    except OSError as error:
        raise MachineError(
            f"checkpoint at step {contents.step} could not be written to {run.checkpoints}: {cause(error, run.path)}; "
            f"{contents.bytes:,} bytes are needed. Earlier checkpoints are untouched: {remedy(error)}, or set "
            "`output.dir` to another disk, and run the same command again"
        ) from None
    return target


def _write(file: Path, pieces: Sequence[bytes | memoryview]) -> dict[str, Any]:
    """Write and fsync a file and read it back; returns its manifest entry. The checksum is computed in parallel."""
    digest = hashlib.sha256()

    def update() -> None:
        for piece in pieces:
            digest.update(piece)

    hashing = threading.Thread(target=update, name="hash", daemon=True)
    hashing.start()
    try:
        with open(file, "wb") as out:
            out.writelines(pieces)
            out.flush()
            os.fsync(out.fileno())
        with open(file, "rb") as stored:
            parts = (piece[at : at + _PART_BYTES] for piece in pieces for at in range(0, len(piece), _PART_BYTES))
            same = all(stored.read(len(part)) == bytes(part) for part in parts) and not stored.read(1)
    finally:
        hashing.join()
    if not same:
        raise OSError(None, f"{file.name} reads back differently than it was written; the disk is failing")
    return {"bytes": sum(map(len, pieces)), "sha256": digest.hexdigest()}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def problems_of(checkpoint: Path) -> list[str]:
    """Problems that make a checkpoint unusable, each naming its file; empty for an intact one. Reads every file."""
    try:
        files = manifest_of(checkpoint)["files"]
    except ArtifactError as error:
        return [str(error)]
    try:
        foreign = sorted(path.name for path in checkpoint.iterdir() if path.suffix in _PICKLES)
    except OSError as error:
        return [f"cannot be read: {error.strerror}"]
    problems = [f"{name} is a pickle, which may contain code; pickles are never loaded" for name in foreign]
    for name, expected in files.items():
        problems += _problems_of_file(checkpoint / name, expected)
    return problems


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """The manifest. Raises ArtifactError if it is missing, damaged, or belongs to another checkpoint."""
    file = checkpoint / MANIFEST
    if not os.path.lexists(file):
        raise ArtifactError(f"{MANIFEST} is missing, so the other files cannot be verified")
    try:
        stored = records.read(file, records.MANIFEST)
    except ArtifactError as error:
        raise ArtifactError(f"{MANIFEST} is damaged ({error})") from None
    manifest: dict[str, Any] = {**stored}
    if manifest.pop("sha256") != _sha256(_json(manifest)):
        raise ArtifactError(f"{MANIFEST} is damaged (its hash does not match)")
    if manifest["format"] != _FORMAT:
        raise ArtifactError(f"{MANIFEST} has format {manifest['format']}; this version reads {_FORMAT}")
    if manifest["step"] != checkpoint_step(checkpoint):
        raise ArtifactError(f"{MANIFEST} belongs to step {manifest['step']}")
    return manifest


def _problems_of_file(file: Path, expected: dict[str, Any]) -> list[str]:
    name = file.name
    try:
        if file.exists() and not file.is_file():
            return [f"{name} is not a regular file"]
        size = file.stat().st_size
        if size != expected["bytes"]:
            return [f"{name} has {size} bytes instead of {expected['bytes']}"]
        with open(file, "rb") as stored:
            digest = hashlib.file_digest(stored, "sha256").hexdigest()
    except FileNotFoundError:
        return [f"{name} is missing"]
    except OSError as error:
        return [f"{name} cannot be read: {error.strerror}"]
    if digest != expected["sha256"]:
        return [f"{name} is damaged: its hash does not match the manifest"]
    if file.suffix != weight_files.SUFFIX:
        return []
    try:
        weight_files.check(file)
    except ArtifactError as error:
        return [str(error)]
    return [f"{name}: `{key}` is not finite" for key in weight_files.not_finite(file)]


def newest_valid(
    run: RunDirectory, problems_of: Callable[[Path], list[str]] = problems_of
) -> tuple[Path | None, dict[Path, list[str]]]:
    """The newest valid checkpoint, or None, and the problems of the damaged ones newer than it.

    Raises ArtifactError if checkpoints exist or existed and none is valid: a run never starts over by itself.
    """
    damaged: dict[Path, list[str]] = {}
    for checkpoint in reversed(run.complete_checkpoints()):
        if not (problems := problems_of(checkpoint)):
            return checkpoint, damaged
        damaged[checkpoint] = problems
    aside = sorted(path.name for path in run.checkpoints.glob("*" + DAMAGED + "*"))
    if damaged or aside or run.saved_steps:
        reasons = [f"{path.name}: {'; '.join(problems)}" for path, problems in damaged.items()]
        reasons += [f"{name}: set aside before" for name in aside]
        raise ArtifactError(
            f"no checkpoint in {run.checkpoints} can be used"
            + (f" ({' | '.join(reasons)})" if reasons else f": step {run.saved_steps[-1]} was saved there, but is gone")
            + ". Restore one from a backup, or use --fresh to start over (the old run is moved aside)"
        )
    return None, {}


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint so that it can be inspected and its step saved again."""
    names = (checkpoint.name + DAMAGED + suffix for suffix in ("", *(f".{number}" for number in range(1, 1000))))
    aside = next(candidate for name in names if not (candidate := checkpoint.with_name(name)).exists())
    return checkpoint.rename(aside)


def prune(run: RunDirectory, keep: int, best_step: int | None, verified: set[Path]) -> None:
    """Remove the oldest checkpoints beyond `keep`, which counts intact ones only; the best and the newest are kept.

    `verified` are known to be intact; any other that is kept is verified and added.
    """
    best = run.checkpoint(best_step) if best_step else None
    room = keep - (best is not None and best.is_dir() and _is_whole(best, verified))
    for checkpoint in reversed(run.complete_checkpoints()):
        if checkpoint == best:
            continue
        if room > 0:
            room -= _is_whole(checkpoint, verified)
        else:
            dispose(checkpoint)


def _is_whole(checkpoint: Path, verified: set[Path]) -> bool:
    if checkpoint not in verified and not problems_of(checkpoint):
        verified.add(checkpoint)
    return checkpoint in verified


def read_tensors(checkpoint: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of one of a checkpoint's safetensors files, copied to host memory. Raises ArtifactError."""
    weight_files.check(checkpoint / name)
    with safe_open(checkpoint / name, framework="pt") as stored:
        return {key: stored.get_tensor(key).clone() for key in stored.keys()}  # noqa: SIM118
