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
    loop = ready(quick(*FEW))
    trained, optimizer = loop.step.trained(), loop.step.engine.optimizer
    before, after = [weight.detach().clone() for weight in trained], []
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4.0)):
        loop.step = replace(loop.step, engine=OneProcess(loop.step.model, optimizer, scaler))
        loop.step.forward_backward(micro_batches(loop, [0, 1], 2), 10)
        loop.step.clip()
        loop.step.update()
        after.append([weight.detach().clone() for weight in trained])
        optimizer.state.clear()
        with torch.no_grad():
            for weight, value in zip(trained, before, strict=True):
                weight.copy_(value)
                weight.grad = None
    assert any((one != value).any() for one, value in zip(after[0], before, strict=True))
    torch.testing.assert_close(after[1], after[0], rtol=0, atol=1e-7)


def test_a_nan_that_stays_stops_once_the_scale_is_used_up(quick, scaled, monkeypatch) -> None:
    config = quick(*FEW, "training.max_steps=9")
    spoil_losses(monkeypatch, *range(3, 10))
    with refusal(NumbersError, "loss is not finite") as stopped:
        finetune.train(config)
    assert stopped.value.exit_code == 5
    assert scaled == [4, 4, 2, 1, 0.5]
    assert len(RunDirectory(config.output.dir).metrics()) == 5
