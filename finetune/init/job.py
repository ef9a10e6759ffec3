"""`finetune init`: from a model, data and a card to a short config with reasons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from finetune.init import questions
from finetune.runtime import libraries


def create(
    model: str | None, data: str | None, gpu: str | None, output: Path | None, *, yes: bool, say: Callable[[str], None]
) -> None:
    """Write the config for `model` and `data` on `gpu`, and show it.

    What is missing is asked for on a terminal, unless `yes`. Raises a FinetuneError where there is no such config.
    """
    wanted = questions.ask(model, data, gpu, output, yes=yes)
    say(f"reading {wanted.data} with the tokenizer of {wanted.model}")
    with libraries.importing_for_forecast():
        from finetune.init.proposal import propose
    say(propose(wanted, say).write(wanted.output))
