"""`finetune init`: from a model, data and a card, or from another tool's config, to a short config with reasons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from finetune.extras.init import questions
from finetune.extras.init.translation import translate
from finetune.runtime import libraries


def create(
    model: str | None, data: str | None, gpu: str | None, other: Path | None, output: Path | None,
    columns: str | None = None, *, yes: bool, say: Callable[[str], None],
) -> None:  # fmt: skip
    """Write the config for `model` and `data` on `gpu`, or what the `other` tool's config means here, and show it.

    `columns` are those of `--columns`. What is missing is asked for on a terminal, unless `yes`. Raises a FinetuneError
    where there is no such config.
    """
    if other:
        draft = translate(other)
        output = output or Path(f"{other.stem}_translated.yaml")
        questions.confirm_replacing(output, yes=yes)
    else:
        wanted = questions.ask(model, data, gpu, output, columns, yes=yes)
        output = wanted.output
        say(f"reading {wanted.data} with the tokenizer of {wanted.model}")
        with libraries.importing():
            from finetune.extras.init.proposal import propose
        draft = propose(wanted, say)
    say(draft.write(output))
