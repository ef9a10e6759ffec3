"""From an example to tokens and labels. A label of -100 is not trained (`IGNORE`).

The rule for a conversation: each assistant turn is trained with its end-of-turn, once; nothing else is. Where the
template marks assistant turns (`{% generation %}`) the marks are used. Elsewhere the mask is found by rendering the
conversation up to each turn and accepted only where the shorter rendering is a token prefix of the longer one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from finetune import template
from finetune.data.formats import Chat, Completion, Example, Message, RowError, Text, Tokens, in_common
from finetune.errors import FinetuneError

IGNORE = -100

LossOn = Literal["assistant", "last", "all"]


@dataclass(frozen=True)
class Encoded:
    """Token ids and labels of one row, of the same length."""

    input_ids: list[int]
    labels: list[int]

    @property
    def trained(self) -> int:
        """Number of tokens that are predicted and trained; the first has no predecessor and never is."""
        return sum(label != IGNORE for label in self.labels[1:])

    def cut(self, length: int, start: int = 0) -> Encoded:
        """At most `length` tokens from `start` on."""
        return Encoded(self.input_ids[start : start + length], self.labels[start : start + length])


def encode(example: Example, tokenizer: Any, loss_on: LossOn = "assistant") -> Encoded:
    """Tokens and labels of `example`. Raises RowError where no trustworthy mask can be found."""
    match example:
        case Chat():
            return _chat(example, tokenizer, loss_on)
        case Completion():
            return _completion(example, tokenizer, loss_on)
        case Tokens():
            return _tokens(example, tokenizer)
        case Text():
            ids = _with_end(tokenizer(example.text)["input_ids"], tokenizer)
            return Encoded(ids, list(ids))


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


# -- text and tokens -------------------------------------------------------------------------------------------------


def _completion(example: Completion, tokenizer: Any, loss_on: LossOn) -> Encoded:
    # Prompt and completion are tokenized apart, as generation will see the prompt: no token spans the boundary.
    prompt = tokenizer(example.prompt)["input_ids"]
    if prompt and prompt[-1] == tokenizer.eos_token_id:
        prompt = prompt[:-1]
    completion = _with_end(tokenizer(example.completion, add_special_tokens=False)["input_ids"], tokenizer)
    ids = prompt + completion
    return Encoded(ids, list(ids) if loss_on == "all" else [IGNORE] * len(prompt) + completion)


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

Span = tuple[int, int]


def _chat(example: Chat, tokenizer: Any, loss_on: LossOn) -> Encoded:
    _check_template(example, tokenizer)
    if loss_on == "all":
        ids = _render(example, len(example.messages), tokenizer)
        return Encoded(ids, list(ids))
    if not _answers(example.messages):
        raise RowError("the conversation has no assistant turn, so there is nothing to train")
    turns = trained_turns(example, loss_on)
    found = _marked(example, turns, tokenizer) if marks_generation(tokenizer) else None
    ids, spans = found or _incremental(example, turns, tokenizer)
    labels = [IGNORE] * len(ids)
    for start, end in spans:
        labels[start:end] = ids[start:end]
    return Encoded(ids, labels)


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


def _render(example: Chat, messages: int, tokenizer: Any, prompt: bool = False) -> list[int]:
    """Ids of the first so many messages; with `prompt`, up to where the assistant begins to write."""
    return list(_rendered(example, messages, tokenizer, add_generation_prompt=prompt)["input_ids"])


def _rendered(example: Chat, messages: int, tokenizer: Any, **options: Any) -> Any:
    try:
        return template.render(tokenizer, example.messages[:messages], tools=example.tools, **options)
    except FinetuneError:
        raise
    except Exception as error:  # a template may raise anything of its own; the row is what it objects to
        raise RowError(f"the chat template refuses it: {error}{_remedy(str(error).lower())}") from None


def _remedy(refusal: str) -> str:
    if "alternate" in refusal:
        return ". Join messages of one role that follow each other into one"
    if "system" in refusal:
        return (
            ". Put the system text at the head of the first user message, or set `data.chat_template` to one with a "
            "system role"
        )
    return ""


def _marked(example: Chat, turns: list[int], tokenizer: Any) -> tuple[list[int], list[Span]] | None:
    """By the template's own marks; None where they do not come through, one run of tokens for each answer.

    transformers maps the marks to tokens by character offsets, which some tokenizers trim: a turn that starts with a
    space is then lost, with all that follow, and one that ends with a line break goes on to the end.
    """
    rendered = _rendered(example, len(example.messages), tokenizer, return_assistant_tokens_mask=True)
    ids, marks = list(rendered["input_ids"]), [bool(bit) for bit in rendered["assistant_masks"]]
    edges = [at for at, (before, now) in enumerate(zip([False, *marks], [*marks, False], strict=True)) if before != now]
    answers = _answers(example.messages)
    if len(edges) != 2 * len(answers):
        return None
    runs = dict(zip(answers, zip(edges[::2], edges[1::2], strict=True), strict=True))
    try:
        return ids, [_closed(ids, *runs[turn], turn, tokenizer) for turn in turns]
    except RowError:
        return None  # the renderings themselves do not lie


def _incremental(example: Chat, turns: list[int], tokenizer: Any) -> tuple[list[int], list[Span]]:
    """By rendering the conversation up to each turn, and to its end."""
    ids = _render(example, len(example.messages), tokenizer)
    spans = []
    for turn in turns:
        if turn == 0:
            raise RowError(
                "messages[0]: where the assistant opens, the mask needs a template with {% generation %} marks; "
                "put a user or system message first, or set `data.loss_on: all`"
            )
        before = _render(example, turn, tokenizer, prompt=True)
        end = _turn_end(example, turn, ids, len(before), tokenizer) if ids[: len(before)] == before else None
        if end is None:
            raise RowError(
                f"messages[{turn}]: the chat template renders the conversation differently up to this turn, so its "
                "tokens cannot be told apart; use a template with {% generation %} marks, or `data.loss_on: all`"
            )
        spans.append(_closed(ids, len(before), end, turn, tokenizer))
    return ids, spans


def _turn_end(example: Chat, turn: int, ids: list[int], start: int, tokenizer: Any) -> int | None:
    """Where the turn that begins at `start` has ended, at the latest; None where that cannot be proven."""
    after = _render(example, turn + 1, tokenizer)
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
    said = example.messages[turn]["content"].strip()
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
