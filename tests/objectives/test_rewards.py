"""Reward models: the loss, the head, what is saved, and what transformers and PEFT make of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import metric, same_adapter
from steps import assert_gradients_close, before_each_step, gradients, micro_batches, ready
from test_two_segments import pairs, read_pair

import finetune
from finetune import settings
from finetune.data.encoded import segments_of
from finetune.data.formats import FORMATS, RowFormat
from finetune.objectives import rewards
from finetune.storage.rundir import RunDirectory


@pytest.fixture
def job(tmp_path: Path, quick, monkeypatch: pytest.MonkeyPatch):
    """A function from overrides to a reward model on pairs with margins, in fp32."""
    monkeypatch.setitem(FORMATS, "pairs", RowFormat("pairs", ("prompt", "chosen", "rejected"), read_pair, ("margin",)))
    monkeypatch.setitem(settings.CHOICES, "data.format", {**settings.CHOICES["data.format"], **FORMATS})
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in pairs(24)))

    def make(*overrides: str, run: str = "run") -> Any:
        return quick(
            f"data.train={file}", "data.format=pairs", "training.objective=reward", "quantization.kind=none",
            "training.precision=fp32", "adapter.dropout=0", "data.max_length=64", *overrides, run=run,
        )  # fmt: skip

    return make


EIGHT = ["training.batch_size=8", "training.micro_batch=8", "data.eval=none", "training.eval_every=null"]


def test_the_loss_has_the_values_of_its_formula() -> None:
    def of(chosen: float, rejected: float, margin: float = 0, centering: float = 0) -> float:
        return float(
            rewards.loss_of_pairs(torch.tensor(float(chosen)), torch.tensor(float(rejected)), margin, centering)
        )

    assert of(0, 0) == pytest.approx(math.log(2), abs=1e-6)
    assert of(2, 1, margin=1) == pytest.approx(math.log(2), abs=1e-6)
    assert of(2, -1, centering=0.01) == pytest.approx(math.log1p(math.exp(-3)) + 0.01, abs=1e-6)


@pytest.mark.parametrize("packing", ["false", "true"])
def test_the_gradient_is_that_of_transformers_classifier_however_the_step_is_split(job, packing: str) -> None:
    loop = ready(job(*EIGHT, "preference.reward_centering=0.01", f"data.packing={packing}"))
    rows = [loop.steps.rows[number] for number in range(8)]
    (whole,) = micro_batches(loop, range(8), 8)
    loss, expected = gradients(loop, [whole])
    model = loop.step.model.get_base_model()
    own = type(model).__mro__[1].forward  # transformers' LlamaForSequenceClassification
    losses = []
    with torch.no_grad():
        for each in rows:
            scores = [float(own(model, input_ids=torch.tensor([one.input_ids])).logits) for one in segments_of(each)]
            losses.append(float(rewards.loss_of_pairs(*map(torch.tensor, scores), each["margin"], 0.01)))
    assert loss == pytest.approx(sum(losses) / 8, rel=1e-5)
    for size in (3, 1):
        again, found = gradients(loop, micro_batches(loop, range(8), size))
        assert again == pytest.approx(loss, rel=1e-5)
        assert_gradients_close(found, expected)


@pytest.mark.parametrize("packing", ["false", "true"])
def test_a_reward_model_learns_as_forecast_and_resumes_to_the_same_bits(job, tmp_path: Path, packing: str) -> None:
    keys = ["training.max_steps=6", "training.eval_every=3", "memory.check=warn", "output.merge=false",
            f"data.packing={packing}", "training.learning_rate=0.01"]  # fmt: skip
    finetune.train(job(*keys, run="whole"))
    whole = RunDirectory(tmp_path / "whole")
    losses = metric(whole, "loss")
    assert losses[-1] < losses[0]
    assert metric(whole, "rewards_accuracies")[-1] == 1
    for difference in json.loads((whole.path / "forecast.json").read_text())["differences"]:
        assert abs(difference["relative"]) < 0.01, difference

    class Stopped(Exception):
        pass

    def stop(loop: Any) -> None:
        if loop.progress.step == 4:
            raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        before_each_step(patch, stop)
        with pytest.raises(Stopped):
            finetune.train(job(*keys, "output.save_every=3", run="halted"))
    finetune.train(job(*keys, "output.save_every=3", run="halted"))
    assert same_adapter(whole, RunDirectory(tmp_path / "halted"))
