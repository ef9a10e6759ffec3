"""Input and output of `finetune generate` and `finetune chat`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from finetune.config.field_types import shortened
from finetune.data import examples
from finetune.errors import ConfigError
from finetune.inference import chat_session as conversation
from finetune.inference import prompts
from finetune.inference.answer_settings import Settings
from finetune.inference.jobs import UNRECORDED, ready, system_of
from finetune.report import words
from finetune.report.terminal import note_beside_output
from finetune.report.visible import LINES, visible
from finetune.settings import config_of
from finetune.storage.rundir import RunDirectory


def generate(
    run: RunDirectory, texts: Sequence[str], file: Path | None, which: str, settings: Settings, *, as_json: bool,
    system: str | None = None, trust_remote_code: bool = False,
) -> None:  # fmt: skip
    """Answer `texts`, the prompts of `file`, or without both those of standard input.

    A single text is answered as text, streamed, or with `as_json` as one JSON object; prompts otherwise as JSON lines,
    in order. They are read before the model is loaded.
    """
    if texts and file:
        raise ConfigError("--prompt and --file both name prompts; give one of them")
    ask = _asking(run, system, trust_remote_code)
    if texts:
        asked = [prompts.Prompt(ask(text), {"prompt": text}) for text in texts]
    else:
        asked = prompts.from_file(file, ask) if file else prompts.from_standard_input(ask)
    opened = ready(run, which, system=system, cache=settings.cache, trust_remote_code=trust_remote_code)
    if len(texts) == 1 and not as_json:
        opened.stream(asked[0].example, settings, _say)
        _say("\n")
        return
    sizes = [0]
    answers = opened.answers([one.example for one in asked], settings, sizes.append)
    for one, answer in zip(asked, answers, strict=True):
        row = {**one.row, "model": which, "answer": answer.text, "tokens": answer.tokens, "ended": answer.ended}
        sys.stdout.write(json.dumps(row, indent=2 if len(texts) == 1 else None, default=str) + "\n")
        sys.stdout.flush()
    note_beside_output(f"KV cache ({settings.cache}): at most {words.size(max(sizes))} for a batch")


def chat(
    run: RunDirectory, which: str, settings: Settings, *, system: str | None = None, trust_remote_code: bool = False
) -> None:
    """A conversation with a model of the run; see `finetune.inference.chat_session`."""
    opened = ready(run, which, system=system, cache=settings.cache, trust_remote_code=trust_remote_code)
    conversation.converse(opened, settings, _say, note_beside_output)


def _asking(run: RunDirectory, system: str | None, trust_remote_code: bool) -> Callable[[str], examples.Example]:
    """A function from a prompt to an example; prints the system message if it is that of the run's rows."""
    used, kind = system_of(run, system), examples.learnt(run.events()) or UNRECORDED
    if used and system is None:
        note_beside_output(f"system message of the rows: {shortened(used, 200)} (--system gives another, or '' none)")
    separator = config_of(run, trust_remote_code=trust_remote_code).data.separator
    return lambda text: examples.asked(kind, text, separator, used)


def _say(piece: str) -> None:
    sys.stdout.write(visible(piece, LINES))
    sys.stdout.flush()
