"""From an example to tokens and labels. A label of -100 is not trained (`IGNORE`).

The rule for a conversation: each assistant turn is trained with its end-of-turn, once; nothing else is. Where the
template marks assistant turns (`{% generation %}`) the marks are used. Elsewhere the mask is found by rendering the
conversation up to each turn and accepted only where the shorter rendering is a token prefix of the longer one.

The encoding of a row is a generator that yields a text where it needs tokens; see tokenizing.py.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from finetune.data import control
from finetune.data.examples import Chat, Completion, Example, Message, RowError, Text, Tokens, in_common
from finetune.data.tokenizing import Asking, Piece, Span, Tokenized, answered
from finetune.errors import FinetuneError
from finetune.model import chat_template as template

IGNORE = -100

LossOn = Literal["assistant", "last", "all"]
ControlTokens = Literal["text", "parse"]


@dataclass(frozen=True)
class Encoded:
    """Token ids and labels of one row, of the same length.

    A row that is cut keeps its first `head` tokens, if it can. In one that was `escaped`, control tokens that its text
    spells are ordinary text.
    """

    input_ids: list[int]
    labels: list[int]
    head: int = 1
    escaped: bool = False

    @property
    def trained(self) -> int:
        """Number of tokens that are predicted and trained; the first has no predecessor and never is."""
        first = bool(self.labels) and self.labels[0] != IGNORE
        return len(self.labels) - self.labels.count(IGNORE) - first

    def cut(self, length: int, start: int = 0) -> Encoded:
        """At most `length` tokens from `start` on."""
        return Encoded(self.input_ids[start : start + length], self.labels[start : start + length])


def encode(
    example: Example, tokenizer: Any, loss_on: LossOn = "assistant", control_tokens: ControlTokens = "text"
) -> Encoded:
    """Tokens and labels of `example`. Raises RowError where no trustworthy mask can be found."""
    [found] = encode_all([example], tokenizer, loss_on, control_tokens)
    if isinstance(found, RowError):
        raise found
    return found


def encode_all(
    examples: Sequence[Example],
    tokenizer: Any,
    loss_on: LossOn = "assistant",
    control_tokens: ControlTokens = "text",
) -> list[Encoded | RowError]:
    """Tokens and labels of each example, or why no trustworthy mask can be found; none depends on the others."""
    return answered([_encoding(example, tokenizer, loss_on, control_tokens) for example in examples], tokenizer)


def prompt_ids(example: Example, tokenizer: Any, control_tokens: ControlTokens = "text") -> list[int]:
    """The tokens that ask for what the example lacks, as its row begins: the conversation up to where the assistant
    begins to write, a prompt without its completion, or a text to go on with. Raises RowError as `encode` does.
    """
    [found] = answered([_prompt(example, tokenizer, control_tokens)], tokenizer)
    if isinstance(found, RowError):
        raise found
    return found


def system_heads(
    rows: Sequence[tuple[Example, Encoded]], tokenizer: Any, control_tokens: ControlTokens = "text"
) -> list[int]:
    """With how many tokens each row begins that belong to the system message, or come before it.

    1 where there is none, or where the template shows it within the first question: in most templates a token of its
    own begins the text.
    """
    first = {
        place: _head(example, tokenizer, control_tokens)
        for place, (example, _) in enumerate(rows)
        if isinstance(example, Chat) and example.messages[0]["role"] == "system"
    }
    heads = [1] * len(rows)
    for place, alone in zip(first, answered(list(first.values()), tokenizer), strict=True):
        if not isinstance(alone, RowError):
            heads[place] = max(1, in_common(rows[place][1].input_ids, alone.ids))
    return heads


def _head(example: Chat, tokenizer: Any, control_tokens: ControlTokens) -> Asking[Tokenized]:
    return (yield from _rendering(_read(example, tokenizer, control_tokens), 1, tokenizer))


def unused(example: Chat, tokenizer: Any) -> list[str]:
    """The fields of its messages that the chat template does not know."""
    names = {name for message in example.messages for name in message} - {"role", "content", "tool_calls"}
    return sorted(names - _names_in(str(tokenizer.chat_template)))


@functools.lru_cache(maxsize=8)
def _names_in(chat_template: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", chat_template))


def is_empty(example: Example, loss_on: LossOn = "assistant") -> bool:
    """Whether what is to be learnt is there but blank: answers of white space, which call no tool either."""
    match example:
        case Chat(messages):
            turns = range(len(messages)) if loss_on == "all" else trained_turns(example, loss_on)
            said = [messages[turn]["content"].strip() or messages[turn].get("tool_calls") for turn in turns]
            return bool(said) and not any(said)
        case Completion(prompt, completion):
            return not completion.strip() and (loss_on != "all" or not prompt.strip())
        case Text(text):
            return not text.strip()
        case Tokens():
            return False


def trained_turns(example: Chat, loss_on: LossOn) -> list[int]:
    """Indices of the messages that are trained, where not all tokens are."""
    turns = [turn for turn in _answers(example.messages) if turn not in example.context]
    return turns[-1:] if loss_on == "last" else turns


def _answers(messages: list[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


Readable = TypeVar("Readable", bound=Example)


def _read(example: Readable, tokenizer: Any, control_tokens: ControlTokens) -> Readable:
    """The example as its text is to be read: with control tokens in it, or as text alone."""
    return control.escaped(example, tokenizer) if control_tokens == "text" else example


def _encoding(example: Example, tokenizer: Any, loss_on: LossOn, control_tokens: ControlTokens) -> Asking[Encoded]:
    example = _read(example, tokenizer, control_tokens)
    match example:
        case Chat(escaped=escaped):
            return replace((yield from _chat(example, tokenizer, loss_on)), escaped=escaped)
        case Completion(escaped=escaped):
            return replace((yield from _completion(example, tokenizer, loss_on)), escaped=escaped)
        case Tokens():
            return _tokens(example, tokenizer)
        case Text(text, escaped):
            ids = _with_end((yield Piece(text, special=True, escaped=escaped)).ids, tokenizer)
            return Encoded(ids, list(ids), escaped=escaped)


def _prompt(example: Example, tokenizer: Any, control_tokens: ControlTokens) -> Asking[list[int]]:
    example = _read(example, tokenizer, control_tokens)
    match example:
        case Chat(messages):
            _check_template(example, tokenizer)
            return (yield from _rendering(example, len(messages), tokenizer, prompt=True)).ids
        case Completion(text, _, escaped) | Text(text, escaped):
            return (yield from _opening(text, escaped, tokenizer))
        case Tokens(input_ids):
            return input_ids


# -- text and tokens -------------------------------------------------------------------------------------------------


def _completion(example: Completion, tokenizer: Any, loss_on: LossOn) -> Asking[Encoded]:
    # Prompt and completion are tokenized apart, as generation will see the prompt: no token spans the boundary.
    prompt = yield from _opening(example.prompt, example.escaped, tokenizer)
    completion = _with_end((yield Piece(example.completion, escaped=example.escaped)).ids, tokenizer)
    ids = prompt + completion
    return Encoded(ids, list(ids) if loss_on == "all" else [IGNORE] * len(prompt) + completion)


def _opening(text: str, escaped: bool, tokenizer: Any) -> Asking[list[int]]:
    """A text that more will follow: without the end that some tokenizers put to any."""
    ids = (yield Piece(text, special=True, escaped=escaped)).ids
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def _with_end(ids: list[int], tokenizer: Any) -> list[int]:
    return list(ids) if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def _tokens(example: Tokens, tokenizer: Any) -> Encoded:
    ids, size = example.input_ids, len(tokenizer)
    labels = list(ids) if example.labels is None else example.labels
    for index, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if not 0 <= token < size:
            raise RowError(f"`input_ids[{index}]` is {token}, and the tokenizer has {size:,} tokens")
        if label not in (IGNORE, token):
            raise RowError(
                f"`labels[{index}]` is {label}, and `input_ids[{index}]` is {token}: a label is {IGNORE} or the id at "
                "the same place; the shift by one is made in training"
            )
    return Encoded(ids, labels)


# -- conversations ---------------------------------------------------------------------------------------------------


def _chat(example: Chat, tokenizer: Any, loss_on: LossOn) -> Asking[Encoded]:
    _check_template(example, tokenizer)
    if loss_on == "all":
        whole = yield from _rendering(example, len(example.messages), tokenizer)
        return Encoded(whole.ids, list(whole.ids))
    if not _answers(example.messages):
        raise RowError("the conversation has no assistant turn, so there is nothing to train")
    turns = trained_turns(example, loss_on)
    marked = marks_generation(tokenizer)
    whole = yield from _rendering(example, len(example.messages), tokenizer, marks=marked)
    spans = _by_marks(example, turns, whole, tokenizer) if marked else None
    if spans is None:
        spans = yield from _by_prefixes(example, turns, whole.ids, tokenizer)
    labels = [IGNORE] * len(whole.ids)
    for start, end in spans:
        labels[start:end] = whole.ids[start:end]
    return Encoded(whole.ids, labels)


def marks_generation(tokenizer: Any) -> bool:
    """Whether the chat template marks the assistant's tokens itself."""
    return "generation" in (tokenizer.chat_template or "") and "endgeneration" in tokenizer.chat_template


