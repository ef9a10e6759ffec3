"""Plans kept in this user's cache: the same plan again imports neither torch nor transformers.

Kept is the plan of a job on a named card, if its key can tell all that it depends on. Deleting the folder only means
planning again, by the kept forecasts (`cache`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pydantic_core

from finetune.config import Config, Sources
from finetune.config.field_types import GIVEN
from finetune.data import sources
from finetune.errors import FinetuneError
from finetune.forecast.plan import Fitted, Plan
from finetune.model.source import catalog, chat_template
from finetune.model.source.locate import BUILTIN_BASE, locate
from finetune.runtime import environment
from finetune.storage import private

_FOLDER = "plans"
_MOST_FILES = 100
# What decides whether the segments of a card grow that is not here (`runtime.segments`).
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OF_A_MODEL = (".json", ".jinja", ".model", ".txt", ".tiktoken")
"""Endings of the files of a model or a tokenizer other than weights."""
_COMMIT = re.compile("[0-9a-f]{40}")


def get(asked: Config, gpu: str | None, gpus: int, make: Callable[[], Plan]) -> Plan:
    """The kept plan of what was `asked`, or the one that `make` makes, which is then kept."""
    key = _key(asked, gpu, gpus)
    if key is None:
        return make()
    file = private.cache_folder() / _FOLDER / f"{key}.json"
    if kept := _read(file, make):
        return kept
    plan = make()
    values = _adapter().dump_python(plan, mode="json", exclude={"fitted": {"find_everything"}})
    private.keep(file, pydantic_core.to_json(values), _MOST_FILES)
    return plan


def _read(file: Path, make: Callable[[], Plan]) -> Plan | None:
    if not (content := private.read(file)):
        return None

    def everything() -> Any:
        fitted = make().fitted
        assert isinstance(fitted, Fitted), "as in the plan that is kept"
        return fitted.everything

    try:
        values = pydantic_core.from_json(content)
        if values["fitted"]:
            values["fitted"]["find_everything"] = everything
        return _adapter().validate_python(values)
    except (ValueError, TypeError, LookupError):
        return None


def _key(asked: Config, gpu: str | None, gpus: int) -> str | None:
    """A hash of everything that the plan depends on; None if that is unknown, or as this machine is at the moment."""
    model, data = asked.model, asked.data
    as_this_machine = not gpu or gpu in ("auto", "cpu") or "WORLD_SIZE" in os.environ
    foreign = model.trust_remote_code or asked.adapter.start_from or asked.output.serve
    others = model.vision != "none" or asked.kernels.compile != "none" or asked.distributed.kind == "deepspeed"
    text = asked.model_dump_json(exclude_unset=True)
    if as_this_machine or foreign or others or GIVEN in text:
        return None
    try:
        rows = [_rows(data.train, "train"), _rows(data.train, "eval")]
        rows += [] if data.eval in ("auto", "none") else [_rows(data.eval, "eval")]
        revisions = {model.tokenizer or model.name: None, model.name: model.revision}  # a tokenizer has none of its own
        files = [_files(*each) for each in (*revisions.items(), (BUILTIN_BASE, None))]
        custom = data.chat_template.endswith(chat_template.SUFFIX)
        template = Path(data.chat_template).read_text(encoding="utf-8") if custom else ""
    except (OSError, ValueError, FinetuneError):  # the plan reports it
        return None
    if None in rows or None in files:
        return None
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    software = [environment.packages(), environment.code_hash(), variables]
    parts = [text, asked.model_dump_json(), gpu, gpus, rows, files, template, software]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _rows(read: Sources, split: str) -> list[Any] | None:
    """What is read of a split; None if that is unknown. A plan does without rows that are not at hand."""
    if not sources.at_hand(read):
        return ["not at hand"]
    return sources.contents(read, split)


def _files(name: str, revision: str | None) -> list[Any] | None:
    """The contents of a model's files besides weights, or the names of pinned ones; None if they may change."""
    if name == BUILTIN_BASE or Path(name).is_dir():
        folder = Path(locate(name))
        files = sorted(file for file in folder.rglob("*") if file.suffix in _OF_A_MODEL and file.is_file())
        return [(str(file), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")
    if cached.exists():
        pinned = constants.HF_HUB_OFFLINE or _COMMIT.fullmatch(revision or "")
        files = sorted(file for file in cached.rglob("*") if file.is_file() and file.parent.name != "blobs")
        return [(str(file), os.path.realpath(file), file.stat().st_mtime_ns) for file in files] if pinned else None
    return ["in the catalog alone"] if catalog.find(name) else None


@functools.cache
def _adapter() -> pydantic.TypeAdapter[Plan]:
    return pydantic.TypeAdapter(Plan)
