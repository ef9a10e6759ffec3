"""KTO: its published values, and a mean over a whole step that no split of the step changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from jobs import EIGHT, in_fp32, metric, sampled, write_rows
from objective_jobs import eight_rows, whole_and_split
from peft import get_peft_model
from steps import (
    assert_gradients_close,
    forecast_that_held,
    gradients,
    gradients_of_trainer,
    micro_batches,
    out_of_memory,
    ready,
    stopped_and_resumed,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetune
from finetune.config import Config
from finetune.data.encoded import IGNORE, segments_of
from finetune.data.prepare import prepare
from finetune.model.source.tokenizer import load_tokenizer
from finetune.objectives import kto
from finetune.objectives.preference import Numbers
from finetune.storage import private
from finetune.training.collator import StepCollator
from finetune.training.eval_loss import HeldOut
from finetune.training.loop import Loop
from finetune.training.oom_retry import Limit


@pytest.mark.parametrize(
    ("ratio", "desirable", "kl", "weights", "expected"),
    [
        (0, True, 0, {}, 0.5),
        (0, False, 0, {"undesirable_weight": 1.5}, 0.75),
        (2, True, 1, {}, 0.475021),
        (-3, False, 1, {}, 0.401312),
        (2, True, 1, {"desirable_weight": 2.0}, 2 * 0.475021),
    ],
)
def test_losses_have_the_values_of_the_paper(
    ratio: float, desirable: bool, kl: float, weights: dict[str, float], expected: float
) -> None:
    numbers = Numbers(beta=0.1, **weights)
    values = torch.tensor([float(ratio)]), torch.tensor([desirable]), torch.tensor(float(kl))
    (found,) = kto.loss_of_answers(*values, numbers).tolist()
    assert found == pytest.approx(expected, abs=1e-6)


# -- in a step ---------------------------------------------------------------------------------------------------------


def answers(number: int, ask: str = "To") -> list[dict[str, Any]]:
    """Answers of different lengths, two of three of them desirable."""
    return [
        {"prompt": f"{ask} {n}. ", "completion": ("yes " if n % 3 else "no ") * (1 + n % 5), "label": n % 3 > 0}
        for n in range(number)
    ]


@pytest.fixture
def job(tmp_path: Path, quick, monkeypatch: pytest.MonkeyPatch):
    """A function from overrides to a KTO job in fp32, eight answers in a step."""
    monkeypatch.setattr(private, "cache_folder", lambda: tmp_path / "cache")
    file = write_rows(tmp_path / "answers.jsonl", answers(24))
    return in_fp32(quick, file, "training.objective=kto", "preference.reference=in_step", "data.max_length=64", *EIGHT)


def moved(config: Config) -> Loop:
    """The loop before its first step, of a model under which most answers are likelier than under the reference."""
    loop = ready(config)
    with torch.no_grad():
        for name, weight in loop.step.model.named_parameters():
            if "lora_B" in name:
                weight.neg_()
    return loop


WEIGHTS = ["preference.desirable_weight=0.8", "preference.undesirable_weight=1.4"]


@pytest.mark.slow
def test_a_step_that_runs_out_of_memory_is_split_with_the_same_mean(job) -> None:
    loop = moved(job("model.name=builtin:tiny-llama", "data.packing=true", "memory.checkpointing=all"))
    (whole,) = micro_batches(loop, range(8), 8)
    loss, expected = gradients(loop, [whole])
    for where in ("forward", "recompute"):  # the pass for the mean, and one after it
        loop.retry.limit = Limit()  # of the pass before
        with out_of_memory(loop, where, whole["input_ids"].numel() // 3) as refused:
            other, found = gradients(loop, [whole])
        assert refused
        assert loop.step.model.training
        assert other == pytest.approx(loss, rel=1e-6)
        assert_gradients_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("packing", sampled(["false", "true"], "false"))
def test_a_run_begins_at_its_reference_and_takes_the_memory_of_its_forecast(job, tmp_path: Path, packing: str) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", answers(6, "Or"))
    keys = [f"data.eval={held_out}", "training.max_steps=2", "training.eval_every=1", "training.learning_rate=0.01"]
    keys += ["adapter.targets=[q_proj]", *(WEIGHTS if packing == "true" else ["adapter.dropout=0.1"])]
    run = finetune.train(job(*keys, f"data.packing={packing}", "memory.check=warn")).run
    first, second = (line for line in run.metrics() if "loss" in line)
    if packing == "false":  # after dropout, an update of zero is zero as well
        assert first["loss"] == metric(run, "eval_loss")[0] == 0.5
    assert [first[name] for name in ("rewards_chosen", "rewards_rejected", "rewards_margins", "kl")] == [0, 0, 0, 0]
    assert first["logps_chosen"] < 0
    assert second["rewards_margins"] == second["rewards_chosen"] - second["rewards_rejected"] != 0
    assert second["kl"] >= 0
    differences = forecast_that_held(run)["differences"]
    assert {"forward", "backward", "optimizer", "evaluation"} <= {each["phase"] for each in differences}


@pytest.mark.long
def test_the_forecast_has_the_pass_of_the_reference(job, tmp_path: Path) -> None:
    alike = [{**each, "completion": "yes " * 5} for each in answers(24)]
    file = write_rows(tmp_path / "alike.jsonl", alike)
    cached = ["preference.reference=cached", "memory.check=warn", "training.micro_batch=4", "training.max_steps=1"]
    finetune.train(job(*cached, f"data.train={file}"))
    forecast = json.loads((tmp_path / "run" / "forecast.json").read_text())
    [difference] = [each for each in forecast["differences"] if each["phase"] == "reference"]
    assert abs(difference["relative"]) < 0.01
    assert forecast["reference"]["rows"] == 24
    assert forecast["reference"]["seconds"] > 0


# -- in a run ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cached_and_in_step_train_alike_and_a_stopped_run_finds_the_scores(job, tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", answers(5, "Or"))
    keys = [f"data.eval={held_out}", "training.max_steps=3", "training.eval_every=2", "output.save_every=1"]
    in_step = finetune.train(job(*keys, run="in_step")).run
    cached = stopped_and_resumed(job(*keys, "preference.reference=cached", run="cached"), 2)
    for name in ("loss", "eval_loss", "rewards_margins", "kl"):
        assert metric(cached, name) == pytest.approx(metric(in_step, name), rel=1e-5, abs=1e-5)
    assert len(set(metric(in_step, "kl"))) > 1
    assert [event["rows"] for event in cached.events() if event["event"] == "reference_scored"] == [29]


@pytest.mark.slow
def test_the_evaluation_loss_has_one_mean_over_all_its_rows(job, tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", answers(7, "Or"))
    loop = moved(job(f"data.eval={held_out}"))
    expected, _ = gradients(loop, loop.steps.collate([loop.evaluation.rows[number] for number in range(7)]))
    assert float(loop.step.sums[8] / loop.step.sums[9]) > 0, "the mean counts"
    by_twos = StepCollator(replace(loop.steps.collate.way, rows=2), 0)
    for evaluation in (loop.evaluation, replace(loop.evaluation, collate=by_twos)):
        assert evaluation.value() == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_rows_without_a_cached_reference_are_evaluated_outside_of_training(job, tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", answers(5, "Or"))
    config = job(f"data.eval={held_out}", "preference.reference=cached")
    loop, tokenizer = ready(config), load_tokenizer(config.model, config.data)
    rows = prepare(config.data, tokenizer).eval
    loss, by_row = HeldOut(loop.step.model, tokenizer, config).loss(rows)
    assert by_row[:, 1].sum() == sum(segments_of(row)[0].trained for row in rows)
    assert loss == pytest.approx(float(by_row[:, 0].sum() / by_row[:, 1].sum()), rel=1e-6)


# -- beside TRL --------------------------------------------------------------------------------------------------------


def of_trl(row: dict[str, Any]) -> dict[str, Any]:
    """A prepared row as TRL's trainer prepares it, with the mismatched answer that it has here."""
    answer, mismatched = segments_of(row)
    prompt = sum(label == IGNORE for label in answer.labels)
    assert answer.input_ids[:prompt] == mismatched.input_ids[:prompt]
    own, other = (list(segment.input_ids[prompt:]) for segment in (answer, mismatched))
    return {
        "prompt_ids": list(answer.input_ids[:prompt]), "completion_ids": own, "KL_completion_ids": other,
        "label": bool(row["desirable"]),
    }  # fmt: skip


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_trls_trainer_however_the_step_is_split(
    job, tmp_path: Path, shallow_base: Path
) -> None:
    from trl import KTOConfig, KTOTrainer

    loop = moved(job(*WEIGHTS, "kernels.fused=off"))
    base = AutoModelForCausalLM.from_pretrained(shallow_base, dtype=torch.float32)
    arguments = KTOConfig(
        str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to="none", beta=0.1, max_length=None,
        gradient_checkpointing=False, per_device_train_batch_size=8, desirable_weight=0.8, undesirable_weight=1.4,
    )  # fmt: skip
    text = [{"prompt": f"a{n}", "completion": "b", "label": n > 3} for n in range(8)]
    trainer = KTOTrainer(
        get_peft_model(base, loop.step.model.peft_config["default"]), args=arguments,
        train_dataset=Dataset.from_list(text), processing_class=AutoTokenizer.from_pretrained(shallow_base),
    )  # fmt: skip
    rows = [of_trl(row) for row in eight_rows(loop)]
    expected_loss, expected = gradients_of_trainer(trainer, loop, rows)
    loss, found = whole_and_split(loop)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_gradients_close(found, expected, within=1e-6)
    sums = loop.step.sums
    assert float(sums[8] / sums[9]) > 0, "z, which is 0 where it would be negative, has to count here"
    packed = moved(job(*WEIGHTS, "data.packing=true", run="packed"))
    with_idle_rank = [*micro_batches(loop, range(8), 8), loop.steps.collate.idle()]
    for other, gradient in (whole_and_split(packed), gradients(loop, with_idle_rank)):
        assert other == pytest.approx(loss, rel=1e-6)
        assert_gradients_close(gradient, found)
    torch.testing.assert_close(packed.step.sums, sums, rtol=1e-5, atol=1e-5)
    in_halves = [gradients_of_trainer(trainer, loop, half)[0] for half in (rows[:4], rows[4:])]
    assert sum(in_halves) / 2 != pytest.approx(expected_loss, rel=1e-4)
