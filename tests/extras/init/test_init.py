"""Facts about `finetune init`: what it asks, what it finds out by itself, and that its config trains."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import workbooks
from jobs import write_rows
from messages import refusal, reported
from transformers import PreTrainedConfig

import finetune
from finetune.choices import load_config
from finetune.data.counts import Counts
from finetune.data.formats import holds_pairs
from finetune.errors import ConfigError, ForecastError
from finetune.extras.init import proposal, questions
from finetune.extras.init.draft import Draft
from finetune.resolve.planner import Planner

Call = Callable[..., tuple[int, str, str]]
# Of no model at hand, so that nothing is forecast, which takes most of the time of `init`.
ELSEWHERE = "someone/some-model"


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def unfitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a model that cannot be forecast, for tests of what else `init` finds out."""

    def fit(planner: Planner) -> None:
        raise ForecastError("not here")

    monkeypatch.setattr(proposal, "_choose_quantization", lambda *_: None)
    monkeypatch.setattr(Planner, "fit", fit)


def write(folder: Path, number: int, name: str = "rows.jsonl", fields: tuple[str, str] = ("question", "answer")) -> str:
    rows = [dict(zip(fields, (f"What is {one}?", f"It is {one}."), strict=True)) for one in range(number)]
    write_rows(folder / name, rows)
    return name


@pytest.mark.slow
def test_a_short_config_is_written_with_the_values_that_fit_and_the_reason_of_each(
    call: Call, tmp_path: Path, shallow_base: Path
) -> None:
    write(tmp_path, 10)
    code, out, err = call("init", shallow_base, "rows.jsonl")
    assert (code, err) == (0, "")
    text = (tmp_path / "rows.yaml").read_text()
    assert text in out
    assert len(text.splitlines()) < 40
    config = load_config(tmp_path / "rows.yaml")
    assert config.data.columns == {"instruction": "question", "output": "answer"}
    assert config.data.eval == "auto"
    assert config.data.max_length == 128
    assert config.quantization.kind == "none"
    assert config.training.rows == 4
    assert config.memory.checkpointing == "auto"
    assert "  checkpointing: auto  # `none` as of now: " in text
    # 9 rows, and one held out, whose loss decides nothing.
    assert (config.training.batch_size, config.training.epochs) == (4, 10)
    assert (config.training.eval_every, config.output.save_every) == (3, 100)
    assert "1 row held out by hash; too few different rows to choose an adapter by" in text
    [head, *lines] = text.splitlines()
    assert "10 rows of the format alpaca; fits: " in head
    chosen = [line for line in lines if line.startswith("  ") and not line.startswith("    ")]
    assert [line for line in chosen if "  # " not in line] == [f"  name: {shallow_base}", "  train: rows.jsonl"]

    before = (tmp_path / "rows.yaml").read_bytes()
    code, _, err = call("init", shallow_base, "rows.jsonl")
    assert code == 2
    assert err == "error: rows.yaml exists and was left as it is; name another file with --output, or add --yes\n"
    assert (tmp_path / "rows.yaml").read_bytes() == before
    code, out, _ = call("init", ELSEWHERE, "rows.jsonl", "--yes")
    assert code == 0
    assert "replaced rows.yaml" in out
    assert load_config(tmp_path / "rows.yaml").model.name == ELSEWHERE


@pytest.mark.slow
def test_equal_rows_are_not_held_out_and_truncation_is_noted(call: Call, tmp_path: Path, shallow_base: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "word " * 3000}) + "\n")
    code, _, _ = call("init", shallow_base, "one.jsonl", "--output", "job.yaml")
    assert code == 0
    config = load_config(tmp_path / "job.yaml")
    assert config.data.eval == "none"
    text = (tmp_path / "job.yaml").read_text()
    assert "too few different rows to hold any out" in text
    assert "1 row of the format text" in text
    positions = json.loads((shallow_base / "config.json").read_text())["max_position_embeddings"]
    assert config.data.max_length == positions
    assert f"the model has {positions:,} positions" in text


@pytest.mark.parametrize(("positions", "length"), [(None, 256), (512, 256), (200, 200)])
def test_the_longest_row_is_rounded_up_within_the_positions_of_the_base(positions: int | None, length: int) -> None:
    data: Any = SimpleNamespace(train_counts=Counts(rows=40, longest=130), eval_counts=None, judges=False)
    draft = Draft()
    proposal._by_rows(draft, data, "rows", PreTrainedConfig(max_position_embeddings=positions))
    assert draft.values["data.max_length"] == length


