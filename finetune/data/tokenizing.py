"""Batched tokenization for code that encodes one row at a time.

Tokenization takes most of the time of data preparation, and is fastest with hundreds of texts per call. So the encoding
of a row is a generator that yields each text to be tokenized, and `answered` batches the requests of many rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from finetune.data import control
from finetune.data.examples import RowError
from finetune.runtime.libraries import tokenizing_in_parallel

CharSpan = tuple[int, int]
"""From one character of a text to another."""

TokenSpan = tuple[int, int]
"""From one token of a text to another."""

# A tokenizer needs about 150 bytes per character; this is 2 million tokens of English, in 1.4 GiB.
TEXT_CHARACTERS = 2**23


class TooMuchText(RowError):
    """A row with too much text to tokenize at once, far beyond any useful length."""

    def __init__(self, characters: int) -> None:
        super().__init__(
            f"the row has {characters:,} characters, more than the {TEXT_CHARACTERS:,} that can be tokenized as one "
            "row; split it, or set `data.too_long: drop`"
        )


class TextPart(NamedTuple):
    """A text to tokenize; `special` adds the tokenizer's special tokens (BOS, EOS).

    `marks` are character spans to be mapped to token spans. An `escaped` text contains stand-ins (control.py).
    """

    text: str
    special: bool = False
    marks: Sequence[CharSpan] = ()
    escaped: bool = False


class Tokenized(NamedTuple):
    """The ids of a piece, and the runs of tokens that its marks cover, None if they cannot be mapped."""

    ids: list[int]
    runs: list[TokenSpan] | None


RowResult = TypeVar("RowResult")
Asking = Generator[TextPart, Tokenized, RowResult]
"""A generator that yields each piece to be tokenized and receives its tokens. Raises RowError for a bad row."""

TokenizedByRow = dict[int, Tokenized | RowError | None]
"""The result that each row is waiting for, by row index; None before its first piece."""


def answered(rows: Sequence[Asking[RowResult]], tokenizer: Any) -> list[RowResult | RowError]:
    """Run all generators and return their results or errors. Pieces are tokenized in batches of half the rows.

    The halves alternate: while the tokenizer, which releases the GIL, works on one half in another thread, templates
    are rendered for the other half in this one, since only the main thread can bound the time a template takes.
    """
    results: dict[int, RowResult | RowError] = {}

    def ask(answers: TokenizedByRow) -> dict[int, TextPart]:
        asked = {}
        for row, answer in answers.items():
            try:
                if answer is None:
                    asked[row] = next(rows[row])
                elif isinstance(answer, RowError):
                    asked[row] = rows[row].throw(answer)
                else:
                    asked[row] = rows[row].send(answer)
            except StopIteration as done:
                results[row] = done.value
            except RowError as error:
                results[row] = error
        return asked

    middle = (len(rows) + 1) // 2
    with ThreadPoolExecutor(max_workers=1) as tokenizing:
        waiting: deque[tuple[dict[int, TextPart], Future[list[Tokenized | RowError]]]] = deque()
        turns: deque[TokenizedByRow] = deque(dict.fromkeys(half) for half in (range(middle), range(middle, len(rows))))
        while turns or waiting:
            if not turns:
                earlier, pending = waiting.popleft()
                turns.append(dict(zip(earlier, pending.result(), strict=True)))
            if asked := ask(turns.popleft()):
                waiting.append((asked, tokenizing.submit(_tokenized, list(asked.values()), tokenizer)))
    return [results[row] for row in range(len(rows))]


def _tokenized(pieces: list[TextPart], tokenizer: Any) -> list[Tokenized | RowError]:
    results: dict[int, Tokenized | RowError] = {}
    alike: dict[tuple[bool, bool], list[int]] = {}
    for number, piece in enumerate(pieces):
        if len(piece.text) > TEXT_CHARACTERS:
            results[number] = TooMuchText(len(piece.text))
        else:
            alike.setdefault((piece.special, piece.escaped), []).append(number)
    for numbers in alike.values():
        results |= zip(numbers, _tokenized_alike([pieces[number] for number in numbers], tokenizer), strict=True)
    return [results[number] for number in range(len(pieces))]


def _tokenized_alike(pieces: list[TextPart], tokenizer: Any) -> list[Tokenized | RowError]:
    """Tokenize pieces with the same flags as one batch."""
    special, escaped = pieces[0].special, pieces[0].escaped
    texts = [piece.text for piece in pieces]
    try:
        with tokenizing_in_parallel():
            if escaped:
                encodings = control.tokenize(texts, tokenizer, special)
                ids = [encoding.ids for encoding in encodings]
            else:
                batch = tokenizer(
                    texts, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False
                )
                # Tokenizers written in Python have no encodings.
                ids, encodings = batch["input_ids"], batch.encodings or [None] * len(texts)
    except MemoryError:  # not the fault of a row
        raise
    except Exception as error:  # tokenizers raises plain Exception if one text fails; retry them one by one
        if len(pieces) == 1:
            return [RowError(f"the tokenizer rejects it: {error}")]
        return [result for piece in pieces for result in _tokenized_alike([piece], tokenizer)]

    results: list[Tokenized | RowError] = []
    for piece, own, encoding in zip(pieces, ids, encodings, strict=True):
        try:
            if escaped:
                control.check(piece.text, own, tokenizer, special)
            results.append(Tokenized(own, _runs(encoding, piece.marks)))
        except RowError as error:
            results.append(error)
    return results


def _runs(encoding: Any, marks: Sequence[CharSpan]) -> list[TokenSpan] | None:
    """The contiguous runs of tokens covered by `marks`, or None if they cannot be mapped.

    A mark is mapped by the tokens of its first and last character. Some tokenizers trim offsets: a mark that starts
    with a space then has no first token, and one that ends with a line break extends to the end of the text. Tokenizers
    written in Python have no offsets.
    """
    runs: list[TokenSpan] = []
    if marks and encoding is None:
        return None
    for first, after in marks:
        if first == after:
            continue
        start, last = encoding.char_to_token(first), encoding.char_to_token(after - 1)
        if start is None:
            return None
        end = len(encoding.ids) if last is None else last + 1
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    return runs
