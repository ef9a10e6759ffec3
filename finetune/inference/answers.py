"""Sample answers: a few held-out prompts, answered by the base before training and by the trained model after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from finetune.config import Config
from finetune.data import examples
from finetune.data.prepare import questions
from finetune.errors import ArtifactError
from finetune.inference.generation import TooLong, answer, prompt_ids
from finetune.model.base import autocast
from finetune.runtime import ranks
from finetune.storage.files import write_json
from finetune.storage.rundir import RunDirectory

# Enough to see a difference, few enough to read.
_QUESTIONS = 3
_TOKENS = 96

Rows = list[dict[str, Any]]


def before(base: Any, tokenizer: Any, config: Config, run: RunDirectory, note: Callable[[str], None]) -> Rows:
    """The base's answers, as the rows of answers.json; from an earlier start of the run where they are there.

    None on ranks other than 0, and none of random weights, which have nothing to say.
    """
    if not ranks.is_main() or config.model.weights == "random":
        return []
    asked = questions(config.data, _QUESTIONS)
    if kept := _kept(asked, run, note):
        return kept
    rows: Rows = []
    with autocast(config.training.precision, base.device):
        for prompt, reference in asked:
            with contextlib.suppress(TooLong):  # training rows are truncated, questions are not
                reply = answer(base, tokenizer, _ids(prompt, tokenizer, config), _TOKENS)
                question = examples.shown(prompt)
                rows.append(
                    {"prompt": prompt, "question": question, "reference": reference, "before": reply, "after": None}
                )
    write_json(run.answers_file, rows)
    return rows


def after(model: Any, tokenizer: Any, config: Config, run: RunDirectory, rows: Rows) -> None:
    """Write the trained model's answers beside the base's."""
    if not rows:
        return
    with autocast(config.training.precision, model.device):
        for row in rows:
            row["after"] = answer(model, tokenizer, _ids(row["prompt"], tokenizer, config), _TOKENS)
    write_json(run.answers_file, rows)


def _kept(asked: list[tuple[Any, str]], run: RunDirectory, note: Callable[[str], None]) -> Rows:
    """The answers of an earlier start; none where they are damaged, or to other questions."""
    try:
        rows: Rows = [{**row} for row in run.answers()]
    except ArtifactError as error:
        note(f"{error}; the base answers again")
        return []
    # Questions too long for the model's positions were left out.
    same = all((row.get("prompt"), row["reference"]) in asked for row in rows)
    return rows if same else []


def _ids(prompt: list[examples.Message] | str, tokenizer: Any, config: Config) -> list[int]:
    example = examples.Completion(prompt, "") if isinstance(prompt, str) else examples.Chat(prompt)
    return prompt_ids(example, tokenizer, config.data.control_tokens)