def test_the_config_for_a_model_that_is_not_cached_says_so(call: Call, tmp_path: Path) -> None:
    write(tmp_path, 3, fields=("prompt", "completion"))
    code, out, err = call("init", "someone/some-model", "rows.jsonl")
    assert (code, err) == (0, "")
    assert "# Not fitted to a card: " in out
    assert load_config(tmp_path / "rows.yaml").model.name == "someone/some-model"


QUESTIONS, LONG_NAME = ("question", "answer"), ("Frage, lang", "Antwort")
# The fields of rows.jsonl, the arguments, the exit code, and words of the message.
REFUSED = [
    (QUESTIONS, [], 2, "finetune init MODEL DATA"),
    (QUESTIONS, ["no/such/model", "rows.jsonl"], 7, "no such model directory"),
    (QUESTIONS, ["builtin:tiny-llama", "row.jsonl"], 3, "did you mean `rows.jsonl`?"),
    (QUESTIONS, ["builtin:tiny-llama", "empty.jsonl"], 3, "empty.jsonl has no rows"),
    (QUESTIONS, ["xlm", "rows.jsonl"], 7, "it sees the"),
    (("left", "right"), ["builtin:tiny-llama", "rows.jsonl"], 3, "Known formats"),
    (("sender", "text"), ["builtin:tiny-llama", "rows.jsonl"], 3, "--columns"),
    (LONG_NAME, [ELSEWHERE, "rows.jsonl", "--columns", "prompt"], 2, "write FIELD=COLUMN"),
    (LONG_NAME, [ELSEWHERE, "rows.jsonl", "--columns", "prompt=Frag,completion=Antwort"], 3,
     "did you mean `Frage, lang`?"),
    (LONG_NAME, [ELSEWHERE, "rows.jsonl", "--columns", "promt=Frage, lang"], 2, "did you mean `prompt`?"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "arguments", "code", "words"), REFUSED)
