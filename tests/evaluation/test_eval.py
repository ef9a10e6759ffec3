"""`finetune eval`: the models of a run side by side, their answers and tasks, and what cannot be evaluated."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import write_rows
from messages import refusal
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetune
from finetune.config import dump
from finetune.data.prepare import questions
from finetune.errors import ArtifactError, ConfigError, DataError
from finetune.evaluation import run_models
from finetune.evaluation.evaluate import _EvaluationJob
from finetune.evaluation.model_results import ModelResults
from finetune.extras.lm_eval.tasks import Tasks
from finetune.model.source.tokenizer import load_tokenizer
from finetune.report.scores import Scores
from finetune.storage.rundir import RunDirectory

pytest.importorskip("lm_eval", reason="needs the package lm_eval")

from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager

RULE = """
def score(answer, reference, row):
    return len(row["messages"])
"""

TASK = """
task: sayings
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Say {{{{number}}}}\\n"
doc_to_choice: ["word", "word word", "nothing"]
doc_to_target: label
metric_list:
  - {{metric: acc, higher_is_better: true}}
  - {{metric: acc_norm, higher_is_better: true}}
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a multiple-choice task over 8 local rows."""
    folder = tmp_path_factory.mktemp("task")
    data = write_rows(folder / "rows.jsonl", [{"number": n, "label": n % 3} for n in range(8)])
    file = folder / "sayings.yaml"
    file.write_text(TASK.format(data=data))
    return file


@pytest.fixture(scope="module")
def texts(task: Path) -> Path:
    """The file of a task that takes the likelihood of texts, whose metrics are no means over rows."""
    head, _, _ = task.read_text().partition("output_type")
    file = task.with_name("texts.yaml")
    file.write_text(
        head.replace("task: sayings", "task: texts") + "output_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        'doc_to_target: "What is {{number}} or word {{label}}?"\nmetric_list: [{metric: bits_per_byte}]\n'
    )
    return file


@pytest.fixture(scope="module")
def run(trained: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run with a merged model."""
    run = RunDirectory(shutil.copytree(trained.path, tmp_path_factory.mktemp("run") / "run"))
    finetune.merge(run)
    return run


