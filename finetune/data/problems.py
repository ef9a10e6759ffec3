"""Problems with rows and files, collected so that one pass reports them all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Self, TypeVar

from finetune.errors import DataError

# A page of problems. More of them usually have one cause, not worth reading the rest of the file for.
LIMIT = 20

# Characters of one problem. What a message quotes of a row, such as a name, may be as long as the row.
_CHARACTERS = 2000

Item = TypeVar("Item")


class BadRows(DataError):
    """All `problems` found, one a line."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems[:LIMIT]
        stopped = [f"Reading stopped after {LIMIT} problems; there may be more."] if len(problems) >= LIMIT else []
        super().__init__("\n".join([*self.problems, *stopped]))


class Problems:
    """A block that collects problems (`with Problems() as problems:`) and ends in one DataError of them all.

    A DataError raised inside is one of them. The `LIMIT`-th ends the block at once. A problem met again, because a
    row is read twice, is reported once.
    """

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, problem: str | DataError, at: int | None = None) -> None:
        """Note a problem, at this place among those found or as the last of them.

        Raises BadRows once the first `LIMIT` are known: an earlier place may still be taken.
        """
        added = problem.problems if isinstance(problem, BadRows) else [_shortened(str(problem))]
        new = [one for one in added if one not in self.found]
        at = len(self.found) if at is None else at
        self.found[at:at] = new
        self.stop_at(at + len(new))

    def stop_at(self, known: int) -> None:
        """Raise BadRows with what was found, where `known` first problems are `LIMIT` or more."""
        if known >= LIMIT:
            raise BadRows(self.found) from None

    def reading(self, items: Iterable[Item]) -> Iterator[Item]:
        """`items`, and after the last of them, or a DataError among them, the end of the block."""
        with self:
            yield from items

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DataError):
            self.add(error)
        if self.found and (error is None or isinstance(error, DataError)):
            raise BadRows(self.found) from None


def _shortened(problem: str) -> str:
    if len(problem) <= _CHARACTERS:
        return problem
    half = _CHARACTERS // 2
    return f"{problem[:half]} [{len(problem) - 2 * half:,} characters] {problem[-half:]}"
