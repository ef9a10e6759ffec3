"""Facts about plain-text prompts, which no chat template surrounds: every place that shows or asks a model says so."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import sampled, write_rows

import finetune
from finetune.data.prepare import prepare
from finetune.errors import ForecastError
from finetune.evaluation import run_models
from finetune.export.export_formats import FORMATS
from finetune.extras.init import proposal
from finetune.model.source.tokenizer import load_tokenizer
from finetune.resolve.planner import Planner
from finetune.storage.rundir import RunDirectory

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def bare_base(shallow_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base without a chat template."""
    folder = tmp_path_factory.mktemp("bare") / "base"
    shutil.copytree(shallow_base, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write(folder: Path, name: str = "rows.jsonl") -> Path:
    rows = [{"prompt": f"What is {number}?", "completion": f"It is {number}."} for number in range(60)]
    write_rows(folder / name, rows)
    return folder / name


@pytest.mark.parametrize("separator", sampled(["", "\n"], "\n"))
def test_what_is_asked_of_a_run_and_of_its_exports_is_what_was_trained(
    separator: str, quick: Any, tmp_path: Path, call: Call
) -> None:
    config = quick(f"data.train={write(tmp_path)}", f"data.separator={json.dumps(separator)}")
    run = finetune.train(config).run

    tokenizer = load_tokenizer(config.model)
    row = prepare(config.data, tokenizer).train[0]
    asked = run_models.Ready(config, None, tokenizer, "completion").asked("What is 7?")
    assert asked == run_models.examples.Completion(f"What is 7?{separator}", "")
    [prompt] = [ids for ids in (tokenizer(f"What is {n}?{separator}")["input_ids"] for n in range(60))
                if ids == row["input_ids"][: len(ids)]]  # fmt: skip
    assert not any(label != -100 for label in row["labels"][: len(prompt)])

    how = ', with "\\n" after each prompt' if separator else ""
    for name in ("merged", "adapter", "ollama"):
        code, out, _ = call("export", run.path, "--to", name)
        assert code == 0
        card = (run.path / FORMATS[name].folder / "README.md").read_text()
        for text in (card, out):
            assert f"trained on plain text to be completed{how}" in text
            assert ("`/v1/chat/completions` adds a chat template, which was not trained" in text) == (name != "ollama")
    modelfile = (run.path / "ollama" / "Modelfile").read_text()
    assert f"# The model was trained on plain text to be completed{how}" in modelfile
    literal = '{{ "\\n" }}' if separator else ""
    assert f'TEMPLATE """{{{{ .Prompt }}}}{literal}"""' in modelfile


def test_a_run_of_conversations_says_nothing_of_plain_text(run: RunDirectory, call: Call) -> None:
    code, out, _ = call("export", run.path, "--to", "adapter")
    assert code == 0
    assert "plain text" not in out + (run.path / "plain-adapter" / "README.md").read_text()


def test_the_header_of_a_run_and_a_look_at_the_data_say_how_prompts_are_joined(
    tmp_path: Path, call: Call, shallow_base: Path, hurried: None, unwarmed: None
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"model: {{name: {shallow_base}}}\ndata: {{train: {write(tmp_path)}}}\n")
    plain, newline = ("plain text in 60 rows, without the chat template" + how for how in (
        "; no white space before the answer in 60 (see data.separator)", ', each followed by "\\n"'
    ))  # fmt: skip
    run = ("training.max_steps=1", "memory.check=off", f"output.dir={tmp_path / 'run'}")
    turns = "if `data.columns: {instruction: prompt, output: completion}` made the rows turns of the chat template\n"
    for said, command, *arguments in (
        (plain, "data", 'data.separator=""'), (newline, "data", r'data.separator="\n"'),
        (newline, "train", r'data.separator="\n"', *run),
    ):  # fmt: skip
        code, out, _ = call(command, job, *arguments)
        assert code == 0
        assert re.search(r"^prompts +(.*)$", out, re.M)[1] == said  # type: ignore[index]
        if command == "data":
            assert f"What is 0?{'↵' if said == newline else ''}" in out
            assert turns in out
            template = out.partition(turns)[2]
            assert re.search(r"<\|im_start\|>user↵\n +What is \d+\?<\|im_end\|>↵\n", template)

    code, out, _ = call("data", job, "data.columns={instruction: prompt, output: completion}")
    assert code == 0
    assert "prompts" not in out
    assert "made the rows turns" not in out


def test_rows_without_a_chat_template_are_not_shown_with_one(call: Call, tmp_path: Path, bare_base: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"model: {{name: {bare_base}}}\ndata: {{train: {write(tmp_path)}}}\n")
    code, out, _ = call("data", job)
    assert code == 0
    assert "made the rows turns" not in out


def _not_fitted(planner: Planner) -> None:
    raise ForecastError("not here")


def test_init_proposes_the_chat_template_where_there_is_one_and_else_a_separator(
    call: Call, tmp_path: Path, bare_base: Path, shallow_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Of the forecast, which takes most of the time of `init`, nothing is looked at.
    monkeypatch.setattr(proposal, "_choose_quantization", lambda *_: None)
    monkeypatch.setattr(Planner, "fit", _not_fitted)
    write(tmp_path)
    for base, said, unsaid in [
        (shallow_base, "instruction: prompt", "separator"),
        (bare_base, 'separator: "\\n"', "instruction"),
    ]:
        code, out, _ = call("init", base, "rows.jsonl", "--yes")
        assert code == 0
        assert said in out
        assert unsaid not in out
        code, out, _ = call("data", "rows.yaml")
        assert code == 0
        assert "no white space before the answer" not in out
