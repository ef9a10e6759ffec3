"""Whole runs on a CUDA device: they train, measure, stop at the cap, and what they export is what was trained."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import finetune
from finetune.config import Config, dump
from finetune.runtime.memory_monitor import CudaMeter
from finetune.storage.rundir import RunDirectory

pytestmark = pytest.mark.gpu

OnCard = AbstractContextManager[None]

Configure = Callable[..., Config]
Train = Callable[[str, Path], subprocess.CompletedProcess[str]]
BesideContext = Callable[[int], int]
MIB = 2**20
PAGE = 18 * MIB  # how far a growing segment's last page may reach over a cap, see `inspect.cap`

LARGE = {
    "memory__checkpointing": "none", "memory__check": "off", "training__batch_size": 64, "training__micro_batch": 64,
    "data__max_length": 512,
}  # fmt: skip


def losses(run: RunDirectory) -> list[float]:
    return [line["loss"] for line in run.metrics() if "loss" in line]


def peaks_of(run: RunDirectory) -> dict[str, dict[str, int]]:
    """Peak memory by phase, over the whole run."""
    (trained,) = [event for event in run.events() if event["event"] == "trained"]
    return trained["memory"]


def falls(run: RunDirectory) -> bool:
    """Whether the mean of the last three losses is well below that of the first three."""
    found = losses(run)
    return statistics.fmean(found[-3:]) < 0.9 * statistics.fmean(found[:3])


@pytest.mark.parametrize("quantization", ["nf4", "int8", "fp4", "none"])
def test_every_storage_trains(configure: Configure, device: torch.device, quantization: str) -> None:
    run = finetune.train(configure(quantization__kind=quantization)).run
    assert len(losses(run)) == 12
    assert falls(run)
    assert not run.snapshot_file.exists()


def test_offloaded_checkpoints_train_to_the_same_losses(
    configure: Configure, cuda: torch.device, on_card: OnCard, tmp_path: Path
) -> None:
    kept = finetune.train(configure(output__dir=tmp_path / "kept"))
    offloaded = finetune.train(configure(output__dir=tmp_path / "offloaded", memory__offload="checkpoints"))
    with on_card:
        assert losses(offloaded.run) == pytest.approx(losses(kept.run), rel=2e-2)


def test_fp16_with_loss_scaling_trains(configure: Configure, cuda: torch.device, on_card: OnCard) -> None:
    result = finetune.train(configure(training__precision="fp16", training__max_steps=24))
    with on_card:
        assert falls(result.run)
    (checkpoint,) = result.run.complete_checkpoints()
    with on_card:
        assert json.loads((checkpoint / "state.json").read_text())["scaler"]["scale"] >= 1


@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_a_resumed_run_ends_with_the_same_bits_in_the_same_memory(
    configure: Configure, cuda: torch.device, on_card: OnCard, tmp_path: Path, quantization: str
) -> None:
    def train(name: str, steps: int) -> RunDirectory:
        config = configure(
            output__dir=tmp_path / name, output__save_every=2, training__max_steps=steps,
            quantization__kind=quantization, training__deterministic=True, training__schedule="constant",
            training__warmup=0, adapter__dropout=0.1, adapter__rank=64, optimizer__kind="paged_adamw_8bit",
        )  # fmt: skip
        return finetune.train(config).run

    whole = train("whole", 6)
    for steps in (2, 4, 6):
        stopped = train("stopped", steps)
    with on_card:
        assert losses(stopped) == losses(whole)
    weights = [load_file(run.adapter / "adapter_model.safetensors") for run in (whole, stopped)]
    with on_card:
        assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())
    peaks = [run.metrics()[-1]["memory"]["backward"]["allocated_bytes"] for run in (whole, stopped)]
    with on_card:
        assert peaks[1] == pytest.approx(peaks[0], rel=0.02)


def test_memory_lines_nest_and_a_snapshot_is_written_when_asked_for(
    configure: Configure, cuda: torch.device, on_card: OnCard
) -> None:
    result = finetune.train(
        configure(training__max_steps=3, training__micro_batch=4, data__max_length=512, memory__snapshot=True)
    )
    lines = [line["memory"] for line in result.run.metrics()]
    with on_card:
        assert len(lines) == 3
    for phases in lines:
        with on_card:
            assert {"forward", "backward", "optimizer"} <= set(phases)
        for peak in phases.values():
            with on_card:
                assert 0 < peak["allocated_bytes"] <= peak["reserved_bytes"] <= peak["device_bytes"]
    with on_card:
        assert peaks_of(result.run)["load"]["allocated_bytes"] > 0
    # A phase that measured another one's work would show it here: the update needs no activations.
    with on_card:
        assert lines[-1]["backward"]["allocated_bytes"] > lines[-1]["optimizer"]["allocated_bytes"]
    with on_card:
        assert result.run.snapshot_file.stat().st_size > 0


@pytest.mark.parametrize(
    "room_bytes",
    [
        pytest.param(40 * MIB, id="in-training"),  # takes the weights, and not one row of 512 tokens
        pytest.param(2 * MIB, id="in-loading"),
    ],
)
def test_a_cap_that_is_too_small_ends_with_exit_code_6_and_a_snapshot(
    configure: Configure, train_in_a_process: Train, beside_context: BesideContext, cuda: torch.device, on_card: OnCard,
    tmp_path: Path, room_bytes: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # In a process of its own: the cap holds for the whole process. Segments of fixed size, whose pages are smaller.
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    config = configure(memory__limit=beside_context(room_bytes), **LARGE)
    done = train_in_a_process(dump(config), tmp_path / "capped.yaml")
    with on_card:
        assert done.returncode == 6, done.stderr
    with on_card:
        assert done.stderr.startswith("error: out of memory")
    with on_card:
        assert "Traceback" not in done.stderr
    with on_card:
        assert (tmp_path / "run" / "memory_snapshot.pickle").stat().st_size > 0
    with on_card:
        assert ("The row that does not fit" in done.stderr) == (room_bytes == 40 * MIB)


def test_a_cap_that_takes_fewer_rows_is_trained_within(
    configure: Configure,
    train_in_a_process: Train,
    beside_context: BesideContext,
    cuda: torch.device,
    on_card: OnCard,
    tmp_path: Path,
) -> None:
    changes = {**LARGE, "training__max_steps": 6}
    config = configure(**changes, memory__limit=beside_context(256 * MIB))
    done = train_in_a_process(dump(config), tmp_path / "capped.yaml")
    with on_card:
        assert done.returncode == 0, done.stderr
    capped = RunDirectory(tmp_path / "run")
    splits = [event for event in capped.events() if event["event"] == "micro_batch_split"]
    with on_card:
        assert splits[0]["rows"] == 64
    with on_card:
        assert splits[0]["step"] == 1
    with on_card:
        assert max(peak["reserved_bytes"] for peak in peaks_of(capped).values()) <= 256 * MIB + PAGE
    roomy = finetune.train(configure(**changes, output__dir=tmp_path / "roomy")).run
    with on_card:
        assert losses(capped) == pytest.approx(losses(roomy), rel=2e-2)


def test_a_cap_that_fits_is_kept(
    configure: Configure,
    train_in_a_process: Train,
    beside_context: BesideContext,
    cuda: torch.device,
    on_card: OnCard,
    tmp_path: Path,
) -> None:
    config = configure(memory__limit=beside_context(512 * MIB), memory__check="off")
    done = train_in_a_process(dump(config), tmp_path / "capped.yaml")
    with on_card:
        assert done.returncode == 0, done.stderr
    with on_card:
        assert (
            max(peak["reserved_bytes"] for peak in peaks_of(RunDirectory(tmp_path / "run")).values())
            <= 512 * MIB + PAGE
        )


def test_the_merged_model_is_the_trained_one(configure: Configure, device: torch.device) -> None:
    result = finetune.train(configure())
    proof = finetune.merge(result.run)
    assert proof["error"] <= proof["bound"]
    assert proof["error"] < proof["effect"]
    assert (result.run.merged / "model.safetensors").is_file()


def test_the_meter_sees_a_peak_that_is_gone(cuda: torch.device, on_card: OnCard) -> None:
    meter = CudaMeter()
    meter.reset()
    before = torch.cuda.memory_allocated()
    size_bytes = 64 * 2**20
    torch.empty(size_bytes, dtype=torch.uint8, device=cuda)
    with on_card:
        assert meter.read()["allocated_bytes"] >= before + size_bytes
    meter.reset()
    with on_card:
        assert meter.read()["allocated_bytes"] < before + size_bytes
