"""Evaluation and answers of runs that were trained on images, beside plain transformers and PEFT."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import seeing
import torch
from jobs import sampled
from messages import refusal
from peft import PeftModel
from PIL import Image
from seeing_jobs import SeeingRun, plain_inputs
from transformers import AutoModelForImageTextToText

import finetune
from finetune.data import images
from finetune.errors import ConfigError, DataError
from finetune.evaluation import commands, run_models
from finetune.evaluation.chat_session import Conversation
from finetune.generation.settings import Settings
from finetune.model.source import chat_template

pytestmark = pytest.mark.slow

SETTINGS = Settings(max_new_tokens=5)
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def opened(seeing_run: SeeingRun) -> run_models.Ready:
    return run_models.ready(seeing_run.run)


def plain(seen: SeeingRun, opened: run_models.Ready) -> Any:
    """transformers' whole model with PEFT's adapter; the base's weights as the run quantized them."""
    model = PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(seen.folder / "base"), seen.run.adapter
    )
    mine = dict(opened.model.get_base_model().named_modules())
    for name, module in model.get_base_model().named_modules():
        weight = getattr(mine[name], "weight", None)
        if hasattr(weight, "quant_state"):
            from bitsandbytes.functional import dequantize_4bit

            module.weight.data.copy_(dequantize_4bit(weight.data, weight.quant_state))
    return model.eval()


@torch.inference_mode()
def test_the_loss_of_base_and_adapter_on_rows_with_images_is_that_of_plain_transformers(
    seeing_run: SeeingRun, opened: run_models.Ready, tmp_path: Path
) -> None:
    run, rows = seeing_run.copied(tmp_path), seeing_run.folder / "held_out.jsonl"
    scores = finetune.evaluate(run, data=rows, metrics=["f1"], max_new_tokens=2)
    found, words = ({one["name"]: one for one in scores.as_dict()["measures"]}[name] for name in ("loss", "f1"))
    assert found["rows"] == words["rows"] == 6
    answered = [json.loads(line) for line in run.eval_answers_file.read_text().splitlines()]
    assert answered[2]["question"] == "[8_0.png] Row 8: what is it? [8_1.png]"
    model, total = plain(seeing_run, opened), {"adapter": 0.0, "base": 0.0}
    count = 0
    for row in seeing_run.rows():
        inputs = plain_inputs(seeing_run.folder, seeing_run.processor, row)
        labels = inputs.pop("labels")[0, 1:]
        count += int((labels != -100).sum())
        total["adapter"] += _nats(model(**inputs).logits, labels)
        with model.disable_adapter():
            total["base"] += _nats(model(**inputs).logits, labels)
    for name, nats in total.items():
        assert found["models"][name]["value"] == pytest.approx(nats / count, rel=1e-4)
        assert found["models"][name]["low"] < nats / count < found["models"][name]["high"]
    assert abs(total["adapter"] - total["base"]) > 0.01 * total["base"]


def _nats(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].float(), labels, reduction="sum"))


