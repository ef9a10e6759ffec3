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
from children import Children
from jobs import sampled
from messages import refusal
from safetensors.torch import load_file
from steps import spoil_gradient, spoil_losses
from test_sharded_ranks import EXACT, ROWS, assert_close, weights
from together import Together, assert_all
from torch.utils import cpp_extension
from transformers import AutoConfig

import finetune
from finetune.config import Config, DistributedSection
from finetune.errors import ConfigError, MachineError, NumbersError
from finetune.model.distributed import zero
from finetune.storage.rundir import RunDirectory

pytest.importorskip("deepspeed")

ZERO = ["distributed.kind=deepspeed"]
GENTLE = [*EXACT, "training.learning_rate=0.03"]
KINDS = {
    "nf4": ["distributed.offload=cpu"],
    "16 bit": ["quantization.kind=none", "memory.checkpointing=keep-products"],
    "full": ["quantization.kind=none", "adapter.kind=none"],
}
SPOIL_LOSSES = functools.partial(spoil_losses, gradients=False)
Make = Callable[..., Together]


@pytest.fixture(scope="module")
def job(children: Children, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("jobs")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(rows_file.read_text().splitlines(keepends=True)[:21]))

    def make(*overrides: str, run: str) -> Together:
        shared = [f"data.train={rows}", "adapter.dropout=0"]
        return Together(children, [*ROWS, *shared, *overrides], RunDirectory(folder / run))

    return make


@pytest.fixture(scope="module")
def alone(job: Make) -> Callable[[str], RunDirectory]:
    """What one process trains without DeepSpeed."""
    runs: dict[str, RunDirectory] = {}

    def train(kind: str) -> RunDirectory:
        if kind not in runs:
            unshared = [key for key in KINDS[kind] if not key.startswith("distributed")]
            one = job(*GENTLE, *unshared, run=f"alone {kind}")
            assert_all(one.go(1), 0)
            runs[kind] = one.run
        return runs[kind]

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage"),
    sampled([("nf4", "weights"), ("16 bit", "gradients"), ("full", "optimizer")], ("nf4", "weights")),
)
def test_ranks_train_what_one_process_trains(
    job: Make, alone: Callable[[str], RunDirectory], kind: str, stage: str
) -> None:
    shared = job(*GENTLE, *KINDS[kind], *ZERO, f"distributed.stage={stage}", run=f"{kind} {stage}")
    assert_all(shared.go(2), 0)
    assert_close(shared.run, alone(kind))


