"""Statistics of a split: number and lengths of its rows, and the location of each row that was dropped or changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from finetune.data.encoded import MISMATCHED, Encoded

CONTROL_TOKENS = "control tokens as text"
DUPLICATE = "duplicate"
EMPTY = "empty answer"
EQUAL = "equal answers"
LOST_THOUGHTS = "thoughts of earlier turns"
REVERSED = "higher score of the rejected answer"
TIE = "equal scores of both answers"
TOO_LONG = "over data.max_length"
UNTRAINED = "nothing to train"


@dataclass(frozen=True, slots=True)
class Affected:
    """A row that was dropped or changed, is a duplicate, has control tokens in its text, or untrained turns.

    `what` was done (dropped, truncated, answer truncated, split, kept), and `why`; `tokens` is the row's original
    length, None if it was never tokenized.
    """

    place: str
    what: str
    why: str
    tokens: int | None = None


@dataclass
class Counts:
    """Statistics of one split. `rows` and `longest` (tokens of a segment) describe the rows that are trained.

    `unused` are the non-empty fields of rows and messages that are ignored; `kinds` counts the rows by kind of example
    (`examples.kind`); `run_together` those whose prompt and completion no white space separates. `systems` are the
    first two different system messages, "" for a row without one. `schema_ordered` are the rows with tool calls whose
    arguments have the order of a column's type. `segments` has the tokens of named segments.
    """

    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    affected: list[Affected] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    run_together: int = 0
    systems: list[str] = field(default_factory=list)
    schema_ordered: int = 0
    segments: dict[str, int] = field(default_factory=dict)

    def add(self, row: Encoded, kind: str, system: str = "") -> None:
        """Count one row of the prepared split."""
        self.rows += 1
        if len(self.systems) < 2 and system not in self.systems:
            self.systems.append(system)
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.tokens += sum(row.lengths)
        self.trained_tokens += row.trained
        self.longest = max(self.longest, *row.lengths)
        for name, tokens in zip(row.names, row.lengths, strict=False):
            self.segments[name] = self.segments.get(name, 0) + tokens

    def add_mismatched(self, tokens: int) -> None:
        """Count the second segment of a row that was added."""
        self.tokens += tokens
        self.longest = max(self.longest, tokens)
        self.segments[MISMATCHED] = self.segments.get(MISMATCHED, 0) + tokens

    @property
    def system(self) -> str | None:
        """The system message that all rows have in common; None if there is none."""
        return self.systems[0] or None if len(self.systems) == 1 else None

    @property
    def truncated(self) -> int:
        """Rows cut to `data.max_length`, in the prompt or in the answer."""
        return self._count(what="truncated") + self.answers_truncated

    @property
    def answers_truncated(self) -> int:
        """Rows whose last answer lost its end, including the end-of-turn token."""
        return self._count(what="answer truncated")

    @property
    def split(self) -> int:
        """Rows split into pieces."""
        return self._count(what="split")

    @property
    def duplicates(self) -> int:
        """Rows with the same tokens and labels as an earlier one, kept or dropped."""
        return self._count(why=DUPLICATE)

    @property
    def control_tokens(self) -> int:
        """Rows with control tokens in their text, which were tokenized as ordinary text."""
        return self._count(why=CONTROL_TOKENS)

    @property
    def lost_thoughts(self) -> int:
        """Rows with turns that are not trained, because the chat template leaves out their thoughts."""
        return self._count(why=LOST_THOUGHTS)

    @property
    def dropped(self) -> int:
        """Number of dropped rows."""
        return self._count(what="dropped")

    @property
    def dropped_locations(self) -> list[str]:
        """Locations of the dropped rows."""
        return [row.place for row in self.affected if row.what == "dropped"]

    @property
    def dropped_why(self) -> Counter[str]:
        """Dropped rows by reason."""
        return Counter(row.why for row in self.affected if row.what == "dropped")

    @property
    def supervised_share(self) -> float:
        """Share of the tokens that are trained."""
        return self.trained_tokens / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The statistics as JSON values, with the dropped rows by reason."""
        own = ("rows", "tokens", "trained_tokens", "longest", "unused", "supervised_share")
        cut = ("truncated", "answers_truncated", "split")
        derived = (*cut, "duplicates", "control_tokens", "lost_thoughts", "run_together", "dropped")
        names = (*own, *derived, "segments") if self.segments else (*own, *derived)
        return {name: getattr(self, name) for name in names} | {"dropped_why": dict(self.dropped_why)}

    def _count(self, what: str | None = None, why: str | None = None) -> int:
        return sum(row.what == (what or row.what) and row.why == (why or row.why) for row in self.affected)
