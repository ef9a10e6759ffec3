"""A row in tokens: one or more segments, each a token sequence with its own labels, and numbers for the objective.

A supervised row is one segment. A pair is two, its chosen and its rejected answer, each with the prompt before it. A
second segment `mismatched` is only measured: it is scored in a separate pass before the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

IGNORE = -100
"""The label of a token that is not trained.

Labels are not shifted: a trained token's label is its own id, here and in batches. The head shifts them
(`objectives.fused_head`): the state of each token is scored with the label of the next one, so scores are (sequences or
1 if packed, tokens - 1). Nothing predicts the first token of a sequence, so it is not counted. Of a padded sequence
the shift leaves its label out; of packed ones, which follow one another, the collator sets it to IGNORE. A sequence
that is `scored` as a whole keeps it.
"""

TEACHER = ("teacher_ids", "teacher_log_probs")
"""The columns of a teacher's values, k for each token, one token after the other; in a batch (sequences, tokens, k)."""


class Teacher(NamedTuple):
    """A teacher's likeliest tokens at each token and their log-probabilities, int32 and float32 (tokens, k).

    -inf stands for no token.
    """

    ids: np.ndarray
    log_probs: np.ndarray


@dataclass(frozen=True)
class RowImage:
    """An image of a row: the path of its file, or the bytes of one.

    Once measured, it has the file's digest, its size in pixels, and the `text` that takes the place of `mark`, which
    the chat template writes for an image; `tokens` of that stand for the image's features.
    """

    path: str = ""
    data: bytes = field(default=b"", repr=False)
    digest: str = ""
    height: int = 0
    width: int = 0
    mark: str = ""
    text: str = field(default="", repr=False)
    tokens: int = 0


MEDIA = "images"
"""The column of what a row shows: images, each with its path or data, digest, height and width."""

MEDIA_SIZES = "seen"
"""The column of the height, width and tokens of each image of a row, one image after the other."""

MISMATCHED = "mismatched"
"""The name of a second segment that is scored in a separate pass before the step."""

ANSWER, DESIRABLE = "answer", "desirable"
"""The segment and the value of a row that is one answer: 1 if it is desirable, else 0."""

# Columns of a prepared split that are about a row.
_ABOUT = {"length", "trained", "place", "source"}


def columns(rows: Any) -> list[str]:
    """The columns of a prepared split that batches are made of.

    `input_ids` and `labels`, all segments of a row one after the other; the lengths of its `segments`, if they are
    named, and how many tokens of them are `shared`; and its values.
    """
    return [name for name in rows.column_names if name not in _ABOUT]


@dataclass(frozen=True)
class RowLayout:
    """The names of the segments (none for a single sequence) and of the values of each row of a data set.

    `optional` are values that an objective reads where all rows have them. `teacher` is k, how many tokens of a teacher
    each token has; 0 without one. `scored`: an objective reads each sequence's last token instead of predicting tokens.
    """

    segments: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    optional: tuple[str, ...] = field(default=(), compare=False)
    teacher: int = 0
    scored: bool = field(default=False, compare=False)

    @property
    def sequences(self) -> int:
        """Number of token sequences in a row."""
        return max(1, len(self.segments))

    @property
    def apart(self) -> bool:
        """Whether a row's two segments go through the model one apart from the other."""
        return MISMATCHED in self.segments

    @property
    def together(self) -> int:
        """Number of token sequences of a row that go through the model in one pass."""
        return 1 if self.apart else self.sequences

    def __str__(self) -> str:
        named = " and ".join(f"`{name}`" for name in (*self.segments, *self.values))
        rows = f"rows of {named}" if named else "rows of one sequence"
        return f"{rows} with a teacher's log-probabilities" if self.teacher else rows


ONE_SEQUENCE = RowLayout()


class Head(NamedTuple):
    """What each part of a row that is cut keeps: the first `bos` tokens; the first `system` ones, to the end of the
    system message, if possible; and the definitions of `tools`, from one position to another.
    """

    bos: int = 0
    system: int = 0
    tools: tuple[int, int] = (0, 0)


NO_HEAD = Head()


