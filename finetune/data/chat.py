"""From an example to tokens and labels. A label of -100 is not trained (`IGNORE`).

The rule for a conversation: each assistant turn is trained with its end-of-turn, once; nothing else is. Where the
template marks assistant turns (`{% generation %}`) the marks are used. Elsewhere the mask is found by rendering the
conversation up to each turn and accepted only where the shorter rendering is a token prefix of the longer one.

Tokenizing takes most of the time, and the least of it for hundreds of texts in one call. So the encoding of a row is
written as a generator that yields a text where it needs tokens, and `encode_all` answers those of many rows at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from finetune import template
from finetune.data.formats import Chat, Completion, Example, Message, RowError, Text, Tokens, in_common
from finetune.errors import FinetuneError
from finetune.libraries import tokenizing_in_parallel

IGNORE = -100

LossOn = Literal["assistant", "last", "all"]


@dataclass(frozen=True)
class Encoded:
    """Token ids and labels of one row, of the same length.

    A row that is cut keeps its first `head` tokens, if it can.
    """

    input_ids: list[int]
    labels: list[int]
    head: int = 1

    @property
    def trained(self) -> int:
        """Number of tokens that are predicted and trained; the first has no predecessor and never is."""
        first = bool(self.labels) and self.labels[0] != IGNORE
        return len(self.labels) - self.labels.count(IGNORE) - first

    def cut(self, length: int, start: int = 0) -> Encoded:
        """At most `length` tokens from `start` on."""
        return Encoded(self.input_ids[start : start + length], self.labels[start : start + length])


def encode(example: Example, tokenizer: Any, loss_on: LossOn = "assistant") -> Encoded:
    """Tokens and labels of `example`. Raises RowError where no trustworthy mask can be found."""
    [found] = encode_all([example], tokenizer, loss_on)
    if isinstance(found, RowError):
        raise found
    return found


def encode_all(examples: Sequence[Example], tokenizer: Any, loss_on: LossOn = "assistant") -> list[Encoded | RowError]:
    """Tokens and labels of each example, or why no trustworthy mask can be found; none depends on the others."""
    return _answered([_encoding(example, tokenizer, loss_on) for example in examples], tokenizer)


def system_head(example: Example, encoded: Encoded, tokenizer: Any) -> int:
    """With how many tokens `encoded` begins that belong to the system message, or come before it.

    1 where there is none, or where the template shows it within the first question: in most templates a token of its
    own begins the text.
    """
    if not isinstance(example, Chat) or example.messages[0]["role"] != "system":
        return 1
    [alone] = _answered([_rendering(example, 1, tokenizer)], tokenizer)
    return 1 if isinstance(alone, RowError) else max(1, in_common(encoded.input_ids, alone.ids))


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


# -- what is asked of the tokenizer, and how it is answered ----------------------------------------------------------

Span = tuple[int, int]


class Piece(NamedTuple):
    """A text to tokenize; with `special` between the tokens that the tokenizer puts around any text of its own.

    `marks` are spans of characters to be told as spans of tokens.
    """

    text: str
    special: bool = False
    marks: Sequence[Span] = ()


class Tokenized(NamedTuple):
    """The ids of a piece, and the runs of tokens that its marks cover; None where that cannot be told."""

    ids: list[int]
    runs: list[Span] | None


Found = TypeVar("Found")
Asking = Generator[Piece, Tokenized, Found]
"""Work that yields a piece wherever it needs one tokenized. It raises RowError where a row is at fault."""


Answers = dict[int, Tokenized | Exception | None]
"""What each row waited for, by its number; None before its first piece."""


def _answered(rows: Sequence[Asking[Found]], tokenizer: Any) -> list[Found | RowError]:
    """What each comes to. The pieces that they wait for are tokenized together, those of half the rows in one call.

    The halves take turns: while one's pieces are with the tokenizer, which is not Python's and leaves it running, the
    other's are rendered. That stays in this thread, for only in the main one its time is bounded.
    """
    found: dict[int, Found | RowError] = {}

    def ask(answers: Answers) -> dict[int, Piece]:
        asked = {}
        for row, answer in answers.items():
            try:
                asked[row] = _step(rows[row], answer)
            except StopIteration as done:
                found[row] = done.value
            except RowError as error:
                found[row] = error
        return asked

    middle = (len(rows) + 1) // 2
    with ThreadPoolExecutor(max_workers=1) as tokenizing:
        waiting: deque[tuple[dict[int, Piece], Future[list[Tokenized | Exception]]]] = deque()
        turns: deque[Answers] = deque(dict.fromkeys(half) for half in (range(middle), range(middle, len(rows))))
        while turns or waiting:
            if not turns:
                earlier, answered = waiting.popleft()
                turns.append(dict(zip(earlier, answered.result(), strict=True)))
            if asked := ask(turns.popleft()):
                waiting.append((asked, tokenizing.submit(_tokenized, list(asked.values()), tokenizer)))
    return [found[row] for row in range(len(rows))]


def _step(row: Asking[Found], answer: Tokenized | Exception | None) -> Piece:
    if answer is None:
        return next(row)
    return row.throw(answer) if isinstance(answer, Exception) else row.send(answer)


def _tokenized(pieces: list[Piece], tokenizer: Any) -> list[Tokenized | Exception]:
    """The tokens of each piece, or what the tokenizer raises at it."""
    found: dict[int, Tokenized | Exception] = {}
    for special in (False, True):
        places = [place for place, piece in enumerate(pieces) if piece.special == special]
        if not places:
            continue
        try:
            with tokenizing_in_parallel():
                batch = tokenizer(
                    [pieces[place].text for place in places],
                    add_special_tokens=special,
                    return_attention_mask=False,
                    return_token_type_ids=False,
                )
        except Exception as error:  # of one text; the others are none the worse for it
            for place in places:
                found[place] = error if len(places) == 1 else _tokenized([pieces[place]], tokenizer)[0]
        else:
            for index, place in enumerate(places):
                found[place] = Tokenized(batch["input_ids"][index], _runs(batch, index, pieces[place].marks))
    return [found[place] for place in range(len(pieces))]


def _runs(batch: Any, index: int, marks: Sequence[Span]) -> list[Span] | None:
    """The unbroken runs of tokens under the `marks` of a text.

    A mark is mapped by the offsets of its first and last character. Some tokenizers trim them: a mark that starts with
    a space then begins at no token, and one that ends with a line break goes on to the end. Tokenizers written in
    Python have none.
    """
    runs: list[Span] = []
    if marks and not batch.is_fast:
        return None
    for first, after in marks:
        if first == after:
            continue
        start, last = batch.char_to_token(index, first), batch.char_to_token(index, after - 1)
        if start is None:
            return None
        end = len(batch["input_ids"][index]) if last is None else last + 1
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], end))
        else:
            runs.append((start, end))
    return runs


def _encoding(example: Example, tokenizer: Any, loss_on: LossOn) -> Asking[Encoded]:
    match example:
        case Chat():
            return (yield from _chat(example, tokenizer, loss_on))
        case Completion():
            return (yield from _completion(example, tokenizer, loss_on))
        case Tokens():
            return _tokens(example, tokenizer)
        case Text():
            ids = _with_end((yield Piece(example.text, special=True)).ids, tokenizer)
            return Encoded(ids, list(ids))


# -- text and tokens -------------------------------------------------------------------------------------------------


def _completion(example: Completion, tokenizer: Any, loss_on: LossOn) -> Asking[Encoded]:
    # Prompt and completion are tokenized apart, as generation will see the prompt: no token spans the boundary.
    prompt = (yield Piece(example.prompt, special=True)).ids
    if prompt and prompt[-1] == tokenizer.eos_token_id:
        prompt = prompt[:-1]
    completion = _with_end((yield Piece(example.completion)).ids, tokenizer)
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
        return (yield Piece(text, marks=found))
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
