"""Facts about chat templates: which one is taken, that it is rendered in a sandbox, and that a run keeps its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import refusal

import finetune
from finetune.config import DataSection, ModelSection
from finetune.errors import ArtifactError, ConfigError
from finetune.evaluation import run_models
from finetune.export.finished_run import FinishedRun
from finetune.model.source import chat_template
from finetune.model.source.tokenizer import load_tokenizer
from finetune.storage import records

ASK = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(ModelSection())


def test_each_named_template_has_its_file_and_each_file_its_name() -> None:
    folder = Path(chat_template.__file__).parent / "templates"
    assert {path.stem for path in folder.iterdir()} == set(chat_template.TEMPLATES) - {"auto"}


def test_the_tokenizer_keeps_its_own_template_unless_another_is_chosen(tmp_path: Path) -> None:
    own = load_tokenizer(ModelSection()).chat_template
    assert "<|im_start|>" in own
    llama3 = load_tokenizer(ModelSection(), DataSection(chat_template="llama3")).chat_template
    assert llama3 == chat_template.named("llama3") != own
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    chosen = load_tokenizer(ModelSection(), DataSection(chat_template=str(file)))
    assert chosen.apply_chat_template(ASK, tokenize=False) == "Hi"


def test_a_template_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.jinja").write_bytes(b"caf\xe9")
    with refusal(ConfigError, "latin.jinja:"):
        chat_template.choose(str(tmp_path / "latin.jinja"), None)


@pytest.mark.parametrize("name", ["llama3", "gemma", "phi3"])
def test_a_named_template_renders_what_the_one_shipped_with_trl_renders(name: str, tokenizer: Any) -> None:
    import importlib.util

    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    peer = (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    turns = [*ASK, {"role": "assistant", "content": " so "}, {"role": "user", "content": "Why?"}]
    tokenizer.bos_token = "<|im_start|>"
    for messages, prompt in ((turns, True), (turns, False), (turns[:2], False), (turns[:1], True)):
        ours, theirs = (
            tokenizer.apply_chat_template(messages, chat_template=text, tokenize=False, add_generation_prompt=prompt)
            for text in (chat_template.named(name), peer)
        )
        assert ours == theirs


# -- the sandbox ------------------------------------------------------------------------------------------------------

Draw = Callable[..., Any]


@pytest.fixture(params=[chat_template.ids, chat_template.text])
def draw(request: pytest.FixtureRequest) -> Draw:
    """As a conversation is rendered in generation, and as it is in preparation."""
    return request.param


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['os'] }}",
    ],
)
def test_a_template_does_not_get_out_of_the_sandbox(escape: str, draw: Draw, tokenizer: Any) -> None:
    tokenizer.chat_template = escape
    with refusal(ArtifactError, "violates its sandbox"):
        draw(tokenizer, ASK)


@pytest.mark.parametrize("reach", ["{% include '/etc/hostname' %}", "{{ range(100001) }}"])
def test_a_template_reads_no_file_and_has_no_long_ranges(reach: str, draw: Draw, tokenizer: Any) -> None:
    tokenizer.chat_template = reach
    with pytest.raises((TypeError, OverflowError), match=r"no loader|too big"):
        draw(tokenizer, ASK)


def test_a_mistake_in_a_template_is_reported_with_its_line(draw: Draw, tokenizer: Any) -> None:
    tokenizer.chat_template = "\n{% for message in messages %}\n{% endif %}"
    with refusal(ArtifactError, "line 3"):
        draw(tokenizer, ASK)


# -- a run keeps its own ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_answers_and_merges_with_the_template_that_it_was_trained_with(quick: Any, tmp_path: Path) -> None:
    """And lists what became of its rows."""
    file = tmp_path / "mine.jinja"
    file.write_text(chat_template.named("chatml").replace("<|im_end|>", "<|pad|>"), encoding="utf-8")
    config = quick(f"data.chat_template={file}", "data.max_length=24", "training.max_steps=1")
    run = finetune.train(config).run
    trained_with = file.read_text(encoding="utf-8")
    os.remove(file)
    tokenizer = run_models.model_of(FinishedRun(run, run.config()), "adapter")[1]
    assert tokenizer.chat_template == trained_with
    finetune.merge(run)
    assert (run.merged / "chat_template.jinja").read_text(encoding="utf-8") == trained_with
    stops_at = json.loads((run.merged / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    assert set(tokenizer.convert_ids_to_tokens(stops_at)) == {"<|endoftext|>", "<|im_end|>", "<|pad|>"}

    listed = records.read_lines(run.data_file, records.AFFECTED).rows
    assert listed
    assert all(row["what"] in ("truncated", "answer truncated") for row in listed)
    assert {row["split"] for row in listed} == {"train", "eval"}
    assert all(row["tokens"] > 24 and row["why"] == "over data.max_length" for row in listed)
    assert all(row["place"].startswith(str(config.data.train)) for row in listed)


@pytest.mark.parametrize("given", [5, True, False, 1.5, ["x"], {"default": 5}, {"default": None}, {"a": ["x"]}])
def test_a_template_of_a_base_that_is_not_text_is_refused(given: Any) -> None:
    """As a tokenizer's config or a key of a GGUF file may have it."""
    with refusal(ArtifactError, "`chat_template`"):
        chat_template.check(chat_template.choose("auto", given))


@pytest.mark.parametrize("given", [None, "", {}, []])
def test_a_base_without_a_template_gets_the_plain_one(given: Any) -> None:
    assert chat_template.choose("auto", given) == chat_template.named("plain")
