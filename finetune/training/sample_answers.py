"""Sample answers: a few held-out questions, answered by the base before training and by the trained model after."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from finetune.config import Config
from finetune.data import examples
from finetune.data.media import Shown
from finetune.data.prepare import Question, media_of, questions
from finetune.errors import ArtifactError, FinetuneError, first_line
from finetune.generation import answering
from finetune.generation.settings import Settings
from finetune.model import bounds
from finetune.model.precision import autocast
from finetune.runtime import ranks
from finetune.runtime.stages import stage
from finetune.storage.files import write_json
from finetune.storage.records import SampleAnswer
from finetune.storage.rundir import RunDirectory
from finetune.training.strategies import holds_parts

# Number of questions, and length of an answer in tokens: enough to see a difference.
QUESTIONS = 3
TOKENS = 96

Asked = list[tuple[examples.Chat | examples.Completion, SampleAnswer]]
"""Prompts with their rows of answers.json, which hold only text: messages may have values that JSON lacks."""


def before(base: Any, tokenizer: Any, config: Config, run: RunDirectory, note: Callable[[str], None]) -> Asked:
    """The base's answers, reused from an earlier start of the run if possible.

    Empty on ranks other than 0, for a model that scores sequences, for random weights, for a sharded base, which rank 0
    cannot run alone, and if the model's code fails; training then explains the failure.
    """
    answers = ranks.is_main() and not config.scorer and config.model.weights != "random"
    if not answers or holds_parts(config.distributed, ranks.world_size()):
        return []
    media = media_of(config.model, config.data, tokenizer, base.config)
    asked = list(itertools.islice(questions(config.data, tokenizer, media), QUESTIONS))
    if kept := _kept(asked, run, note):
        return kept
    stage("the base answers a few questions, to compare with later")
    positions = bounds.table_size(base) or math.inf
    # Training rows are truncated, questions are not.
    short = [
        each for each in asked
        if len(answering.prompt_ids(each.prompt, tokenizer, config.data.control_tokens)) < positions
    ]  # fmt: skip
    try:
        replies = _replies(base, tokenizer, [each.prompt for each in short], config)
    except (torch.OutOfMemoryError, MemoryError, FinetuneError):
        raise
    except Exception as error:  # the model's code may raise anything
        note(
            f"no sample answers: {type(base).__name__} fails to generate ({type(error).__name__}: {first_line(error)})"
        )
        return []
    with_replies: Asked = []
    for each, reply in zip(short, replies, strict=True):
        question = examples.shown(each.prompt)
        with_replies.append(
            (each.prompt, {"question": question, "reference": each.reference, "before": reply, "after": None})
        )
    write_json(run.answers_file, [row for _, row in with_replies])
    return with_replies


def after(model: Any, tokenizer: Any, config: Config, run: RunDirectory, asked: Asked) -> None:
    """Write the trained model's answers beside the base's."""
    if not asked:
        return
    replies = _replies(model, tokenizer, [prompt for prompt, _ in asked], config)
    for (_, row), reply in zip(asked, replies, strict=True):
        row["after"] = reply
    write_json(run.answers_file, [row for _, row in asked])


def _replies(model: Any, tokenizer: Any, prompts: Sequence[examples.Example], config: Config) -> list[str]:
    ids = [answering.prompt_ids(prompt, tokenizer, config.data.control_tokens) for prompt in prompts]
    shown = Shown.by(prompts, media_of(config.model, config.data, tokenizer, model.config))
    with autocast(config.training.precision, model.device):
        return [each.text for each in answering.answers(model, tokenizer, ids, Settings(TOKENS), shown=shown)]


def _kept(asked: list[Question], run: RunDirectory, note: Callable[[str], None]) -> Asked:
    """The answers of an earlier start; empty if they are damaged or answer other questions."""
    prompts = {(examples.shown(prompt), reference): prompt for _, prompt, reference in asked}
    try:
        # May be fewer than asked: questions too long for the model's positions were skipped.
        return [(prompts[row["question"], row["reference"]], row) for row in run.answers()]
    except ArtifactError as error:
        note(f"{error}; generating the base's answers again")
    except KeyError:
        pass
    return []
