"""Chat templates: the table of named ones, a file, or the tokenizer's own; and rendering within time and memory limits.

transformers renders in jinja2's ImmutableSandboxedEnvironment: no attributes that start with an underscore, no changes
to its inputs, ranges of at most 100,000. The sandbox limits neither time nor memory, so `text` does: time by SIGALRM,
which works only in the main thread and between two operations; the power operator, which can run forever within one, is
refused; memory by the process's data limit, where the system has one (Linux).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.config.fields import Help
from finetune.errors import ArtifactError, ConfigError
from finetune.runtime import libraries

# A row is rendered in well under a millisecond; a machine that swaps may take a thousand times as long.
RENDER_SECONDS = 5.0

# What rendering may take, and what may come of it: the longest row that is read has 64 MiB of text.
RENDER_BYTES = 2**30
_RENDERED_CHARACTERS = 2**27

SUFFIX = ".jinja"

_FOLDER = Path(__file__).parent / "templates"
_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


TEMPLATES: dict[str, Help] = {
    "auto": Help("the tokenizer's own, or `plain` where it has none"),
    "plain": Help("roles in plain text and the end of text as end of turn: no new token has to be learnt"),
    "chatml": Help("`<|im_start|>role … <|im_end|>` (ChatML)"),
    "llama2": Help("`[INST] … [/INST]` with `<<SYS>>` in the first question (Llama 2 chat)"),
    "llama3": Help("`<|start_header_id|>role<|end_header_id|> … <|eot_id|>` (Llama 3)"),
    "mistral": Help("`[INST] … [/INST]` with the system text before the first question (Mistral 7B v0.1, v0.2)"),
    "gemma": Help("`<start_of_turn>role … <end_of_turn>`, without a system role (Gemma 1, 2)"),
    "phi3": Help("`<|role|> … <|end|>` (Phi 3)"),
}


def named(name: str) -> str:
    """The text of a template that ships with the program."""
    return (_FOLDER / f"{name}{SUFFIX}").read_text(encoding="utf-8")


def choose(choice: str, own: Any) -> Any:
    """The template that `choice` (a name of TEMPLATES, or a .jinja file) means for a tokenizer with its `own`, if any.

    Raises ConfigError for a file that cannot be read.
    """
    if choice == "auto":
        return own or named("plain")
    if not choice.endswith(SUFFIX):
        return named(choice)
    try:
        return Path(choice).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"`data.chat_template`: {choice}: no such file; use a file that exists, or one of {', '.join(TEMPLATES)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`data.chat_template`: {choice}: cannot be read: {error}") from None


def text(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    prompt: bool = False,
    marks: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation; with `prompt`, up to where the assistant begins to write.

    With `marks` also where each run of characters starts and ends that the template marks as the assistant's
    (`{% generation %}`). Raises ArtifactError for a template that is none, that tries what the sandbox forbids, that
    goes on for more than `RENDER_SECONDS` or takes more than `RENDER_BYTES`; and whatever the template itself raises.
    """
    from transformers.utils import chat_template_utils

    with _guarded():
        # As `apply_chat_template` does it, which gives the marks by token only, and so one conversation at a time.
        [rendered], found = chat_template_utils.render_jinja_template(
            [[{key: value for key, value in message.items() if value is not None} for message in messages]],
            tools=tools,
            chat_template=tokenizer.get_chat_template(None, tools),
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompt,
            **tokenizer.special_tokens_map,
        )
        if len(rendered) > _RENDERED_CHARACTERS:
            raise MemoryError
    return rendered, found[0] if marks else []


def ids(tokenizer: Any, messages: list[dict[str, Any]], *, prompt: bool = False) -> list[int]:
    """The tokens of `text`. Raises as it does."""
    found: list[int] = tokenizer(text(tokenizer, messages, prompt=prompt)[0], add_special_tokens=False)["input_ids"]
    return found


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Bound what is rendered within the block in time and memory, and raise what it must not do as ArtifactError.

    Tokenizing its text is not bounded by these: the tokenizer ends the process where it gets no memory.
    """
    from jinja2.exceptions import SecurityError, TemplateSyntaxError
    from transformers.utils import chat_template_utils

    sandboxed = libraries.replaced(chat_template_utils, "ImmutableSandboxedEnvironment", _sandbox())
    try:
        with sandboxed, _for_at_most(RENDER_SECONDS), _with_at_most(RENDER_BYTES):
            yield
    except _OutOfTime:
        why = f"was still running after {RENDER_SECONDS:g} seconds"
    except MemoryError:
        why = f"takes more than {RENDER_BYTES} bytes"
    except RecursionError:
        why = "is nested too deeply"
    except SecurityError as error:
        why = f"reaches out of its sandbox: {error}"
    except TemplateSyntaxError as error:
        why = f"is not valid: line {error.lineno}: {error.message}"
    else:
        return
    raise ArtifactError(f"the chat template {why}; set `data.chat_template` to one that you trust") from None


class _OutOfTime(BaseException):
    """Not an Exception, so that no handler on the way takes it for an error of its own."""


@functools.cache
def _sandbox() -> type:
    """jinja2's sandbox without powers."""
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"**"})

        def call_binop(self, *_: Any) -> Any:
            raise SecurityError("powers (`**`) are not allowed")

    return Sandbox


@contextlib.contextmanager
def _with_at_most(more_bytes: int) -> Iterator[None]:
    """Let the process take so much more memory than it has, and no more: Python then raises MemoryError."""
    import resource

    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY)  # for each row: a file object would take six times as long
    except OSError:
        yield
        return
    held = int(os.read(statm, 256).split()[5]) * resource.getpagesize()  # data and stack, as the limit counts them
    os.close(statm)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [held + more_bytes, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextlib.contextmanager
def _for_at_most(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise _OutOfTime

    earlier = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def end_of_turn(tokenizer: Any) -> int | None:
    """The token that closes an assistant turn, found by rendering one; the end of text for a template that refuses to.

    None where a turn is closed by no special token, so that no model could learn to stop.
    """
    return _end_of_turn(tokenizer, str(tokenizer.chat_template))


@functools.lru_cache(maxsize=8)
def _end_of_turn(tokenizer: Any, _: str) -> int | None:
    try:
        prompt, whole = ids(tokenizer, _PROBE[:1], prompt=True), ids(tokenizer, _PROBE)
    except ArtifactError:
        raise
    except Exception:  # of whatever kind a template raises; it may want a system message first
        return int(tokenizer.eos_token_id)
    special = special_ids(tokenizer)
    found = None
    # A template may close the conversation as well (Phi 3): the first token after the answer's words counts.
    for token in reversed(whole[len(prompt) :]):
        if token in special:
            found = int(token)
        elif tokenizer.decode([token]).strip():
            break
    return found


def stop_ids(tokenizer: Any) -> list[int]:
    """The tokens at which an answer has ended: the end of text, and the end of turn where that is another."""
    return sorted({tokenizer.eos_token_id, end_of_turn(tokenizer)} - {None})


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of tokens that no text spells, but the unknown token, which any text may."""
    return _special_ids(tokenizer, len(tokenizer))


@functools.lru_cache(maxsize=8)
def _special_ids(tokenizer: Any, _: int) -> frozenset[int]:
    added = (token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
    return frozenset({*added, *tokenizer.all_special_ids} - {tokenizer.unk_token_id})
