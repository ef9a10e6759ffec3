"""Sources: where rows come from. Each row knows its place, for messages that a person can follow to the line."""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from finetune.config import Source, Sources, entries
from finetune.config.fields import unknown
from finetune.data import cache, python_docs
from finetune.data.problems import Problems
from finetune.data.readers import ENDINGS, Records, reader
from finetune.errors import DataError, MachineError


class Row(NamedTuple):
    """One record: where it stands (`train.jsonl:12`), its fields, and the name of its source in the config."""

    place: str
    fields: dict[str, Any]
    source: str = ""

    def share(self, purpose: str = "") -> float:
        """A number in [0, 1) that depends on the content alone, so that equal rows always share a fate.

        Another `purpose` gives a number of its own.
        """
        content = json.dumps(self.fields, sort_keys=True, default=str)
        return int.from_bytes(hashlib.sha256((purpose + content).encode()).digest()[:8], "big") / 2**64


Rows = Iterator[Row]

# Tokenized in some seconds.
_SMALL_BYTES = 16 * 2**20

# What `datasets` puts beside its Arrow files, which holds no rows or holds them again.
_BESIDE_ROWS = ("dataset_info.json", "state.json", "dataset_dict.json", "cache-*.arrow")


def rows(sources: Sources, split: str = "train", problems: Problems | None = None) -> Rows:
    """The rows of `sources`, one after the other, each as often as its weight says.

    `split` chooses among the rows of a source that keeps its own held-out ones (`eval`). Raises DataError at once for
    what does not exist; after the last row, or after 20 problems, for all that is malformed, with file:line:column,
    and for what the caller has added to `problems` meanwhile; MachineError when a hub data set cannot be fetched.
    """
    chosen = entries(sources)
    _refuse_twice(chosen)
    problems = problems or Problems()
    parts = [_weighted(_records(entry.source, split, problems), entry) for entry in chosen]
    return problems.reading(row for part in parts for row in part)


def at_hand(sources: Sources) -> bool:
    """Whether they can be read in seconds and without a network: built-ins, or local files of no great size."""
    outside = [entry.source for entry in entries(sources) if entry.source not in BUILTIN]
    found = [_files(source) for source in outside]
    return all(found) and sum(file.stat().st_size for files in found for file in files) <= _SMALL_BYTES


def contents(sources: Sources) -> list[tuple[str, str]] | None:
    """Each file or data set that is read, with what tells its content: a hash of its bytes, or the hub's commit.

    None where that is not known. Raises what reading would where a data set cannot be fetched.
    """
    found = []
    for entry in entries(sources):
        try:
            told = _contents(entry.source)
        except OSError:
            return None  # reading it will say what is wrong
        if told is None:
            return None
        found += told
    return found


def _contents(source: str) -> list[tuple[str, str]] | None:
    if source in BUILTIN:
        # Made from the documentation of this very Python.
        return [(source, f"{_digest(Path(python_docs.__file__))} {sys.version} {sys.flags.optimize}")]
    if files := _files(source):
        return [(str(file), _digest(file)) for file in files]
    # `datasets` keeps what it has fetched in `<name>/<config>/<version>/<commit>/`.
    kept = [Path(file["filename"]).parent for file in _fetched(source).cache_files]
    return [(source, "/".join(folder.parts[-4:])) for folder in kept] or None