@dataclass(frozen=True)
class Segment:
    """Token ids and labels of one sequence, of the same length, and the `media` (images) that some of them stand for.

    If it is cut, its parts keep the `head`. In an `escaped` segment, control tokens in its text were tokenized as text.
    `lost_thoughts`: turns are not trained because the chat template drops their thoughts.
    `scored`: a head reads the last labelled token, instead of tokens being predicted.
    """

    input_ids: list[int]
    labels: list[int]
    head: Head = NO_HEAD
    escaped: bool = False
    lost_thoughts: bool = False
    teacher: Teacher | None = field(default=None, compare=False)
    media: tuple[RowImage, ...] = ()
    scored: bool = False

    @property
    def trained(self) -> int:
        """Number of trained tokens; the first is one only if it is scored (see IGNORE)."""
        first = bool(self.labels) and self.labels[0] != IGNORE and not self.scored
        return len(self.labels) - self.labels.count(IGNORE) - first

    def cut(self, length: int, start: int = 0) -> Segment:
        """At most `length` tokens starting at `start`."""
        return self.some(range(len(self.labels))[start : start + length])

    def some(self, positions: Sequence[int]) -> Segment:
        """The tokens at these positions."""
        ids, labels = ([values[at] for at in positions] for values in (self.input_ids, self.labels))
        teacher = self.teacher and Teacher(*(each[[*positions]] for each in self.teacher))
        return Segment(ids, labels, teacher=teacher, scored=self.scored)


@dataclass(frozen=True)
class Encoded:
    """A row's segments in order, their names unless it is a single sequence, and its values by name."""

    segments: tuple[Segment, ...]
    names: tuple[str, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def layout(self) -> RowLayout:
        """The names of segments and values."""
        teacher = self.segments[0].teacher
        return RowLayout(self.names, tuple(self.values), teacher=0 if teacher is None else teacher.ids.shape[1])

    @property
    def input_ids(self) -> list[int]:
        """Token ids of all segments, one after the other."""
        return list(chain.from_iterable(segment.input_ids for segment in self.segments))

    @property
    def labels(self) -> list[int]:
        """Labels of all segments, one after the other."""
        return list(chain.from_iterable(segment.labels for segment in self.segments))

    @property
    def media(self) -> tuple[RowImage, ...]:
        """What all segments show, one after the other."""
        return tuple(chain.from_iterable(segment.media for segment in self.segments))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each segment."""
        return tuple(len(segment.input_ids) for segment in self.segments)

    @property
    def shared(self) -> int:
        """The number of tokens at the start of all segments that need to be computed only once.

        They are the same, untrained and followed by another such token: the last one predicts the answer of each
        segment, so that each has its own.
        """
        import numpy as np

        if len(self.segments) == 1:
            return 0
        shortest = min(self.lengths)
        ids, labels = (
            np.array([getattr(segment, name)[:shortest] for segment in self.segments])
            for name in ("input_ids", "labels")
        )
        alike = ((ids == ids[0]) & (labels == IGNORE)).all(0)
        return max(0, int(alike.cumprod().sum()) - 1)

    @property
    def trained(self) -> int:
        """Number of trained tokens in all segments; of two that go apart, in the one that has more."""
        each = [segment.trained for segment in self.segments]
        return max(each) if self.layout.apart else sum(each)

    @property
    def escaped(self) -> bool:
        """Whether control tokens in the text of any segment were tokenized as ordinary text."""
        return any(segment.escaped for segment in self.segments)

    @property
    def lost_thoughts(self) -> bool:
        """Whether turns of any segment are not trained because the chat template drops their thoughts."""
        return any(segment.lost_thoughts for segment in self.segments)


def lengths_of(row: Mapping[str, Any]) -> Sequence[int]:
    """Tokens of each segment of a row of a prepared split."""
    lengths: Sequence[int] = row.get("segments") or [len(row["input_ids"])]
    return lengths


def segments_of(row: Mapping[str, Any]) -> list[Segment]:
    """The segments of a row of a prepared split."""
    ids, labels = list(row["input_ids"]), list(row["labels"])
    starts = accumulate([0, *lengths_of(row)])
    return [Segment(ids[start:end], labels[start:end]) for start, end in pairwise(starts)]
