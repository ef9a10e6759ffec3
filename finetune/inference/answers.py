"""Sample answers: a few held-out questions, answered by the base before training and by the trained model after."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

from finetune.config import Config
from finetune.data import examples
from finetune.data.prepare import Question, questions
from finetune.errors import ArtifactError
from finetune.inference.generation import TooLong, answer, prompt_ids
from finetune.model.base import autocast
from finetune.runtime import ranks
from finetune.runtime.stages import stage
from finetune.storage.files import write_json
from finetune.storage.rundir import RunDirectory
from finetune.training.strategies import cannot_run_alone

# Number of questions, and length of an answer in tokens: enough to see a difference.
_QUESTIONS = 3
_TOKENS = 96

Asked = list[tuple[examples.Chat | examples.Completion, dict[str, Any]]]
"""Prompts with their rows of answers.json. Those hold only text, since messages may have values that JSON lacks."""


def before(base: Any, tokenizer: Any, config: Config, run: RunDirectory, note: Callable[[str], None]) -> Asked:
    """The base's answers, reused from an earlier start of the run if possible.

    Empty on ranks other than 0, for random weights, and for a sharded base, which rank 0 cannot run alone.
    """
    if not ranks.is_main() or config.model.weights == "random" or cannot_run_alone(config.distributed):
        return []
    asked = list(itertools.islice(questions(config.data), _QUESTIONS))
    if kept := _kept(asked, run, note):
        return kept
    found: Asked = []
    stage("the base answers a few questions, to compare with later")
    with autocast(config.training.precision, base.device):
        for _, prompt, reference in asked:
            with contextlib.suppress(TooLong):  # training rows are truncated, questions are not
                reply = answer(base, tokenizer, prompt_ids(prompt, tokenizer, config.data.control_tokens), _TOKENS)
                question = examples.shown(prompt)
                found.append((prompt, {"question": question, "reference": reference, "before": reply, "after": None}))
    write_json(run.answers_file, [row for _, row in found])
    return found


def after(model: Any, tokenizer: Any, config: Config, run: RunDirectory, asked: Asked) -> None:
    """Write the trained model's answers beside the base's."""
    if not asked:
        return
    with autocast(config.training.precision, model.device):
        for prompt, row in asked:
            row["after"] = answer(model, tokenizer, prompt_ids(prompt, tokenizer, config.data.control_tokens), _TOKENS)
    write_json(run.answers_file, [row for _, row in asked])


def _kept(asked: list[Question], run: RunDirectory, note: Callable[[str], None]) -> Asked:
    """The answers of an earlier start; empty if they are damaged or answer other questions."""
    prompts = {(examples.shown(prompt), reference): prompt for _, prompt, reference in asked}
    try:
        # May be fewer than asked: questions too long for the model's positions were skipped.
        return [(prompts[row["question"], row["reference"]], {**row}) for row in run.answers()]
    except ArtifactError as error:
        note(f"{error}; generating the base's answers again")
    except KeyError:
        pass
    return []
