"""The splits of a local folder or pattern, by the conventions of `datasets`, and which of them a config's key reads.

`datasets` finds them in the README of a hub data set, or in the names of files and folders; the rules are its own.
"""

from __future__ import annotations

import functools
import itertools
import json
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finetune.errors import DataError, first_line

Split = Literal["train", "eval"]
"""The rows that are trained on, or those that are held out."""

NONE = ""
"""The name of the files that are in no split, beside others that are in one."""

KINDS = ("test", "validation", "train")
"""What a split may be for, in the order in which a file whose name says several is taken."""

# A README whose head has the key `configs`; what else a README holds is not read.
_CONFIGS = re.compile(rb"\s*---\r?\n(?:(?!---).*\n)*?[^\S\n]*configs[^\S\n]*:")

# Matching takes longer with each star of a pattern, which a foreign README may hold.
_MOST_STARS = 8


@dataclass(frozen=True)
class SplitUse:
    """What becomes of splits of one source: `use` is "train", "eval", or "none" where they are not read.

    `files` counts them (0 for a data set of the hub) and `first` names one; `rows` counts those that are prepared, None
    where that is unknown.
    """

    source: str
    use: str
    names: tuple[str, ...]
    files: int
    first: str = ""
    rows: int | None = None


def of_files(root: Path, files: Sequence[Path], *, by_pattern: bool = False) -> dict[str, list[Path]]:
    """The `files` below `root` by the name of their split, each in one; all of them under `NONE` if none is in any.

    Raises DataError if the README of `root` describes splits that cannot be found.
    """
    names = {file.relative_to(root).as_posix(): file for file in files}
    found = _saved(root, names) or _described(root, names, by_pattern=by_pattern) or _by_names(tuple(names))
    splits: dict[str, list[Path]] = {}
    left = dict(names)
    # Splits that must not be trained come first: a file that is in several is taken for the one with least use.
    for split in sorted(found, key=lambda name: [*KINDS, NONE].index(kind_of(name))):
        if there := [name for name in found[split] if name in left]:
            splits[split] = [left.pop(name) for name in there]
    return {**splits, NONE: list(left.values())} if left else splits


def names_one(pattern: str) -> bool:
    """Whether a pattern itself, relative to its folder, names a split: then all that it matches is meant."""
    return bool(_by_names((re.sub(r"\[[^\]]*\]|[*?]+", "-", pattern),)))


def chosen(found: Mapping[str, Any], split: str, where: str) -> list[str]:
    """The names of the splits to read: for "train" those for training, for "eval" for validation, or else for tests.

    `found` has the local files of each split, or anything else for a data set of the hub. Files in no split, and splits
    of other names, are read where there is none for that. Raises DataError for several to train, or none.
    """
    by_kind = {kind: [name for name in found if kind_of(name) == kind] for kind in (*KINDS, NONE)}
    if split == "eval" and (held_out := by_kind["validation"] or by_kind["test"]):
        return held_out
    train = ["train"] if "train" in found else by_kind["train"]
    if len(train) == 1 or (not train and by_kind[NONE]):
        return train or by_kind[NONE]
    several = f"has several training splits, {', '.join(sorted(train))}"
    wrong = several if train else f"has no training split, only {' and '.join(sorted(found))}"
    files = found[train[0] if train else next(iter(found))]
    cure = "download it (`hf download NAME --repo-type dataset --local-dir FOLDER`), and name the files to train"
    if isinstance(files, list):  # one that is named itself is read, whatever its name is
        cure = f"name the files to train themselves, such as `{files[0]}`"
    raise DataError(f"{where}: {wrong}; {cure}")


def holds_out(names: Iterable[str]) -> bool:
    """Whether one of the splits is for validation."""
    return any(kind_of(name) == "validation" for name in names)


@functools.cache
def kind_of(name: str) -> str:
    """What the split `name` is for: one of KINDS, or `NONE`."""
    if name in (*KINDS, NONE):  # without the import of `datasets`, which takes half a second
        return name
    from datasets.data_files import DEFAULT_PATTERNS_SPLIT_IN_FILENAME

    patterns = {str(split): each for split, each in DEFAULT_PATTERNS_SPLIT_IN_FILENAME.items()}
    return next((kind for kind in KINDS if _matching(patterns[kind], [f"{name}."])), NONE)


