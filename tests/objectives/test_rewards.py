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
from objective_jobs import PLAIN, copied, eight_rows, pairs, quick_in, whole_and_split
from peft import PeftModel, get_peft_model
from steps import (
    assert_gradients_close,
    forecast_that_held,
    gradients,
    gradients_of_trainer,
    micro_batches,
    ready,
)
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import RewardConfig, RewardTrainer

import finetune
from finetune.data.encoded import RowLayout, segments_of
from finetune.data.examples import Completion
from finetune.data.fields import Fields
from finetune.data.formats import FORMATS, RowFormat
from finetune.data.prepare import prepare
from finetune.errors import ConfigError, DataError
from finetune.model import build
from finetune.model.adapters import adapter_files
from finetune.model.base import load_architecture
from finetune.model.source.tokenizer import load_tokenizer
from finetune.objectives import OBJECTIVES, contract, rewards, scored
from finetune.recipe import provenance
from finetune.storage.rundir import RunDirectory
from finetune.training.collator import row_count


@pytest.fixture
def job(tmp_path: Path, quick):
    """A function from overrides to a reward model on pairs with margins, in fp32."""
    return of_rewards(quick, tmp_path)


def of_rewards(quick: Any, folder: Path) -> Any:
    file = write_rows(folder / "pairs.jsonl", pairs(24))
    return in_fp32(quick, file, "data.format=pairs_with_margin", "training.objective=reward", "data.max_length=64")


LEARNING = ["training.max_steps=6", "training.eval_every=3", "training.learning_rate=0.01", *PLAIN]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, shallow_base: Path) -> RunDirectory:
    """A finished run on packed rows, forecast. Do not write to it."""
    folder = tmp_path_factory.mktemp("learned")
    return finetune.train(
        of_rewards(quick_in(folder, shallow_base), folder)(*LEARNING, "memory.check=warn", "data.packing=true")
    ).run


def test_a_run_of_an_earlier_version_is_read_and_is_the_same_job(job, tmp_path: Path) -> None:
    config = job()
    for loss_on in ("assistant", "last"):
        run = RunDirectory(tmp_path / loss_on)
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
def test_loss_and_gradients_are_those_of_trls_trainer_however_the_step_is_split(
    job, tmp_path: Path, shallow_base: Path, packing: str
) -> None:
    loop = ready(job(*EIGHT, "preference.reward_centering=0.01", "kernels.fused=off", f"data.packing={packing}"))
    rows = [
        {"chosen_ids": chosen.input_ids, "rejected_ids": rejected.input_ids, "margin": row["margin"]}
        for row in eight_rows(loop)
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
    loss, found = whole_and_split(loop, within=1e-6)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_gradients_close(found, expected, within=1e-6)


@pytest.mark.slow
def test_a_reward_model_learns_as_forecast(learned: RunDirectory) -> None:
    losses = metric(learned, "loss")
    assert losses[-1] < losses[0]
    assert metric(learned, "rewards_accuracies")[-1] == 1
    forecast_that_held(learned)


def scores(model: Any, rows: list[list[int]]) -> list[float]:
    """What transformers' own class, or PEFT's on it, gives each row."""
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([row])).logits) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", sampled(["none", "nf4"], "none"))
def test_transformers_and_peft_load_what_is_published_with_equal_scores(
    job, learned: RunDirectory, tmp_path: Path, quantization: str
) -> None:
    if quantization == "none":
        run = copied(learned, tmp_path)
    else:
        run = finetune.train(job(*LEARNING, f"quantization.kind={quantization}")).run
    finetune.merge(run)
    config = run.config()
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
def test_eval_compares_held_out_pairs_with_the_rule_that_the_longer_answer_wins(
    learned: RunDirectory, call, tmp_path: Path
) -> None:
    run = copied(learned, tmp_path)
    scored = {one["name"]: one for one in finetune.evaluate(run).record["measures"]}
    assert scored["accuracy"]["models"]["adapter"]["value"] == 1
    assert scored["accuracy"]["models"]["base"]["value"] == 0, "equal scores are no win"
    assert scored["pair loss"]["models"]["adapter"]["value"] < scored["pair loss"]["models"]["base"]["value"]
    assert scored["the longer answer is the chosen one"]["rows"] == 3
    for command in (["chat"], ["generate", "--prompt", "a"], ["export", "--to", "gguf"], ["eval", "--metric", "exact"]):
        code, _, err = call(*command[:1], run.path, *command[1:])
        assert (code, "reward model" in err) == (2, True), err


