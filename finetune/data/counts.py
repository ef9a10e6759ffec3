"""Statistics of a split's rows: their number and lengths, and each row that was dropped or changed, by its position."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

CONTROL_TOKENS = "control tokens as text"
DUPLICATE = "duplicate"
EMPTY = "empty answer"
TOO_LONG = "over data.max_length"
UNTRAINED = "nothing to train"


@dataclass(frozen=True, slots=True)
class Affected:
    """A row that is not what its source has, is there twice, or has text that spells control tokens.

    `what` was done (dropped, truncated, answer truncated, split, kept), and `why`; `tokens` is the row's length before,
    None where it was never tokenized.
    """

    place: str
    what: str
    why: str
    tokens: int | None = None


@dataclass
class Counts:
    """What became of the rows of one split. `rows` and `longest` (tokens) are of what is trained on.

    `unused` are the fields of rows and messages that hold something and go nowhere; `kinds` counts the rows by the kind
    of example that they are (`examples.kind`).
    """

    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    affected: list[Affected] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)

    def add(self, tokens: int, trained_tokens: int, kind: str) -> None:
        """Count one row that is trained on."""
        self.rows += 1
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.tokens += tokens
        self.trained_tokens += trained_tokens
        self.longest = max(self.longest, tokens)

    @property
    def truncated(self) -> int:
        """Rows cut to `data.max_length`, in the prompt or in the answer."""
        return self._count(what="truncated") + self.answers_truncated

    @property
    def answers_truncated(self) -> int:
        """Rows whose last answer lost its end, and its end-of-turn with it."""
        return self._count(what="answer truncated")

    @property
    def split(self) -> int:
        """Rows taken apart into pieces."""
        return self._count(what="split")

    @property
    def duplicates(self) -> int:
        """Rows with the tokens and labels of an earlier one, kept or dropped."""
        return self._count(why=DUPLICATE)

    @property
    def control_tokens(self) -> int:
        """Rows whose text spells control tokens, which are ordinary text there."""
        return self._count(why=CONTROL_TOKENS)

    @property
    def dropped(self) -> int:
        """Rows left out."""
        return self._count(what="dropped")

    @property
    def dropped_places(self) -> list[str]:
        """Where the rows stand that were left out."""
        return [row.place for row in self.affected if row.what == "dropped"]

    @property
    def dropped_why(self) -> Counter[str]:
        """Rows left out by reason."""
        return Counter(row.why for row in self.affected if row.what == "dropped")

    @property
    def supervised_share(self) -> float:
        """Part of the tokens that is trained."""
        return self.trained_tokens / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The numbers as JSON values, with the rows left out by reason."""
        own = ("rows", "tokens", "trained_tokens", "longest", "unused", "supervised_share")
        derived = ("truncated", "answers_truncated", "split", "duplicates", "control_tokens", "dropped")
        return {name: getattr(self, name) for name in (*own, *derived)} | {"dropped_why": dict(self.dropped_why)}

    def _count(self, what: str | None = None, why: str | None = None) -> int:
        return sum(row.what == (what or row.what) and row.why == (why or row.why) for row in self.affected)
