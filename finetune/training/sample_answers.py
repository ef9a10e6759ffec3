"""Sample answers: a few held-out questions, answered by the base before training and by the trained model after."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


@dataclass
class SampleAnswers:
    """The questions of a run, empty where none are `asked`, and their answers so far."""

    tokenizer: Any
    config: Config
    run: RunDirectory
    asked: Asked = field(default_factory=list)

    def before(self, base: Any, note: Callable[[str], None]) -> None:
        """Ask the base, or take its answers from an earlier start of the run.

        Asks nothing on ranks other than 0, for a model that scores sequences, for random weights, for a sharded base,
        which rank 0 cannot run alone, and if the model's code fails; training then explains the failure.
        """
        config = self.config
        answers = ranks.is_main() and not config.scorer and config.model.weights != "random"
        if not answers or holds_parts(config.distributed, ranks.world_size()):
            return
        media = media_of(config.model, config.data, self.tokenizer, base.config)
        chosen = list(itertools.islice(questions(config.data, self.tokenizer, media), QUESTIONS))
        if kept := _kept(chosen, self.run, note):
            self.asked = kept
            return
        stage("the base answers a few questions, to compare with later")
        positions = bounds.table_size(base) or math.inf
        # Training rows are truncated, questions are not.
        short = [
            each for each in chosen
            if len(answering.prompt_ids(each.prompt, self.tokenizer, config.data.control_tokens)) < positions
        ]  # fmt: skip
        try:
            replies = self._replies(base, [each.prompt for each in short])
        except (torch.OutOfMemoryError, MemoryError, FinetuneError):
            raise
        except Exception as error:  # the model's code may raise anything
            why = f"{type(error).__name__}: {first_line(error)}"
            note(f"no sample answers: {type(base).__name__} fails to generate ({why})")
            return
        for each, reply in zip(short, replies, strict=True):
            question = examples.shown(each.prompt)
            self.asked.append(
                (each.prompt, {"question": question, "reference": each.reference, "before": reply, "after": None})
            )
        write_json(self.run.answers_file, [row for _, row in self.asked])

    def after(self, model: Any) -> None:
        """Write the trained model's answers beside the base's."""
        if not self.asked:
            return
        replies = self._replies(model, [prompt for prompt, _ in self.asked])
        for (_, row), reply in zip(self.asked, replies, strict=True):
            row["after"] = reply
        write_json(self.run.answers_file, [row for _, row in self.asked])

    def _replies(self, model: Any, prompts: Sequence[examples.Example]) -> list[str]:
        config = self.config
        ids = [answering.prompt_ids(prompt, self.tokenizer, config.data.control_tokens) for prompt in prompts]
        shown = Shown.by(prompts, media_of(config.model, config.data, self.tokenizer, model.config))
        with autocast(config.training.precision, model.device):
            return [each.text for each in answering.answers(model, self.tokenizer, ids, Settings(TOKENS), shown=shown)]


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