def _check_template(example: Chat, tokenizer: Any) -> None:
    """A template that does not know of tools would leave them out without a word."""
    text = str(tokenizer.chat_template)
    calls = any(message.get("tool_calls") for message in example.messages)
    for name, used in (("tools", example.tools), ("tool_calls", calls)):
        if used and name not in text:
            raise RowError(
                f"the chat template does not render `{name}`, so they would be lost; use a model whose template does, "
                "or set `data.chat_template` to a file with one"
            )


def _rendering(
    example: Chat, messages: int, tokenizer: Any, *, prompt: bool = False, marks: bool = False
) -> Asking[Tokenized]:
    """The first so many messages in tokens; with `prompt`, up to where the assistant begins to write."""
    try:
        text, found = template.text(
            tokenizer, example.messages[:messages], tools=example.tools, prompt=prompt, marks=marks
        )
    except FinetuneError:
        raise
    except Exception as error:  # a template may raise anything of its own; the row is what it objects to
        raise RowError(f"the chat template refuses it: {error}{_remedy(str(error).lower())}") from None
    return (yield Piece(text, marks=found, escaped=example.escaped))


def _remedy(refusal: str) -> str:
    if "alternate" in refusal:
        return ". Join messages of one role that follow each other into one"
    if "system" in refusal:
        return (
            ". Put the system text at the head of the first user message, or set `data.chat_template` to one with a "
            "system role"
        )
    return ""


