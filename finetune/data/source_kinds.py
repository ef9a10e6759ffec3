"""Kinds of sources: rows given from Python, local files, and data sets of the hub.

Another kind is a subclass of `SourceKind` in a file of its own, and an entry in `sources.KINDS`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import glob
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.config.field_types import GIVEN, nearest
from finetune.data import cache, in_memory, splits
from finetune.data.problems import Problems
from finetune.data.readers import endings, reader
from finetune.errors import DataError, MachineError, first_line
from finetune.runtime import hub

Record = tuple[str, dict[str, Any], Path | None]
"""The location of a row (`train.jsonl:12`), its fields, and the folder of its file, if it has one."""

# Files that `datasets` writes beside its Arrow files: without rows, or with copies of them.
_BESIDE_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json", "cache-*.arrow")

# One shard of several, as the hub and `datasets` name them.
_PART = re.compile(r"(?P<name>.*?)(?P<number>\d{4,})-of-(?P<parts>\d{4,})(?P<ending>\D.*)")


class SourceKind:
    """A kind of source. By default it has no local files and no splits, and none is known to be missing."""

    def has(self, source: str) -> bool:
        """Whether a source of this name, which no earlier kind has, is of this kind."""
        raise NotImplementedError

    def records(
        self, source: str, split: str, key: str, problems: Problems, encoding: str | None
    ) -> Iterator[Record]:  # fmt: skip
        """The records of a source, the value of `key`; arguments and errors as in `sources.rows`."""
        raise NotImplementedError

    def contents(self, source: str, split: str) -> list[tuple[str, str]]:
        """Each file or data set that is read for a split, with an identifier of its content; empty if it is unknown."""
        raise NotImplementedError

    def size_bytes(self, source: str) -> int | None:
        """How much is read of a source; None if it is not on this machine."""
        raise NotImplementedError

    def missing(self, source: str) -> str | None:
        """Why a source cannot be found, if that is known without a network."""
        return None

    def files(self, source: str, split: str) -> list[Path]:
        """The local files that are read for a split, sorted by name. Raises DataError."""
        return []

    def by_split(self, source: str, *, fetch: bool) -> dict[str, list[Path]]:
        """The local files of each split; what would be downloaded is left out unless it may be `fetch`ed."""
        return {}

    def holds_out(self, source: str) -> bool:
        """Whether a source has its own held-out rows: a split for validation, or the `eval` of a built-in."""
        return splits.holds_out(self.by_split(source, fetch=True))


class FromPython(SourceKind):
    """Rows given from Python, which this process keeps."""

    def has(self, source: str) -> bool:
        return source.startswith(GIVEN)

    def records(
        self, source: str, split: str, key: str, problems: Problems, encoding: str | None
    ) -> Iterator[Record]:  # fmt: skip
        return ((location, fields, None) for location, fields in in_memory.records(source, key))

    def contents(self, source: str, split: str) -> list[tuple[str, str]]:
        in_memory.size_bytes(source)  # the rows, too, must be there: more than the prepared ones is read
        return [(source, "")]

    def size_bytes(self, source: str) -> int | None:
        return in_memory.size_bytes(source)


class LocalFiles(SourceKind):
    """A file, a folder or a pattern, and every name that cannot be a data set of the hub."""

    def has(self, source: str) -> bool:
        return not is_of_hub(source) or no_files(source) is not None

    def records(
        self, source: str, split: str, key: str, problems: Problems, encoding: str | None
    ) -> Iterator[Record]:  # fmt: skip
        files = self.files(source, split)
        if not files:
            raise DataError(str(no_files(source)))

        def read() -> Iterator[Record]:
            for file in files:
                rows = reader(file)
                assert rows is not None, "files have a reader"
                try:
                    for location, fields in rows(file, problems, encoding):
                        yield location, fields, file.parent
                except DataError as error:
                    problems.add(error)  # go on, to report the problems of the other files too

        return read()

    def contents(self, source: str, split: str) -> list[tuple[str, str]]:
        return [(str(file), digest(file)) for file in self.files(source, split)]

    def size_bytes(self, source: str) -> int | None:
        files = self.files(source, "train")
        return sum(file.stat().st_size for file in files) if files else None

    def missing(self, source: str) -> str | None:
        return None if _local_splits(source) else no_files(source)

    def files(self, source: str, split: str) -> list[Path]:
        found = _local_splits(source)
        files = sorted(file for name in splits.chosen(found, split, source) for file in found[name]) if found else []
        parts: dict[tuple[str, ...], set[str]] = {}  # the numbers of the shards of each set in a folder
        for file in files if os.path.isdir(source) else ():
            if part := _PART.match(file.name):
                its = (str(file.parent), part["name"], part["parts"], part["ending"])
                parts.setdefault(its, set()).add(part["number"])
        for (folder, name, several, ending), numbers in parts.items():
            if len(numbers) < int(several):
                raise DataError(
                    f"{folder}: only {len(numbers):,} of {int(several):,} files {name}…-of-{several}{ending} are here; "
                    "download the others, or select files by a list or a pattern"
                )
        return files

    def by_split(self, source: str, *, fetch: bool) -> dict[str, list[Path]]:
        return _local_splits(source)


class HubDataSet(SourceKind):
    """A data set of the hub, which `datasets` downloads once and memory-maps.

    Streaming would download it again for the training rows, the held-out rows and the sample questions, and the next
    run would not work offline.
    """

    def has(self, source: str) -> bool:
        return True

    def records(
        self, source: str, split: str, key: str, problems: Problems, encoding: str | None
    ) -> Iterator[Record]:  # fmt: skip
        for name, part in self._parts(source, split):
            for index, fields in enumerate(in_memory.of_dataset(part), start=1):
                yield f"{source}[{name}]:{index}", dict(fields), None

    def contents(self, source: str, split: str) -> list[tuple[str, str]]:
        # `datasets` caches downloads in `<name>/<config>/<version>/<commit>/`.
        kept = [Path(file["filename"]) for _, part in self._parts(source, split) for file in part.cache_files]
        return [(source, "/".join([*file.parts[-5:-1], file.stem])) for file in kept]

    def size_bytes(self, source: str) -> int | None:
        return None

    def by_split(self, source: str, *, fetch: bool) -> dict[str, list[Path]]:
        return {name: [] for name in _fetched(source)} if fetch else {}

    def _parts(self, source: str, split: str) -> list[tuple[str, Any]]:
        """The splits that are read for `split`, by name."""
        found = _fetched(source)
        return [(one, found[one]) for one in splits.chosen(found, split, f"data set `{source}`")]


def digest(file: Path) -> str:
    """The hash of a file's content, kept while the file is as it was."""
    stat = file.stat()
    return _digest_of(file, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _digest_of(file: Path, *_: int) -> str:
    """Cached, because sources are hashed before and after reading, and for both splits."""
    return cache.digest(file)


def no_files(source: str) -> str | None:
    """The reason why a source has no local files; None if it may be a data set of the hub."""
    if re.match(r"\w+://", source):
        return f"{source}: addresses are not read; download the file, or name a data set of the hub as OWNER/NAME"
    if os.path.isdir(source):
        return f"{source}: the folder has no file ending in {endings()}"
    if os.path.exists(source):
        return f"{source}: expected a file ending in {endings()}"
    if glob.has_magic(source):
        return f"{source}: matches no file ending in {endings()}"
    if is_of_hub(source):
        return None
    folder = Path(source).parent
    if not folder.is_dir():
        return f"{source}: no such file or folder; the folder {folder} does not exist either"
    known: list[str] = []
    with contextlib.suppress(OSError):  # the folder may not be readable
        known = sorted(str(file) for file in folder.iterdir() if reader(file))
    return f"{source}: no such file or folder" + (f"; {nearest(str(Path(source)), known)}" if known else "")


def is_of_hub(source: str) -> bool:
    """Whether a source can only name a data set of the hub."""
    path = Path(source)
    is_place = reader(path) or path.is_absolute() or source.startswith((".", "builtin:")) or source.endswith("/")
    return not (is_place or os.path.exists(source) or glob.has_magic(source))


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


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or any(fnmatch.fnmatch(name, pattern) for pattern in _BESIDE_ROWS)


@functools.lru_cache(maxsize=8)
def _fetched(name: str) -> Any:
    """The splits of a data set by name."""
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    hub.fail_fast()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name)
    except (datasets.exceptions.DatasetNotFoundError, ConnectionError, HfHubHTTPError, OSError) as error:
        local = f" A local file must end in {endings()}." if "." in Path(name).name else ""
        if why := hub.obstacle():
            raise MachineError(
                f"data set `{name}`: not a local file, not cached, and the hub cannot be reached ({why}); download it "
                f"on a machine with a network, and name its files.{local}"
            ) from None
        raise MachineError(f"data set `{name}` cannot be downloaded from the hub: {first_line(error)}{local}") from None
    except (ValueError, RuntimeError) as error:  # RuntimeError: a data set script, which is not run
        raise DataError(f"data set `{name}`: {first_line(error)}") from None
