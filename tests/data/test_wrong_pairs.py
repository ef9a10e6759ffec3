"""What people get wrong in pairs and in configs for them: each mistake ends training with its place and a cure.

The job is a real one, up to the point where it would load weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import TINY

import finetune
from finetune.choices import load_config
from finetune.data.problems import LIMIT, BadRows
from finetune.errors import ConfigError, DataError

ASK = {"role": "user", "content": "Why?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Because.", "No."))
PAIR = {"prompt": "Why? ", "chosen": "Because.", "rejected": "No."}
HELD = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}

DATA: list[tuple[str, Any, str, str]] = [
    # (what is wrong, the row, its field or place, the cure)
    ("no rejected answer", {"prompt": "Why?", "chosen": "So."}, "`rejected` is missing", "`data.columns`"),
    ("other names", {"prompt": "Why?", "preferred": "So.", "other": "No."}, "`chosen` is missing", "`data.columns`"),
    ("one answer", {"prompt": "Why?", "completion": "So."}, "`chosen` is missing", "`training.objective: supervised`"),
    ("conversations", {"messages": [ASK, GOOD]}, "`chosen` is missing", "`training.objective: supervised`"),
    ("labels", {"prompt": "Why?", "completion": "So.", "label": True}, "`chosen` is missing", "`data.columns`"),
    ("text and messages", {**PAIR, "rejected": [BAD]}, "`chosen` and `rejected`", "write both alike"),
    ("numbers", {**PAIR, "chosen": 3, "rejected": 4}, "`chosen`", "must be text, a message or a list of messages"),
    ("null", {**PAIR, "rejected": None}, "`rejected`", "or remove the row"),
    ("an empty list", {**HELD, "rejected": []}, "`rejected`", "not an empty list; or remove the row"),
    ("texts in a list", {**HELD, "chosen": ["So."]}, "`chosen[0]`", "an object with `role` and `content`"),
    ("a role that does not exist", {**HELD, "chosen": {"role": "judge", "content": "So."}}, "`chosen.role`", "user"),
    ("a number as content", {**HELD, "chosen": [{**GOOD, "content": 5}]}, "`chosen[0].content`", "must be text"),
    ("answers alone", {"chosen": [GOOD], "rejected": [BAD]}, "there is no `prompt`", "add what they answer"),
    ("texts alone", {"chosen": "Because.", "rejected": "No."}, "there is no `prompt`", "add what they answer"),
    (
        "two prompts", {"chosen": [ASK, GOOD], "rejected": [{**ASK, "content": "How?"}, BAD]},
        "begin with different prompts", "make them equal, or remove the row",
    ),
    (
        "a prompt beside another one", {"prompt": "How?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        "the prompt is not that with which", "remove it",
    ),
    ("a question last", {**HELD, "rejected": [ASK, BAD, ASK]}, "`rejected` must end with", "remove what follows it"),
    ("a tool last", {**HELD, "chosen": [GOOD, {"role": "tool", "content": "3"}]}, "`chosen` must end with", "remove"),
    ("an answer in the prompt", {**HELD, "prompt": [ASK, GOOD]}, "end with an answer of the assistant", "remove it"),
    ("whole conversations twice", {"messages": [ASK, GOOD], "chosen": "So.", "rejected": "No."}, "end with an answer",
     "remove it"),
    ("a number as prompt", {**PAIR, "prompt": 7}, "`prompt`", "must be text, not a number"),
    ("texts as prompt", {**HELD, "prompt": ["Why?"]}, "`prompt[0]`", "an object with `role` and `content`"),
    ("ranks as words", {"prompt": "Why?", "answers": [{"answer": "So.", "rank": "first"}]},
     "`answers[0].rank`", "must be a number"),
    ("scores as words", {**PAIR, "score_chosen": "good", "score_rejected": "bad"}, "`score_chosen`", "a number"),
    ("images", {**PAIR, "images": ["a.png"]}, "`images`", "remove the row"),
    ("a list as a row", ["Why?", "Because.", "No."], "a row must be", "a JSON object in braces"),
    ("a row cut off", '{"prompt": "Why?", "chosen": "So.",', ":36: not valid JSON", "property name"),
]  # fmt: skip

DROPPED: list[tuple[dict[str, Any], str]] = [
    ({**PAIR, "rejected": PAIR["chosen"]}, "1 equal answers"),
    ({**PAIR, "rejected": " "}, "1 empty answer"),
    ({**PAIR, "score_chosen": 1, "score_rejected": 1.0}, "1 equal scores of both answers"),
    ({**PAIR, "score_chosen": "2", "score_rejected": "8"}, "1 higher score of the rejected"),
    ({**PAIR, "chosen": "yes " * 400}, "1 over data.max_length"),
]

CONFIGS: list[tuple[list[str], int, str, str]] = [
    (["data.format=messages"], 3, ":1 to 8: `messages`", "their format in `data.format`"),
    (["training.objective=supervised", "data.format=pairs"], 2, "`training.objective`", "set one to match the other"),
    (["training.objective=reward", "data.format=pairs_with_margin"], 3, "`margin`", "`data.format: pairs`"),
    (["data.loss_on=all"], 3, "`data.loss_on: all`", "set `data.loss_on: assistant`"),
    (["data.max_length=8", "data.too_long=truncate"], 3, "`data.max_length` 8", "set `data.too_long: drop`"),
    (["data.max_length=8", "data.too_long=split"], 3, "`data.max_length` 8", "set `data.too_long: drop`"),
    (["data.columns={chosen: better, rejected: worse}"], 3, "from `better`, which", "choose from prompt, chosen"),
    (["data.format=dpo"], 2, "`data.format`", "write `pairs`"),
    (["data.eval=pairs.jsonl"], 2, "`data.eval`", "set `data.eval: auto`"),
    (["preference.label_smoothing=0.5"], 2, "`preference.label_smoothing`", "less than 0.5"),
    (["preference.beta=0"], 2, "`preference.beta`", "greater than 0"),
    (["preference.beta=small"], 2, "`preference.beta`", "expected a number"),
    (["preference.target_margin=1"], 2, "`preference.target_margin`", "remove it"),
    (["training.objective=simpo", "preference.label_smoothing=0.1"], 2, "`preference.label_smoothing`", "remove it"),
    (["training.objective=simpo", "preference.reference=cached"], 2, "`preference.reference`", "remove it"),
    (["training.objective=orpo", "preference.nll_weight=0.1"], 2, "`preference.nll_weight`", "remove it"),
    (["training.objective=reward", "preference.beta=0.1"], 2, "`preference.beta`", "remove it"),
    (["training.objective=supervised", "preference.beta=0.1"], 2, "`preference.beta`", "choose another objective"),
    (["preference.reward_centering=0.01"], 2, "`preference.reward_centering`", "remove it"),
    (["training.neftune_noise_alpha=5"], 2, "`training.neftune_noise_alpha`", "remove it"),
    (["preference.reference=in_step", "quantization.kind=none", "adapter.init=pissa"], 2, "`preference.reference`",
     "set `cached`"),
    (["preference.reference=in_step", "quantization.kind=none", "adapter.kind=none"], 2, "`preference.reference`",
     "`adapter.kind: lora`"),
    (["preference.reference=frozen"], 2, "`preference.reference`", "'auto', 'cached' or 'in_step'"),
    (["training.objective=reward", "distributed.kind=fsdp"], 2, "`distributed.kind`", "set `distributed.kind: ddp`"),
    (["training.objective=reward", "quantization.kind=none", "adapter.kind=none"], 2, "`adapter.kind`", "set"),
    (["model.labels=[good]"], 2, "`model.labels`", "remove it"),
    (["training.objective=pdo"], 2, "`training.objective`", "choose from supervised, dpo"),
    (["training.objective=ppo"], 2, "`training.objective`", "train on pairs by `dpo`"),
    (["training.objective=rm"], 2, "`training.objective`", "write `reward`"),
    (["training.objective=sigmoid"], 2, "`training.objective`", "write `dpo`"),
    (["preference.loss_type=ipo"], 2, "`preference.loss_type`", "write `training.objective`"),
    (["training.beta=0.1"], 2, "`training.beta`", "write `preference.beta`"),
    (["training.pref_loss=ipo"], 2, "`training.pref_loss`", "write `training.objective`"),
    (["training.simpo_gamma=0.5"], 2, "`training.simpo_gamma`", "write `preference.target_margin`"),
    (["model.ref_model=gpt2"], 2, "`model.ref_model`", "leave it out: the reference is the model that training starts"),
    (["preferences.beta=0.1"], 2, "`preferences`", "did you mean `preference`?"),
]  # fmt: skip


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Trains on rows; loading weights fails the test."""

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("finetune.model.build.load_base", loaded)
    monkeypatch.chdir(tmp_path)

    def run(rows: list[Any], *overrides: str) -> None:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        Path("pairs.jsonl").write_text("\n".join(lines) + "\n")
        job = ["data.train=pairs.jsonl", "data.eval=none", "training.eval_every=null", "output.merge=false"]
        finetune.train(load_config(TINY, [*job, "training.objective=dpo", "memory.check=off", *overrides]))

    return run


