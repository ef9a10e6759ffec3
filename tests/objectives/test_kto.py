"""KTO: its published values, and a mean over a whole step that no split of the step changes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from jobs import EIGHT, in_fp32, metric, same_adapter, sampled, write_rows
from messages import refusal
from peft import get_peft_model
from steps import (
    assert_gradients_close,
    forecast_that_held,
    gradients,
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
from finetune.errors import ConfigError
from finetune.model.source.tokenizer import load_tokenizer
from finetune.objectives import kto
from finetune.objectives.preference import Numbers
from finetune.settings import load_config
from finetune.storage import private
from finetune.storage.rundir import RunDirectory
from finetune.training.eval_loss import held_out_loss
from finetune.training.loop import Loop


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


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"training": {"objective": "kto"}, "preference": {"nll_weight": 1}}, "preference.nll_weight"),
        ({"training": {"objective": "dpo"}, "preference": {"desirable_weight": 2}}, "preference.desirable_weight"),
        ({"training": {"objective": "kto"}, "data": {"loss_on": "all"}}, "data.loss_on"),
    ],
)
def test_a_key_that_does_not_suit_it_is_refused(keys: dict[str, Any], refused: str) -> None:
    with refusal(ConfigError, f"`{refused}`"):
        load_config(keys)


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
@pytest.mark.parametrize("way", [["adapter.dropout=0.1"], ["data.packing=true", *WEIGHTS]])
def test_at_first_no_answer_is_likelier_than_under_the_reference(job, tmp_path: Path, way: list[str]) -> None:
    finetune.train(job(*way, "training.max_steps=2", "training.learning_rate=0.01"))
    first, second = RunDirectory(tmp_path / "run").metrics()[:2]
    if WEIGHTS[0] not in way:  # after dropout, an update of zero is zero as well
        assert first["loss"] == 0.5
    assert [first[name] for name in ("rewards_chosen", "rewards_rejected", "rewards_margins", "kl")] == [0, 0, 0, 0]
    assert first["logps_chosen"] < 0
    assert second["rewards_margins"] == second["rewards_chosen"] - second["rewards_rejected"] != 0
    assert second["kl"] >= 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    sampled(
        [[], ["data.packing=true"], ["kernels.fused=on"], ["preference.reference=cached"]],
        ["data.packing=true"], ["preference.reference=cached"],
    ),
)  # fmt: skip
def test_the_gradient_does_not_depend_on_how_a_step_is_split(job, way: list[str]) -> None:
    plain, loop = moved(job(*WEIGHTS, "kernels.fused=off")), moved(job(*WEIGHTS, *way, run="other"))
    (whole,) = micro_batches(plain, range(8), 8)
    loss, expected = gradients(plain, [whole])
    sums = plain.step.sums
    assert float(sums[8] / sums[9]) > 0, "z, which is 0 where it would be negative, has to count here"
    for size in (8, 3, 1):
        other, found = gradients(loop, micro_batches(loop, range(8), size))
        assert other == pytest.approx(loss, rel=1e-6)
        assert_gradients_close(found, expected)
        torch.testing.assert_close(loop.step.sums, sums, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("packing", sampled(["false", "true"], "true"))
def test_a_step_that_runs_out_of_memory_is_split_with_the_same_mean(job, packing: str) -> None:
    loop = moved(job("model.name=builtin:tiny-llama", f"data.packing={packing}"))
    (whole,) = micro_batches(loop, range(8), 8)
    loss, expected = gradients(loop, [whole])
    for where in ("forward", "recompute"):  # the pass for the mean, and one after it
        with out_of_memory(loop, where, whole["input_ids"].numel() // 3) as refused:
            other, found = gradients(loop, [whole])
        assert len(refused) >= 2 or where == "recompute"
        assert loop.step.model.training
        assert other == pytest.approx(loss, rel=1e-6)
        assert_gradients_close(found, expected)


@pytest.mark.slow
def test_a_rank_without_rows_adds_nothing(job) -> None:
    loop = ready(job())
    (whole,) = micro_batches(loop, range(8), 8)
    loss, expected = gradients(loop, [whole])
    other, found = gradients(loop, [whole, loop.steps.collate.idle()])
    assert other == pytest.approx(loss, rel=1e-6)
    assert_gradients_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("packing", sampled(["false", "true"], "false"))
def test_a_run_takes_the_memory_of_its_forecast(job, tmp_path: Path, packing: str) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", answers(6, "Or"))
    finetune.train(
        job(f"data.eval={held_out}", "training.max_steps=2", "training.eval_every=1", f"data.packing={packing}",
            "memory.check=warn")
    )  # fmt: skip
    assert metric(RunDirectory(tmp_path / "run"), "eval_loss")[0] == 0.5
    differences = forecast_that_held(RunDirectory(tmp_path / "run"))["differences"]
    assert {"forward", "backward", "optimizer", "evaluation"} <= {each["phase"] for each in differences}


@pytest.mark.slow
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
def test_cached_and_in_step_train_alike(job, tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", answers(5, "Or"))
    for kind in ("cached", "in_step"):
        finetune.train(job(f"preference.reference={kind}", f"data.eval={held_out}", "training.eval_every=2", run=kind))
    cached, in_step = (RunDirectory(tmp_path / name) for name in ("cached", "in_step"))
    for name in ("loss", "eval_loss", "rewards_margins", "kl"):
        assert metric(cached, name) == pytest.approx(metric(in_step, name), rel=1e-5, abs=1e-5)
    assert len(set(metric(in_step, "kl"))) > 1
    again = RunDirectory(tmp_path / "again")
    finetune.train(
        job(
            "preference.reference=cached",
            f"data.eval={held_out}",
            "training.seed=7",
            "training.max_steps=1",
            run="again",
        )
    )
    assert [event["rows"] for event in again.events() if event["event"] == "reference_found"] == [29]
    assert not [event for event in again.events() if event["event"] == "reference_scored"]


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(job, tmp_path: Path) -> None:
    keys = ["training.max_steps=5", "preference.reference=cached", "adapter.dropout=0.1"]
    whole = finetune.train(job(*keys, run="whole")).run
    halted = stopped_and_resumed(job(*keys, "output.save_every=2", run="halted"), 3)
    assert metric(halted, "loss", "kl") == metric(whole, "loss", "kl")
    assert same_adapter(whole, halted)


@pytest.mark.slow
def test_the_evaluation_loss_has_one_mean_over_all_its_rows(job, tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", answers(7, "Or"))
    losses = []
    for size in (8, 2):
        loop = moved(job(f"data.eval={held_out}", f"training.micro_batch={size}", run=f"run{size}"))
        losses.append(loop.evaluation.loss())
    rows = [loop.evaluation.rows[number] for number in range(7)]
    ratios = by_whole_logits(loop, rows)
    kl = max(0.0, float(np.mean([ratio for _, ratio in ratios])))
    sign = [1 if row["desirable"] else -1 for row in rows]
    expected = np.mean(
        [1 / (1 + math.exp(0.1 * each * (ratio - kl))) for each, (ratio, _) in zip(sign, ratios, strict=True)]
    )
    assert losses == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.slow
def test_rows_without_a_cached_reference_are_evaluated_outside_of_training(job, tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", answers(5, "Or"))
    config = job(f"data.eval={held_out}", "preference.reference=cached")
    loop, tokenizer = ready(config), load_tokenizer(config.model, config.data)
    rows = prepare(config.data, tokenizer).eval
    loss, by_row = held_out_loss(loop.step.model, tokenizer, rows, config)
    assert by_row[:, 1].sum() == sum(segments_of(row)[0].trained for row in rows)
    assert loss == pytest.approx(float(by_row[:, 0].sum() / by_row[:, 1].sum()), rel=1e-6)


@torch.no_grad()
def by_whole_logits(loop: Loop, rows: Sequence[dict[str, Any]]) -> list[list[float]]:
    """R of both segments of each row, one by one from the whole logits."""
    model, ratios = loop.step.model.eval(), []
    for row in rows:
        sums = []
        for segment in segments_of(row):
            ids, labels = torch.tensor(segment.input_ids), torch.tensor(segment.labels)[1:]
            each = []
            for off in (False, True):
                if off:
                    with model.disable_adapter():
                        logits = model(input_ids=ids[None]).logits
                else:
                    logits = model(input_ids=ids[None]).logits
                log_probs = logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
                each.append(float(log_probs[labels != IGNORE].sum()))
            sums.append(each[0] - each[1])
        ratios.append(sums)
    return ratios


# -- beside TRL --------------------------------------------------------------------------------------------------------


@pytest.fixture
def trl_step(tmp_path: Path, shallow_base: Path):
    """A function from a loop and the micro-batches of a step to the loss and gradients of TRL's trainer."""

    def step(loop: Loop, parts: Sequence[Sequence[dict[str, Any]]]) -> tuple[float, dict[str, torch.Tensor]]:
        from trl import KTOConfig, KTOTrainer

        ours = loop.step.model
        base = AutoModelForCausalLM.from_pretrained(shallow_base, dtype=torch.float32)
        arguments = KTOConfig(
            str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to="none", beta=0.1, max_length=None,
            gradient_checkpointing=False, per_device_train_batch_size=8, desirable_weight=0.8, undesirable_weight=1.4,
        )  # fmt: skip
        text = [{"prompt": f"a{n}", "completion": "b", "label": n > 3} for n in range(8)]
        trainer = KTOTrainer(
            get_peft_model(base, ours.peft_config["default"]), args=arguments, train_dataset=Dataset.from_list(text),
            processing_class=AutoTokenizer.from_pretrained(shallow_base),
        )  # fmt: skip
        trained = {key: weight for key, weight in trainer.model.named_parameters() if weight.requires_grad}
        weights = {key: weight for key, weight in ours.named_parameters() if weight.requires_grad}
        assert trained.keys() == weights.keys()
        with torch.no_grad():
            for key, weight in weights.items():
                trained[key].copy_(weight)
        total = 0.0
        for part in parts:
            loss = trainer.compute_loss(trainer.model.train(), trainer.data_collator([*map(of_trl, part)])) / len(parts)
            loss.backward()
            total += float(loss.detach())
        return total, {key: weight.grad for key, weight in trained.items()}

    return step


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
def test_loss_and_gradients_are_those_of_trls_trainer_whose_mean_is_that_of_a_micro_batch(job, trl_step) -> None:
    loop = moved(job(*WEIGHTS, "kernels.fused=off"))
    rows = [loop.steps.rows[number] for number in range(8)]
    loss, found = gradients(loop, micro_batches(loop, range(8), 8))
    expected_loss, expected = trl_step(loop, [rows])
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6 * largest)
    in_halves, _ = trl_step(loop, [rows[:4], rows[4:]])
    assert in_halves != pytest.approx(expected_loss, rel=1e-4)
    assert gradients(loop, micro_batches(loop, range(8), 4))[0] == pytest.approx(expected_loss, rel=1e-6)
