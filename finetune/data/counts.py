"""Statistics of a split: number and lengths of its rows, and the location of each row that was dropped or changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from finetune.data.columnar import Struct
from finetune.data.encoded import Encoded
from finetune.data.examples import Chat, Completion, Content, kind, parts, system

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
class Traits:
    """What was noticed in the content of a split's rows.

    `unused` are the non-empty fields of rows and messages that are ignored; `kinds` counts the rows by kind of example
    (`examples.kind`); `run_together` those whose prompt and completion no white space separates. `systems` are the
    first two different system messages, "" for a row without one. `schema_ordered` are the rows with tool calls whose
    arguments have the order of a column's type.
    """

    unused: list[str] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    run_together: int = 0
    systems: list[str] = field(default_factory=list)
    schema_ordered: int = 0


@dataclass
class Counts:
    """Statistics of one split. `rows` and `longest` (tokens of a segment) describe the rows that are trained.

    `segments` has the tokens of named segments.
    """

    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    affected: list[Affected] = field(default_factory=list)
    segments: dict[str, int] = field(default_factory=dict)
    traits: Traits = field(default_factory=Traits)

    def add(self, content: Content, rows: Sequence[Encoded]) -> None:
        """Count the rows of the prepared split that came of `content`."""
        examples = parts(content)
        messages = [message for each in examples if isinstance(each, Chat) for message in each.messages]
        calls = [call["function"]["arguments"] for each in messages for call in each.get("tool_calls") or ()]
        # The arguments of a struct do not keep the order in which they were written.
        of_a_schema = any(isinstance(arguments, Struct) and len(arguments) > 1 for arguments in calls)
        run_together = any(isinstance(each, Completion) and each.runs_together for each in examples)
        traits, its_kind, its_system = self.traits, kind(content), system(content)
        for row in rows:
            self.rows += 1
            self.tokens += sum(row.lengths)
            self.trained_tokens += row.trained
            self.longest = max(self.longest, *row.lengths)
            for name, tokens in zip(row.names, row.lengths, strict=False):
                self.segments[name] = self.segments.get(name, 0) + tokens
            traits.kinds[its_kind] = traits.kinds.get(its_kind, 0) + 1
            if len(traits.systems) < 2 and its_system not in traits.systems:
                traits.systems.append(its_system)
            traits.schema_ordered += of_a_schema
            traits.run_together += run_together

    @property
    def system(self) -> str | None:
        """The system message that all rows have in common; None if there is none."""
        systems = self.traits.systems
        return systems[0] or None if len(systems) == 1 else None

    @property
    def dropped(self) -> int:
        """Number of dropped rows."""
        return self.dropped_why.total()

    @property
    def dropped_why(self) -> Counter[str]:
        """Dropped rows by reason."""
        return Counter(row.why for row in self.affected if row.what == "dropped")

    @property
    def supervised_share(self) -> float:
        """Share of the tokens that are trained."""
        return self.trained_tokens / self.tokens if self.tokens else 0.0

    def places(self, *, what: str | None = None, why: str | None = None) -> list[str]:
        """Locations of the affected rows to which this was done, or for this reason."""
        return [row.place for row in self.affected if row.what == (what or row.what) and row.why == (why or row.why)]

    def as_dict(self) -> dict[str, Any]:
        """The statistics as JSON values, with the affected rows by what was done and why.

        `answers_truncated` are the truncated rows whose last answer lost its end, including the end-of-turn token;
        `split` those in pieces; `duplicates` have the same tokens and labels as an earlier one, kept or dropped;
        `control_tokens` have some in their text, which were tokenized as ordinary text; and `lost_thoughts` have turns
        that are not trained, because the chat template leaves out their thoughts.
        """
        what, why = Counter(row.what for row in self.affected), Counter(row.why for row in self.affected)
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "longest": self.longest,
            "unused": self.traits.unused,
            "supervised_share": self.supervised_share,
            "truncated": what["truncated"] + what["answer truncated"],
            "answers_truncated": what["answer truncated"],
            "split": what["split"],
            "duplicates": why[DUPLICATE],
            "control_tokens": why[CONTROL_TOKENS],
            "lost_thoughts": why[LOST_THOUGHTS],
            "run_together": self.traits.run_together,
            "dropped": what["dropped"],
            **({"segments": self.segments} if self.segments else {}),
            "dropped_why": dict(self.dropped_why),
        }

    def stored(self) -> dict[str, Any]:
        """All fields as JSON values, those of `traits` among them, for `of_stored`."""
        values = asdict(self)
        return values | values.pop("traits")

    @classmethod
    def of_stored(cls, values: Mapping[str, Any]) -> Counts:
        """What `stored` returned."""
        traits = Traits(**{each.name: values[each.name] for each in fields(Traits)})
        own = {name: value for name, value in values.items() if not hasattr(traits, name)}
        return cls(**{**own, "affected": [Affected(**row) for row in own["affected"]]}, traits=traits)
