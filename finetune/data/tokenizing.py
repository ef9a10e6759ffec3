"""Batched tokenization for code that encodes one row at a time.

Tokenization takes most of the time of data preparation, and is fastest with hundreds of texts per call. So the encoding
of a row is a generator that yields a text when it needs its tokens, and `answered` batches the requests of many rows.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from finetune.data import control
from finetune.data.examples import RowError
from finetune.runtime.libraries import tokenizing_in_parallel

Span = tuple[int, int]

# A tokenizer holds some 150 bytes for each of them; this is 2 million tokens of English, in 1.4 GiB.
TEXT_CHARACTERS = 2**23


class TooMuchText(RowError):
    """More text than is tokenized at once, and more tokens than a row can be of use with."""

    def __init__(self, characters: int) -> None:
        super().__init__(
            f"the row has {characters:,} characters, and no more than {TEXT_CHARACTERS:,} are tokenized as one row; "
            "split it into several, or set `data.too_long: drop`"
        )


class Piece(NamedTuple):
    """A text to tokenize; with `special` between the tokens that the tokenizer puts around any text of its own.

    `marks` are spans of characters to be mapped to spans of tokens. An `escaped` text has stand-ins (control.py).
    """

    text: str
    special: bool = False
    marks: Sequence[Span] = ()
    escaped: bool = False


class Tokenized(NamedTuple):
    """The ids of a piece, and the runs of tokens that its marks cover; None where they cannot be mapped."""

    ids: list[int]
    runs: list[Span] | None


Found = TypeVar("Found")
Asking = Generator[Piece, Tokenized, Found]
"""Work that yields a piece wherever it needs one tokenized. It raises RowError where a row is at fault."""

Answers = dict[int, Tokenized | RowError | None]
"""What each row waited for, by its number; None before its first piece."""


def answered(rows: Sequence[Asking[Found]], tokenizer: Any) -> list[Found | RowError]:
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
        waiting: deque[tuple[dict[int, Piece], Future[list[Tokenized | RowError]]]] = deque()
        turns: deque[Answers] = deque(dict.fromkeys(half) for half in (range(middle), range(middle, len(rows))))
        while turns or waiting:
            if not turns:
                earlier, pending = waiting.popleft()
                turns.append(dict(zip(earlier, pending.result(), strict=True)))
            if asked := ask(turns.popleft()):
                waiting.append((asked, tokenizing.submit(_tokenized, list(asked.values()), tokenizer)))
    return [found[row] for row in range(len(rows))]


def _step(row: Asking[Found], answer: Tokenized | RowError | None) -> Piece:
    if answer is None:
        return next(row)
    return row.throw(answer) if isinstance(answer, RowError) else row.send(answer)


def _tokenized(pieces: list[Piece], tokenizer: Any) -> list[Tokenized | RowError]:
    """The tokens of each piece, or why the tokenizer has none for it."""
    found: dict[int, Tokenized | RowError] = {
        place: TooMuchText(len(piece.text)) for place, piece in enumerate(pieces) if len(piece.text) > TEXT_CHARACTERS
    }
    for special, escaped in itertools.product((False, True), repeat=2):
        places = [
            place
            for place, piece in enumerate(pieces)
            if (piece.special, piece.escaped) == (special, escaped) and place not in found
        ]
        if not places:
            continue
        try:
            with tokenizing_in_parallel():
                encodings = _encodings([pieces[place].text for place in places], tokenizer, special, escaped)
        except MemoryError:  # the machine's, and no row's
            raise
        except Exception as error:  # tokenizers raises bare ones, at one text; the others are none the worse for it
            for place in places:
                if len(places) == 1:
                    found[place] = RowError(f"the tokenizer refuses it: {error}")
                else:
                    [found[place]] = _tokenized([pieces[place]], tokenizer)
        else:
            for place, (ids, encoding) in zip(places, encodings, strict=True):
                found[place] = Tokenized(ids, _runs(encoding, pieces[place].marks))
                if escaped:
                    try:
                        control.check(pieces[place].text, ids, tokenizer, special)
                    except RowError as error:
                        found[place] = error
    return [found[place] for place in range(len(pieces))]


def _encodings(texts: list[str], tokenizer: Any, special: bool, escaped: bool) -> list[tuple[list[int], Any]]:
    """The ids of each text with its `tokenizers.Encoding`, which tokenizers written in Python do not have."""
    if escaped:
        return [(encoding.ids, encoding) for encoding in control.tokenize(texts, tokenizer, special)]
    batch = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False)
    return list(zip(batch["input_ids"], batch.encodings or [None] * len(texts), strict=True))


def _runs(encoding: Any, marks: Sequence[Span]) -> list[Span] | None:
    """The unbroken runs of tokens under the `marks` of a text.

    A mark is mapped by the offsets of its first and last character. Some tokenizers trim them: a mark that starts with
    a space then begins at no token, and one that ends with a line break goes on to the end. Tokenizers written in
    Python have none.
    """
    runs: list[Span] = []
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
