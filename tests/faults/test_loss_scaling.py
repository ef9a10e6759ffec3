"""A NaN loss in fp16. On a GPU: tests/gpu/test_gpu_oom_retry.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from messages import refusal
from steps import micro_batches, ready, spoil_losses

import finetune
from finetune.errors import NumbersError
from finetune.model.distributed.engine import Engine, OneProcess
from finetune.storage.rundir import RunDirectory
from finetune.training import strategies
from finetune.training.guards import Skips
from finetune.training.step import Step
from finetune.training.strategies import Given

FEW = ["data.eval=none", "training.eval_every=null", "optimizer.kind=adamw_torch_fused"]


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """torch's own scaler, on the CPU, around steps in float32; the loss scale after each step.

    The fused optimizer is the one to which torch's scaler leaves it to skip the update.
    """
    scales: list[float] = []
    make, rescale = strategies.engine, Step.rescale

    def with_scaler(given: Given) -> Engine:
        return make(replace(given, scaler=torch.amp.GradScaler("cpu", init_scale=4.0)))

    def recorded(self: Step) -> None:
        rescale(self)
        assert self.engine.scaler is not None
        scales.append(self.engine.scaler.get_scale())

    monkeypatch.setattr(strategies, "engine", with_scaler)
    monkeypatch.setattr(Step, "rescale", recorded)
    return scales


def test_the_scaler_backs_off_and_a_nan_is_never_shown_as_0(quick, scaled, monkeypatch) -> None:
    spoil_losses(monkeypatch, 2, 3)
    run = finetune.train(quick(*FEW, "training.max_steps=5")).run
    lines = run.metrics()
    assert [line["loss"] is None for line in lines] == [False, True, True, False, False]
    assert all(line["loss"] > 0 for line in lines if line["loss"] is not None)
    assert [line.get("skipped", False) for line in lines] == [False, True, True, False, False]
    assert scaled == [4, 2, 1, 1, 1]
    assert len({line["learning_rate"] for line in lines[1:4]}) == 1, "the schedule waits"
    assert lines[4]["learning_rate"] < lines[3]["learning_rate"]
    assert run.finished


def test_an_update_under_loss_scaling_is_that_of_the_gradients_without(quick) -> None:
    def updated(scaler: torch.amp.GradScaler | None) -> dict[str, torch.Tensor]:
        loop = ready(quick(*FEW, "training.max_steps=5", run=f"scaled-{scaler is not None}"))
        loop.step = replace(loop.step, engine=OneProcess(loop.step.model, loop.step.engine.optimizer, scaler))
        for group in loop.step.engine.optimizer.param_groups:
            group["lr"] = 1e-3
        inputs = micro_batches(loop, [0, 1], 2)
        before = {name: weight.detach().clone() for name, weight in loop.step.model.named_parameters()}
        loop.step.forward_backward(inputs, 10)
        loop.step.clip()
        loop.step.update()
        return {
            name: weight - before[name]
            for name, weight in loop.step.model.named_parameters()
            if weight.grad is not None
        }

    plain, scaled_by_4 = updated(None), updated(torch.amp.GradScaler("cpu", init_scale=4.0))
    assert plain
    assert any(change.any() for change in plain.values())
    for name, change in plain.items():
        torch.testing.assert_close(scaled_by_4[name], change, rtol=1e-4, atol=1e-7)


def test_a_nan_that_stays_stops_once_the_scale_is_used_up(quick, scaled, monkeypatch) -> None:
    config = quick(*FEW, "training.max_steps=9")
    spoil_losses(monkeypatch, *range(3, 10))
    with refusal(NumbersError, "loss is not finite") as stopped:
        finetune.train(config)
    assert stopped.value.exit_code == 5
    assert scaled == [4, 4, 2, 1, 0.5]
    assert len(RunDirectory(config.output.dir).metrics()) == 5


def test_skips_under_loss_scaling_are_too_many_when_the_scale_is_used_up() -> None:
    skips = Skips()
    assert not any(skips.see(True, 2.0**power) for power in range(16, -1, -1))
    assert skips.see(True, 0.5)
    assert not skips.see(False, None)
