"""The micro-batches of a data set that take most memory, made of its own rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.data.batching import Sizes, chosen_rows, per_step, worst_batches
from finetune.data.encoded import IGNORE, TEACHER, segments_of
from finetune.training.collator import Inputs, StepCollator


@dataclass(frozen=True)
class LargestStep:
    """A micro-batch that takes most memory, and how many a step of this rank has if all are like it."""

    inputs: Inputs
    micro_batches: int


def largest_steps(
    rows: Any, collate: StepCollator, batch_size: int, most_tokens: int | None = None
) -> Iterator[LargestStep]:
    """The largest steps of `batch_size` of `rows` on all ranks, of those rows with at most `most_tokens` if given."""
    way, step_rows = collate.way, batch_size // collate.rank_groups
    sizes = Sizes.of(rows, way)
    for batch in worst_batches(sizes.no_longer(most_tokens), way, step_rows, "the data's rows"):
        chosen = [{**row, "shared": way.shared(row)} for row in map(rows.__getitem__, chosen_rows(sizes, batch))]
        if way.layout.apart:
            chosen = [longer_segment(row) for row in chosen]
        if batch.packed:  # fills it to the last token, as other rows may
            chosen = [cut(*each) for each in zip(chosen, batch.by_row, batch.shared_by_row, strict=True)]
        chosen = labelled(chosen, batch.trained_tokens)
        inputs = collate.micro_batch([*map(in_both_passes, chosen)] if way.layout.apart else chosen)
        yield LargestStep(inputs, per_step(step_rows, way, batch))


def longer_segment(row: dict[str, Any]) -> dict[str, Any]:
    """The longer of a row's two segments that go through the model apart, as a row: either pass may be the larger."""
    longest = max(segments_of(row), key=lambda segment: len(segment.input_ids))
    ids, labels = longest.input_ids, longest.labels
    return {**row, "input_ids": ids, "labels": labels, "segments": [len(ids)]}


def in_both_passes(row: dict[str, Any]) -> dict[str, Any]:
    """A row of one segment with that as its second one as well."""
    return {**row, **{name: [*row[name], *row[name]] for name in ("input_ids", "labels", "segments")}}


def cut(row: dict[str, Any], computed: Sequence[int], shared: int) -> dict[str, Any]:
    """A row with each segment cut to its number of `computed` tokens, to which the `shared` ones are added."""
    lengths = [computed[0], *(length + shared for length in computed[1:])]
    kept = [segment.cut(length) for segment, length in zip(segments_of(row), lengths, strict=True)]
    ids, labels = ([part for segment in kept for part in getattr(segment, name)] for name in ("input_ids", "labels"))
    named = {"segments": lengths, "shared": shared} if "segments" in row else {}
    each = len(row[TEACHER[0]]) // len(row["input_ids"]) if TEACHER[0] in row else 0
    # Rows with a teacher have one segment.
    teacher = {name: row[name][: each * len(ids)] for name in TEACHER if name in row}
    return {**row, "input_ids": ids, "labels": labels, **named, **teacher}


def labelled(rows: Sequence[dict[str, Any]], trained_tokens: int) -> list[dict[str, Any]]:
    """`rows` with labels on `trained_tokens` tokens, if they have fewer: shorter rows may have more than the longest.

    The first token of a segment gets none, because nothing predicts it, nor do those that it shares with the first.
    """
    missing = trained_tokens - sum(segment.trained for row in rows for segment in segments_of(row))
    more: list[dict[str, Any]] = []
    for row in rows:
        labels: list[int] = []
        for number, segment in enumerate(segments_of(row)):
            first = 1 + (row.get("shared", 0) if number else 0)
            free = [at for at, label in enumerate(segment.labels) if at >= first and label == IGNORE]
            free = free[: max(missing, 0)]
            missing -= len(free)
            for at in free:
                segment.labels[at] = segment.input_ids[at]
            labels += segment.labels
        more.append({**row, "labels": labels})
    return more
