"""Facts about pairs: the layouts in which they are published, and what is refused or dropped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import write_rows

import finetune
from finetune.choices import load_config
from finetune.data.examples import Chat, Completion, RowError, Unusable
from finetune.data.formats import FORMATS, MARGINS, PREFERENCES, read
from finetune.storage.rundir import RunDirectory


@pytest.fixture(autouse=True)
def _no_format_stays() -> Iterator[None]:
    """Those of functions are for the process, and other tests compare the table."""
    before = dict(FORMATS)
    yield
    FORMATS.clear()
    FORMATS.update(before)


ASK = {"role": "user", "content": "Why?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Because.", "No."))
GPT = [{"from": "gpt", "value": message["content"]} for message in (GOOD, BAD)]
CHATS = Chat([ASK, GOOD]), Chat([ASK, BAD])
TEXTS = {"chosen": "Because.", "rejected": "No."}

LAYOUTS: list[tuple[str, dict[str, Any], tuple[Any, Any]]] = [
    ("TRL", {"prompt": "Why? ", **TEXTS}, (Completion("Why? ", "Because."), Completion("Why? ", "No."))),
    ("TRL, messages", {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, CHATS),
    ("TRL, implicit prompt", {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, CHATS),
    (
        "UltraFeedback",
        {"prompt": "Why?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "messages": [ASK, GOOD], "score_chosen": 8,
         "score_rejected": 5.5},
        CHATS,
    ),
    (
        "HH",
        {"chosen": "\n\nHuman: Why?\n\nAssistant: I know.", "rejected": "\n\nHuman: Why?\n\nAssistant: I don't."},
        tuple(Completion("\n\nHuman: Why?\n\nAssistant:", text, one_text=True) for text in (" I know.", " I don't.")),
    ),
    ("Argilla", {"instruction": "Why?", "chosen_response": "Because.", "rejected_response": "No."}, CHATS),
    ("Intel", {"system": "", "question": "Why?", **TEXTS}, CHATS),
    (
        "Nectar",
        {"prompt": "Why? ", "answers": [{"answer": text, "rank": rank} for rank, text in ((2, "So."), (3, "No."),
                                                                                          (1, "Because."))]},
        (Completion("Why? ", "Because."), Completion("Why? ", "No.")),
    ),
    ("LLaMA-Factory, Alpaca", {"instruction": "Why?", "input": "", **TEXTS}, CHATS),
    (
        "LLaMA-Factory, ShareGPT",
        {"conversations": [{"from": "human", "value": "Why?"}], "chosen": GPT[0], "rejected": GPT[1]},
        CHATS,
    ),
    ("Axolotl", {"messages": [ASK], "chosen": GOOD, "rejected": BAD}, CHATS),
    ("Axolotl, text", {"messages": [ASK], **TEXTS}, CHATS),
]  # fmt: skip


def test_a_pair_is_read_in_each_published_layout() -> None:
    for name, row, expected in LAYOUTS:
        pair, unused = read(row, "pairs", {})
        segments = [
            Chat(one.messages) if isinstance(one, Chat) else one  # the prompt has no answer that could be trained
            for one in pair.segments.values()
        ]
        assert tuple(segments) == expected, name
        assert (list(pair.segments), pair.values) == (["chosen", "rejected"], {})
        assert unused in ([], ["messages"])


def test_only_what_differs_is_trained_in_whole_conversations() -> None:
    row = {"chosen": [ASK, GOOD, ASK, GOOD], "rejected": [ASK, GOOD, ASK, BAD]}
    pair, _ = read(row, "pairs", {})
    assert [segment.context for segment in pair.segments.values()] == [{1}, {1}]


def test_a_margin_is_read_where_the_format_names_it() -> None:
    row = {"prompt": "Why?", **TEXTS, "margin": 2}
    assert FORMATS["pairs_with_margin"].read(row).values == {"margin": 2.0}
    assert read(row, "pairs", {})[1] == ["margin"]
    assert FORMATS["pairs_with_margin"].read({**row, "margin": "2"}).values == {"margin": 2.0}, "of a table"
    with pytest.raises(RowError, match="`margin` must be a number"):
        FORMATS["pairs_with_margin"].read({**row, "margin": "much"})


def test_a_tie_teaches_nothing() -> None:
    for row in (
        {"prompt": "Why?", **TEXTS, "score_chosen": 5, "score_rejected": 5.0},
        {"prompt": "Why?", "answers": [{"answer": text, "rank": 1} for text in ("a", "b")]},
    ):
        with pytest.raises(Unusable, match="equal scores"):
            read(row, "pairs", {})


@pytest.mark.slow
def test_dpo_trains_on_pairs_by_default_and_says_what_it_dropped(quick, tmp_path, capsys) -> None:
    rows = [{"prompt": f"To {n}. ", "chosen": "yes " * (1 + n % 5), "rejected": "no " * (2 + n % 3)} for n in range(12)]
    rows[3]["rejected"] = rows[3]["chosen"]
    rows[4]["chosen"] = " "
    rows[5] |= {"score_chosen": 1, "score_rejected": 1}
    rows[6]["rejected"] = "no " * 400
    file = write_rows(tmp_path / "pairs.jsonl", rows)
    short = ["data.eval=none", "training.eval_every=null", "training.max_steps=1"]
    config = quick(f"data.train={file}", "training.objective=dpo", *short)
    assert (config.data.format, config.data.too_long) == ("pairs", "drop")
    finetune.train(config)
    run = RunDirectory(config.output.dir)
    assert len(list(run.metrics())) >= config.training.max_steps
    reasons = [json.loads(line)["why"] for line in run.data_file.read_text().splitlines()]
    assert sorted(reasons) == [
        "empty answer", "equal answers", "equal scores of both answers", "over data.max_length"
    ]  # fmt: skip
    assert "8 rows" in capsys.readouterr().out
    assert load_config({"data": {"train": "a.jsonl"}}).data.format == "auto"
    kept = load_config({"data": {"too_long": "error", "format": "preference"}, "training": {"objective": "dpo"}}).data
    assert (kept.format, kept.too_long) == ("preference", "error")


def test_a_function_may_return_pairs_of_which_a_supervised_run_gets_the_answers() -> None:
    def of_two(row: dict[str, Any]) -> dict[str, Any]:
        """Questions with two answers."""
        return {"prompt": row["q"], "chosen": row["a"], "rejected": row["b"]}

    row = {"q": "Why? ", "a": "Because.", "b": "No."}
    values = {"data": {"train": "a.jsonl", "format": of_two}}
    compared = load_config({**values, "training": {"objective": "dpo"}})
    pair, _ = read(row, compared.data.format, {})
    assert pair.segments == {"chosen": Completion("Why? ", "Because."), "rejected": Completion("Why? ", "No.")}
    assert read(row, load_config(values).data.format, {})[0] == Completion("Why? ", "Because.")


def test_what_another_objective_or_format_would_read_is_listed_with_it(quick: Any, tmp_path: Path) -> None:
    """As in UltraFeedback, whose messages are the chosen answer's."""
    beside = [{"messages": [ASK, GOOD], "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "kind": n} for n in range(4)]
    margins = [{"prompt": f"Why {n}? ", "chosen": "So.", "rejected": "No.", "margin": n} for n in range(4)]
    for rows, objective, unused in (
        (beside, "supervised", ["chosen", "kind", f"rejected ({PREFERENCES})"]),
        (margins, "reward", [f"margin ({MARGINS})"]),
    ):
        file = write_rows(tmp_path / "rows.jsonl", rows)
        job = quick(f"data.train={file}", f"training.objective={objective}", "data.eval=none")
        assert finetune.inspect_data(job).inspection.train.traits.unused == unused


def test_pairs_of_openais_export_are_read_by_every_objective() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    row = {
        "input": {"messages": [ASK], "tools": [tool], "parallel_tool_calls": True},
        "preferred_output": [GOOD], "non_preferred_output": [BAD],
    }  # fmt: skip
    plain = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD], "tools": [tool]}
    for form in ("auto", "preference", "pairs", "unpaired"):
        assert read(row, form, {}) == (read(plain, form, {})[0], ["parallel_tool_calls"])


def test_an_image_in_a_prompt_that_the_answers_repeat_is_no_error() -> None:
    shown = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Why?"}]}
    row = {"prompt": [shown], "chosen": [shown, GOOD], "rejected": [shown, BAD]}
    assert read(row, "pairs", {})[0] == read({**row, "chosen": [GOOD], "rejected": [BAD]}, "pairs", {})[0]