def test_adapters_on_experts_are_refused_where_they_would_not_be_gathered(
    quick: Callable[..., Config], tiny_base: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(tiny_base, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    AutoConfig.for_model("mixtral", vocab_size=2048, hidden_size=32, num_attention_heads=4).save_pretrained(base)
    mixture = [f"model.name={base}", "model.weights=random", "quantization.kind=none", "optimizer.kind=sgd", *ZERO]
    with refusal(ConfigError, "distributed.stage"):
        finetune.train(quick(*mixture))


@pytest.mark.long
def test_killed_ranks_resume_and_one_process_goes_on(job: Make) -> None:
    """With every weight trained, and without DeepSpeed, which reads and writes the same files."""
    full = ["optimizer.kind=adamw_torch_fused", "optimizer.weight_decay=0.1", "training.learning_rate=0.001"]
    full += KINDS["full"]
    alone, killed = job(*full, run="one"), job(*full, *ZERO, run="killed")
    assert_all(alone.go(1), 0)
    killed.kill(2, step=4, saved=2)
    fewer = job(*full, run="fewer")
    shutil.copytree(killed.run.path, fewer.run.path)
    assert_all(killed.go(2), 0)
    assert_close(killed.run, alone.run)
    assert_all(fewer.go(1), 0)
    assert [event["step"] for event in fewer.run.events() if event["event"] == "resumed"] == [2]
    assert_close(fewer.run, alone.run)


@pytest.mark.long
def test_one_process_alone_keeps_slices_on_the_host(job: Make, alone: Callable[[str], RunDirectory]) -> None:
    shared = job(*GENTLE, *ZERO, "distributed.offload=cpu", run="host")
    assert_all(shared.go(1), 0)
    assert_close(shared.run, alone("nf4"))


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
    plain = ["training.precision=fp32", "adapter.dropout=0", *GENTLE]
    expected = finetune.train(quick(*plain, run="plain")).run
    found = finetune.train(quick(*plain, *ZERO, f"distributed.stage={stage}", run=stage)).run
    assert ["skipped" in line for line in found.metrics() if "loss" in line] == [False, True, False, False]
    assert weights(found).keys() == weights(expected).keys()
    for name, tensor in weights(expected).items():
        torch.testing.assert_close(weights(found)[name], tensor, rtol=0, atol=1e-5)
    assert "LOCAL_RANK" not in os.environ


def test_a_checkpoint_from_before_the_first_update_has_no_states_and_is_resumed(
    quick: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only step was skipped."""
    monkeypatch.setenv("LOCAL_RANK", "0")  # which DeepSpeed's start would leave to later tests where a run fails
    spoil_gradient(monkeypatch, 1)
    adam = ["training.precision=fp32", "adapter.dropout=0", "optimizer.kind=adamw_torch_fused", "kernels.fused=off"]
    adam += ["training.learning_rate=0.001"]  # Adam divides by what may be rounding alone
    for run in ("plain", "zero"):
        begun = RunDirectory((config := quick(*adam, "training.max_steps=1", run=run)).output.dir)
        with refusal(NumbersError, "step 1"):
            finetune.train(config)
        assert load_file(begun.complete_checkpoints()[-1] / "optimizer.safetensors") == {}
    expected = finetune.train(quick(*adam, "training.max_steps=3", run="plain")).run
    found = finetune.train(quick(*adam, *ZERO, "training.max_steps=3", run="zero")).run
    for name, tensor in weights(expected).items():
        torch.testing.assert_close(weights(found)[name], tensor, rtol=0, atol=1e-5)


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


@pytest.mark.slow
@pytest.mark.skipif(not built("async_io"), reason="DeepSpeed's async_io is not compiled here (libaio, ten minutes)")
@pytest.mark.parametrize("processes", [1, 2])
def test_optimizer_states_on_a_disk_are_updated_saved_and_resumed(job: Make, tmp_path: Path, processes: int) -> None:
    # Of a quarter of a million numbers a rank, below which DeepSpeed keeps them in memory.
    full = ["optimizer.kind=adamw_torch_fused", "training.learning_rate=0.001", *KINDS["full"]]
    disk = [*ZERO, "distributed.offload=nvme", f"distributed.nvme_path={tmp_path}"]
    alone, killed = job(*full, run=f"memory {processes}"), job(*full, *disk, run=f"disk {processes}")
    assert_all(alone.go(1), 0)
    killed.kill(processes, step=4, saved=2)
    assert list(tmp_path.glob("finetune-*/**/*.swp"))
    assert_all(killed.go(processes), 0)
    assert_close(killed.run, alone.run)
    assert not list(tmp_path.iterdir()), "neither what the killed ranks left nor what these wrote"


@pytest.mark.parametrize("place", ["missing", "file"])
def test_a_disk_that_cannot_be_used_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    section = DistributedSection(kind="deepspeed", offload="nvme", nvme_path=str(tmp_path / place))
    with refusal(MachineError, "nvme_path"):
        zero.check(section, torch.device("cpu"))


def test_a_disk_that_no_rank_can_use_ends_all_with_one_message(job: Make, tmp_path: Path) -> None:
    disk = [*ZERO, "distributed.offload=nvme", f"distributed.nvme_path={tmp_path / 'missing'}"]
    first, second = job(*disk, run="nowhere").go(2)
    assert (first.code, second.code) == (4, 4), first.output + second.output
    assert " ".join(first.output.split()).startswith("error: `distributed.nvme_path`: nothing can be written to")
    assert second.output == "", "the first one has said it"


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