def test_unusable_arguments_are_refused_before_anything_is_loaded(
    call: Call, tmp_path: Path, fields: tuple[str, str], arguments: list[str], code: int, words: str
) -> None:
    write(tmp_path, 2, fields=fields)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "xlm").mkdir()
    values = {"model_type": "xlm", "emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 4096}
    (tmp_path / "xlm" / "config.json").write_text(json.dumps(values))
    found, _, err = call("init", *arguments)
    assert found == code
    reported(err, words)
    assert not list(tmp_path.glob("*.yaml"))


@pytest.mark.parametrize(
    ("fields", "columns"),
    [(LONG_NAME, "prompt=Frage, lang,completion=Antwort"), (("a", "b"), "text=b"), (None, "instruction=q,output=a")],
)
def test_columns_may_be_named(fields: tuple[str, str] | None, columns: str, call: Call, tmp_path: Path) -> None:
    data = write(tmp_path, 10, fields=fields) if fields else "someone/rows"  # on the hub, as they are named
    code, _, _ = call("init", ELSEWHERE, data, "--columns", columns, "--output", "job.yaml")
    assert code == 0
    assert fields or load_config(tmp_path / "job.yaml").data.columns == {"instruction": "q", "output": "a"}


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("judges", [True, False])
def test_the_best_epoch_is_kept_where_the_held_out_rows_suffice_to_judge(judges: bool) -> None:
    counts = {"train_counts": Counts(rows=50, longest=9), "eval_counts": Counts(rows=10, longest=9)}
    data: Any = SimpleNamespace(**counts, judges=judges, splits=[])
    draft = Draft()
    proposal._by_rows(draft, data, "rows", PreTrainedConfig())
    assert draft.values["data.eval"] == "auto"
    assert draft.values["training.eval_every"] == 13
    assert draft.values.get("output.save_every") == (13 if judges else None)


def test_the_card_is_asked_for_once_the_data_were_read_and_again_after_a_mistake(
    call: Call, tmp_path: Path, shallow_base: Path, monkeypatch: pytest.MonkeyPatch, unfitted: None
) -> None:
    write(tmp_path, 3)
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write("{\n")
    monkeypatch.setattr(sys, "stdin", stdin := _Terminal("RTX 4O9O\n24GiB\n"))
    code, _, err = call("init", shallow_base, "rows.jsonl")
    assert code == 3
    assert "rows.jsonl:4:" in err
    assert stdin.tell() == 0, "nothing was asked"

    write(tmp_path, 3)
    code, out, err = call("init", shallow_base, "rows.jsonl")
    assert code == 0
    assert "RTX 4O9O" in err
    assert out.index("reading rows.jsonl") < out.index("Card: ")
    assert load_config(tmp_path / "rows.yaml").training.precision == "auto"


GUESSED = ("customer_message", "agent_reply")


@pytest.mark.parametrize(
    ("arguments", "answer", "code"),
    [
        ([], None, 2), ([], "n\n", 2), ([], "y\n\n", 0), (["--yes"], None, 0),
        (["--columns", "prompt=customer_message,completion=agent_reply"], None, 0),
        (["--columns", "instruction=customer_message,output=agent_reply"], None, 0),
    ],
)  # fmt: skip
def test_columns_that_are_guessed_are_confirmed_or_named(
    arguments: list[str], answer: str | None, code: int, call: Call, tmp_path: Path, shallow_base: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write(tmp_path, 10, fields=GUESSED)
    if answer:
        monkeypatch.setattr(sys, "stdin", _Terminal(answer))
    found, out, err = call("init", ELSEWHERE, "rows.jsonl", *arguments)
    assert found == code
    assert ("Is `agent_reply` the answer to `customer_message`?" in out) == (answer is not None)
    if code:
        assert "--columns prompt=customer_message,completion=agent_reply" in err
        assert not (tmp_path / "rows.yaml").exists()
    else:
        assert load_config(tmp_path / "rows.yaml").data.columns == {
            "instruction": "customer_message", "output": "agent_reply"
        }  # fmt: skip
        assert call("data", "rows.yaml", f"model.name={shallow_base}")[0] == 0


@pytest.mark.slow
def test_a_european_spreadsheet_becomes_a_config_that_reads_it(
    call: Call, tmp_path: Path, shallow_base: Path, subtests: pytest.Subtests
) -> None:
    table = [("Frage", "Antwort"), *((f"Schöne Grüße; {n}?", f"Ja,\nso „{n}“") for n in range(10))]
    text = "".join(";".join(f'"{cell}"' for cell in row) + "\r\n" for row in table)
    for name, encoding in [("utf8.csv", "utf-8"), ("mark.csv", "utf-8-sig"), ("windows.csv", "cp1252"), ("x.xlsx", "")]:
        with subtests.test(name=name):
            if encoding:
                (tmp_path / name).write_bytes(text.encode(encoding))
            else:
                workbooks.write(tmp_path / name, {"Tabelle1": table})
            columns = ["--columns", "prompt=Frage,completion=Antwort"]
            code, out, err = call("init", ELSEWHERE, name, "--output", f"{name}.yaml", *columns)
            assert (code, err) == (0, "")
            assert ("encoding: cp1252  # not UTF-8; is `Schöne` right? Else another" in out) == (encoding == "cp1252")
            code, out, _ = call("data", f"{name}.yaml", f"model.name={shallow_base}")
            assert code == 0
            assert "Schöne Grüße; 0?" in out
            assert "„0“" in out


def test_a_chat_export_is_refused_with_one_sentence(call: Call, tmp_path: Path, shallow_base: Path) -> None:
    write(tmp_path, 10, fields=("sender", "text"))
    (tmp_path / "job.yaml").write_text(f"model: {{name: {shallow_base}}}\ndata: {{train: rows.jsonl}}\n")
    for command in (["init", shallow_base, "rows.jsonl"], ["data", "job.yaml"], ["train", "job.yaml"]):
        code, _, err = call(*command)
        assert code == 3
        assert err.startswith("error: rows.jsonl:1")
        reported(err, "`sender`", "`text`")
        assert err.count("\n") == 1
    assert call("data", "job.yaml", "data.format=text")[0] == 0


def test_on_a_terminal_it_asks_for_what_is_missing_and_again_after_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 2)
    monkeypatch.setattr(sys, "stdin", _Terminal("builtin:tiny-lama\nbuiltin:tiny-llama\nrows.json\nrows.jsonl\n"))
    wanted = questions.ask(None, None, None, None, yes=False)
    assert wanted == questions.Wanted("builtin:tiny-llama", "rows.jsonl", None, Path("rows.yaml"), asks=True)
    err = capsys.readouterr().err
    reported(err, "`builtin:tiny-llama`")
    reported(err, "`rows.jsonl`")

    (tmp_path / "rows.yaml").write_text("mine")
    for answer, agreed in (("n", False), ("y", True)):
        monkeypatch.setattr(sys, "stdin", _Terminal(f"{answer}\n"))
        if agreed:
            assert questions.ask("builtin:tiny-llama", "rows.jsonl", None, None, yes=False) == wanted
        else:
            with refusal(ConfigError, "left as it is"):
                questions.ask("builtin:tiny-llama", "rows.jsonl", None, None, yes=False)


@pytest.mark.slow
def test_a_config_of_two_keys_trains_on_one_row(tmp_path: Path, shallow_base: Path, hurried: None) -> None:
    rows = write(tmp_path, 1, fields=("prompt", "completion"))
    (tmp_path / "job.yaml").write_text(f"model:\n  name: {shallow_base}\ndata:\n  train: {rows}\n")
    result: Any = finetune.train(load_config("job.yaml"))
    metrics = result.run.metrics_file.read_text()
    assert '"loss"' in metrics
    assert "eval_loss" not in metrics


OTHER_OBJECTIVES = {
    "dpo": (
        {"chosen": "It is.", "rejected": "No."}, "rows of the format pairs",
        "objective: dpo  # rows have a chosen and a rejected answer\n", 7.4e-5,
    ),
    "kto": (
        {"completion": "It is."}, "rows of the format unpaired",
        "objective: kto  # rows have an answer that is labelled good or bad\n", 3.7e-5,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("objective", OTHER_OBJECTIVES)
def test_pairs_and_labelled_answers_become_a_config_for_their_objective(
    objective: str, call: Call, tmp_path: Path, shallow_base: Path, hurried: None, unfitted: None
) -> None:
    fields, rows, why, rate = OTHER_OBJECTIVES[objective]
    rows_of = (
        {**fields, "prompt": f"What is {one}?"} | ({"label": one % 2 == 0} if objective == "kto" else {})
        for one in range(60)
    )
    write_rows(tmp_path / "rows.jsonl", rows_of)
    code, _, err = call("init", shallow_base, "rows.jsonl", "--output", "job.yaml")
    assert (code, err) == (0, "")
    text = (tmp_path / "job.yaml").read_text()
    assert rows in text
    assert why in text
    assert "columns:  # turns of the chat template; left out, they are text without it\n" in text
    config = load_config("job.yaml")
    assert config.data.columns == {"instruction": "prompt"}
    assert config.data.format in rows
    assert (config.training.learning_rate, config.training.epochs) == (rate, 3)
    if objective != "dpo":
        return
    _, shown, _ = call("data", "job.yaml")
    assert "rejected" in shown
    short = ("training.max_steps=1", "training.batch_size=2", "training.micro_batch=2", "data.eval=none",
             "training.eval_every=null", "memory.check=off")  # fmt: skip
    code, shown, err = call("train", "job.yaml", *short)
    assert (code, "60 rows" in shown) == (0, True)
    said = "of preferences only the chosen answer is trained; to train on both, set `training.objective: dpo`"
    code, shown, _ = call("data", "job.yaml", "training.objective=supervised")
    assert (code, f"rejected ({said})" in " ".join(shown.split())) == (0, True)


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Why?", "chosen_response": "So.", "rejected_response": "No."},
        {"prompt": "Why? ", "answers": [{"answer": "So.", "rank": 1}, {"answer": "No.", "rank": 2}]},
        {
            "prompt": "Why?", "messages": [{"role": "user", "content": "Why?"}], "score_chosen": 1, "score_rejected": 1,
            **{name: [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": text}]
               for name, text in (("chosen", "So."), ("rejected", "No."))},
        },
        {"chosen": "\n\nHuman: Why?\n\nAssistant: So.", "rejected": "\n\nHuman: Why?\n\nAssistant: No."},
    ],
)  # fmt: skip
def test_pairs_are_recognised_in_layouts_that_other_formats_have_too(row: dict[str, Any]) -> None:
    assert holds_pairs(row, {})
    assert not holds_pairs({"messages": [{"role": "user", "content": "Why?"}]}, {})
