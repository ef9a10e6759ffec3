"""Reward models: the loss, the head, what is saved, and what transformers and PEFT make of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from jobs import EIGHT, in_fp32, metric, mixture, sampled, write_rows
from messages import refusal
from peft import PeftModel, get_peft_model
from steps import (
    assert_gradients_close,
    forecast_that_held,
    gradients,
    gradients_of_trainer,
    micro_batches,
    ready,
)
from test_two_segments import pairs
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import RewardConfig, RewardTrainer

import finetune
from finetune.data.encoded import segments_of
from finetune.errors import ConfigError
from finetune.lifecycle import provenance
from finetune.model import build
from finetune.model.adapters import adapter_files
from finetune.model.base import load_architecture
from finetune.objectives import rewards, scored
from finetune.storage.rundir import RunDirectory


@pytest.fixture
def job(tmp_path: Path, quick):
    """A function from overrides to a reward model on pairs with margins, in fp32."""
    file = write_rows(tmp_path / "pairs.jsonl", pairs(24))
    return in_fp32(quick, file, "data.format=pairs_with_margin", "training.objective=reward", "data.max_length=64")


@pytest.mark.parametrize("loss_on", ["assistant", "last"])
def test_a_run_of_an_earlier_version_is_read_and_is_the_same_job(job, tmp_path: Path, loss_on: str) -> None:
    config = job()
    run = RunDirectory(tmp_path / "earlier")
    run.path.mkdir()
    run.config_file.write_text(yaml.safe_dump(config.changed({"data.loss_on": loss_on}).model_dump(mode="json")))
    assert run.config().data.loss_on == loss_on
    provenance.refuse_changes(config, run)
    with refusal(ConfigError, "learning_rate"):
        provenance.refuse_changes(config.changed({"training.learning_rate": 0.5}), run)


def test_the_loss_has_the_values_of_its_formula() -> None:
    def of(chosen: float, rejected: float, margin: float = 0, centering: float = 0) -> float:
        scores = torch.tensor([chosen, rejected], dtype=torch.float32)
        return float(rewards.loss_of_pairs(scores[0], scores[1], margin, centering))

    assert of(0, 0) == pytest.approx(math.log(2), abs=1e-6)
    assert of(2, 1, margin=1) == pytest.approx(math.log(2), abs=1e-6)
    assert of(2, -1, centering=0.01) == pytest.approx(math.log1p(math.exp(-3)) + 0.01, abs=1e-6)


@pytest.mark.slow
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
        assert again == pytest.approx(loss, rel=1e-6)
        assert_gradients_close(found, expected, within=1e-6)


def test_loss_and_gradients_are_those_of_trls_trainer(job, tmp_path: Path, shallow_base: Path) -> None:
    loop = ready(job(*EIGHT, "preference.reward_centering=0.01", "kernels.fused=off"))
    rows = [
        {"chosen_ids": chosen.input_ids, "rejected_ids": rejected.input_ids, "margin": row["margin"]}
        for row in (loop.steps.rows[number] for number in range(8))
        for chosen, rejected in [segments_of(row)]
    ]
    base = AutoModelForSequenceClassification.from_pretrained(shallow_base, num_labels=1, dtype=torch.float32)
    settings = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
    trainer = RewardTrainer(
        get_peft_model(base, loop.step.model.peft_config["default"]),
        args=RewardConfig(str(tmp_path / "trl"), center_rewards_coefficient=0.01, **settings),
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(shallow_base),
    )  # fmt: skip
    expected_loss, expected = gradients_of_trainer(trainer, loop, rows)
    loss, found = gradients(loop, micro_batches(loop, range(8), 8))
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_gradients_close(found, expected, within=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("packing", sampled(["false", "true"], "true"))
def test_a_reward_model_learns_as_forecast(job, packing: str) -> None:
    keys = ["training.max_steps=6", "training.eval_every=3", "memory.check=warn", "output.merge=false",
            f"data.packing={packing}", "training.learning_rate=0.01"]  # fmt: skip
    whole = finetune.train(job(*keys)).run
    losses = metric(whole, "loss")
    assert losses[-1] < losses[0]
    assert metric(whole, "rewards_accuracies")[-1] == 1
    forecast_that_held(whole)


def scores(model: Any, rows: list[list[int]]) -> list[float]:
    """What transformers' own class, or PEFT's on it, gives each row."""
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([row])).logits) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", sampled(["none", "nf4"], "none"))
def test_transformers_and_peft_load_what_is_published_with_equal_scores(job, tmp_path: Path, quantization: str) -> None:
    config = job(
        "training.max_steps=4", "output.merge=true", f"quantization.kind={quantization}", "training.learning_rate=0.01"
    )
    finetune.train(config)
    run = RunDirectory(tmp_path / "run")
    record = json.loads((run.merged / "merge.json").read_text())
    assert record["error"] <= record["bound"]
    assert record["kept"] > 0.9
    saved = json.loads((run.adapter / "adapter_config.json").read_text())
    assert (saved["task_type"], saved["modules_to_save"]) == ("SEQ_CLS", ["score"])

    rows = [list(range(5, 20)), list(range(300, 306))]
    merged = AutoModelForSequenceClassification.from_pretrained(run.merged, dtype=torch.float32).eval()
    assert merged.config.num_labels == 1
    assert merged.config.id2label == {0: "reward"}
    base = AutoModelForSequenceClassification.from_pretrained(config.model.name, num_labels=1, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(run.adapter)).eval()
    assert scores(merged, rows) == pytest.approx(scores(adapted, rows), rel=record["bound"]), "rounded to bfloat16"
    if quantization == "none":
        ours = build.load(config, load_architecture(config.model), torch.device("cpu"))
        ours = adapter_files.load_adapter(ours, run.adapter, config.adapter)
        with torch.no_grad():
            own = [float(ours(input_ids=torch.tensor([row])).logits[0, -1]) for row in rows]
        assert scores(adapted, rows) == pytest.approx(own, rel=1e-6)
    padded = torch.full((2, 15), merged.config.pad_token_id)
    padded[0], padded[1, :6] = torch.tensor(rows[0]), torch.tensor(rows[1])
    with torch.no_grad():
        together = merged(input_ids=padded, attention_mask=padded != merged.config.pad_token_id).logits[:, 0]
    assert together.tolist() == pytest.approx(scores(merged, rows), rel=1e-5)


@pytest.mark.slow
def test_eval_compares_held_out_pairs_with_the_rule_that_the_longer_answer_wins(job, call, tmp_path: Path) -> None:
    finetune.train(job("training.max_steps=4", "training.learning_rate=0.01"))
    scored = {one["name"]: one for one in finetune.evaluate(tmp_path / "run").record["measures"]}
    assert scored["accuracy"]["models"]["adapter"]["value"] == 1
    assert scored["accuracy"]["models"]["base"]["value"] == 0, "equal scores are no win"
    assert scored["pair loss"]["models"]["adapter"]["value"] < scored["pair loss"]["models"]["base"]["value"]
    assert scored["the longer answer is the chosen one"]["rows"] == 3
    for command in (["chat"], ["generate", "--prompt", "a"], ["export", "--to", "gguf"], ["eval", "--metric", "exact"]):
        code, _, err = call(*command[:1], tmp_path / "run", *command[1:])
        assert (code, "reward model" in err) == (2, True), err


@pytest.mark.slow
@pytest.mark.parametrize("packing", sampled(["false", "true"], "true"))
def test_eval_scores_a_file_of_answers_by_their_last_token_however_they_are_batched(
    job, call, tmp_path: Path, packing: str
) -> None:
    finetune.train(job("training.max_steps=4", "training.learning_rate=0.01", f"data.packing={packing}", *EIGHT[:2]))
    run = RunDirectory(tmp_path / "run")
    turns = [{"role": "user", "content": "To 9."}, {"role": "assistant", "content": "yes yes"}]
    kinds = {
        "texts": [{"prompt": f"To {n}. ", "completion": "yes " * (1 + 5 * n % 7)} for n in range(3)],
        "turns": [{"messages": turns}, {"messages": [*turns, turns[0], {**turns[1], "content": "no " * 9}]}],
    }
    for name, rows in kinds.items():
        alone = []
        for row in rows:
            file = tmp_path / "alone.jsonl"
            file.write_text(json.dumps(row) + "\n")
            finetune.evaluate(run, data=file, models=["adapter"])
            (line,) = run.eval_answers_file.read_text().splitlines()
            alone.append(json.loads(line)["scores"]["reward"]["adapter"])
        long = {**rows[0], "completion": "b " * 99, "messages": [turns[0], {**turns[1], "content": "b " * 99}]}
        together = write_rows(tmp_path / f"{name}.jsonl", [{key: row[key] for key in rows[0]} for row in [*rows, long]])
        code, _, err = call("eval", run.path, "--data", together)
        assert code == 0, err
        record = json.loads(run.eval_file.read_text())
        lines = [json.loads(line) for line in run.eval_answers_file.read_text().splitlines()]
        assert [line["row"] for line in lines] == [f"{together}:{number + 1}" for number in range(len(rows))]
        scores = [line["scores"]["reward"]["adapter"] for line in lines]
        assert scores == pytest.approx(alone, rel=1e-5)
        assert len({round(score, 4) for score in scores}) == len(rows)
        (measure,) = record["measures"]
        figure = measure["models"]["adapter"]
        assert (measure["name"], measure["rows"]) == ("reward", len(rows))
        assert figure["low"] <= figure["value"] <= figure["high"]
        assert figure["value"] == pytest.approx(sum(scores) / len(rows))
        assert "1 rows have no score: over data.max_length." in record["notes"]


@pytest.mark.slow
@pytest.mark.parametrize("template", sampled(["plain", "chatml", "llama3", "gemma", "mistral", "phi3"], "chatml"))
def test_rewards_are_those_of_the_published_model_on_the_text_of_its_template(
    job, tmp_path: Path, template: str
) -> None:
    """ChatML writes a line break after the end of a turn, and that is the token that transformers' class scores."""
    content = [
        {name: [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[name]}]
         for name in ("chosen", "rejected")} | {"margin": row["margin"]}
        for row in pairs(24)
    ]  # fmt: skip
    file = write_rows(tmp_path / "turns.jsonl", content)
    keys = [f"data.train={file}", f"data.chat_template={template}", "data.max_length=256", "output.merge=true"]
    finetune.train(job(*keys, "training.max_steps=4", "training.learning_rate=0.01"))
    run = RunDirectory(tmp_path / "run")
    other = write_rows(tmp_path / "other.jsonl", content)
    finetune.evaluate(run, data=other, models=["merged"])
    lines = [json.loads(line) for line in run.eval_answers_file.read_text().splitlines()]
    published = AutoModelForSequenceClassification.from_pretrained(run.merged).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.merged)
    assert published.config.pad_token_id == tokenizer.pad_token_id
    for name in ("chosen", "rejected"):
        expected = [line["scores"][name]["merged"] for line in lines]
        for side in ("left", "right"):
            batch = tokenizer.apply_chat_template(
                [row[name] for row in content], padding=True, return_tensors="pt", return_dict=True,
                tokenizer_kwargs={"padding_side": side},
            )  # fmt: skip
            with torch.no_grad():
                found = published(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
            wanted = torch.tensor(expected)
            assert (found - wanted).norm() < 0.05 * wanted.norm(), "in bfloat16"


def test_a_mixture_of_experts_is_trained_with_its_balancing_loss(job, tmp_path: Path) -> None:
    loop = ready(job(*EIGHT, *mixture(tmp_path / "mixture")))
    (batch,) = micro_batches(loop, range(8), 8)
    loss, _ = gradients(loop, [batch])
    base = loop.step.model.get_base_model()
    with torch.no_grad():
        output = base.model(batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True)
        balancing = load_balancing_loss_func(output.router_logits, 4, 2, batch["attention_mask"])
        scores = scored(loop.step.model, batch).logits.view(-1, 2)
        own = rewards.loss_of_pairs(*scores.T, batch["margin"], 0).mean()
    assert float(balancing) > 1
    assert loss == pytest.approx(float(own + 0.5 * balancing), rel=1e-5)


@pytest.mark.parametrize(
    "keys",
    [
        ["adapter.kind=none"], ["adapter.init=pissa"], ["distributed.kind=fsdp"], ["memory.loss_tokens=64"],
        ["preference.beta=0.1"], ["training.objective=dpo", "model.labels=[good]"], ["model.labels=[good]"],
    ],
)  # fmt: skip
def test_what_a_reward_model_does_not_have_is_refused(job, keys: list[str]) -> None:
    with pytest.raises(ConfigError, match=keys[-1].partition("=")[0]):
        job(*keys)
