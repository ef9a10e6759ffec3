"""Another tool's config in ours: what each key is called here, and a list of those without a counterpart.

What a key is called stands in `finetune.config.other_names`; here is what takes several keys together: the batch, the
data, and what the tool does where its config says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune.config import other_names, strict_yaml
from finetune.config.load import text_of
from finetune.config.rules import contradictions
from finetune.errors import ConfigError
from finetune.init.draft import Draft

_BATCH = ("micro_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
_DATA = ("datasets", "dataset", "dataset_dir", "test_datasets", "eval_dataset")


@dataclass(frozen=True)
class Tool:
    """A tool whose config has the key `model`; `defaults` are the values of its keys that differ from ours."""

    model: str
    rows: int
    """Rows of a micro-batch by default."""
    defaults: Mapping[str, Any]


TOOLS = {
    # src/axolotl/utils/schemas/
    "Axolotl": Tool("base_model", 1, {"sequence_len": 512, "optimizer": "adamw_torch_fused"}),
    # src/llamafactory/hparams/ and transformers' TrainingArguments
    "LLaMA-Factory": Tool(
        "model_name_or_path",
        8,
        {
            "lora_rank": 8, "cutoff_len": 2048, "learning_rate": 5e-5, "num_train_epochs": 3, "warmup_ratio": 0,
            "lr_scheduler_type": "linear", "optim": "adamw_torch",
        },
    ),
}  # fmt: skip
"""The tools whose configs are translated."""


def translate(path: Path) -> Draft:
    """The config at `path` in our keys. Raises ConfigError for one that cannot be read or is of no tool in TOOLS."""
    given = _read(path)
    name = next((name for name, tool in TOOLS.items() if tool.model in given), None)
    if name is None:
        wanted = " or ".join(f"`{tool.model}` ({name})" for name, tool in TOOLS.items())
        raise ConfigError(f"{path}: a config to translate has {wanted}; this one has neither")
    tool = TOOLS[name]
    draft = Draft(f"Translated by `finetune init` from {path.name}, a config of {name}")
    left = [key for key in {**tool.defaults, **given} if key not in (*_BATCH, *_DATA)]
    for _ in range(2):  # a key may need one that comes later, as early stopping needs evaluations
        left = [key for key in left if not _take_key(draft, key, given, tool)]
    left += [key for key in _DATA if not _take_data(draft, key, given)]
    _take_batch(draft, tool, given)
    _take_what_is_said_by_silence(draft, name)
    if left:
        draft.notes.append(f"Without a counterpart here: {', '.join(_shown(key, given[key]) for key in left)}")
    draft.notes += [f"To be decided: `{key}`: {message}" for key, message in contradictions(draft.config)]
    return draft


def _read(path: Path) -> dict[str, Any]:
    """The keys that have a value."""
    document = strict_yaml.parse(text_of(path))
    if document.problems:
        raise ConfigError("\n".join(f"{path}:{problem.line}: {problem.message}" for problem in document.problems))
    return {key: value for key, value in document.values.items() if value is not None}


def _shown(key: str, value: Any) -> str:
    text = json.dumps(value, default=str)
    return f"{key}: {text}" if len(text) <= _LONGEST else key


_LONGEST = 60


def _take_key(draft: Draft, key: str, given: Mapping[str, Any], tool: Tool) -> bool:
    reason = key if key in given else "its default there"
    return _take(draft, other_names.taken(key, given.get(key, tool.defaults.get(key))), reason)


def _take(draft: Draft, found: other_names.Settings | None, reason: str) -> bool:
    """Add settings, if they are allowed here with those before; whether they were."""
    if found is None:
        return False
    more = Draft(values=draft.values | found)
    try:
        _ = more.config
    except ValidationError:
        return False
    for key, value in found.items():
        draft.take(key, value, "" if reason == key.partition(".")[2] else reason)
    return True


def _take_batch(draft: Draft, tool: Tool, given: Mapping[str, Any]) -> None:
    rows = next((given[key] for key in _BATCH[:2] if key in given), tool.rows)
    steps = given.get(_BATCH[2], 1)
    if type(rows) is int and type(steps) is int:
        draft.take("training.batch_size", rows * steps, f"{rows} rows, {steps} times, on one GPU")
        draft.take("training.micro_batch", rows)


def _take_data(draft: Draft, key: str, given: Mapping[str, Any]) -> bool:
    """Take the data sets that a key names; whether it said nothing else."""
    if key not in given or key == "dataset_dir":
        return True
    ours = "data.train" if key in ("datasets", "dataset") else "data.eval"
    if isinstance(given[key], str):
        names = [name.strip() for name in given[key].split(",")]
        return _take_sources(draft, ours, [_registered(name, given) for name in names], key)
    sets = given[key] if isinstance(given[key], list) else []
    if not sets or not all(isinstance(one, dict) and isinstance(one.get("path"), str) for one in sets):
        return False
    if more := sorted({name for one in sets for name in one} - {"path", "type", "ds_type"}):
        draft.notes.append(f"No counterpart here in `{key}`: {', '.join(more)}; see `data.columns` for columns' names")
    return _take_sources(draft, ours, [one["path"] for one in sets], key)


def _take_sources(draft: Draft, ours: str, sources: list[str], reason: str) -> bool:
    return _take(draft, {ours: sources[0] if len(sources) == 1 else sources}, reason)


def _registered(name: str, given: Mapping[str, Any]) -> str:
    """The file or hub name of a data set that LLaMA-Factory knows by dataset_info.json, or `name` itself."""
    folder = Path(str(given.get("dataset_dir", "data")))
    try:
        entry = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))[name]
        return str(folder / entry["file_name"]) if "file_name" in entry else str(entry["hf_hub_url"])
    except (OSError, ValueError, KeyError, TypeError):
        return name


def _take_what_is_said_by_silence(draft: Draft, name: str) -> None:
    """A base that is not said to be quantized is not, nor are rows held out that nothing asks for."""
    if "quantization.kind" not in draft.values:
        draft.take("quantization.kind", "none", f"not quantized in {name}")
    if not {"data.eval", "data.eval_share"} & set(draft.values):
        draft.take("data.eval", "none", f"none in {name}")
    if "adapter.alpha" not in draft.values and "adapter.rank" in draft.values:
        draft.take("adapter.alpha", 2 * draft.values["adapter.rank"], "twice the rank")
    if "data.train" not in draft.values:
        draft.notes.append("No data set is named: write `data.train`")
