"""A number that is not finite: in the base, in one gradient or loss, and one that stays."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jobs import sampled, write_rows
from messages import refusal
from safetensors.torch import load_file, save_file
from steps import before_each_step, spoil_gradient, spoil_losses

import finetune
from finetune.errors import ArtifactError, NumbersError
from finetune.report.terminal import Terminal
from finetune.storage.rundir import RunDirectory, checkpoint_step
from finetune.training.guards import SKIPS_IN_A_ROW, Skips, Spikes, remedy
from finetune.training.loop import Loop

FEW = ["data.eval=none", "training.eval_every=null", "optimizer.kind=adamw_8bit"]

# -- in the base, whose file and tensor are named, and not the learning rate ------------------------------------------

# Every row meets it, and a layer below NF4 as the quantization leaves it on this device.
EMBEDDING, NORM = "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"
PROJECTION = "model.layers.1.mlp.up_proj.weight"


def damaged(base: Path, folder: Path, tensor: str, numbers: int | None = None) -> Path:
    """A copy of the base with NaN in the first `numbers` of the tensor, or in all."""
    file = shutil.copytree(base, folder) / "model.safetensors"
    tensors = load_file(file)
    tensors[tensor].view(-1)[:numbers] = math.nan
    save_file(tensors, file, {"format": "pt"})
    return folder


def refused(tensor: str, use: Callable[[], object]) -> None:
    with refusal(ArtifactError, "model.safetensors:", f"`{tensor}`"):
        use()


@pytest.mark.usefixtures("one_sample_answer")
@pytest.mark.parametrize(
    ("tensor", "numbers", "job"),
    [
        (EMBEDDING, None, []),
        (NORM, None, []),
        (EMBEDDING, None, ["data.train={rows}", "data.eval=none"]),
        (NORM, None, ["data.train={rows}", "data.eval=none"]),
        (PROJECTION, 1, [*FEW, "quantization.kind=none"]),
    ],
    ids=["embedding", "norm", "embedding, no questions", "norm, no questions", "one number"],
)
def test_nan_in_the_base_is_refused_by_its_file_and_tensor(
    quick, shallow_base: Path, tmp_path: Path, tensor: str, numbers: int | None, job: list[str]
) -> None:
    base = damaged(shallow_base, tmp_path / "base", tensor, numbers)
    (tmp_path / "rows.txt").write_text("a line of text\n" * 20)
    job = [each.format(rows=tmp_path / "rows.txt") for each in job]
    refused(tensor, lambda: finetune.train(quick(f"model.name={base}", *job)))


@pytest.mark.parametrize("tensor", sampled([EMBEDDING, NORM], EMBEDDING))
def test_answers_evaluation_and_merge_refuse_it_too(
    tiny_base: Path, run: RunDirectory, tmp_path: Path, tensor: str
) -> None:
    base = damaged(tiny_base, tmp_path / "base", tensor)
    run.config_file.write_text(run.config_file.read_text().replace("builtin:tiny-llama", str(base)))
    kept = run.adapter / "fingerprint.json"  # of an earlier version: another base would be refused for that alone
    kept.write_text(json.dumps({"tokenizer": json.loads(kept.read_text())["tokenizer"]}))
    refused(tensor, lambda: finetune.generate(run, "x", max_new_tokens=2))
    refused(tensor, lambda: finetune.generate(run, "x", which="base", max_new_tokens=2))
    refused(tensor, lambda: finetune.evaluate(run))
    refused(tensor, lambda: finetune.merge(run, terminal=Terminal(quiet=True)))


def test_a_sound_base_is_not_blamed(quick) -> None:
    job = quick(*FEW, "optimizer.weight_decay=1e9", "training.max_steps=8").changed({"training.learning_rate": 1e9})
    with refusal(NumbersError, "learning_rate"):
        finetune.train(job)


# -- in a step ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Weights and optimizer states at the beginning of each step."""
    found: list[dict[str, torch.Tensor]] = []

    def act(loop: Loop) -> None:
        tensors = {name: weight for name, weight in loop.step.model.named_parameters() if weight.requires_grad}
        for number, values in enumerate(loop.step.engine.optimizer.state.values()):
            tensors |= {f"{number}.{name}": torch.as_tensor(value) for name, value in values.items()}
        found.append({name: tensor.detach().clone() for name, tensor in tensors.items()})

    before_each_step(monkeypatch, act)
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_one_infinite_gradient_is_skipped_and_written_down(quick, states, monkeypatch) -> None:
    spoil_gradient(monkeypatch, 3)
    run = finetune.train(quick(*FEW, "training.max_steps=5")).run
    lines = run.metrics()
    assert [line["step"] for line in lines if line.get("skipped")] == [3]
    assert [line["grad_norm"] is None for line in lines] == [False, False, True, False, False]
    assert all(math.isfinite(line["loss"]) for line in lines)
    (event,) = [event for event in run.events() if event["event"] == "update_skipped"]
    assert (event["step"], event["reason"], event["total"]) == (3, "grad_norm is not finite", 1)
    # states[n] is how step n + 1 began.
    assert not equal(states[1], states[2])
    assert equal(states[2], states[3]), "neither a weight nor a moment nor a step count has changed"
    assert not equal(states[3], states[4])
    assert lines[3]["learning_rate"] == lines[2]["learning_rate"], "nor has the schedule gone on, as under loss scaling"
    assert lines[4]["learning_rate"] < lines[3]["learning_rate"]
    assert all(tensor.isfinite().all() for tensor in load_file(run.adapter / "adapter_model.safetensors").values())


