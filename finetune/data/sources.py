"""Sources of rows. Each row carries its location, so that messages can name file and line."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from finetune import tables
from finetune.config import DataSection, Sources, entries
from finetune.config.field_types import source_name
from finetune.data import lines, splits
from finetune.data.compressed import COMPRESSIONS
from finetune.data.fields import as_json
from finetune.data.problems import Problems
from finetune.data.readers import TEXT_READERS
from finetune.data.source_kinds import FromPython, HubDataSet, LocalFiles, SourceKind, is_of_hub
from finetune.errors import DataError


class Row(NamedTuple):
    """One record: its location (`train.jsonl:12`), its fields, the name of its source in the config, and the folder of
    its file, if it has one.
    """

    location: str
    fields: dict[str, Any]
    source: str = ""
    folder: Path | None = None

    def share(self, purpose: str = "") -> float:
        """A number in [0, 1) for each `purpose` that depends only on the content: equal rows are treated alike."""
        return int.from_bytes(hashlib.sha256((purpose + as_json(self.fields)).encode()).digest()[:8], "big") / 2**64


Rows = Iterator[Row]

# Tokenized in a few seconds.
_SMALL_BYTES = 16 * 2**20

KINDS: list[SourceKind] = [FromPython(), LocalFiles(), HubDataSet()]
"""The kinds of sources; the first that has a source reads it. `extras/python_docs` puts the built-in rows first."""


def kind_of(source: str) -> SourceKind:
    """The kind of a source."""
    return next(kind for kind in KINDS if kind.has(source))


def rows(sources: Sources, split: str = "train", problems: Problems | None = None, encoding: str | None = None) -> Rows:
    """The rows of `sources` in order, repeated according to their weights.

    `split` selects those of a source that has several splits (see `splits.chosen`); `encoding` is that of text files
    that are not UTF-8. Raises DataError at once for a source that does not exist, and after the last row or 20 problems
    for malformed rows (file:line:column) and whatever is in `problems`; MachineError if a hub data set cannot be
    downloaded.
    """
    chosen = entries(sources)
    read_by: dict[Path, str] = {}
    for entry in chosen:
        files = kind_of(entry.source).files(entry.source, split)
        for file in [file.resolve() for file in files] or [Path(entry.source)]:
            if earlier := read_by.get(file):
                by = "" if str(file) == entry.source else f", by `{earlier}` and by `{entry.source}`"
                raise DataError(
                    f"{source_name(str(file))}: is read twice{by}; name it once, with a `weight` to repeat its rows"
                )
            read_by[file] = entry.source
    problems = problems or Problems()
    key = f"data.{split}"
    keys = [key] if isinstance(sources, str) else [key_of(key, index) for index in range(len(chosen))]
    records = [
        kind_of(entry.source).records(entry.source, split, key, problems, encoding)
        for entry, key in zip(chosen, keys, strict=True)
    ]

    def weighted() -> Rows:
        with problems:
            for entry, own in zip(chosen, records, strict=True):
                whole, part = divmod(entry.weight, 1)
                for location, fields, folder in own:
                    row = Row(location, fields, entry.source, folder)
                    more = part > 0 and row.share("weight") < part
                    yield from [row] * (int(whole) + more)

    return weighted()


def key_of(key: str, index: int) -> str:
    """The Python expression of a source in the list that is the value of `key`."""
    return f"{key}[{index}].source"


def first_row(source: str, encoding: str | None = None) -> Row | None:
    """The first row of a built-in or of local files; None for a data set of the hub, which would be downloaded."""
    if is_of_hub(source):
        return None
    first = next(rows(source, encoding=encoding), None)
    if first is None:
        raise DataError(f"{source} has no rows")
    return first


def foreign_word(source: str, encoding: str) -> str | None:
    """The first word beyond ASCII in local text files that are not UTF-8, read in `encoding`; None if none is found."""
    files = kind_of(source).files(source, "train") if at_hand(source) else []
    texts = [file for file in files if file.suffix.lower() in (*TEXT_READERS, *COMPRESSIONS)]
    return next(filter(None, (lines.foreign_word(file, encoding) for file in texts)), None)


def at_hand(sources: Sources) -> bool:
    """Whether all sources are quick to read offline: built-in, small local files, or rows in memory."""
    sizes = [kind_of(entry.source).size_bytes(entry.source) for entry in entries(sources)]
    known = [size for size in sizes if size is not None]
    return len(known) == len(sizes) and sum(known) <= _SMALL_BYTES


def missing(sources: Sources) -> list[str]:
    """A reason for each local source that cannot be found."""
    reasons = (kind_of(entry.source).missing(entry.source) for entry in entries(sources))
    return [why for why in reasons if why]


def contents(sources: Sources, split: str) -> list[tuple[str, str]] | None:
    """Each file or data set that is read for a split, with an identifier of its content, a hash or the hub's commit;
    None if that is unknown.
    """
    try:
        by_source = [kind_of(entry.source).contents(entry.source, split) for entry in entries(sources)]
    except OSError:
        return None  # reading it will report the error
    return [file for files in by_source for file in files] if all(by_source) else None


def split_uses(section: DataSection, *, fetch: bool = True) -> list[splits.SplitUse]:
    """What is read of each source that has splits, and what is not; without the numbers of rows.

    A data set of the hub, which would be downloaded, is left out unless it may be `fetch`ed.
    """
    trained = [entry.source for entry in entries(section.train)]
    evaluated = [] if section.eval in ("auto", "none") else [entry.source for entry in entries(section.eval)]
    found = {one: kind_of(one).by_split(one, fetch=fetch) for one in dict.fromkeys(trained + evaluated)}
    if section.eval == "auto":
        evaluated = [source for source in trained if splits.holds_out(found[source])]
    read = {
        (source, use): splits.chosen(found[source], use, source)
        for use, several in (("train", trained), ("eval", evaluated))
        for source in several
        if found[source]
    }
    files_read = {file for (source, _), names in read.items() for name in names for file in found[source][name]}
    uses: list[splits.SplitUse] = []
    for source, its in found.items():
        known = [(use, read[source, use], its) for use in ("train", "eval") if (source, use) in read]
        if {*its} <= {splits.NONE} or ({*its} == {"train"} and len(known) == 1):
            continue
        taken = {name for _, names, _ in known for name in names}
        left = {name: [file for file in its[name] if file not in files_read] for name in its}
        known += [("none", [name], left) for name in its if name not in taken and (left[name] or not its[name])]
        for use, names, of in known:
            files = [file for name in names for file in of[name]]
            uses.append(splits.SplitUse(source, use, tuple(names), len(files), files[0].name if files else ""))
    return uses


def refuse_shared(train: Sources, held_out: Sources) -> None:
    """Raise DataError naming a file that both read: rows seen in training measure nothing."""
    trained = {
        file.resolve() for entry in entries(train) for file in kind_of(entry.source).files(entry.source, "train")
    }
    for entry in entries(held_out):
        for file in kind_of(entry.source).files(entry.source, "eval"):
            if file.resolve() in trained:
                raise DataError(
                    f"{file}: is read by both `data.train` and `data.eval` ({entry.source}); remove it from "
                    "`data.train`, or name other rows in `data.eval`"
                )


tables.complete(__name__)