@pytest.mark.slow
def test_eval_scores_a_file_of_answers_by_their_last_token_however_they_are_batched(
    learned: RunDirectory, call, tmp_path: Path
) -> None:
    run = copied(learned, tmp_path)
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
    run = finetune.train(job(*keys, "training.max_steps=2", "training.learning_rate=0.01")).run
    content = content[:8]
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


# -- rows of two segments ----------------------------------------------------------------------------------------------


def test_a_row_without_labels_adds_nothing(job) -> None:
    loop = ready(job(*EIGHT))
    (batch,) = micro_batches(loop, range(8), 8)
    assert batch["row"].tolist() == [number for number in range(8) for _ in range(2)]
    assert (len(batch["input_ids"]), row_count(batch)) == (16, 8)
    idle = loop.steps.collate.idle()
    assert {*idle} == {*batch} - {"margin"}
    with torch.no_grad():
        total, counted, *_ = loop.step.objective.loss(loop.step.model, idle)
    assert (float(total), int(counted)) == (0, 0)


def test_the_look_at_the_data_has_both_answers(job, call, tmp_path: Path) -> None:
    config = job()
    (tmp_path / "job.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    code, out, err = call("data", tmp_path / "job.yaml", "--json")
    assert code == 0, err
    found = json.loads(out)
    first, second = found["samples"][:2]
    assert [first["place"].rsplit(", ")[-1], second["place"].rsplit(", ")[-1]] == ["chosen", "rejected"]
    assert "".join(piece["text"] for piece in second["pieces"]).count("no ") >= 3
    assert sum(found["train"]["segments"].values()) == found["train"]["tokens"]
    assert found["worst_batch"]["segments"] == 2


def test_rows_that_do_not_suit_the_objective_are_refused(job) -> None:
    layout = OBJECTIVES["kto"].layout
    with refusal(ConfigError, "`kto`", *(f"`{name}`" for name in (*layout.segments, *layout.values))):
        contract.check_rows("kto", RowLayout(), 1)
    with refusal(ConfigError, "distributed.context"):
        contract.check_rows("reward", OBJECTIVES["reward"].layout, 2)
    with refusal(ConfigError, "trains rows of one sequence"):
        finetune.train(job("training.objective=supervised"))
    with refusal(ConfigError, "trains rows of one sequence"):
        finetune.plan(job("training.objective=supervised"))


def prepared(job, *overrides: str) -> Any:
    config = job(*overrides)
    return prepare(config.data, load_tokenizer(config.model, config.data))


def test_a_pair_with_one_answer_too_long_is_dropped_and_never_cut(job) -> None:
    whole = prepared(job, "data.eval=none")
    longest = whole.train_counts.longest
    assert longest == max(max(each["segments"]) for each in whole.train)
    shorter = [f"data.max_length={longest - 1}", "data.eval=none"]
    found = prepared(job, *shorter, "data.too_long=drop")
    assert 0 < found.train_counts.dropped == len(whole.train) - len(found.train)
    assert all(max(each["segments"]) < longest for each in found.train)
    for policy in ("truncate", "split", "error"):
        with refusal(DataError, "one of several segments is not cut alone"):
            prepared(job, *shorter, f"data.too_long={policy}")


def test_rows_of_one_sequence_and_of_two_are_not_mixed(job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def either(fields: Fields) -> Any:
        return read_pair(fields) if fields["margin"] else Completion("a", "b")

    read_pair = FORMATS["pairs_with_margin"].read
    monkeypatch.setitem(FORMATS, "pairs_with_margin", RowFormat("either", ("prompt",), either))
    rows = pairs(3)
    rows[1]["margin"] = 0
    write_rows(tmp_path / "pairs.jsonl", rows)
    with refusal(DataError, "pairs.jsonl:2"):
        prepared(job, "data.eval=none")
