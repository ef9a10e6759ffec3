"""Problems with rows and files, collected so that one pass reports them all."""

from __future__ import annotations

import re
from typing import Self

from finetune.errors import DataError

# One page. More problems than this usually have one cause, and the rest of the file need not be read to see it.
LIMIT = 20

# Maximum length of one problem: a message may quote a value as long as its row.
_CHARACTERS = 2000


class BadRows(DataError):
    """All `problems` found, one per line; rows of a file that fail alike share one."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems[:LIMIT]
        stopped = [f"Reading stopped after {LIMIT} problems; there may be more."] if len(problems) >= LIMIT else []
        super().__init__("\n".join([*_together(self.problems), *stopped]))


class Problems:
    """Context manager that collects problems and raises them as one BadRows at its end.

    A DataError raised inside is added to them. The `LIMIT`-th problem ends the block at once. A problem found again,
    because a row is read twice, is reported once.
    """

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, problem: str | DataError, at: int | None = None) -> None:
        """Insert a problem at index `at`, by default at the end; raises BadRows once the first `LIMIT` are known."""
        added = problem.problems if isinstance(problem, BadRows) else [_shortened(str(problem))]
        new = [one for one in added if one not in self.found]
        at = len(self.found) if at is None else at
        self.found[at:at] = new
        self.stop_at(at + len(new))

    def stop_at(self, known: int) -> None:
        """Raise BadRows if `known`, the number of problems whose position is final, has reached `LIMIT`."""
        if known >= LIMIT:
            raise BadRows(self.found) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DataError):
            self.add(error)
        if self.found and (error is None or isinstance(error, DataError)):
            raise BadRows(self.found) from None


_LOCATION = re.compile(r"(?P<before>.+?(?::|\[))(?P<number>\d+)(?P<after>\]?: .*)", re.DOTALL)


def _together(problems: list[str]) -> list[str]:
    """The problems in order, with one for all rows of a source that have the same: `rows.jsonl:1 to 5, 7: ...`."""
    rows: dict[tuple[str, str], list[int]] = {}
    for problem in problems:
        location = _LOCATION.fullmatch(problem)
        key = (location["before"], location["after"]) if location else (problem, "")
        rows.setdefault(key, []).append(int(location["number"]) if location else 0)
    together = []
    for (before, after), numbers in rows.items():
        ranges: list[list[int]] = []
        for number in sorted(numbers):
            if ranges and number == ranges[-1][-1] + 1:
                ranges[-1].append(number)
            else:
                ranges.append([number])
        named = ", ".join(f"{each[0]} to {each[-1]}" if len(each) > 1 else str(each[0]) for each in ranges)
        together.append(f"{before}{named}{after}" if after else before)
    return together


def _shortened(problem: str) -> str:
    if len(problem) <= _CHARACTERS:
        return problem
    half = _CHARACTERS // 2
    return f"{problem[:half]} [{len(problem) - 2 * half:,} characters] {problem[-half:]}"