def _digest(file: Path) -> str:
    stat = file.stat()
    return _digest_of(file, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _digest_of(file: Path, *_: int) -> str:
    """Once a start: a source is asked for before and after it is read, and for both splits."""
    return cache.digest(file)


def has_held_out_split(sources: Sources) -> bool:
    """Whether each source keeps its own held-out rows, under the split name `eval`."""
    return all(entry.source in BUILTIN for entry in entries(sources))


def refuse_shared(train: Sources, held_out: Sources) -> None:
    """Raise DataError naming a file that both read: what is trained on measures nothing."""
    trained = {file.resolve() for entry in entries(train) for file in _files(entry.source)}
    for entry in entries(held_out):
        for file in _files(entry.source):
            if file.resolve() in trained:
                raise DataError(
                    f"{file}: is read by `data.train` and by `data.eval` ({entry.source}); keep it out of one, or set "
                    "`data.eval: auto` to hold out a share of the rows by hash"
                )


def _refuse_twice(chosen: list[Source]) -> None:
    read_by: dict[Path, str] = {}
    for entry in chosen:
        for file in [file.resolve() for file in _files(entry.source)] or [Path(entry.source)]:
            if earlier := read_by.get(file):
                raise DataError(
                    f"{file}: is read twice, by `{earlier}` and by `{entry.source}`; name it once, with a `weight` to "
                    "see its rows more often"
                )
            read_by[file] = entry.source


def _weighted(records: Records, entry: Source) -> Rows:
    whole, part = divmod(entry.weight, 1)
    for place, fields in records:
        row = Row(place, fields, entry.source)
        more = part > 0 and row.share("weight") < part
        yield from [row] * (int(whole) + more)


def _records(source: str, split: str, problems: Problems) -> Records:
    """The records of one source: a built-in, a local file, folder or pattern, or a hub data set."""
    if source.startswith("builtin:"):
        if source not in BUILTIN:
            raise DataError(f"data source {unknown(source, BUILTIN)}")
        return _builtin(source, split)
    if files := _files(source):
        return _local(files, problems)
    path = Path(source)
    if path.is_dir():
        raise DataError(f"{source}: the folder has no file ending in {ENDINGS}")
    if path.exists():
        raise DataError(f"{source}: expected a file ending in {ENDINGS}")
    if glob.has_magic(source):
        raise DataError(f"{source}: matches no file ending in {ENDINGS}")
    if reader(path) or path.is_absolute() or source.startswith(".") or source.endswith("/"):
        raise DataError(f"{source}: no such file or folder{_nearest(path)}")
    return _hub(source)


def _files(source: str) -> list[Path]:
    """The local files that a source reads, in the order of their names; none for what is not local."""
    path = Path(source)
    if path.is_dir():
        found = [file for file in path.rglob("*") if not _is_hidden(file.relative_to(path))]
        _refuse_links_out(path, found)
    elif path.exists() or not glob.has_magic(source):
        found = [path]
    else:
        found = [Path(match) for match in glob.glob(source, recursive=True)]
    return sorted(file for file in found if reader(file) and file.is_file())


def _refuse_links_out(folder: Path, found: list[Path]) -> None:
    """A folder is often someone else's; what is taken from it must not be the reader's own files (such as a key)."""
    inside = folder.resolve()
    for file in found:
        target = Path(os.path.realpath(file))  # which, unlike `resolve`, takes links that lead in a circle
        if not target.is_relative_to(inside) and reader(file):
            raise DataError(
                f"{file}: a link that leads out of {folder}, to {target}; name that file itself, or a pattern such as "
                f"{file.parent / ('*' + file.suffix)}, if it is meant"
            )


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts) or any(path.match(name) for name in _BESIDE_ROWS)


def _local(files: list[Path], problems: Problems) -> Records:
    for file in files:
        read = reader(file)
        assert read is not None, "_files gives only what can be read"
        try:
            yield from read(file, problems)
        except DataError as error:
            problems.add(error)  # the other files may have some of their own


def _builtin(source: str, split: str) -> Records:
    for index, fields in enumerate(BUILTIN[source](split), start=1):
        yield f"{source}[{split}]:{index}", fields


def _hub(name: str) -> Records:
    for index, fields in enumerate(_fetched(name), start=1):
        yield f"{name}[train]:{index}", dict(fields)


@functools.lru_cache(maxsize=8)
def _fetched(name: str) -> Any:
    """The data set, fetched whole by its first reader and mapped into memory.

    A streamed one would be fetched again by each: for the training rows, for the held-out ones, and for the questions,
    and could not be read without a network the next time.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return datasets.load_dataset(name, split="train")
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError, HfHubHTTPError, OSError) as error:
        local = f" A local file must end in {ENDINGS}." if "." in Path(name).name else ""
        raise MachineError(
            f"data set `{name}` (train) cannot be fetched from the hub: {_first(error)}{local}"
        ) from None
    except (ValueError, RuntimeError) as error:  # the latter for a data set that is a script, which is not run
        raise DataError(f"data set `{name}`: {_first(error)}") from None


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist either"
    known = sorted(str(found) for found in path.parent.iterdir() if reader(found))
    return f"; {unknown(str(path), known)}" if known else ""


BUILTIN: dict[str, Callable[[Any], list[dict[str, Any]]]] = {"builtin:python_docs": python_docs.conversations}
