"""What happens to a row over `data.max_length`. A new policy is one entry in TOO_LONG."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from finetune.data.chat import IGNORE, Encoded
from finetune.data.examples import RowError


@dataclass(frozen=True)
class TooLong:
    """A policy: from a row that is too long and the limit in tokens to what was done, and the rows that are left.

    `keeps_head`: it looks at the row's `head`. `blind`: it looks at nothing, so it may be a row of too much text to
    tokenize.
    """

    help: str
    apply: Callable[[Encoded, int], tuple[str, list[Encoded]]]
    keeps_head: bool = False
    blind: bool = False


def _error(row: Encoded, limit: int) -> tuple[str, list[Encoded]]:
    raise RowError(
        f"the row has {len(row.input_ids):,} tokens, over `data.max_length` {limit:,}; raise it, or set "
        f"`data.too_long` to one of {', '.join(name for name in TOO_LONG if name != 'error')}"
    )


def _drop(row: Encoded, limit: int) -> tuple[str, list[Encoded]]:
    return "dropped", []


def _truncate(row: Encoded, limit: int) -> tuple[str, list[Encoded]]:
    """The row's head stays, and the last answer; between them is cut.

    The head is a system message that opens the conversation, where it fits in half of the room before the last answer;
    else the first token, which begins the text in most templates. An answer over the limit leaves a quarter of the row
    to its prompt. An earlier answer without its beginning is kept, but not trained.
    """
    start, end = _last_answer(row)
    room = limit - (end - start)
    prompt = min(start, room if room > 0 else max(1, limit // 4))
    head = row.head if 2 * row.head <= prompt else 1
    head = min(head, prompt - 1) if prompt else 0
    begin = start - (prompt - head)
    labels = list(row.labels)
    if begin > head and labels[begin - 1] != IGNORE:
        for at in range(begin, start):
            if labels[at] == IGNORE:
                break
            labels[at] = IGNORE
    places = [*range(head), *range(begin, len(labels))][:limit]
    kept = Encoded([row.input_ids[at] for at in places], [labels[at] for at in places])
    return ("truncated" if places[-1] >= end - 1 else "answer truncated"), [kept]


def _last_answer(row: Encoded) -> tuple[int, int]:
    """Where the last unbroken run of trained tokens starts and ends."""
    end = max((at for at, label in enumerate(row.labels) if label != IGNORE), default=-1) + 1
    start = end
    while start > 0 and row.labels[start - 1] != IGNORE:
        start -= 1
    return start, end


def _split(row: Encoded, limit: int) -> tuple[str, list[Encoded]]:
    """Each piece begins with the last token of the one before, untrained, so that no token goes unpredicted."""
    pieces = [row.cut(limit)]
    for start in range(limit - 1, len(row.labels) - 1, max(1, limit - 1)):
        piece = row.cut(limit, start)
        pieces.append(Encoded(piece.input_ids, [IGNORE, *piece.labels[1:]]))
    return "split", pieces


TOO_LONG: dict[str, TooLong] = {
    "error": TooLong("the run stops and names the row", _error),
    "drop": TooLong("the row is left out", _drop, blind=True),
    "truncate": TooLong(
        "the prompt loses its beginning but a system message of moderate length, so that the last answer stays; an "
        "answer over the limit loses its end",
        _truncate,
        keeps_head=True,
    ),
    "split": TooLong("it becomes pieces of `max_length`; those with nothing to train are left out", _split),
}
