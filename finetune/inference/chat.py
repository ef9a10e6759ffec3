"""A conversation in the terminal, with the run's adapter switched off and on to compare."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace

from finetune.data.examples import Chat, Message
from finetune.errors import ConfigError, DataError
from finetune.inference.generation import Settings
from finetune.inference.jobs import Ready

COMMANDS = {
    "/base": "answer with the base alone",
    "/adapter": "answer with the adapter again",
    "/reset": "forget the conversation",
    "/help": "show these commands",
    "/quit": "leave, as does Ctrl-D; Ctrl-C stops an answer",
}


class Conversation:
    """Turns of a person and a model. `say` prints pieces of answers, `note` whole lines about them."""

    def __init__(
        self, ready: Ready, settings: Settings, say: Callable[[str], None], note: Callable[[str], None]
    ) -> None:
        self._ready, self._settings, self._say, self._note = ready, settings, say, note
        self._messages: list[Message] = []
        self._turns = 0
        self._base = False

    def greet(self) -> None:
        """Print what a person needs to know."""
        self._note("; ".join(f"{name}: {help}" for name, help in COMMANDS.items()))
        if self._ready.kind != "chat":
            self._note("this run was trained on plain text: each line is continued by itself, without those before it")

    def take(self, line: str) -> bool:
        """Answer a line, or do what a command says; False once it says to leave."""
        word = line.strip()
        if word == "/quit":
            return False
        if word == "/help":
            self.greet()
        elif word == "/reset":
            self._messages = []
            self._note("the conversation begins anew")
        elif word in ("/base", "/adapter"):
            self._switch(word == "/base")
        elif word.startswith("/") and word.removeprefix("/").isalpha():
            self._note(f"no command {word}; there are {', '.join(COMMANDS)}")
        elif word:
            self._answer(line)
        return True

    def _switch(self, base: bool) -> None:
        if not self._ready.switchable:
            self._note("there is no adapter to switch here: the weights are a whole model")
            return
        self._base = base
        self._note(f"answers now come from the {'base alone' if base else 'base with the adapter'}")

    def _answer(self, line: str) -> None:
        turns = self._ready.kind == "chat"
        asked = [*self._messages, {"role": "user", "content": line}]
        pieces: list[str] = []

        def say(piece: str) -> None:
            pieces.append(piece)
            self._say(piece)

        # Otherwise a question asked again would always get the same sampled answer.
        settings = replace(self._settings, seed=self._settings.seed + self._turns)
        self._turns += 1
        try:
            with self._ready.model.disable_adapter() if self._base else contextlib.nullcontext():
                self._ready.stream(Chat(asked) if turns else self._ready.asked(line), settings, say)
        except KeyboardInterrupt:
            self._say(" [stopped]")
        except ConfigError as error:
            self._note(f"{error}, or /reset")
            return
        self._say("\n")
        if turns:
            self._messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


def converse(ready: Ready, settings: Settings, say: Callable[[str], None], note: Callable[[str], None]) -> None:
    """Take lines from the terminal, or from standard input if that is none, until it ends or one says to leave.

    Raises DataError for input that is not text.
    """
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
        except KeyboardInterrupt:  # as in a shell, which drops the line
            say("\n")
            continue
        except UnicodeDecodeError as error:
            raise DataError(f"standard input is not text: {error}") from None
        if not (line or interactive) or not conversation.take(line.rstrip("\r\n")):
            return
