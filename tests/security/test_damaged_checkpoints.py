"""A checkpoint that is damaged or forged is refused by what is wrong with it, and the one before is used."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import Trap, refused
from messages import refusal
from safetensors.torch import save_file
from signed import sign

from finetune.errors import ArtifactError
from finetune.storage import checkpoint
from finetune.storage.checkpoint import Contents
from finetune.storage.rundir import RunDirectory

WEIGHTS, STATE, MANIFEST = "a.safetensors", "state.json", "manifest.json"
DAMAGED = r"^manifest\.json is damaged"
Damage = Callable[[Path], object]


@pytest.fixture
def saved(tmp_path: Path) -> RunDirectory:
    """Checkpoints at steps 1 and 2."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    for step in (1, 2):
        tensors = {"weight": torch.full((1024,), float(step))}
        checkpoint.write(run, Contents(step, {WEIGHTS: tensors}, {STATE: {"step": step}}, {"seed": 3}))
    return run


# -- changes of one file, of which the manifest knows nothing ---------------------------------------------------------


def in_file(change: Callable[[bytes], bytes]) -> Damage:
    return lambda file: file.write_bytes(change(file.read_bytes()))


def flipped(place: Callable[[int], int]) -> Damage:
    """One bit flipped at a byte of so many."""

    def flip(content: bytes) -> bytes:
        bad = bytearray(content)
        bad[place(len(bad))] ^= 1
        return bytes(bad)

    return in_file(flip)


def folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Damage] = {
    "deleted": Path.unlink,
    "empty": in_file(lambda content: b""),
    "cut": in_file(lambda content: content[:-1]),
    "longer": in_file(lambda content: content + b"\0"),
    "first bit": flipped(lambda size: 0),
    "middle bit": flipped(lambda size: size // 2),
    "last bit": flipped(lambda size: size - 1),
    "a folder": folder_instead,
}


@pytest.mark.parametrize("name", [WEIGHTS, STATE, MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_with_a_damaged_file_is_refused_by_its_name(saved: RunDirectory, name: str, damage: str) -> None:
    older, newest = saved.complete_checkpoints()
    assert checkpoint.newest_valid(saved) == (newest, {})
    DAMAGES[damage](newest / name)
    found, problems = checkpoint.newest_valid(saved)
    assert found == older
    [problem] = problems[newest]
    assert problem.startswith(f"{name} is missing" if damage == "deleted" else name)
    if name != MANIFEST and damage == "a folder":
        assert problem == f"{name} is not a regular file"


# -- forgeries, whose manifest agrees with the files ------------------------------------------------------------------


def manifest(change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda folder: sign(folder, change)


def signed(change: Callable[[Path], object], name: str = WEIGHTS) -> Damage:
    def forge(folder: Path) -> None:
        change(folder / name)
        sign(folder)

    return forge


def weights(value: float) -> Callable[[Path], object]:
    return lambda file: save_file({"weight": torch.tensor([1.0, value])}, file)


FORGERIES: dict[str, tuple[Damage, str]] = {
    "a file without its size": (manifest(lambda it: it["files"][STATE].pop("bytes")), DAMAGED),
    "a file without its hash": (manifest(lambda it: it["files"][STATE].pop("sha256")), DAMAGED),
    "another hash of its own": (
        lambda folder: in_file(lambda content: content.replace(b'"seed": 3', b'"seed": 4'))(folder / MANIFEST),
        DAMAGED + r" \(its hash does not match\)$",
    ),
    "no provenance": (manifest(lambda it: it.update(made_with=None)), DAMAGED),
    "another format": (manifest(lambda it: it.update(format=2)), r"^manifest\.json has format 2; this version reads 1"),
    "another step": (manifest(lambda it: it.update(step=1)), r"^manifest\.json belongs to step 1$"),
    "a pickle beside": (lambda folder: (folder / "optimizer.pt").touch(), r"^optimizer\.pt is a pickle"),
    "not a number": (signed(weights(float("nan"))), r"^a\.safetensors: `weight` is not finite$"),
    "infinite": (signed(weights(float("inf"))), r"^a\.safetensors: `weight` is not finite$"),
    **{
        f"header {header[:9]!r}": (signed(lambda file, header=header: file.write_bytes(header)), r"a\.safetensors")
        for header in (
            b"", struct.pack("<Q", 2**40) + b"{}",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_checkpoint_is_refused_by_what_is_wrong(saved: RunDirectory, forgery: str) -> None:
    older, newest = saved.complete_checkpoints()
    forge, message = FORGERIES[forgery]
    forge(newest)
    found, problems = checkpoint.newest_valid(saved)
    assert found == older
    [problem] = problems[newest]
    assert re.search(message, problem), problem
    if message.startswith(DAMAGED):
        with refusal(ArtifactError, "manifest.json"):
            checkpoint.manifest_of(newest)
    if forgery.startswith("header"):
        with pytest.raises(ArtifactError, match=message):
            checkpoint.read_tensors(newest, WEIGHTS)


@pytest.mark.slow
def test_a_checkpoint_with_pickles_is_refused_and_nothing_is_unpickled(run: RunDirectory, trap: Trap, call) -> None:
    """The files in which transformers keeps a checkpoint's state."""
    for folder in run.complete_checkpoints():
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "adapter_model.bin"):
            trap.pickled(folder / name)
    ended = call(
        "train", run.config_file, "training.max_steps=21", f"output.dir={run.path}", "memory.check=off", writes=run.path
    )
    refused(ended, run.complete_checkpoints()[-1].name)
