"""Mismatched answers: each prompt with an answer to another one, a second segment of rows of single answers.

The mean over them of how much likelier an answer is than under the reference estimates how far a model is from it
(arXiv 2402.01306, section 4). They are fixed when rows are prepared, so that the reference scores them once, and do not
depend on which rows share a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from finetune.data.counts import Counts
from finetune.data.encoded import ANSWER, DESIRABLE, IGNORE, MISMATCHED, Encoded, Segment
from finetune.data.rows import mapped, writer
from finetune.data.sources import Row
from finetune.errors import DataError

# Rows among which answers are exchanged: of similar length, as they are sorted by it.
_WINDOW_ROWS = 256
_BATCH_ROWS = 256


class OnePrompt(DataError):
    """All rows answer the same prompt, so that there is no answer to another one."""


def add(file: Path, into: Path, counts: Counts, max_length: int, named: str) -> None:
    """Write the rows of `file`, each of one answer, `into` another file with their mismatched answers, and count them.

    One over `max_length` is cut at its end: it is only measured, so that no stop is learnt from it, and each row keeps
    one. Raises OnePrompt, naming the data.
    """
    rows = mapped(file)
    starts: list[int] = []  # of the answers, in tokens
    lengths: list[int] = []
    prompts: list[int] = []  # their numbers in order of appearance
    known: dict[int, int] = {}  # these numbers, by the hash of a prompt's tokens
    for row in rows:
        ids, labels = row["input_ids"], row["labels"]
        start = next(at for at, label in enumerate(labels) if label != IGNORE)
        starts.append(start)
        lengths.append(len(ids) - start)
        prompts.append(known.setdefault(hash(tuple(ids[:start])), len(known)))
    if len(known) < 2:
        raise OnePrompt(
            f"{named}: all answers are to one prompt, and `training.objective: kto` measures how likely answers to "
            "others are; add rows with other prompts"
        )
    partners = exchanged(prompts, lengths)
    with writer(into) as write:
        for at in range(0, len(rows), _BATCH_ROWS):
            others = partners[at : at + _BATCH_ROWS]
            kept = []
            for number, partner in enumerate(others, start=at):
                own, other, start, after = rows[number], rows[partner], starts[number], starts[partner]
                mismatched = Segment(
                    [*own["input_ids"][:start], *other["input_ids"][after:]],
                    [*own["labels"][:start], *other["labels"][after:]],
                ).cut(max_length)
                answer = Segment(own["input_ids"], own["labels"])
                encoded = Encoded((answer, mismatched), (ANSWER, MISMATCHED), {DESIRABLE: own[DESIRABLE]})
                kept.append((Row(own["place"], {}, own["source"]), encoded))
                added = encoded.lengths[1]
                counts.tokens += added
                counts.longest = max(counts.longest, added)
                counts.segments[MISMATCHED] = counts.segments.get(MISMATCHED, 0) + added
            write(kept)


def exchanged(prompts: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """For each row, the row whose answer it is shown: to another prompt, of similar length, and each about once.

    `prompts` are equal numbers for equal prompts, `lengths` the tokens of the answers. Sorted by length, rows are
    divided into windows, and each window, sorted by prompt, is rotated by as many rows as the most frequent prompt has:
    then no prompt meets its own answers, unless it has more than half of the window. Such a row takes the next longer
    answer to another prompt. There must be two prompts.
    """
    order = sorted(range(len(prompts)), key=lengths.__getitem__)
    partners = [-1] * len(order)
    ends = [*range(_WINDOW_ROWS, len(order) - _WINDOW_ROWS + 1, _WINDOW_ROWS), len(order)]
    for start, end in zip([0, *ends], ends, strict=False):
        window = sorted(order[start:end], key=prompts.__getitem__)
        most = max(Counter(prompts[row] for row in window).values())
        for row, other in zip(window, window[most:] + window[:most], strict=True):
            partners[row] = other
    following: dict[int, int] = {}  # the next row, wrapping around, that has another prompt
    for at in range(2 * len(order) - 1, -1, -1):
        row, after = order[at % len(order)], order[(at + 1) % len(order)]
        if prompts[row] != prompts[after]:
            following[row] = after
        elif after in following:
            following[row] = following[after]
    return [other if prompts[other] != prompts[row] else following[row] for row, other in enumerate(partners)]