def test_losses_that_stay_infinite_stop_the_run_although_their_gradients_are_finite(quick, tmp_path: Path) -> None:
    """Of a margin the gradient is 1 at most, and the loss of four that are as large as a number can be is infinite."""
    rows = [{"prompt": f"{n}? ", "chosen": "Because.", "rejected": "No.", "margin": 3e38} for n in range(40)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    config = quick(
        f"data.train={file}", "data.eval=none", "training.eval_every=null", "training.objective=reward",
        "data.format=pairs_with_margin", "training.precision=fp32", "training.max_steps=6",
    )  # fmt: skip
    with refusal(NumbersError, SKIPS_IN_A_ROW) as stopped:
        finetune.train(config)
    assert stopped.value.exit_code == 5
    run = RunDirectory(config.output.dir)
    lines = run.metrics()
    assert [(line["loss"], line["skipped"]) for line in lines] == [(None, True)] * SKIPS_IN_A_ROW
    assert all(line["grad_norm"] is not None for line in lines)
    assert not run.adapter.exists()


def test_a_fault_that_stays_stops_at_the_last_finite_checkpoint(quick, monkeypatch) -> None:
    config = quick(*FEW, "training.max_steps=9", "output.save_every=2")
    with monkeypatch.context() as patch, refusal(NumbersError, "grad_norm", "step 7") as stopped:
        spoil_gradient(patch, 3, 5, 6, 7, 8, 9)
        finetune.train(config)
    assert stopped.value.exit_code == 5
    run = RunDirectory(config.output.dir)
    assert [line["step"] for line in run.metrics() if line.get("skipped")] == [3, 5, 6, 7]
    saved = run.complete_checkpoints()
    assert [checkpoint_step(path) for path in saved] == [4, 6]
    assert str(saved[-1]) in str(stopped.value)
    for path in saved:
        weights = load_file(path / "adapter_model.safetensors")
        assert all(tensor.isfinite().all() for tensor in weights.values())
    assert not run.adapter.exists()
    assert finetune.train(config).run.finished, "without the fault it goes on from there"


def test_a_run_whose_every_update_was_skipped_ends_in_5_and_publishes_nothing(
    quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says so again, at the same command; with more steps it goes on."""
    config = quick(*FEW, "training.max_steps=2")
    run = RunDirectory(config.output.dir)
    with monkeypatch.context() as patch:
        spoil_losses(patch, 1, 2)
        for _ in range(2):
            with refusal(NumbersError, "step 2") as stopped:
                finetune.train(config)
            assert stopped.value.exit_code == 5
            assert not run.finished
            assert not run.adapter.exists()
    assert finetune.train(quick(*FEW, "training.max_steps=4")).run.finished
    shown = [(line.get("skipped", False), line["loss"] is None) for line in run.metrics()]
    assert shown == [(True, True), (True, True), (False, False), (False, False)]


def test_an_evaluation_before_the_first_update_is_not_the_best_of_training(
    quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rate is so high that the base, evaluated again after the skipped step, stays the best."""
    spoil_losses(monkeypatch, 1)
    worse = ["training.learning_rate=1", "training.schedule=constant", "training.max_grad_norm=0"]
    config = quick("training.eval_every=1", "output.best=true", "output.save_every=1", *worse)
    result = finetune.train(config)
    base, skipped, *trained = (line["eval_loss"] for line in result.evaluations)
    assert skipped == base < min(trained)
    assert any(
        tensor.any()
        for name, tensor in load_file(result.run.adapter / "adapter_model.safetensors").items()
        if "lora_B" in name
    )


def test_the_advice_fits_the_precision_and_what_was_trained() -> None:
    assert "learning_rate" not in remedy(0, scaled=True) + remedy(0, scaled=False)
    assert "fp16" not in remedy(0, scaled=False) + remedy(9, scaled=False)
    assert "fp16" in remedy(9, scaled=True)


def test_skips_are_too_many_only_in_a_row_and_not_while_the_loss_scale_falls() -> None:
    skips, row = Skips(), [True] * (SKIPS_IN_A_ROW - 1)
    assert not any(skips.see(skipped, None) for skipped in [*row, False, *row, False])
    assert not any(skips.see(True, scale) for scale in (65536.0, 32768.0, 16384.0, 8192.0))
    assert [skips.see(True, None) for _ in range(SKIPS_IN_A_ROW)] == [*[False] * (SKIPS_IN_A_ROW - 1), True]
    assert skips.total == 3 * SKIPS_IN_A_ROW + 2
    skips = Skips()
    assert not any(skips.see(True, 2.0**power) for power in range(16, -1, -1))
    assert skips.see(True, 0.5), "the scale is used up"
    assert not skips.see(False, None)


def losses(count: int) -> list[float]:
    """Noise around 2, the same each time."""
    return [2 + 0.1 * math.sin(7 * number) for number in range(count)]


def test_a_spike_of_the_loss_is_reported_once() -> None:
    spikes = Spikes()
    assert not any(spikes.see(loss) for loss in losses(60))
    assert spikes.see(4.0) == pytest.approx(2, abs=0.1)
    assert spikes.see(4.0) is None, "still above"
    assert spikes.see(2.0) is None
    assert spikes.see(4.0) is not None, "once more"


def test_losses_that_are_not_reported_as_a_spike() -> None:
    spikes = Spikes()
    assert not any(spikes.see(loss) for loss in [9.0, 3.0, *losses(10)]), "too early to tell"
    assert not any(Spikes().see(loss) for loss in [None, math.nan, math.inf])
    even = Spikes()
    assert not any(even.see(loss) for loss in [*[0.01] * 40, 0.08]), "hundreds of deviations, and next to nothing"
    falling = Spikes()
    assert not any(falling.see(5 / (1 + number / 10)) for number in range(200))


def test_a_spike_is_an_event(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(loop: Loop) -> None:
        if loop.progress.step + 1 == spoilt:
            for name, weight in loop.step.model.named_parameters():
                if "lora_B" in name:
                    weight.data += 1

    spoilt = 5
    before_each_step(monkeypatch, act)
    monkeypatch.setattr(Spikes, "AT_LEAST", spoilt - 1)
    even = ["training.batch_size=24", "training.micro_batch=24", "training.learning_rate=1e-6"]
    run = finetune.train(quick(*FEW, *even, f"training.max_steps={spoilt}")).run
    (spike,) = [event for event in run.events() if event["event"] == "loss_spike"]
    assert spike["step"] == spoilt
    assert spike["loss"] == run.metrics()[-1]["loss"] > spike["median"]
