"""The identity of a base model: a hash of its config, of every byte of its weights, and of its image processor."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from finetune.config import ModelSection
from finetune.errors import ArtifactError, FinetuneError, first_line
from finetune.model.source import file_hashes
from finetune.model.source.locate import processor_files, weights_directory
from finetune.storage import weight_files
from finetune.storage.weight_files import SUFFIX

# Earlier versions hashed samples of the weights and wrote hex without a prefix.
_WHOLE = "sha256:"
# Reading this much takes about ten seconds, so it is announced.
_LARGE_BYTES = 4 * 2**30
_INDEX = SUFFIX + ".index.json"
_PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
# transformers 5.24 (`distributed.checkpoint.is_sharded_checkpoint`) takes a folder with such a file for a checkpoint of
# several ranks, and reads every safetensors file in it, whatever model.safetensors and the index say.
_PART_OF_CHECKPOINT = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")


def of_base(section: ModelSection, note: Callable[[str], None] = lambda text: None) -> str | None:
    """The identity of a base: a hash of config.json, of the weight files that are loaded, of a rotary scaling, and for
    a job with images of its processor's files.

    None for random weights, and for a base that is not available locally or not in a supported format. Calls `note`
    if reading takes a while. Raises ArtifactError for a file that is damaged or cannot be read.
    """
    folder = _folder(section)
    if folder is None or not (files := loaded_files(folder)):
        return None
    for file in files:
        weight_files.check(file)
    try:
        new_bytes = sum(file.stat().st_size for file in files if not file_hashes.known(file))
        if new_bytes >= _LARGE_BYTES:
            note(f"hashing the {new_bytes / 2**30:.1f} GiB of {section.name} once, to detect later changes")
        config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
        with ThreadPoolExecutor(max_workers=4) as pool:
            parts = [config, *pool.map(file_hashes.sha256, files)]
        if section.rope_scaling:
            parts.append(section.rope_scaling.model_dump_json())
        parts += [hashlib.sha256(file.read_bytes()).hexdigest() for file in processor_files(section)]
    except OSError as error:
        raise ArtifactError(f"{error.filename or folder}: cannot be read: {error.strerror}") from None
    return _WHOLE + hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _folder(section: ModelSection) -> Path | None:
    """The folder of a base's files; None for random weights or a base that is not available locally."""
    if section.weights == "random":
        return None
    try:
        return weights_directory(section.name, section.revision)
    except FinetuneError:
        return None


def confirmed(section: ModelSection, before: str | None, note: Callable[[str], None] = lambda text: None) -> str | None:
    """The identity of a base after it was read, which must be the one `before` (None: unknown). `note` as in `of_base`.

    Raises ArtifactError if its files were replaced meanwhile: what was read is then of neither base, or of both.
    """
    now = of_base(section, note)
    if before and now != before:
        raise ArtifactError(
            f"the files of {section.name} were changed, replaced or removed while they were read, and nothing was made "
            "of them. Restore them, and run the same command again"
        )
    return now


class Mapped:
    """The weight files of a base that was loaded on a CPU, where weights stay in the pages of their files.

    A file that is replaced by another or removed stays mapped; one that is written to changes the model that trains.
    """

    def __init__(self, section: ModelSection) -> None:
        folder = _folder(section)
        files = loaded_files(folder) if folder else []
        self._files = {file: (_stamp(file), file_hashes.sha256(file)) for file in files}

    def check(self) -> None:
        """Raise ArtifactError if a file was written to."""
        for file, ((inode, *before), digest) in self._files.items():
            with contextlib.suppress(FileNotFoundError):
                now, *after = _stamp(file)
                if now != inode or after == before:
                    continue
                if file_hashes.sha256(file) != digest:
                    raise ArtifactError(
                        f"{file} was written to while this run trained on it. On a CPU the weights are the file's own "
                        "pages, so no step since the last checkpoint is saved: restore the file, and run the same "
                        "command again to resume from there"
                    )
                self._files[file] = (_stamp(file), digest)


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def comparable(identity: str | None) -> bool:
    """Whether a stored identity is a hash of whole files, as `of_base` computes it now."""
    return identity is not None and identity.startswith(_WHOLE)


