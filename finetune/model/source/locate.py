"""Locates a model: the built-in base, a local directory, or the hub; and explains why one cannot be loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from finetune import builtin
from finetune.config import ModelSection
from finetune.config.field_types import unknown
from finetune.errors import ArtifactError, ConfigError, FinetuneError, MachineError
from finetune.model.source import catalog
from finetune.runtime import hub

BUILTIN_BASE = "builtin:tiny-llama"
IMAGE_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""The files of a base's image processor, beside its tokenizer."""

# The libraries read whole JSON files. A large vocabulary takes tens of MB.
_JSON_BYTES = 128 * 2**20

_HUB = "https://huggingface.co/"
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

# Files that show what a folder without config.json is.
_WITHOUT_CONFIG = {
    "adapter_config.json": "it has an adapter: name that in `adapter.start_from`, and its base in `model.name`",
    "config.yaml": "it is a run directory: name `merged/` in it, once `finetune merge` has written that",
    "model_index.json": "it has a model of images (diffusers), which has no tokens to be trained on",
    "params.json": "it has a model in Mistral's own form: download the one in transformers' form",
}

_CURE = "restore its files, or download them again"

T = TypeVar("T")


def locate(name: str) -> str:
    """The directory or hub name for transformers to load. Raises ArtifactError for a name that is neither."""
    path = Path(name)
    if name.startswith("builtin:"):
        if name != BUILTIN_BASE:
            raise ArtifactError(f"model {unknown(name, [BUILTIN_BASE])}")
        path = builtin.file("data/tiny-llama")
        if (path / "config.json").is_file():
            return str(path)
        raise ArtifactError(f"{BUILTIN_BASE} is missing from this installation; make it with data/build_tiny_llama.py")
    if path.suffix.lower() == ".gguf" and path.is_file():
        from finetune.model.source import gguf_base

        return str(gguf_base.unpacked(path))
    if path.is_dir():
        if (path / "config.json").is_file():
            return _bounded(path)
        others = [what for file, what in _WITHOUT_CONFIG.items() if (path / file).is_file()]
        what = others[0] if others else "this one has none: download the model again"
        if found := sorted(path.glob("*.gguf")):
            what = f"this one has GGUF files: name one of them, such as {found[0]}"
        raise ArtifactError(f"{name}: a model directory needs config.json; {what}")
    if name.startswith(_HUB):
        raise ArtifactError(f"{name}: give the model's name on the hub: {name.removeprefix(_HUB)}")
    if name.lower().endswith("gguf"):
        raise ArtifactError(f"{name}: no such file; download the GGUF file and give its path, or name another base")
    if path.is_file():
        raise ArtifactError(f"{name}: a file; name the directory of the model: {path.parent}")
    if not _HUB_NAME.fullmatch(name):
        raise ArtifactError(
            f"{name}: no such model directory, and no name of the hub, such as `meta-llama/Llama-3.1-8B`; check its "
            "spelling"
        )
    return name


def locate_tokenizer(name: str) -> str:
    """As `locate`, also for a directory that has a tokenizer and no model, such as that of an adapter."""
    folder = Path(name)
    return _bounded(folder) if (folder / "tokenizer.json").is_file() else locate(name)


def _bounded(folder: Path) -> str:
    for file in folder.glob("*.json"):
        if (size := file.stat().st_size) > _JSON_BYTES:
            raise ArtifactError(f"{file}: {size} bytes of JSON, more than any model has; download the model again")
    return str(folder)


