"""Policies for rows longer than `data.max_length`. A new policy is one entry in TOO_LONG."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from finetune.data.encoded import IGNORE, Encoded, Segment
from finetune.data.examples import RowError


@dataclass(frozen=True)
class LengthPolicy:
    """A policy: `apply` takes a sequence that is too long and the limit in tokens; returns what was done, and what is
    left of it.

    `keeps_head`: it uses the sequence's `head`. `blind`: it ignores the content, so it also applies to text too long
    to tokenize. `cuts`: it may leave part of a sequence.
    """

    help: str
    apply: Callable[[Segment, int], tuple[str, list[Segment]]]
    keeps_head: bool = False
    blind: bool = False
    cuts: bool = False


def shortened(row: Encoded, limit: int, policy: str) -> tuple[str, list[Encoded]]:
    """Apply a policy to a row with a segment over `limit` tokens; returns what was done, and the resulting rows.

    Raises RowError if the policy is `error`, and if it would cut one of several segments: they would end differently.
    An image is not cut either.
    """
    if len(row.segments) > 1 and not TOO_LONG[policy].blind:
        raise RowError(
            f"`{row.names[row.lengths.index(max(row.lengths))]}` has {max(row.lengths):,} tokens, over "
            f"`data.max_length` {limit:,}, and one of several segments is not cut alone: set `data.too_long: drop`"
        )
    what, segments = TOO_LONG[policy].apply(max(row.segments, key=lambda each: len(each.input_ids)), limit)
    return what, [replace(row, segments=(segment,)) for segment in segments]


def _error(row: Segment, limit: int) -> tuple[str, list[Segment]]:
    cures = "show fewer images or smaller ones (`data.image_pixels`), or set `data.too_long: drop`"
    if not row.media:
        cures = f"or set `data.too_long` to one of {', '.join(name for name in TOO_LONG if name != 'error')}"
    raise RowError(f"the row has {len(row.input_ids):,} tokens, over `data.max_length` {limit:,}; raise it, {cures}")


def _truncate(row: Segment, limit: int) -> tuple[str, list[Segment]]:
    """Keep the row's head and its last answer, and cut between them.

    The head is BOS and the opening system message, if that fits in half of the room before the last answer; and the
    definitions of tools, without which no call is learnt: a row that has no room for them is dropped. An answer over
    the limit leaves a quarter of the row to its prompt. An earlier answer that lost its beginning is kept as context,
    but not trained.
    """
    end = max((at for at, label in enumerate(row.labels) if label != IGNORE), default=-1) + 1
    start = end  # of the last answer, the last contiguous run of trained tokens
    while start > 0 and row.labels[start - 1] != IGNORE:
        start -= 1
    room = limit - (end - start)
    prompt = min(start, room if room > 0 else max(1, limit // 4))
    tools = [at for at in range(*row.head.tools) if at < start]
    head = sorted({*range(min(start, max(row.head.bos, row.head.system))), *tools})
    if 2 * len(head) > prompt:
        head = sorted({*range(min(start, row.head.bos)), *tools})
    if len(head) >= prompt:
        if tools:
            return "dropped", []
        head = []

    begin = start - prompt
    while bisect_left(head, begin) > prompt - (start - begin):
        begin += 1
    labels = list(row.labels)
    if begin - 1 not in head and begin > 0 and labels[begin - 1] != IGNORE:
        for at in range(begin, start):
            if labels[at] == IGNORE:
                break
            labels[at] = IGNORE
    positions = [*head[: bisect_left(head, begin)], *range(begin, len(labels))][:limit]
    kept = replace(row, labels=labels).some(positions)
    return ("truncated" if positions[-1] >= end - 1 else "answer truncated"), [kept]


def _in_pieces(row: Segment, limit: int) -> tuple[str, list[Segment]]:
    """Each piece begins with the last token of the one before, untrained, so that every token is predicted once.

    Before it comes the head of a conversation, untrained: the system message, if it fits in half of the piece, and the
    definitions of tools. A row whose tools leave less than a quarter of a piece is dropped.
    """
    bos, system, _ = row.head
    tools = range(*row.head.tools)
    head = sorted({*range(max(bos, system)), *tools}) if system > bos or tools else []
    if 2 * len(head) > limit:
        head = sorted({*range(bos), *tools}) if tools else []
    if head and len(head) > min(3 * limit // 4, limit - 2):
        return "dropped", []
    pieces, end = [row.cut(limit)], limit
    while end < len(row.labels):
        begin = end - (limit > 1)
        kept = head[: bisect_left(head, begin)]
        end = min(len(row.labels), begin + limit - len(kept))
        piece = row.some([*kept, *range(begin, end)])
        again = len(kept) + 1
        pieces.append(replace(piece, labels=[*[IGNORE] * again, *piece.labels[again:]]))
    return "split", pieces


TOO_LONG: dict[str, LengthPolicy] = {
    "error": LengthPolicy("the run stops and names the row", _error),
    "drop": LengthPolicy("the row is dropped", lambda row, limit: ("dropped", []), blind=True),
    "truncate": LengthPolicy(
        "the start of the prompt is cut, except a system message of moderate length and the definitions of tools, to "
        "keep the last answer; a row without room for its tools is dropped; an answer over the limit loses its end",
        _truncate,
        keeps_head=True,
        cuts=True,
    ),
    "split": LengthPolicy(
        "it is split into pieces of `max_length`, each with a system message of moderate length and the definitions of "
        "tools; a piece with nothing to train is dropped, and a row without room for its tools",
        _in_pieces,
        keeps_head=True,
        cuts=True,
    ),
}
