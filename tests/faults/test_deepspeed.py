"""Ranks that share a model by DeepSpeed's ZeRO train what one process trains, and any number of them resumes."""

from __future__ import annotations

import functools
import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import sampled
from messages import refusal
from rank_jobs import EXACT, PLAIN, UNEVALUATED, ZERO, Jobs, assert_close, weights
from safetensors.torch import load_file
from steps import spoil_gradient, spoil_losses
from together import assert_all, assert_refused
from torch.utils import cpp_extension
from transformers import AutoConfig

import finetune
from finetune.config import Config, DistributedSection
from finetune.errors import ConfigError, MachineError, NumbersError
from finetune.extras.zero import engine as zero
from finetune.storage.rundir import RunDirectory

pytest.importorskip("deepspeed")

SPOIL_LOSSES = functools.partial(spoil_losses, gradients=False)
PRECISE = ["training.precision=fp32", "adapter.dropout=0", *UNEVALUATED]


def test_adapters_on_experts_are_refused_where_they_would_not_be_gathered(
    quick: Callable[..., Config], tiny_base: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(tiny_base, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    AutoConfig.for_model("mixtral", vocab_size=2048, hidden_size=32, num_attention_heads=4).save_pretrained(base)
    mixture = [f"model.name={base}", "model.weights=random", "quantization.kind=none", "optimizer.kind=sgd", ZERO]
    with refusal(ConfigError, "distributed.stage"):
        finetune.train(quick(*mixture))


def test_slices_of_a_tensor_that_ranks_cannot_share_evenly_end_in_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, slices = torch.arange(1.0, 9.0).view(2, 4), []
    monkeypatch.setattr(zero.ranks, "world_size", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(zero.ranks, "rank", lambda rank=rank: rank)
        slices.append(zero.partition_of(whole, 3).tolist())
    assert slices == [[1, 2, 3], [4, 5, 6], [7, 8, 0]]


@pytest.mark.parametrize("stage", sampled(["gradients", "weights"], "weights"))
@pytest.mark.parametrize("spoil", sampled([spoil_gradient, SPOIL_LOSSES], spoil_gradient))
def test_an_update_that_is_not_finite_is_skipped(
    quick: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., None], stage: str
) -> None:
    """And nothing of it stays, nor of the warm-up, which is such an update, nor of the start as a launcher's."""
    spoil(monkeypatch, 2)
    plain = [*EXACT, *UNEVALUATED, "training.learning_rate=0.03", "training.max_steps=3"]
    expected = finetune.train(quick(*plain, run="plain")).run
    found = finetune.train(quick(*plain, ZERO, f"distributed.stage={stage}", run=stage)).run
    assert ["skipped" in line for line in found.metrics() if "loss" in line] == [False, True, False]
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=1e-5)
    assert "LOCAL_RANK" not in os.environ


@pytest.mark.long
def test_a_checkpoint_from_before_the_first_update_has_no_states_and_is_resumed(
    quick: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only step was skipped."""
    monkeypatch.setenv("LOCAL_RANK", "0")  # which DeepSpeed's start would leave to later tests where a run fails
    spoil_gradient(monkeypatch, 1)
    adam = [*PRECISE, "optimizer.kind=adamw_torch_fused", "kernels.fused=off"]
    adam += ["training.learning_rate=0.001"]  # Adam divides by what may be rounding alone
    for run in ("plain", "zero"):
        begun = RunDirectory((config := quick(*adam, "training.max_steps=1", run=run)).output.dir)
        with refusal(NumbersError, "step 1"):
            finetune.train(config)
        assert load_file(begun.complete_checkpoints()[-1] / "optimizer.safetensors") == {}
    expected = finetune.train(quick(*adam, "training.max_steps=2", run="plain")).run
    found = finetune.train(quick(*adam, ZERO, "training.max_steps=2", run="zero")).run
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=1e-5)


def test_the_norm_of_a_dropped_update_is_on_the_device() -> None:
    """Beside the loss, with which it is read."""
    engine: Any = zero.Zero.__new__(zero.Zero)
    engine._engine = SimpleNamespace(step=lambda: None, get_global_grad_norm=lambda: math.inf)
    engine._device = torch.device("meta")
    assert engine.clip(1.0).device.type == "meta"


def test_the_schedule_knows_of_updates_that_deepspeed_makes() -> None:
    """Or torch warns that rates change before the first one."""
    engine: Any = zero.Zero.__new__(zero.Zero)
    engine.optimizer = zero.Rates([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.1}])
    schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda done: 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.update()
        schedule.step()


def test_what_another_user_left_on_a_disk_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "finetune-other").write_text("not a directory, as one that cannot be entered is none to us")
    zero.Disk(str(tmp_path), 1).close()
    assert [path.name for path in tmp_path.iterdir()] == ["finetune-other"]


def built(name: str) -> bool:
    """Whether an extension was compiled here, which takes minutes."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return any(Path(root).glob(f"**/{name}.so"))


@pytest.mark.skipif(not built("async_io"), reason="DeepSpeed's async_io is not compiled here (libaio, ten minutes)")
@pytest.mark.parametrize("processes", [1, 2])
def test_optimizer_states_on_a_disk_are_updated_saved_and_resumed(
    odd_jobs: Jobs, tmp_path: Path, processes: int
) -> None:
    # Of a quarter of a million numbers a rank, below which DeepSpeed keeps them in memory.
    full = [PLAIN, "adapter.kind=none", "training.precision=fp32", "training.batch_size=6", "training.micro_batch=1",
            "training.max_steps=5", "output.save_every=2", "optimizer.kind=adamw_torch_fused",
            "training.learning_rate=0.001"]  # fmt: skip
    killed = odd_jobs(*full, ZERO, "distributed.offload=nvme", f"distributed.nvme_path={tmp_path}")
    killed.kill(processes, step=4, saved=2)
    assert list(tmp_path.glob("finetune-*/**/*.swp"))
    assert_all(killed.go(processes), 0)
    assert_close(killed.run, odd_jobs.alone(*full))
    assert not list(tmp_path.iterdir()), "neither what the killed ranks left nor what these wrote"


@pytest.mark.parametrize("place", ["missing", "file"])
def test_a_disk_that_cannot_be_used_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    section = DistributedSection(kind="deepspeed", offload="nvme", nvme_path=str(tmp_path / place))
    with refusal(MachineError, "nvme_path"):
        zero.check(section, torch.device("cpu"))


def test_a_disk_that_no_rank_can_use_ends_all_with_one_message(jobs: Jobs, tmp_path: Path) -> None:
    disk = [ZERO, "distributed.offload=nvme", f"distributed.nvme_path={tmp_path / 'missing'}"]
    assert_refused(jobs(*disk).go(2), 4, "error: `distributed.nvme_path`: nothing can be written to")


def test_a_disk_without_room_is_refused_and_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=15))
    with refusal(MachineError, "take up to 16 bytes; free some"):
        zero.Disk(str(tmp_path), 1)
    assert not list(tmp_path.iterdir())


def test_async_io_that_cannot_be_compiled_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "_async_io", lambda: SimpleNamespace(is_compatible=lambda: False))
    section = DistributedSection(kind="deepspeed", offload="nvme", nvme_path=str(tmp_path))
    with refusal(MachineError, "libaio"):
        zero.check(section, torch.device("cpu"))