def lacking(message: str, *parts: str) -> list[str]:
    assert not Path("runs").exists()
    return [part for part in parts if part not in message]


@pytest.mark.slow
def test_wrong_pairs_are_refused_with_line_field_and_cure(train: Any) -> None:
    for start in range(0, len(DATA), LIMIT - 1):
        cases = DATA[start : start + LIMIT - 1]
        with pytest.raises(BadRows) as caught:
            train([PAIR, *(row for _, row, _, _ in cases)])
        for line, (said, (what, _, *parts)) in enumerate(zip(caught.value.problems, cases, strict=True), 2):
            assert lacking(said, f"pairs.jsonl:{line}", *parts) == [], (what, said)


@pytest.mark.slow
def test_pairs_that_teach_nothing_are_refused_with_the_reason(train: Any) -> None:
    rows, reasons = zip(*DROPPED, strict=True)
    with pytest.raises(DataError) as caught:
        train(rows)
    assert lacking(str(caught.value), "(pairs.jsonl) leaves nothing to train: 5 rows dropped", *reasons) == []


@pytest.mark.slow
def test_wrong_configs_for_pairs_are_refused_with_key_and_cure(train: Any) -> None:
    rows = [{**PAIR, "prompt": f"Why {number}? "} for number in range(8)]
    for overrides, exit_code, *parts in CONFIGS:
        with pytest.raises((ConfigError, DataError)) as caught:
            train(rows, *overrides)
        assert (caught.value.exit_code, lacking(str(caught.value), *parts)) == (exit_code, []), overrides
