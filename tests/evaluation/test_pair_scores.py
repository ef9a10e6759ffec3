"""Facts about `finetune eval` of runs on preferences: accuracy by pairs beside simple rules, against the base."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import sampled, write_rows

import finetune
from finetune.data.encoded import segments_of
from finetune.data.prepare import prepare_held_out, questions
from finetune.evaluation.run_models import model_of
from finetune.export.finished_run import FinishedRun
from finetune.storage.rundir import RunDirectory
from finetune.training import sample_answers


@pytest.fixture
def job(tmp_path: Path, quick: Any) -> Callable[..., Any]:
    """A function from overrides to a job on pairs of which the longer answer is the chosen one, in fp32."""
    rows = [{"prompt": f"To {n}. ", "chosen": "yes " * (2 + n % 5), "rejected": "no " * (1 + n % 2)} for n in range(20)]
    file = write_rows(tmp_path / "pairs.jsonl", rows)

    def make(*overrides: str) -> Any:
        return quick(
            f"data.train={file}", "data.eval_share=0.3", "training.precision=fp32", "training.learning_rate=0.003",
            "quantization.kind=none", "adapter.dropout=0", "data.max_length=64", *overrides,
        )  # fmt: skip

    return make


def log_probs(model: Any, ids: list[int], labels: list[int]) -> float:
    """The summed log-probability of the trained tokens, from whole logits."""
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return float(sum(scores[at, label] for at, label in enumerate(labels[1:]) if label != -100))


@pytest.mark.slow
@pytest.mark.parametrize("reference", sampled(["in_step", "cached"], "cached"))
def test_a_run_of_dpo_is_measured_on_held_out_pairs_as_by_whole_logits(
    job: Any, call: Any, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_answers, "QUESTIONS", 3)
    config = job("training.objective=dpo", f"preference.reference={reference}", "output.merge=true")
    finetune.train(config)
    run = RunDirectory(config.output.dir)
    record = finetune.evaluate(run).record
    measures = {one["name"]: one for one in record["measures"]}
    values = {name: {model: each["value"] for model, each in one["models"].items()} for name, one in measures.items()}
    model, tokenizer = model_of(FinishedRun(run, config), "adapter")
    rewards = []
    for row in prepare_held_out(config.data, tokenizer)[0]:
        ours = [log_probs(model, each.input_ids, each.labels) for each in segments_of(row)]
        with model.disable_adapter():
            base = [log_probs(model, each.input_ids, each.labels) for each in segments_of(row)]
        rewards.append([0.1 * (one - other) for one, other in zip(ours, base, strict=True)])
    margins = [chosen - rejected for chosen, rejected in rewards]
    losses = [math.log1p(math.exp(-margin)) for margin in margins]
    assert measures["accuracy"]["rows"] == len(margins) >= 5
    assert values["reward margin"]["adapter"] == pytest.approx(sum(margins) / len(margins), abs=1e-5)
    assert values["pair loss"]["adapter"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert values["accuracy"]["adapter"] == sum(margin > 0 for margin in margins) / len(margins) > 0.5
    assert values["pair loss"]["base"] == pytest.approx(math.log(2), abs=1e-5)
    assert values["accuracy"]["base"] == 0, "the base is the reference"
    assert values["pair loss"]["merged"] == pytest.approx(values["pair loss"]["adapter"], abs=0.02)
    assert values["the longer answer is the chosen one"]["adapter"] > 0.8
    assert "loss" not in values
    assert any("The base is the reference" in note for note in record["notes"])

    # One model alone is measured against the base as well.
    asked = ["--model", "adapter", "--metric", "exact_match", "--max-new-tokens", 1]
    code, out, _ = call("eval", run.path, *asked)
    assert (code, "accuracy" in out, "exact_match" in out) == (0, True, True)
    alone = json.loads(run.eval_file.read_text())
    [margin] = [one for one in alone["measures"] if one["name"] == "reward margin"]
    assert margin["models"]["adapter"]["value"] == pytest.approx(values["reward margin"]["adapter"])
    assert not any("The base is the reference" in note for note in alone["notes"])
    # Sample questions are answered by the chosen one.
    assert len(run.answers()) == 3
    assert all(row["reference"].startswith("yes") and row["before"] is not None for row in run.answers())
    assert {each.reference.split()[0] for each in questions(config.data, tokenizer)} == {"yes"}


@pytest.mark.long
def test_a_run_of_kto_is_measured_on_held_out_answers_as_by_whole_logits(job: Any) -> None:
    config = job("training.objective=kto", "preference.desirable_weight=0.5")
    finetune.train(config)
    run = RunDirectory(config.output.dir)
    record = finetune.evaluate(run).record
    values = {one["name"]: {name: each["value"] for name, each in one["models"].items()} for one in record["measures"]}
    model, tokenizer = model_of(FinishedRun(run, config), "adapter")
    ratios, desirable = [], []
    for row in prepare_held_out(config.data, tokenizer)[0]:
        ours = [log_probs(model, each.input_ids, each.labels) for each in segments_of(row)]
        with model.disable_adapter():
            base = [log_probs(model, each.input_ids, each.labels) for each in segments_of(row)]
        ratios.append([one - other for one, other in zip(ours, base, strict=True)])
        desirable.append(row["desirable"] > 0)
    kl = max(0, sum(mismatched for _, mismatched in ratios) / len(ratios))
    losses = [
        0.5 / (1 + math.exp(0.1 * (ratio - kl))) if good else 1 / (1 + math.exp(0.1 * (kl - ratio)))
        for (ratio, _), good in zip(ratios, desirable, strict=True)
    ]
    chosen = [0.1 * ratio for (ratio, _), good in zip(ratios, desirable, strict=True) if good]
    assert 0 < len(chosen) < len(ratios)
    assert values["answer loss"]["adapter"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert values["rewards chosen"]["adapter"] == pytest.approx(sum(chosen) / len(chosen), abs=1e-5)
    assert values["kl"]["adapter"] == pytest.approx(kl, abs=1e-4)
    assert values["rewards rejected"]["base"] == pytest.approx(0, abs=1e-5)
    assert not any("cross-entropy" in note for note in record["notes"])


@pytest.mark.slow
def test_the_base_of_an_objective_without_a_reference_has_an_accuracy(job: Any) -> None:
    config = job("training.objective=simpo", "training.max_steps=1")
    finetune.train(config)
    measures = {one["name"]: one for one in finetune.evaluate(config.output.dir).record["measures"]}
    assert measures["rewards chosen"]["models"]["base"]["value"] < 0
    assert measures["reward margin"]["models"]["adapter"]["difference"]["value"] != 0


@pytest.mark.slow
def test_where_the_reference_is_not_the_base_the_trained_tokens_are_measured_as_of_answers(job: Any) -> None:
    config = job("training.objective=dpo", "adapter.init=pissa", "training.max_steps=1")
    finetune.train(config)
    assert [one["name"] for one in finetune.evaluate(config.output.dir).record["measures"]] == ["loss", "perplexity"]