@pytest.fixture(scope="module")
def scores(run: RunDirectory, task: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Scores:
    """All models of the run, with metrics and tasks."""
    rule = tmp_path_factory.mktemp("rule") / "rule.py"
    rule.write_text(RULE)
    return finetune.evaluate(
        run, metrics=["f1", "json", f"{rule}:score"], tasks=[str(task), str(texts)], max_new_tokens=4
    )


def measure(scores: Scores, name: str) -> dict[str, Any]:
    [found] = [one for one in scores.record["measures"] if one["name"].endswith(name)]
    return {**found}


@pytest.mark.slow
def test_losses_are_those_of_training_and_lie_in_their_intervals(scores: Scores, run: RunDirectory) -> None:
    lines = [line["eval_loss"] for line in run.metrics() if "eval_loss" in line]
    assert scores.losses["base"] == pytest.approx(lines[0], rel=1e-4)
    assert scores.losses["adapter"] == pytest.approx(lines[-1], rel=1e-4), "too few rows to judge the best: the last"
    assert scores.losses["merged"] == pytest.approx(scores.losses["adapter"], rel=0.05)
    loss = measure(scores, "loss")
    assert list(loss["models"]) == ["base", "adapter", "merged"]
    assert loss["better"] == "lower"
    for figure in loss["models"].values():
        assert figure["low"] < figure["value"] < figure["high"]
    difference = loss["models"]["adapter"]["difference"]
    assert difference["value"] == scores.losses["adapter"] - scores.losses["base"]
    assert difference["low"] < difference["value"] < difference["high"] < 0


def test_answers_are_scored_against_references_and_kept(scores: Scores, run: RunDirectory) -> None:
    config = run.config()
    asked = list(questions(config.data, load_tokenizer(config.model, run.data(config.data))))
    rule = measure(scores, "rule.py:score")
    assert {figure["value"] for figure in rule["models"].values()} == {2}
    assert rule["rows"] == len(asked)
    assert measure(scores, "json")["models"]["base"]["value"] == 0
    lines = [json.loads(line) for line in run.eval_answers_file.read_text().splitlines()]
    assert [line["reference"] for line in lines] == [one.reference for one in asked]
    assert lines[0]["question"].startswith("Say ")
    assert lines[0]["answers"]["adapter"] == finetune.generate(run, lines[0]["question"], max_new_tokens=4)
    f1 = [line["scores"]["f1"]["adapter"] for line in lines]
    assert measure(scores, "f1")["models"]["adapter"]["value"] == pytest.approx(sum(f1) / len(f1))
    assert any("cut off at 4 tokens" in note for note in scores.notes)


def test_eval_json_and_the_report_hold_what_was_returned(scores: Scores, run: RunDirectory) -> None:
    assert json.loads(run.eval_file.read_text()) == scores.as_dict()
    assert scores.record["steps"] == 20
    page = run.report_file.read_text()
    for cell in ("sayings: acc", f"{scores.losses['merged']:.4f}", "percentile bootstrap over rows (1,000 resamples"):
        assert cell in page
    run.eval_file.write_text("{}")
    with refusal(ArtifactError, "eval.json:"):
        Scores.read(run)


def test_a_task_has_the_interval_of_its_rows(scores: Scores) -> None:
    accuracy = measure(scores, "sayings: acc")
    assert accuracy["rows"] == 8
    assert accuracy["better"] == "higher"
    for figure in accuracy["models"].values():
        assert 0 <= figure["low"] <= figure["value"] <= figure["high"] <= 1
        assert figure["value"] * 8 == round(figure["value"] * 8)
    bits = measure(scores, "texts: bits_per_byte")
    assert bits["rows"] is None
    assert bits["models"]["adapter"]["difference"]["value"] != 0
    assert bits["models"]["adapter"]["low"] is None


@pytest.mark.slow
def test_a_task_on_the_model_in_memory_scores_as_lm_evals_own_command_on_the_exported_model(
    scores: Scores, run: RunDirectory, task: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        "lm_eval", "--model", "hf", "--model_args", f"pretrained={run.merged}", "--tasks", f"{task},{texts}",
        "--batch_size", "16", "--device", "cpu", "--output_path", str(tmp_path), "--log_samples",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    # Its own 14,000 tasks, which take half a minute to list, are not needed.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))
    cli_evaluate()
    [file] = tmp_path.rglob("results_*.json")
    theirs = json.loads(file.read_text())["results"]
    for name, metric in [("sayings", "acc"), ("sayings", "acc_norm"), ("texts", "bits_per_byte")]:
        ours = measure(scores, f"{name}: {metric}")["models"]["merged"]["value"]
        assert ours == theirs[name][f"{metric},none"], "to the bit"


@pytest.mark.slow
def test_an_impossible_evaluation_is_refused_before_a_model_is_loaded(
    run: RunDirectory, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("finetune.evaluation.evaluate.model_of", load)
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": f"some text {number}"} for number in range(4)])
    (tmp_path / "rule.py").write_text("def score(answer, reference, row):\n    return row['label']\n")
    (tmp_path / "wrong.yaml").write_text("output_type: multiple_choice\n")
    (tmp_path / "unsafe.yaml").write_text(task.read_text() + "unsafe_code: true\n")
    (tmp_path / "lost.yaml").write_text(task.read_text().replace("rows.jsonl", "gone.jsonl"))
    for changes, arguments, error, message in [
        ({}, {"models": ["adaptor"]}, ConfigError, "did you mean `adapter`"),
        ({}, {"metrics": ["rogue_l"]}, ConfigError, "did you mean `rouge_l`"),
        ({}, {"metrics": [f"{tmp_path}/rule.py:score"]}, DataError, r"rows\.jsonl:\d+: .*KeyError: 'label'"),
        ({}, {"tasks": [f"{tmp_path}/none.yaml"]}, ConfigError, "cannot be read"),
        ({}, {"tasks": [f"{tmp_path}/wrong.yaml"]}, ConfigError, "cannot be loaded"),
        ({}, {"tasks": [f"{tmp_path}/unsafe.yaml"]}, ConfigError, "executes code that the model wrote"),
        ({}, {"tasks": [f"{tmp_path}/lost.yaml"]}, DataError, "its data is not there"),
        ({"data.eval": "none"}, {}, DataError, "no evaluation set"),
        ({"data.eval": "none"}, {"metrics": ["f1"], "tasks": [str(task)]}, DataError, "no evaluation set"),
        ({"data.eval": str(texts)}, {"metrics": ["f1"]}, DataError, "no row of the evaluation set ends with an answer"),
    ]:
        with subtests.test(changes=changes, arguments=arguments):
            other = RunDirectory(tmp_path / "run")
            other.path.mkdir(exist_ok=True)
            other.config_file.write_text(dump(run.config().changed(changes)))
            with pytest.raises(error, match=message):
                finetune.evaluate(other, **arguments)
            assert not other.eval_file.exists()


def test_an_unknown_task_is_reported_with_the_nearest(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = TaskManager(include_path=task.parent, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_defaults: known)
    with refusal(ConfigError, "`sayngs`", "`sayings`"):
        Tasks(["sayngs"], batch_size=1, limit=None, apply_chat_template=False)


def test_the_report_marks_a_merged_model_of_an_earlier_adapter(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_models, "model_of", lambda *_: (None, None))
    for merged, said in ((True, False), (False, True)):
        monkeypatch.setattr(RunDirectory, "is_merged", merged)
        run_models.ready(run, "merged")
        assert (run_models.EARLIER_ADAPTER in capsys.readouterr().err.replace("\n", " ")) == said


@pytest.mark.slow
def test_a_run_without_an_evaluation_set_takes_tasks_alone_and_a_damaged_adapter_exits_7(
    run: RunDirectory, task: Path, tmp_path: Path
) -> None:
    other = RunDirectory(shutil.copytree(run.path, tmp_path / "run"))
    other.config_file.write_text(dump(run.config().changed({"data.eval": "none"})))
    other.eval_file.unlink(missing_ok=True)
    other.eval_answers_file.write_text("of an earlier evaluation")
    found = finetune.evaluate(other, tasks=[str(task)], models=["adapter"], limit=2)
    assert not other.eval_answers_file.exists()
    assert [one["name"] for one in found.record["measures"]] == ["sayings: acc", "sayings: acc_norm"]
    assert measure(found, "sayings: acc")["rows"] == 2
    assert found.losses == {}
    lost = run.config().changed({"data.train": "python:0123456789abcdef"})
    other.config_file.write_text(dump(lost))
    found = finetune.evaluate(other, tasks=[str(task)], models=["adapter"], limit=1)
    assert "given from Python" in found.notes[1]
    with refusal(DataError, "run the program that gave them again"):
        finetune.evaluate(other)
    file = other.adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(dict(list(tensors.items())[1:]), file)
    (other.adapter / "fingerprint.json").unlink()  # which earlier versions did not write
    before = other.eval_file.read_bytes()
    with refusal(ArtifactError, "do not fit this base"):
        finetune.evaluate(other, tasks=[str(task)])
    assert other.eval_file.read_bytes() == before


def test_a_merged_model_of_an_earlier_adapter_is_noted(run: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory(shutil.copytree(run.path, tmp_path / "run"))
    job = _EvaluationJob(other, other.config(), with_loss=True)
    assert job.notes({"merged": ModelResults()}) == []
    other.event("trained", step=21, memory={})
    assert "of an earlier adapter" in job.notes({"merged": ModelResults()})[0]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_untied_weights_stay_untied_while_tasks_run(task: Path, tiny_base: Path) -> None:
    """lm_eval ties the weights of the model that it is given."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    base = AutoModelForCausalLM.from_pretrained(tiny_base)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"])).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
        before = model(input_ids=ids).logits
        assert len(list(Tasks([str(task)], batch_size=2, limit=1, apply_chat_template=True).run(model, tokenizer))) == 2
        assert torch.equal(model(input_ids=ids).logits, before)