def _by_marks(example: Chat, turns: list[int], whole: Tokenized, tokenizer: Any) -> list[Span] | None:
    """By the template's own marks; None where they do not come through, one run of tokens for each answer."""
    answers = _answers(example.messages)
    if whole.runs is None or len(whole.runs) != len(answers):
        return None
    runs = dict(zip(answers, whole.runs, strict=True))
    try:
        return [_closed(whole.ids, *runs[turn], turn, tokenizer) for turn in turns]
    except RowError:
        return None  # the renderings themselves do not lie


def _by_prefixes(example: Chat, turns: list[int], ids: list[int], tokenizer: Any) -> Asking[list[Span]]:
    """By rendering the conversation up to each turn, and to its end."""
    spans = []
    for turn in turns:
        if turn == 0:
            raise RowError(
                "messages[0]: where the assistant opens, the mask needs a template with {% generation %} marks; "
                "put a user or system message first, or set `data.loss_on: all`"
            )
        before = (yield from _rendering(example, turn, tokenizer, prompt=True)).ids
        end = None
        if ids[: len(before)] == before:
            end = yield from _turn_end(example, turn, ids, len(before), tokenizer)
        if end is None:
            raise RowError(
                f"messages[{turn}]: the chat template renders the conversation differently up to this turn, so its "
                "tokens cannot be told apart; use a template with {% generation %} marks, or `data.loss_on: all`"
            )
        spans.append(_closed(ids, len(before), end, turn, tokenizer))
    return spans


def _turn_end(example: Chat, turn: int, ids: list[int], start: int, tokenizer: Any) -> Asking[int | None]:
    """Where the turn that begins at `start` has ended, at the latest; None where that cannot be proven."""
    after = ids
    if turn + 1 < len(example.messages):
        after = (yield from _rendering(example, turn + 1, tokenizer)).ids
    shared = in_common(ids, after)
    closing = after[shared:]
    if shared > start and not _words(closing, tokenizer) and ids[len(ids) - len(closing) :] == closing:
        return shared  # what is left is how the template closes any conversation (Phi 3)
    # Templates of reasoning models render the last answer with its thoughts and earlier ones without. The turn then
    # ends with its first end-of-turn, provided that it says what the message says.
    ends = template.end_of_turn(tokenizer)
    if ends not in ids[start:] or example.messages[turn].get("tool_calls"):
        return None
    end = ids.index(ends, start)
    rendered = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False).strip()
    content = example.messages[turn]["content"]
    said = (control.plain(content, tokenizer) if example.escaped else content).strip()
    if rendered == said or (rendered and said and (rendered.endswith(said) or said.endswith(rendered))):
        return end + 1
    return None


def _closed(ids: list[int], start: int, end: int, turn: int, tokenizer: Any) -> Span:
    """The span of a turn, up to and with the token that ends it.

    Templates put a line break after the end-of-turn; generation stops before it, so it is not learnt. Marks may leave
    the end-of-turn out, and an answer whose end is not learnt never ends.
    """
    ends = template.end_of_turn(tokenizer)
    places = [at for at in range(start, end) if ids[at] == ends]
    if len(places) > 1:
        name = tokenizer.convert_ids_to_tokens(ends)
        raise RowError(
            f"messages[{turn}].content has the end-of-turn `{name}` in it, which the template adds; remove it"
        )
    if places:
        return start, places[0] + 1
    if ids[end : end + 1] == [ends]:
        return start, end + 1
    # A call of a tool may end otherwise than an answer.
    while end > start and not _words(ids[end - 1 : end], tokenizer):
        end -= 1
        if ids[end] in template.special_ids(tokenizer):
            return start, end + 1
    raise RowError(
        f"messages[{turn}]: the chat template closes this turn with no end-of-turn token, so that a model could not "
        "learn to stop; set `data.chat_template` to a template that does"
    )


def _words(ids: list[int], tokenizer: Any) -> bool:
    """Whether there is anything but special tokens and white space."""
    special = template.special_ids(tokenizer)
    words = [token for token in ids if token not in special]
    return bool(words and tokenizer.decode(words).strip())