def at_hand(name: str) -> bool:
    """Whether a model's tokenizer is available offline: in a local directory or in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    located = locate_tokenizer(name)
    if Path(located).is_dir():
        return any((Path(located) / file).is_file() for file in ("tokenizer.json", "tokenizer.model"))
    return isinstance(try_to_load_from_cache(located, "tokenizer_config.json"), str)


def weights_directory(name: str, revision: str | None, *, download: bool = False) -> Path:
    """The folder of a model's files, local or a snapshot in the hub's cache; `download` fetches what that lacks."""
    from huggingface_hub import snapshot_download

    folder = Path(locate(name))
    if folder.is_dir():
        return folder
    files = ["*.json", "*.safetensors"] if download else None
    snapshot = hub_call(
        f"the weights of `{name}`",
        lambda: snapshot_download(name, revision=revision, allow_patterns=files, local_files_only=not download),
    )
    return Path(snapshot)


def processor_files(section: ModelSection) -> list[Path]:
    """The files of IMAGE_PROCESSORS that the base of a job with images has, fetched if the hub can be reached."""
    from transformers.utils import cached_file

    if section.vision == "none":
        return []
    hub.fail_fast()
    failures = ("gated_repo", "missing_entries", "connection_errors")
    lenient = dict.fromkeys((f"_raise_exceptions_for_{failure}" for failure in failures), False)
    found = (cached_file(locate(section.name), name, revision=section.revision, **lenient) for name in IMAGE_PROCESSORS)
    return [Path(file) for file in found if file]


def card(section: ModelSection) -> Mapping[str, Any]:
    """The keys at the head of the base's model card, such as `license`; none if it cannot be had."""
    from huggingface_hub import ModelCard, hf_hub_download

    hub.fail_fast()
    try:
        folder = Path(locate(section.name))
        remote = not folder.is_dir()
        file = hf_hub_download(section.name, "README.md", revision=section.revision) if remote else folder / "README.md"
        return ModelCard.load(file).data.to_dict()
    except Exception:  # offline, gated, no card, or one that cannot be parsed
        return {}


def hub_call(what: str, load: Callable[[], T]) -> T:
    """Run a loading call. Raises MachineError if the hub cannot be reached or refuses, ArtifactError for unusable
    files.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    from safetensors import SafetensorError

    hub.fail_fast()
    refusals = (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError)
    try:
        return load()
    except SafetensorError as error:
        raise ArtifactError(f"{what}: a weights file is damaged: {_first(error)}") from None
    except (OSError, *refusals) as error:
        text = str(error)
        if isinstance(error, refusals) or isinstance(error.__cause__ or error.__context__, refusals):
            raise MachineError(f"{what}: the hub refuses: {_first(error)}") from None
        if "couldn't connect" in text or "offline" in text.lower() or "internet" in text:
            why = f" ({obstacle})" if (obstacle := hub.obstacle()) else ""
            raise MachineError(
                f"{what}: not a local directory, not cached, and the hub cannot be reached{why}; download it on a "
                "machine with a network, and name its directory (`model.weights: random` needs no weights)"
            ) from None
        raise ArtifactError(f"{what}: {_first(error).rstrip('.')}; {_CURE}") from None
    except FinetuneError:
        raise
    except Exception as error:  # untrusted files may cause anything, and tokenizers raises plain Exception
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            raise
        if "Couldn't instantiate the backend tokenizer" in str(error):
            raise ArtifactError(f"{what}: it has no tokenizer files; set `model.tokenizer`") from None
        if "custom code" in str(error):
            raise ArtifactError(
                f"{what}: it is loaded by Python code of its own; read that, and set `model.trust_remote_code: true` "
                "with `model.revision`, the hash of the commit; or use another base"
            ) from None
        near = catalog.nearest(what)
        known = f". Known architectures: {', '.join(near)}." if near else ""
        why = _first(error).rstrip(".")
        raise ArtifactError(f"{what}: its files cannot be read: {why}; {_CURE}{known}") from None


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def remote_code(section: ModelSection) -> str | None:
    """The pinned revision whose code may run, or None if no code may run."""
    return section.revision if section.trust_remote_code else None


def pinned_code(section: ModelSection) -> dict[str, Any]:
    """transformers' arguments that say whether Python code shipped with the model may run, and from which commit.

    `code_revision` also applies to code in another repository that the model's config points to; without it
    transformers would use that code's latest version. Raises ConfigError for a local directory, whose code has no
    commit.
    """
    revision = remote_code(section)
    if revision and Path(locate(section.name)).is_dir():
        raise ConfigError(
            f"`model.trust_remote_code`: {section.name} is a directory, whose code is not pinned to a commit; use the "
            "hub name with `model.revision` (works offline if it is cached)"
        )
    return {"trust_remote_code": True, "code_revision": revision} if revision else {"trust_remote_code": False}