def _matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that one of the patterns matches, as `datasets` matches them."""
    from fsspec.utils import glob_translate

    matches = [re.compile(glob_translate(posixpath.normpath(pattern))).match for pattern in patterns]
    return [name for name in names if any(match(name) for match in matches)]


@functools.lru_cache(maxsize=64)
def _by_names(names: tuple[str, ...]) -> dict[str, list[str]]:
    """The names by split, as `datasets` recognises it in names of files and folders; none if it does in no name."""
    # Its public function looks on the disk, where files without rows would count, and signs of a pattern in the
    # folder's own name would be one.
    from datasets.data_files import DEFAULT_PATTERNS_ALL, _get_data_files_patterns

    def found(without: str = "nothing") -> dict[str, list[str]]:
        return _get_data_files_patterns(lambda pattern: [] if without in pattern else _matching([pattern], names))

    try:
        patterns = found()
    except ValueError:  # a name before `-00000-of-00001` that no split can have
        patterns = found(without="-of-")
    except FileNotFoundError:
        return {}
    if list(itertools.chain(*patterns.values())) == list(itertools.chain(*DEFAULT_PATTERNS_ALL.values())):
        return {}
    return {str(split): _matching(each, names) for split, each in patterns.items()}


def _saved(root: Path, names: Iterable[str]) -> dict[str, list[str]]:
    """The splits of a `DatasetDict` that `save_to_disk` wrote: one folder each."""
    listed = root / "dataset_dict.json"
    if not listed.is_file():
        return {}
    try:
        splits = [*json.loads(listed.read_text(encoding="utf-8"))["splits"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{listed}: cannot be read as a list of splits: {first_line(error)}") from None
    found = {str(split): [name for name in names if name.startswith(f"{split}/")] for split in splits}
    return {split: files for split, files in found.items() if files}


def _described(root: Path, names: Iterable[str], *, by_pattern: bool) -> dict[str, list[str]]:
    """The splits that `configs` in the README of a data set of the hub describes.

    None for files that a pattern takes from beside its default data set.
    """
    card = root / "README.md"
    if not card.is_file() or not _CONFIGS.match(card.read_bytes()):
        return {}
    import yaml
    from datasets.data_files import sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub.repocard import metadata_load

    try:
        described: Any = metadata_load(card) or {}
        configs = MetadataConfigs.from_dataset_card_data(described)
        if not configs:
            return {}
        default = configs.get_default_config_name()
        if default is None and by_pattern:
            return {}
        if default is None:
            raise DataError(
                f"{root}: its README.md describes several data sets, {', '.join(sorted(configs))}; name the folder or "
                "the files of one of them"
            )
        config: Mapping[str, Any] = configs[default]
        base = posixpath.normpath(config.get("data_dir") or ".")
        inside = [name for name in names if base == "." or name.startswith(f"{base}/")]
        if "data_files" not in config:
            found = _by_names(tuple(posixpath.relpath(name, base) for name in inside)) or {"train": inside}
            return {split: [posixpath.normpath(f"{base}/{name}") for name in found[split]] for split in found}
        patterns = sanitize_patterns(config["data_files"])
        elsewhere = all("://" in one for one in itertools.chain(*patterns.values()))
        if long := next((one for one in itertools.chain(*patterns.values()) if one.count("*") > _MOST_STARS), None):
            raise DataError(f"{card}: the pattern {long[:80]!r} has more than {_MOST_STARS} stars")
        found = {
            split: _matching([posixpath.join(base, pattern) for pattern in each], inside)
            for split, each in patterns.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"{card}: the splits that it describes cannot be read: {first_line(error)}") from None
    if not any(found.values()) and not by_pattern and not elsewhere:
        raise DataError(f"{card}: describes the splits {', '.join(found)}, but none of their files is here")
    return {split: files for split, files in found.items() if files}
