"""A conversation in the terminal, in which the adapter can be switched off and on."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from finetune.config.field_types import shortened
from finetune.data import images
from finetune.data.examples import Chat, Example, media_in, opening
from finetune.errors import ConfigError, DataError, FinetuneError, MachineError
from finetune.evaluation.run_models import Ready
from finetune.generation.settings import Settings
from finetune.storage.files import append_line

COMMANDS = {
    "/base": "answer with the base alone",
    "/adapter": "answer with the adapter again",
    "/both": "answer with both, the base first; the conversation goes on from the adapter's answer",
    "/retry": "answer the last line again",
    "/temperature": "show the temperature, or set it: /temperature 0.7; 0 is greedy",
    "/image": "show an image with the next line: /image cat.jpg",
    "/save": "append the conversation to a file, as a row that can be trained on: /save rows.jsonl",
    "/reset": "forget the conversation",
    "/help": "show these commands",
    "/quit": "leave, as does Ctrl-D; Ctrl-C stops an answer",
}
_WITH_ARGUMENT = ("/temperature", "/image", "/save")


class Conversation:
    """Turns of a person and a model. `say` prints pieces of answers, `note` whole lines about them."""

    def __init__(
        self, ready: Ready, settings: Settings, say: Callable[[str], None], note: Callable[[str], None]
    ) -> None:
        self._ready, self._settings, self._say, self._note = ready, settings, say, note
        self._so_far = self._before = Chat([])
        self._turns = 0
        self._last: tuple[str, list[str]] | None = None
        self._shown: list[str] = []  # paths of images, with the next line
        self._models = ["adapter"]

    def greet(self) -> None:
        """Print the commands and the system message."""
        self._note(f"commands: {', '.join(COMMANDS)}")
        if self._ready.system:
            self._note(f"system message: {shortened(self._ready.system)}")
        if self._ready.kind != "chat":
            self._note("this run was trained on plain text: each line is continued by itself, without those before it")

    def take(self, line: str) -> bool:
        """Answer a line or execute a command; False if the command is to leave."""
        word = line.strip()
        name, _, argument = word.partition(" ")
        if name not in _WITH_ARGUMENT:
            name = word
        if name == "/quit":
            return False
        if name in COMMANDS:
            self._obey(name, argument.strip())
        elif word.startswith("/") and word.removeprefix("/").isalpha():
            self._note(f"no command {word}; there are {', '.join(COMMANDS)}")
        elif word:
            self._answer(line)
        return True

    def _obey(self, name: str, argument: str) -> None:
        match name:
            case "/help":
                self._note("\n".join(f"{name:12}  {help}" for name, help in COMMANDS.items()))
            case "/reset":
                self._so_far, self._before, self._last, self._shown = Chat([]), Chat([]), None, []
                self._note("the conversation begins anew")
            case "/retry":
                self._retry()
            case "/temperature":
                try:
                    if argument:
                        self._settings = replace(self._settings, temperature=float(argument))
                    self._note(f"the temperature is {self._settings.temperature:g}")
                except ValueError:
                    self._note(f"{argument} is no number; /temperature 0.7 sets it")
                except ConfigError as error:
                    self._note(str(error))
            case "/image":
                self._show(argument)
            case "/save":
                self._save(argument)
            case _ if not hasattr(self._ready.model, "disable_adapter"):
                self._note("there is no adapter to switch here: the weights are a whole model")
            case _:
                self._models = ["base", "adapter"] if name == "/both" else [name.removeprefix("/")]
                by = {"/base": "the base alone", "/adapter": "the base with the adapter", "/both": "both"}
                self._note(f"answers now come from {by[name]}")

    def _retry(self) -> None:
        if self._last is None:
            self._note("there is nothing to answer again")
            return
        if not self._settings.temperature:
            self._note("at temperature 0 a model always gives the same answer; /temperature 0.7 varies it")
        self._so_far = self._before
        next_images, (line, self._shown) = self._shown, self._last
        self._answer(line)
        self._shown = next_images

    def _show(self, path: str) -> None:
        if not path:
            self._note("name a file: /image cat.jpg")
            return
        file = str(Path(path).expanduser())
        try:
            [image] = media_in(self._ready.asked("", [file]))
        except FinetuneError as error:
            self._note(str(error))
            return
        self._shown.append(file)
        size = f"{image.width} x {image.height} pixels, {image.tokens} tokens"
        self._note(f"the next line shows {path} ({size})")

    def _save(self, path: str) -> None:
        if not path or not self._so_far.messages:
            self._note("name a file: /save rows.jsonl" if self._so_far.messages else "there is no conversation to save")
            return
        try:
            messages = [*opening(self._ready.system), *images.as_in_rows(self._so_far)]
            append_line(Path(path).expanduser(), {"messages": messages})
            self._note(f"saved as a row of {path}")
        except MachineError as error:
            self._note(str(error))

    def _answer(self, line: str) -> None:
        try:
            prompt = self._ready.asked(line, self._shown)
        except FinetuneError as error:
            self._note(str(error))
            return
        before, shown, self._shown = self._so_far, self._shown, []
        asked = before
        if turns := isinstance(prompt, Chat):
            asked = Chat([*before.messages, prompt.messages[-1]], images=(*before.images, *prompt.images))
            prompt = replace(asked, messages=[*opening(self._ready.system), *asked.messages])
        # A new seed each turn, so that a repeated question gets another sampled answer.
        settings = replace(self._settings, seed=self._settings.seed + self._turns)
        self._turns += 1
        self._last, self._before = (line, shown), before
        for model in self._models:
            if len(self._models) > 1:
                self._say(f"[{model}] ")
            try:
                text = self._stream(model, prompt, settings)
            except (ConfigError, DataError) as error:
                self._note(f"{error}, or /reset")
                return
        if turns:
            self._so_far = replace(asked, messages=[*asked.messages, {"role": "assistant", "content": text}])

    def _stream(self, model: str, prompt: Example, settings: Settings) -> str:
        """The answer of a model, up to an interrupt if there is one."""
        pieces: list[str] = []

        def say(piece: str) -> None:
            pieces.append(piece)
            self._say(piece)

        base = model == "base"
        try:
            with self._ready.model.disable_adapter() if base else contextlib.nullcontext():
                self._ready.stream(prompt, settings, say)
        except KeyboardInterrupt:
            self._say(" [stopped]")
        self._say("\n")
        return "".join(pieces).rstrip("\n")


def converse(ready: Ready, settings: Settings, say: Callable[[str], None], note: Callable[[str], None]) -> None:
    """Answer the lines of a terminal, or of standard input, until it ends or a command says to leave."""
    interactive = sys.stdin.isatty()
    conversation = Conversation(ready, settings, say, note)
    if interactive:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # lets `input` edit the line
        conversation.greet()
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except EOFError:
            say("\n")
            return
        except KeyboardInterrupt:  # drops the line, like a shell
            say("\n")
            continue
        except UnicodeDecodeError as error:
            raise DataError(f"standard input is not text: {error}") from None
        if not (line or interactive) or not conversation.take(line.rstrip("\r\n")):
            return
