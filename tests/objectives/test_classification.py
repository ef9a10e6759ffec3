"""Classifiers: their rows, the loss, what is saved, what transformers and PEFT make of it, and their evaluation."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import in_fp32, metric, same_adapter, write_rows
from messages import refusal
from objective_jobs import PLAIN, copied, eight_rows, quick_in, whole_and_split
from peft import PeftModel
from steps import forecast_that_held, ready, stopped_and_resumed
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

import finetune
from finetune.data.prepare import classes, prepare
from finetune.errors import ArtifactError, ConfigError, DataError
from finetune.evaluation.sequence_scores import _macro_f1
from finetune.model.source.tokenizer import load_tokenizer
from finetune.model.structure import sequence_head
from finetune.resolve import resolve
from finetune.storage.rundir import RunDirectory

COLOURS = ("red", "green", "blue")


def rows(number: int) -> list[dict[str, Any]]:
    """Texts of different lengths; blue is the most frequent."""
    colours = [COLOURS[min(n % 4, 2)] for n in range(number)]
    return [{"text": f"Box {n}{' is' * (n % 5)} {colour}", "label": colour} for n, colour in enumerate(colours)]


@pytest.fixture
def job(tmp_path: Path, quick):
    """A function from overrides to a classifier of three colours, in fp32."""
    return of_colours(quick, tmp_path)


def of_colours(quick: Any, folder: Path) -> Any:
    file = write_rows(folder / "rows.jsonl", rows(48))
    return in_fp32(quick, file, "training.objective=classification", "data.max_length=64")


LEARNING = [
    "training.max_steps=8", "training.batch_size=8", "training.learning_rate=0.003", "memory.checkpointing=none",
]  # fmt: skip
PACKED = [*LEARNING, "training.eval_every=4", "data.packing=true"]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, shallow_base: Path) -> RunDirectory:
    """A finished run on packed rows. Do not write to it."""
    folder = tmp_path_factory.mktemp("learned")
    return finetune.train(of_colours(quick_in(folder, shallow_base), folder)(*PACKED)).run


# -- rows -------------------------------------------------------------------------------------------------------------


def test_classes_are_those_of_the_training_rows_in_an_order_that_does_not_depend_on_theirs(job, tmp_path: Path) -> None:
    config = resolve(job(), until="form").config
    assert config.data.labels == config.model.labels == ["blue", "green", "red"]
    for content, expected in (
        ([10, 2, 1], ["1", "2", "10"]),
        (["10", "2", 1], ["1", "2", "10"]),
        (["b", "a", -1], ["-1", "a", "b"]),
    ):
        file = write_rows(tmp_path / "other.jsonl", [{"text": f"a text {label}", "label": label} for label in content])
        assert classes(job(f"data.train={file}").data) == expected
    assert classes(job("data.labels=[red, green, blue, black]").data) == ["red", "green", "blue", "black"]


def test_a_row_has_the_tokens_that_the_tokenizer_or_its_template_gives_whoever_asks(job, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Is it red?"}, {"role": "assistant", "content": "No."}]
    content = [
        {"text": "a red box", "label": 1},
        {"prompt": "a blue box", "label": 0},
        {"messages": turns, "label": 1},
        {"messages": turns[:1], "label": 0},
        {"prompt": turns[:1], "system": "Answer.", "label": 2},
    ]
    config = job(f"data.train={write_rows(tmp_path / 'kinds.jsonl', content)}", "data.eval=none")
    config = resolve(config, until="form").config
    tokenizer = load_tokenizer(config.model, config.data)
    found = prepare(config.data, tokenizer).train
    system = {"role": "system", "content": "Answer."}
    assert found["input_ids"][:] == [
        tokenizer("a red box").input_ids,
        tokenizer("a blue box").input_ids,
        *(
            tokenizer.apply_chat_template(messages, return_dict=False)
            for messages in (turns, turns[:1], [system, *turns[:1]])
        ),
    ]
    assert found["label"][:] == [1, 0, 1, 0, 2]


def test_a_row_that_is_wrong_is_named(job, tmp_path: Path) -> None:
    wrong = [{"text": "a", "label": label} for label in (None, "", True, 0.5, ["red"])]
    wrong += [{"text": "a"}, {"label": "red"}, {"text": 3, "label": "red"}, {"messages": [], "label": "red"}]
    for row, key in zip(wrong, ("label",) * 6 + ("text", "text", "messages"), strict=True):
        file = write_rows(tmp_path / "wrong.jsonl", [*rows(2), row])
        with refusal(DataError, "wrong.jsonl:3", f"`{key}`"):
            finetune.train(job(f"data.train={file}"))


def test_a_class_that_no_training_row_has_and_a_single_one_are_refused(job, tmp_path: Path) -> None:
    other = write_rows(tmp_path / "other.jsonl", [{"text": "a box", "label": "rde"}])
    with refusal(DataError, "other.jsonl:1", "`label`", "`red`"):
        finetune.train(job(f"data.eval={other}"))
    with refusal(DataError, "`label`", "`rde`"):
        finetune.train(job(f"data.train={other}"))
    for labels in ("[red]", "[red, red, blue]"):
        with refusal(ConfigError, "`data.labels`"):
            finetune.plan(job(f"data.labels={labels}"), "cpu")


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["false", "true"])
def test_the_gradient_is_that_of_transformers_classifier_however_the_step_is_split(
    job, tmp_path: Path, packing: str
) -> None:
    """With rows of one token, which are trained and measured like others."""
    texts = [*("abcd"[n] for n in range(4)), *(row["text"] for row in rows(4))]
    content = [{"text": text, "label": COLOURS[n % 3]} for n, text in enumerate(texts)]
    keys = [f"data.{name}={write_rows(tmp_path / f'{name}.jsonl', content)}" for name in ("train", "eval")]
    config = job(*keys, "training.batch_size=8", "training.micro_batch=8", f"data.packing={packing}")
    loop = ready(config)
    kept = eight_rows(loop)
    assert sorted(len(row["input_ids"]) for row in kept)[:5] == [1, 1, 1, 1, len(kept[4]["input_ids"])]
    loss, _ = whole_and_split(loop, rel=1e-5)
    model = loop.step.model.get_base_model()
    own = type(model).__mro__[1].forward  # transformers' LlamaForSequenceClassification
    with torch.no_grad():
        scores = torch.cat([own(model, input_ids=torch.tensor([row["input_ids"]])).logits for row in kept])
    labels = torch.tensor([int(row["label"]) for row in kept])
    assert loss == pytest.approx(float(cross_entropy(scores, labels)), rel=1e-6)
    config = resolve(config, until="form").config
    assert prepare(config.data, load_tokenizer(config.model, config.data)).eval_counts.rows == 8


@pytest.mark.slow
def test_a_classifier_learns_and_resumes_to_the_same_bits(job, learned: RunDirectory) -> None:
    losses = metric(learned, "loss")
    assert losses[-1] < losses[0]
    assert all(0 <= share <= 1 for share in metric(learned, "accuracy"))
    halted = stopped_and_resumed(job(*PACKED, "output.save_every=4"), 5)
    assert same_adapter(learned, halted)


@pytest.mark.long
def test_a_classifier_takes_the_memory_of_its_forecast(job) -> None:
    for packing in ("false", "true"):
        keys = ["training.max_steps=2", f"data.packing={packing}", "memory.check=warn"]
        forecast_that_held(finetune.train(job(*keys, run=packing)).run)


@pytest.mark.slow
def test_transformers_and_peft_load_what_is_published_and_eval_says_what_they_would(
    learned: RunDirectory, call, tmp_path: Path
) -> None:
    run = copied(learned, tmp_path)
    config = run.config()
    finetune.merge(run)
    saved = json.loads((run.adapter / "adapter_config.json").read_text())
    assert (saved["task_type"], saved["modules_to_save"]) == ("SEQ_CLS", ["score"])
    merged = AutoModelForSequenceClassification.from_pretrained(run.merged, dtype=torch.float32).eval()
    assert merged.config.id2label == {0: "blue", 1: "green", 2: "red"}
    assert merged.config.label2id == {"blue": 0, "green": 1, "red": 2}
    base = AutoModelForSequenceClassification.from_pretrained(config.model.name, num_labels=3, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(run.adapter)).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.merged)

    def given(model: Any, text: str) -> str:
        with torch.no_grad():
            return merged.config.id2label[int(model(**tokenizer(text, return_tensors="pt")).logits.argmax())]

    content = rows(60)[48:]
    content[0]["label"] = "blue"  # which it is not
    other = write_rows(tmp_path / "other.jsonl", content)
    measures = {one["name"]: one for one in finetune.evaluate(run, data=other).record["measures"]}
    lines = [json.loads(line) for line in run.eval_answers_file.read_text().splitlines()]
    assert [line["row"] for line in lines] == [f"{other}:{number}" for number in range(1, 13)]
    assert [line["reference"] for line in lines] == [row["label"] for row in content]
    for name, model in (("adapter", adapted), ("merged", merged)):
        answers = [given(model, row["text"]) for row in content]
        assert [line["answers"][name] for line in lines] == answers
        right = [float(line["reference"] == answer) for line, answer in zip(lines, answers, strict=True)]
        assert [line["scores"]["accuracy"][name] for line in lines] == right
        figure = measures["accuracy"]["models"][name]
        assert figure["value"] == pytest.approx(np.mean(right))
        assert figure["low"] < figure["value"] < 1
    assert measures["accuracy"]["models"]["base"]["value"] == 0, "its scores are equal, so it gives no class"
    assert {line["answers"]["base"] for line in lines} == {""}
    assert measures["the most frequent label"]["models"]["base"]["value"] == 7 / 12
    assert 0 <= measures["macro F1"]["models"]["adapter"]["low"] <= measures["macro F1"]["models"]["adapter"]["high"]
    (served,) = finetune.export_model(run, "merged")["serve"].values()
    _, _, program = shlex.split(served)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program)  # noqa: S102 -- the command that people are shown
    (of_text,) = ast.literal_eval(printed.getvalue())
    assert {each["label"] for each in of_text} == {"blue", "green", "red"}
    card = (run.merged / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "`blue`, `green`, `red`" in card
    assert "next token" not in card
    for command in (["chat"], ["generate", "--prompt", "a"], ["export", "--to", "gguf"], ["eval", "--metric", "exact"]):
        code, _, err = call(*command[:1], run.path, *command[1:])
        assert (code, "is a classifier" in err) == (2, True), err


@pytest.mark.slow
def test_a_pipeline_scores_rows_at_once_as_one_by_one_where_the_padding_token_is_eos(
    job, tmp_path: Path, shallow_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a template that ends with EOS, and texts that end with other tokens; a merge is proven to."""
    tokenizer = AutoTokenizer.from_pretrained(shallow_base)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    answer = {"role": "assistant", "content": "so"}
    content = [{"messages": [{"role": "user", "content": row.pop("text")}, answer], **row} for row in rows(40)]
    file = write_rows(tmp_path / "turns.jsonl", content)
    keys = [f"data.train={file}", f"model.tokenizer={tmp_path / 'tokenizer'}", "data.chat_template=mistral"]
    finetune.train(job(*keys, *LEARNING, "training.max_steps=4", "output.merge=true"))
    merged = RunDirectory(tmp_path / "run").merged
    scoring = pipeline("text-classification", str(merged), function_to_apply="none", top_k=None)
    assert scoring.model.config.pad_token_id == scoring.tokenizer.pad_token_id != tokenizer.eos_token_id
    texts = [f"Box {n}{' is' * n} red{tokenizer.eos_token * (n % 2)}" for n in range(8)]
    for each, text in zip(scoring(texts, batch_size=4), texts, strict=True):
        (alone,) = scoring([text], batch_size=1)
        ids = torch.tensor([tokenizer(text).input_ids])
        with torch.no_grad():
            states = scoring.model.model(ids).last_hidden_state[:, -1]
            last = scoring.model.score(states)[0].float().tolist()
        for found in (each, alone):
            by_label = {one["label"]: one["score"] for one in found}
            expected = dict(zip(scoring.model.config.id2label.values(), last, strict=True))
            assert by_label == pytest.approx(expected, rel=0.05, abs=0.02), "in bfloat16"
    monkeypatch.setattr(sequence_head, "padding_for", lambda tokenizer, rows: tokenizer.eos_token_id)
    with refusal(ArtifactError, "other scores in transformers"):
        finetune.merge(tmp_path / "run")


def test_macro_f1_is_the_mean_over_the_classes_that_occur() -> None:
    # Of two classes: 1 right of 2 given and 1 wanted (F1 2/3), and 2 right of 2 given and 3 wanted (F1 4/5).
    assert _macro_f1(np.array([1.0, 2, 0, 3, 5, 0])) == pytest.approx((2 / 3 + 4 / 5) / 2)


@pytest.mark.slow
def test_plan_and_a_look_at_the_data_find_the_classes_themselves(job) -> None:
    assert finetune.inspect_data(job()).inspection.train.rows == 40
    planned = finetune.plan(job(*PLAIN, "data.eval=none"), "cpu")
    assert planned.config.model.labels == ["blue", "green", "red"]
