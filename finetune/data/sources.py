"""Sources of rows. Each row carries its location, so that messages can name file and line."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import glob
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from finetune.config import DataSection, Source, Sources, entries
from finetune.config.field_types import GIVEN, nearest, source_name, unknown
from finetune.data import cache, in_memory, lines, python_docs, splits
from finetune.data.compressed import COMPRESSIONS
from finetune.data.fields import as_json
from finetune.data.problems import Problems
from finetune.data.readers import ENDINGS, TEXT_READERS, Records, reader
from finetune.errors import DataError, MachineError, first_line
from finetune.runtime import hub


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

# Files that `datasets` writes beside its Arrow files: without rows, or with copies of them.
_BESIDE_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json", "cache-*.arrow")

# One shard of several, as the hub and `datasets` name them.
_PART = re.compile(r"(?P<name>.*?)(?P<number>\d{4,})-of-(?P<parts>\d{4,})(?P<ending>\D.*)")


def rows(sources: Sources, split: str = "train", problems: Problems | None = None, encoding: str | None = None) -> Rows:
    """The rows of `sources` in order, repeated according to their weights.

    `split` selects those of a source that has several splits (see `splits.chosen`); `encoding` is that of text files
    that are not UTF-8. Raises DataError at once for a source that does not exist, and after the last row or 20 problems
    for malformed rows (file:line:column) and whatever is in `problems`; MachineError if a hub data set cannot be
    downloaded.
    """
    chosen = entries(sources)
    _refuse_twice(chosen, split)
    problems = problems or Problems()
    key = f"data.{split}"
    keys = [key] if isinstance(sources, str) else [key_of(key, index) for index in range(len(chosen))]
    parts = [
        _weighted(_records(entry.source, split, key, problems, encoding), entry)
        for entry, key in zip(chosen, keys, strict=True)
    ]
    return problems.reading(row for part in parts for row in part)


def key_of(key: str, index: int) -> str:
    """The Python expression of a source in the list that is the value of `key`."""
    return f"{key}[{index}].source"


def first_row(source: str, encoding: str | None = None) -> Row | None:
    """The first row of a built-in or of local files; None for a data set of the hub, which would be downloaded."""
    if _is_of_hub(source):
        return None
    first = next(rows(source, encoding=encoding), None)
    if first is None:
        raise DataError(f"{source} has no rows")
    return first


def foreign_word(source: str, encoding: str) -> str | None:
    """The first word beyond ASCII in local text files that are not UTF-8, read in `encoding`; None if none is found."""
    if source in BUILTIN or source.startswith(GIVEN) or _is_of_hub(source) or not at_hand(source):
        return None
    texts = [file for file in _files(source, "train") if file.suffix.lower() in (*TEXT_READERS, *COMPRESSIONS)]
    return next(filter(None, (lines.foreign_word(file, encoding) for file in texts)), None)


def at_hand(sources: Sources) -> bool:
    """Whether all sources are quick to read offline: built-in, small local files, or rows in memory."""
    chosen = [entry.source for entry in entries(sources) if entry.source not in BUILTIN]
    held = [source for source in chosen if source.startswith(GIVEN)]
    files_by_source = [_files(source, "train") for source in chosen if source not in held]
    sizes = [file.stat().st_size for files in files_by_source for file in files] + list(map(in_memory.size_bytes, held))
    return all(files_by_source) and sum(sizes) <= _SMALL_BYTES


def missing(sources: Sources) -> list[str]:
    """A reason for each local source that cannot be found."""
    chosen = [entry.source for entry in entries(sources)]
    local = [source for source in chosen if source not in BUILTIN and not source.startswith(GIVEN)]
    return [why for source in local if not _local_splits(source) and (why := _no_files(source))]


def contents(sources: Sources, split: str) -> list[tuple[str, str]] | None:
    """Each file or data set that is read for a split, with an identifier of its content, a hash or the hub's commit;
    None if that is unknown.
    """
    try:
        by_source = [_contents(entry.source, split) for entry in entries(sources)]
    except OSError:
        return None  # reading it will report the error
    return [file for files in by_source for file in files] if all(by_source) else None


def _contents(source: str, split: str) -> list[tuple[str, str]]:
    if source in BUILTIN:
        return [(source, _digest(python_docs.FILE))]
    if source.startswith(GIVEN):
        in_memory.size_bytes(source)  # the rows, too, must be there: more than the prepared ones is read
        return [(source, "")]
    if files := _files(source, split):
        return [(str(file), _digest(file)) for file in files]
    # `datasets` caches downloads in `<name>/<config>/<version>/<commit>/`.
    kept = [Path(file["filename"]) for _, part in _hub_splits(source, split) for file in part.cache_files]
    return [(source, "/".join([*file.parts[-5:-1], file.stem])) for file in kept]


def _digest(file: Path) -> str:
    stat = file.stat()
    return _digest_of(file, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _digest_of(file: Path, *_: int) -> str:
    """Cached, because sources are hashed before and after reading, and for both splits."""
    return cache.digest(file)


def has_held_out_split(source: str) -> bool:
    """Whether a source has its own held-out rows: a split for validation, or the `eval` of a built-in."""
    return source in BUILTIN or splits.holds_out(_files_by_split(source))


def split_uses(section: DataSection, *, fetch: bool = True) -> list[splits.SplitUse]:
    """What is read of each source that has splits, and what is not; without the numbers of rows.

    A data set of the hub, which would be downloaded, is left out unless it may be `fetch`ed.
    """
    trained = [entry.source for entry in entries(section.train)]
    evaluated = [] if section.eval in ("auto", "none") else [entry.source for entry in entries(section.eval)]
    found = {source: _files_by_split(source, fetch) for source in dict.fromkeys(trained + evaluated)}
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


def _files_by_split(source: str, fetch: bool = True) -> dict[str, list[Path]]:
    """The files of a source by split; none of each split of a data set of the hub, which is `fetch`ed for its names."""
    if source in BUILTIN or source.startswith(GIVEN):
        return {}
    if local := _local_splits(source):
        return local
    return {} if _no_files(source) or not fetch else {name: [] for name in _fetched(source)}


def refuse_shared(train: Sources, held_out: Sources) -> None:
    """Raise DataError naming a file that both read: rows seen in training measure nothing."""
    trained = {file.resolve() for entry in entries(train) for file in _files(entry.source, "train")}
    for entry in entries(held_out):
        for file in _files(entry.source, "eval"):
            if file.resolve() in trained:
                raise DataError(
                    f"{file}: is read by both `data.train` and `data.eval` ({entry.source}); remove it from "
                    "`data.train`, or name other rows in `data.eval`"
                )


def _refuse_twice(chosen: list[Source], split: str) -> None:
    read_by: dict[Path, str] = {}
    for entry in chosen:
        for file in [file.resolve() for file in _files(entry.source, split)] or [Path(entry.source)]:
            if earlier := read_by.get(file):
                by = "" if str(file) == entry.source else f", by `{earlier}` and by `{entry.source}`"
                raise DataError(
                    f"{source_name(str(file))}: is read twice{by}; name it once, with a `weight` to repeat its rows"
                )
            read_by[file] = entry.source


def _weighted(records: Rows, entry: Source) -> Rows:
    whole, part = divmod(entry.weight, 1)
    for record in records:
        row = record._replace(source=entry.source)
        more = part > 0 and row.share("weight") < part
        yield from [row] * (int(whole) + more)


def _records(source: str, split: str, key: str, problems: Problems, encoding: str | None) -> Rows:
    """The records of one source, the value of `key`: built-in, given from Python, of local files, or of the hub."""
    if source.startswith("builtin:"):
        if source not in BUILTIN:
            raise DataError(f"data source {unknown(source, BUILTIN)}")
        return itertools.starmap(Row, _builtin(source, split))
    if source.startswith(GIVEN):
        return itertools.starmap(Row, in_memory.records(source, key))
    if files := _files(source, split):
        return _local(files, problems, encoding)
    if why := _no_files(source):
        raise DataError(why)
    return itertools.starmap(Row, _hub(source, split))


def _no_files(source: str) -> str | None:
    """The reason why a source has no local files; None if it may be a data set of the hub."""
    if re.match(r"\w+://", source):
        return f"{source}: addresses are not read; download the file, or name a data set of the hub as OWNER/NAME"
    if os.path.isdir(source):
        return f"{source}: the folder has no file ending in {ENDINGS}"
    if os.path.exists(source):
        return f"{source}: expected a file ending in {ENDINGS}"
    if glob.has_magic(source):
        return f"{source}: matches no file ending in {ENDINGS}"
    return None if _is_of_hub(source) else f"{source}: no such file or folder{_nearest(Path(source))}"


def _is_of_hub(source: str) -> bool:
    """Whether a source can only name a data set of the hub."""
    path = Path(source)
    is_place = reader(path) or path.is_absolute() or source.startswith((".", "builtin:")) or source.endswith("/")
    return not (is_place or os.path.exists(source) or glob.has_magic(source))


def _files(source: str, split: str) -> list[Path]:
    """The local files that a source reads for a split, sorted by name; none if it is not local. Raises DataError."""
    found = _local_splits(source)
    files = sorted(file for name in splits.chosen(found, split, source) for file in found[name]) if found else []
    if os.path.isdir(source):
        _refuse_missing_parts(files)
    return files


def _local_splits(source: str) -> dict[str, list[Path]]:
    """The local files of a source by split, or all as `splits.NONE`; {} if it is not local. Raises DataError."""
    _check_path(source)
    root: Path | None = None  # of a folder, or of a pattern that does not name a split itself
    if os.path.isdir(source):
        root = Path(source)
        paths = _below(root)
    elif os.path.exists(source) or not glob.has_magic(source):
        paths = [Path(source)] if os.path.isfile(source) else []
    else:
        *folders, _ = Path(source).parts
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), folders))
        root = None if splits.names_one(Path(source).relative_to(root).as_posix()) else root
        try:
            paths = [path for path in map(Path, glob.glob(source, recursive=True)) if reader(path)]
        except RecursionError:
            raise DataError(f"{source[:200]!r} cannot be read: the pattern matches too many folders") from None
    files = sorted(file for file in paths if reader(file) and not file.is_dir())
    for file in files:
        _check_path(str(file))
        if not file.is_file():
            raise DataError(f"{file}: a broken link, or not a regular file; restore or remove it")
    if not files or root is None:
        return {splits.NONE: files} if files else {}
    return splits.of_files(root, files, by_pattern=not os.path.isdir(source))


def _check_path(path: str) -> None:
    """Raise DataError for a path that is too long, a loop of links, or not UTF-8, so that it cannot be printed."""
    try:
        path.encode()
        if "\0" in path or not glob.has_magic(path):
            os.stat(path)
    except FileNotFoundError:
        return
    except UnicodeEncodeError:
        shown = path.encode(errors="backslashreplace").decode()
        raise DataError(f"{shown}: the name is not UTF-8; rename it") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path[:200]!r} cannot be read: {reason}") from None


def _below(folder: Path) -> list[Path]:
    """The files below a folder, without hidden ones. Raises DataError for a link to a folder."""
    paths: list[Path] = []

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}")

    for at, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        for link in (Path(at, name) for name in folders if os.path.islink(os.path.join(at, name))):
            raise DataError(f"{link}: a link to a folder, which is not followed; remove it, or name the target folder")
        paths += [Path(at, name) for name in names if not _is_hidden(name)]
    return paths


def _refuse_missing_parts(files: list[Path]) -> None:
    """Raise DataError if some shards of a set such as `train-00000-of-00005.parquet` are missing."""
    there: dict[tuple[str, ...], set[str]] = {}
    for file in files:
        if reader(file) and (part := _PART.match(file.name)):
            there.setdefault((str(file.parent), part["name"], part["parts"], part["ending"]), set()).add(part["number"])
    for (folder, name, parts, ending), numbers in there.items():
        if len(numbers) < int(parts):
            raise DataError(
                f"{folder}: only {len(numbers):,} of {int(parts):,} files {name}…-of-{parts}{ending} are here; "
                "download the others, or select files by a list or a pattern"
            )


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or any(fnmatch.fnmatch(name, pattern) for pattern in _BESIDE_ROWS)


def _local(files: list[Path], problems: Problems, encoding: str | None) -> Rows:
    for file in files:
        read = reader(file)
        assert read is not None, "_files returns only files with a reader"
        try:
            for location, fields in read(file, problems, encoding):
                yield Row(location, fields, folder=file.parent)
        except DataError as error:
            problems.add(error)  # go on, to report the problems of the other files too


def _builtin(source: str, split: str) -> Records:
    for index, fields in enumerate(BUILTIN[source](split), start=1):
        yield f"{source}[{split}]:{index}", fields


def _hub(name: str, split: str) -> Records:
    for part_name, part in _hub_splits(name, split):
        for index, fields in enumerate(in_memory.of_dataset(part), start=1):
            yield f"{name}[{part_name}]:{index}", dict(fields)


def _hub_splits(name: str, split: str) -> list[tuple[str, Any]]:
    """The splits of a data set of the hub that are read for `split`, by name."""
    found = _fetched(name)
    return [(one, found[one]) for one in splits.chosen(found, split, f"data set `{name}`")]


@functools.lru_cache(maxsize=8)
def _fetched(name: str) -> Any:
    """The splits of a data set by name, downloaded once and memory-mapped.

    Streaming would download it again for the training rows, the held-out rows and the sample questions, and the next
    run would not work offline.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    hub.fail_fast()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name)
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError, HfHubHTTPError, OSError) as error:
        local = f" A local file must end in {ENDINGS}." if "." in Path(name).name else ""
        if why := hub.obstacle():
            raise MachineError(
                f"data set `{name}`: not a local file, not cached, and the hub cannot be reached ({why}); download it "
                f"on a machine with a network, and name its files.{local}"
            ) from None
        raise MachineError(f"data set `{name}` cannot be downloaded from the hub: {first_line(error)}{local}") from None
    except (ValueError, RuntimeError) as error:  # RuntimeError: a data set script, which is not run
        raise DataError(f"data set `{name}`: {first_line(error)}") from None


def _nearest(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist either"
    known: list[str] = []
    with contextlib.suppress(OSError):  # the folder may not be readable
        known = sorted(str(file) for file in path.parent.iterdir() if reader(file))
    return f"; {nearest(str(path), known)}" if known else ""


BUILTIN: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
    "builtin:python_docs": python_docs.conversations,
    "builtin:python_pairs": python_docs.pairs,
}