@torch.inference_mode()
def test_answers_to_images_are_those_of_plain_transformers_alone_and_in_a_batch(
    seeing_run: SeeingRun, opened: run_models.Ready, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [{"messages": row["messages"][:1]} for row in seeing_run.rows()]
    file = seeing.rows(seeing_run.folder, prompts, "prompts.jsonl")
    monkeypatch.setattr(commands, "ready", lambda *_, **__: opened)
    asked = ["generate", seeing_run.run.path, "--file", file, "--max-new-tokens", 5]
    batch, alone = ([json.loads(line) for line in call(*asked, "--batch", size)[1].splitlines()] for size in (4, 1))
    assert [row["messages"] for row in batch] == [row["messages"] for row in prompts]
    assert [row["answer"] for row in batch] == [row["answer"] for row in alone]
    model, stops = plain(seeing_run, opened), chat_template.stop_ids(opened.tokenizer)
    for row, found in zip(seeing_run.rows(), batch, strict=True):
        inputs = plain_inputs(seeing_run.folder, seeing_run.processor, row)
        first = int((inputs.pop("labels")[0] != -100).nonzero()[0])
        short = {
            name: value[:, :first] if value.shape[:2] == inputs["input_ids"].shape else value
            for name, value in inputs.items()
        }
        ids = model.generate(**short, max_new_tokens=5, do_sample=False, eos_token_id=stops)
        assert opened.tokenizer.decode(ids[0, first:], skip_special_tokens=True).strip() == found["answer"]


@pytest.mark.parametrize("seeing_run", sampled(["qwen3_vl", "idefics3"], "qwen3_vl"), indirect=True)
def test_images_decide_an_answer(seeing_run: SeeingRun, opened: run_models.Ready, call: Call, monkeypatch: Any) -> None:
    monkeypatch.setattr(commands, "ready", lambda *_, **__: opened)
    folder, run = seeing_run.folder, seeing_run.run
    files = [folder / seeing.picture(folder, f"{at}.png", (40, 40), at) for at in (101, 102, 103)]
    asked = ["generate", run.path, "--prompt", "What?", "--max-new-tokens", 5, "--json"]
    said = [json.loads(call(*asked, "--image", file)[1])["answer"] for file in files]
    assert len({*said}) > 1
    for image in (files[0].read_bytes(), Image.open(files[0])):
        assert finetune.generate(run, "What?", images=[image], max_new_tokens=5) == said[0]
    assert finetune.generate(run, "What?", images=[files[0]], which="base", max_new_tokens=5) != said[0]
    with refusal(ConfigError, "`images`", "cat.png"):
        finetune.generate(run, "What?", images="cat.png")
    with refusal(DataError, "`images[0]`"):
        finetune.generate(run, "What?", images=[3])


@pytest.mark.parametrize("seeing_run", ["qwen3_vl"], indirect=True)
def test_an_image_that_cannot_be_shown_is_an_error_of_a_sentence(
    seeing_run: SeeingRun, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run = seeing_run.folder, seeing_run.run.path
    picture = folder / seeing.picture(folder, "whole.png", (40, 40))
    (folder / "cut.png").write_bytes(picture.read_bytes()[:-30])
    (folder / "text.png").write_text("no image")
    tried = {
        "missing.png": "no such file", "cut.png": "the file is cut off", "text.png": "it is of no format that is read",
    }  # fmt: skip
    for name, told in tried.items():
        code, out, err = call("generate", run, "--prompt", "What?", "--image", folder / name)
        assert (code, out) == (3, ""), err
        assert told in " ".join(err.split())
    with monkeypatch.context() as patch:
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 700)  # an error from twice as many on
        code, _, err = call("generate", run, "--prompt", "What?", "--image", picture)
        assert (code, "(1600 pixels) exceeds limit" in " ".join(err.split())) == (3, True)
    rows = seeing.rows(folder, [{"prompt": "What?", "images": ["missing.png"]}], "bad.jsonl")
    code, _, err = call("generate", run, "--file", rows)
    assert (code, "bad.jsonl:1" in err, "no such file" in " ".join(err.split())) == (3, True, True)
    assert call("generate", run, "--file", rows, "--image", picture)[0] == 2


@pytest.fixture
def conversation(seeing_run: SeeingRun, opened: run_models.Ready) -> tuple[Conversation, list[str], list[str]]:
    said: list[str] = []
    notes: list[str] = []
    return Conversation(opened, SETTINGS, said.append, notes.append), said, notes


def test_a_conversation_shows_images_and_is_saved_as_a_row(
    seeing_run: SeeingRun, opened: run_models.Ready, conversation: Any, tmp_path: Path
) -> None:
    talk, said, notes = conversation
    picture = seeing_run.folder / seeing.picture(seeing_run.folder, "shown.png", (40, 34), 7)
    talk.take(f"/image {picture}")
    tokens = opened.asked("", [str(picture)]).images[0].tokens
    assert tokens > 3
    assert f"40 x 34 pixels, {tokens} tokens" in notes.pop()
    talk.take("What is it?")
    alone = opened.asked("What is it?", [str(picture)])
    assert "".join(said).strip() == next(opened.answers([alone], SETTINGS)).text
    talk.take("And now?")
    talk.take("/image nowhere.png")
    assert "no such file" in notes[-1]
    talk.take("/image")
    assert "name a file" in notes[-1]
    talk.take(f"/image {picture}")
    talk.take("/retry")
    assert talk._shown == [str(picture)], "of the next line"
    talk.take(f"/save {tmp_path / 'talk.jsonl'}")
    [row] = [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * 2
    assert row["messages"][0]["content"][0] == {"type": "image", "path": str(picture)}
    assert images.shown_in(talk._so_far.messages) == 1
    talk.take("/reset")
    assert not talk._so_far.images


def test_a_run_of_text_says_that_it_shows_no_images(
    run: Any, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / seeing.picture(tmp_path, "one.png", (40, 40))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"/image " + str(file).encode() + b"\n")))
    code, _, err = call("chat", run.path)
    assert (code, "shows no images to its base" in " ".join(err.split())) == (0, True)
    code, _, err = call("generate", run.path, "--prompt", "What?", "--image", file)
    assert (code, "shows no images to its base" in " ".join(err.split())) == (2, True)
