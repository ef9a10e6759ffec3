"""One checkpoint: the order of writes to the disk, and what is refused. Faults are injected in tests/faults."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from messages import refusal
from safetensors.torch import load_file

from finetune.errors import ArtifactError, MachineError
from finetune.storage import checkpoint, weight_files
from finetune.storage.checkpoint import Contents
from finetune.storage.rundir import RunDirectory, checkpoint_step

TENSORS = {
    "large": torch.arange(3 * 2**18 + 5, dtype=torch.float32),  # longer than what is read back at once
    "odd": torch.arange(3, dtype=torch.uint8),
    "none": torch.empty(0),
    "half": torch.tensor([1.0, -2.0, 3.0], dtype=torch.bfloat16),
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


def contents(step: int = 1) -> Contents:
    return Contents(step, {"a.safetensors": dict(TENSORS)}, {"state.json": {"step": step}}, {"seed": 3})


def test_tensors_round_trip_and_the_size_is_predicted(run: RunDirectory) -> None:
    folder = checkpoint.write(run, contents())
    assert checkpoint.problems_of(folder) == []
    for found in (checkpoint.read_tensors(folder, "a.safetensors"), load_file(folder / "a.safetensors")):
        assert found.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert torch.equal(found[name], tensor)
            assert found[name].dtype == tensor.dtype
    written = sum(file.stat().st_size for file in folder.iterdir())
    assert sum(tensor.nbytes for tensor in TENSORS.values()) < written <= contents().bytes


def test_tensors_in_a_file_are_aligned_to_eight_bytes(run: RunDirectory) -> None:
    """Readers may map files. Longer and longer tensor names give the header every remainder modulo eight."""
    for step in range(1, 9):
        folder = checkpoint.write(run, Contents(step, {"a.safetensors": {"n" * step: torch.ones(2)}}, {}, {}))
        file = (folder / "a.safetensors").read_bytes()
        header, tensor_bytes = struct.unpack("<Q", file[:8])[0], 2 * 4
        assert (8 + header) % 8 == 0
        assert len(file) == 8 + header + tensor_bytes


def test_every_file_is_fsynced_before_the_manifest_is_written(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought: dict[str, int] = {}
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if file.parent.name.startswith("step-") and not (file.parent / "manifest.json").exists():
            brought[file.name] = file.stat().st_size
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    folder = checkpoint.write(run, contents())
    assert brought == {name: (folder / name).stat().st_size for name in ("a.safetensors", "state.json")}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def lengthen(file: Path) -> None:
    with open(file, "ab") as stored:
        stored.write(b"\0")


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("change", [flip, lengthen, shorten])
@pytest.mark.parametrize("name", ["a.safetensors", "state.json", "manifest.json"])
def test_data_that_reads_back_differently_is_not_published(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Path], None]
) -> None:
    checkpoint.write(run, contents(1))
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        fsync(descriptor)
        if (file := Path(os.readlink(f"/proc/self/fd/{descriptor}"))).name == name:
            change(file)

    monkeypatch.setattr(os, "fsync", failing)
    with refusal(MachineError, name):
        checkpoint.write(run, contents(2))
    assert checkpoint.newest_valid(run) == (run.checkpoint(1), {})


def test_writing_waits_for_a_slow_hash(tmp_path: Path) -> None:
    class Pieces(list[bytes]):
        """Pieces over which the hashing thread iterates slowly."""

        def __iter__(self) -> Iterator[bytes]:
            if threading.current_thread().name == "hash":
                threading.Event().wait(0.3)
            return super().__iter__()

    line = checkpoint._write(tmp_path / "file", Pieces([b"ab", b"c"]))
    assert line == {"bytes": 3, "sha256": checkpoint._sha256(b"abc")}


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["a damaged one", "one set aside", "a line that says so"])
def test_a_run_without_a_valid_checkpoint_left_does_not_start_over(run: RunDirectory, left: str) -> None:
    assert checkpoint.newest_valid(run) == (None, {})
    folder = checkpoint.write(run, contents(4))
    if left == "a damaged one":
        flip(folder / "state.json")
    elif left == "one set aside":
        checkpoint.set_aside(folder)
    else:
        shutil.rmtree(folder)
        run.event("saved", step=4)
    with refusal(ArtifactError, "step"):
        checkpoint.newest_valid(run)


def test_several_damaged_checkpoints_of_one_step_are_set_aside(run: RunDirectory) -> None:
    for name in ("step-00000004.damaged", "step-00000004.damaged.1", "step-00000004.damaged.2"):
        folder = checkpoint.write(run, contents(4))
        assert checkpoint.set_aside(folder).name == name
        assert not folder.exists()


# -- retention -------------------------------------------------------------------------------------------------------


def test_pruning_keeps_the_configured_number_of_intact_checkpoints_including_the_best(run: RunDirectory) -> None:
    for step in (1, 2, 3, 4, 5):
        folder = checkpoint.write(run, contents(step))
        assert (run.checkpoints / "latest").read_text() == folder.name + "\n"
    verified: set[Path] = set()
    checkpoint.prune(run, 3, 1, verified)
    assert [checkpoint_step(path) for path in run.complete_checkpoints()] == [1, 4, 5]
    assert verified == set(run.complete_checkpoints())
    flip(run.checkpoint(1) / "state.json")
    checkpoint.prune(run, 2, 1, set())
    assert [checkpoint_step(path) for path in run.complete_checkpoints()] == [1, 4, 5], "a damaged best does not count"


def test_nothing_is_written_to_a_disk_that_is_too_small(run: RunDirectory, monkeypatch) -> None:
    checkpoint.write(run, contents(1))
    monkeypatch.setattr(checkpoint, "_SMALL_FILES_BYTES", 2**60)
    with refusal(MachineError, "1,15"):  # the bytes that are needed
        checkpoint.write(run, contents(2))
    assert {path.name for path in run.checkpoints.iterdir()} == {"latest", "step-00000001"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_non_finite_weights_of_any_width_are_detected(dtype: torch.dtype) -> None:
    weight = torch.tensor([1.0, -448.0])
    assert weight_files.is_finite(weight.to(dtype))
    weight[1] = torch.nan
    assert not weight_files.is_finite(weight.to(dtype))


def test_unreadable_folders_and_files_are_named(run: RunDirectory, monkeypatch) -> None:
    folder = checkpoint.write(run, contents())

    def failing(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", failing)
        assert checkpoint.problems_of(folder) == ["cannot be read: Input/output error"]
    monkeypatch.setattr(checkpoint.hashlib, "file_digest", failing)
    assert checkpoint.problems_of(folder)[0] == "a.safetensors cannot be read: Input/output error"
