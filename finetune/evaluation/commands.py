"""Input and output of `finetune generate` and `finetune chat`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.choices import config_of
from finetune.config.field_types import shortened
from finetune.data import examples, images, readers
from finetune.data.examples import Example, RowError
from finetune.data.fields import text
from finetune.data.media import TEXT_ALONE, Media
from finetune.data.messages import conversation, read_messages
from finetune.data.prepare import media_of
from finetune.data.problems import Problems
from finetune.errors import ConfigError, DataError
from finetune.evaluation import chat_session
from finetune.evaluation.run_models import UNRECORDED, ready, system_of, with_images
from finetune.generation.settings import Settings
from finetune.model.source.tokenizer import load_tokenizer
from finetune.report import words
from finetune.report.terminal import note_beside_output
from finetune.report.visible import LINES, visible
from finetune.storage.rundir import RunDirectory


def generate(
    run: RunDirectory, texts: Sequence[str], file: Path | None, which: str, settings: Settings, *, as_json: bool,
    system: str | None = None, shown: Sequence[str] = (), trust_remote_code: bool = False,
) -> None:  # fmt: skip
    """Answer `texts`, the prompts of `file`, or without both those of standard input.

    Each text shows the images `shown`. A single text is answered as text, streamed, or with `as_json` as one JSON
    object; prompts otherwise as JSON lines, in order. They are read before the model is loaded.
    """
    if texts and file:
        raise ConfigError("--prompt and --file both name prompts; give one of them")
    if shown and not texts:
        raise ConfigError("--image goes with --prompt; rows of a file name their images themselves")
    ask, media = _asking(run, system, trust_remote_code)
    if texts:
        named = {"images": [*shown]} if shown else {}
        asked = [Prompt(with_images(ask(one), shown, media), {"prompt": one, **named}) for one in texts]
    else:
        asked = prompts_from_file(file, ask, media) if file else prompts_from_standard_input(ask, media)
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
    """A conversation with a model of the run; see `finetune.evaluation.chat_session`."""
    opened = ready(run, which, system=system, cache=settings.cache, trust_remote_code=trust_remote_code)
    chat_session.converse(opened, settings, _say, note_beside_output)


def _asking(run: RunDirectory, system: str | None, trust_remote_code: bool) -> tuple[Callable[[str], Example], Media]:
    """Return a function from a prompt to an example, and what is shown to the run's base.

    Prints the system message if it comes from the run's rows.
    """
    used, kind = system_of(run, system), examples.learnt(run.events()) or UNRECORDED
    if used and system is None:
        note_beside_output(f"system message of the rows: {shortened(used, 200)} (--system gives another, or '' none)")
    config = config_of(run, trust_remote_code=trust_remote_code)
    media = TEXT_ALONE
    if config.model.vision != "none":
        media = media_of(config.model, config.data, load_tokenizer(config.model, run.data(config.data)))
    return lambda text: examples.asked(kind, text, config.data.separator, used), media


def _say(piece: str) -> None:
    sys.stdout.write(visible(piece, LINES))
    sys.stdout.flush()


@dataclass(frozen=True)
class Prompt:
    """A prompt as an example without an answer, and the row it came from."""

    example: Example
    row: dict[str, Any]


def prompts_from_file(
    path: Path, asked: Callable[[str], Example], media: Media = TEXT_ALONE, folder: Path | None = None
) -> list[Prompt]:
    """The prompts of a file: rows with `messages` or `prompt`, or lines of text; `asked` makes an example of a text.

    Images are shown to a base of these `media`; their paths are relative to `folder`, by default the file's.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file")
    prompts: list[Prompt] = []
    with Problems() as problems:
        read = readers.reader(path) or readers.READERS[".txt"]
        for location, fields in read(path, problems):
            row = {"prompt" if name == "text" else name: value for name, value in fields.items()}
            name = "messages" if "messages" in row else "prompt"
            try:
                example: Example
                if name == "messages" or isinstance(row.get(name), list):
                    example = conversation(read_messages(row, name), row, where=name)
                    if example.messages[-1]["role"] == "assistant":
                        raise RowError(f"`{name}` ends with the assistant's answer; remove that message")
                else:
                    example = images.placed_in(asked(text(row, name)), row)
                prompts.append(Prompt(media.measured_example(example, folder or path.parent), row))
            except RowError as error:
                problems.add(f"{location}: {error}")
    if not prompts:
        raise DataError(f"{path}: no prompts; write one a line, or JSON lines with `prompt` or `messages`")
    return prompts


def prompts_from_standard_input(asked: Callable[[str], Example], media: Media = TEXT_ALONE) -> list[Prompt]:
    """The prompts of standard input: JSON lines if it begins with a brace, otherwise lines of text."""
    if sys.stdin.isatty():
        raise ConfigError(
            "no prompt; give --prompt or --file, or pipe prompts in (`finetune chat` is for a conversation)"
        )
    content = sys.stdin.buffer.read()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("stdin.jsonl" if content.lstrip().startswith(b"{") else "stdin.txt")
        path.write_bytes(content)
        try:
            return prompts_from_file(path, asked, media, Path())
        except DataError as error:
            raise DataError(str(error).replace(str(path), "standard input")) from None