def files_to_load(folder: Path) -> list[Path]:
    """`loaded_files` of a base on disk, checked by their headers. Raises ArtifactError, also for a missing one."""
    if (folder / "adapter_config.json").is_file():
        raise ArtifactError(
            f"{folder / 'adapter_config.json'}: an adapter next to the base is not supported; use a base without one"
        )
    refuse_parts_of_checkpoint(folder)
    if (index := _loaded(folder)) and index.name.endswith(_INDEX) and index.is_file():
        _check_index(index)
    files = [folder / name for name in _names(folder)]
    if not files:
        pickles = sorted(file.name for file in folder.glob("*") if file.suffix in _PICKLES)
        what = f"its weights are in {pickles[0]}, which may contain code, and not in" if pickles else "it has no"
        cure = "convert it, or use another base" if pickles else "download the model again"
        raise ArtifactError(f"{folder}: {what} model{SUFFIX}; {cure} (`model.weights: random` needs no weights)")
    for file in files:
        if not _is_inside(file, folder):
            raise ArtifactError(f"{folder}: its index names {file}, outside its folder; download the model again")
        if file.suffix != SUFFIX:
            raise ArtifactError(f"{file}: only {SUFFIX} files are supported; convert it, or use another base")
        if not file.is_file():
            raise ArtifactError(f"{file}: missing, and named by the model's index; the download is incomplete")
        weight_files.check(file)
    return files


def refuse_parts_of_checkpoint(folder: Path) -> None:
    """Raise ArtifactError for a folder that transformers takes for a checkpoint of several ranks."""
    if parts := _parts_of_checkpoint(folder):
        raise ArtifactError(
            f"{parts[0]}: a part of a checkpoint of several ranks, by its name; transformers would read every file of "
            "the folder as such a checkpoint. Move these files elsewhere, or use a base without them"
        )


def _parts_of_checkpoint(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("shard-*" + SUFFIX) if _PART_OF_CHECKPOINT.fullmatch(file.name))


def loaded_files(folder: Path) -> list[Path]:
    """The weight files that transformers 5.24 loads from `folder` (`_get_resolved_checkpoint_files`), sorted by name.

    The folder may contain others, such as the same weights in another format. Empty if one is missing or is not in a
    supported format.
    """
    files = [folder / name for name in _names(folder)]
    sound = all(file.suffix == SUFFIX and _is_inside(file, folder) and file.is_file() for file in files)
    return files if sound and not _parts_of_checkpoint(folder) else []


def stored_names(section: ModelSection) -> frozenset[str]:
    """The names of the tensors in a base's files; none if these are not available locally."""
    folder = _folder(section)
    files = [] if folder is None else loaded_files(folder)
    with contextlib.suppress(ArtifactError):
        return frozenset(name for file in files for name in weight_files.shapes(file))
    return frozenset()


def _names(folder: Path) -> list[str]:
    """What config.json or the index call the weight files; none if there is neither model.safetensors nor an index."""
    loaded = _loaded(folder)
    if loaded is None or not loaded.name.endswith(_INDEX):
        return [os.path.relpath(loaded, folder)] if loaded else []
    try:
        return sorted({str(each) for each in json.loads(loaded.read_bytes())["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []


def _loaded(folder: Path) -> Path | None:
    """The weight file or index that transformers loads, which need not exist; None if config.json does not say."""
    try:
        named = json.loads((folder / "config.json").read_bytes()).get("transformers_weights")
        one = folder / ("model" + SUFFIX)
        return folder / named if named else one if one.is_file() else folder / weight_files.INDEX
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _check_index(index: Path) -> None:
    """Raise ArtifactError for an index that transformers 5.24 cannot read (`get_checkpoint_shard_files`)."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{index}: cannot be read: {first_line(error)}; download it again") from None
    parts = content.get("weight_map") if isinstance(content, dict) else None
    names = list(parts.values()) if isinstance(parts, dict) else []
    if not names or not all(isinstance(name, str) for name in names) or not isinstance(content.get("metadata"), dict):
        raise ArtifactError(
            f"{index}: not an index of weight files, which has the name of a file for each tensor in `weight_map`, and "
            "an object `metadata`; download it again"
        )


def _is_inside(file: Path, folder: Path) -> bool:
    return file.is_relative_to(folder) and ".." not in file.relative_to(folder).parts
