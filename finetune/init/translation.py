"""Translate another tool's config into ours, and list the keys without a counterpart.

The names of single keys are in `finetune.config.other_names`; this module translates what
depends on several keys: the batch, the data, and the other tool's defaults.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune.config import other_names, strict_yaml
from finetune.config.load import ignored_keys, text_of
from finetune.config.rules import contradictions
from finetune.errors import ConfigError
from finetune.init import data_sets, preferences, refusals
from finetune.init.draft import Draft
from finetune.settings import CHOICES

_BATCH = ("micro_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps", "batch_size")
_DATA = ("datasets", "dataset", "dataset_name", "pretraining_dataset", "dataset_dir", "test_datasets", "eval_dataset")
_LAST = ("lora_target_parameters", "dataset_train_split", "dataset_test_split")


@dataclass(frozen=True)
class Tool:
    """A tool whose config has the key `model`. The facts of each are in `tools.json`, with where they were read.

    `rows`: of a micro-batch by default. `defaults`: the values of its keys that differ from ours, and `objectives`
    those that an objective adds. `full`: the key without which every weight is trained. `own`: keys that tell its
    config from that of another tool with the same key `model`.
    """

    read_in: str
    model: str
    rows: int
    defaults: Mapping[str, Any]
    full: str | None
    own: Sequence[str]
    objectives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


TOOLS = {
    name: Tool(**facts)
    for name, facts in json.loads(
        resources.files(__package__).joinpath("tools.json").read_text(encoding="utf-8")
    ).items()
}
"""The tools whose configs are translated."""


def translate(path: Path) -> Draft:
    """The config at `path` in our keys.

    Raises ConfigError for one that cannot be read, is of no tool in TOOLS, or asks for another kind of training.
    """
    given, lines = _read(path)
    name = _tool(given, path)
    tool = TOOLS[name]
    refused = [f"{path}:{lines[key]}: {why}" for key, why in (*refusals.of(given), *_unusable_counts(given))]
    if refused:
        raise ConfigError("\n".join(refused))
    draft = Draft(f"Translated by `finetune init` from {path.name}, a config of {name}")
    if objective := preferences.objective(given):
        asking, ours = objective
        draft.take("training.objective", ours, asking)
        tool = replace(tool, defaults={**tool.defaults, **tool.objectives.get(ours, {})})
        read, unread = preferences.read(given, name, ours)
        draft.notes += [f"Left out, as {name} does not read it for `{ours}`: {_shown(*each)}" for each in unread]
        given = read
    left = [key for key in {**tool.defaults, **given} if key not in (*_BATCH, *_DATA, *_LAST)]
    taken: dict[str, str] = {}
    for _ in range(2):  # a key may need one that comes later, as early stopping needs evaluations
        left = [key for key in left if not _take_key(draft, key, given, tool, taken)]
    left += [key for key in _LAST if key in given and not _take_last(draft, key, given[key])]
    others: list[str] = []
    left += [key for key in _DATA if not _take_data(draft, key, given, others)]
    _take_batch(draft, tool, given)
    _apply_implicit_defaults(draft, name, given, taken)
    _note_the_rest(draft, {key: given[key] for key in left if key in given}, others)
    draft.notes += [f"To be decided: `{key}`: {message}" for key, message in contradictions(draft.config)]
    return draft


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The keys that have a value, and their lines."""
    document = strict_yaml.parse(text_of(path))
    if document.problems:
        raise ConfigError("\n".join(f"{path}:{problem.line}: {problem.message}" for problem in document.problems))
    values = {str(key): value for key, value in document.values.items() if value is not None}
    return values, {key: document.lines.get((key,), 1) for key in values}


def _tool(given: Mapping[str, Any], path: Path) -> str:
    """The tool a config is for: of those whose key for the model it has, the one with most keys in it."""
    names = [name for name, tool in TOOLS.items() if tool.model in given]
    if not names:
        wanted = " or ".join(
            f"`{model}` ({', '.join(name for name, tool in TOOLS.items() if tool.model == model)})"
            for model in dict.fromkeys(tool.model for tool in TOOLS.values())
        )
        raise ConfigError(f"{path}: a config to translate has {wanted}; this one has neither")
    own = {name: len(given.keys() & TOOLS[name].own) for name in names}
    if len(names) > 1 and not any(own.values()):
        raise ConfigError(
            f"{path}: it may be a config of {' or '.join(names)}, whose defaults differ; add `finetuning_type: lora` "
            "for LLaMA-Factory, or `use_peft: true` for TRL"
        )
    return max(names, key=own.__getitem__)


def _unusable_counts(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The keys of the batch whose value is not a count of rows or steps, with the message."""
    for key in _BATCH:
        if key in given and (type(given[key]) is not int or not 0 < given[key] <= _MOST_ROWS):
            yield key, f"`{_shown(key, given[key])}`: a whole number above 0 is needed, such as 4"


def _shown(key: str, value: Any) -> str:
    text = json.dumps(value, default=str)
    return f"{key}: {text}" if len(text) <= _LONGEST else key


_LONGEST = 60
_MOST_ROWS = 2**20
"""The rows of a step that a config may have."""


def _take_key(draft: Draft, key: str, given: Mapping[str, Any], tool: Tool, taken: dict[str, str]) -> bool:
    """Set our key for a given one or its default; the first of two wins. `taken`: the given keys by ours."""
    if key not in given:
        return _take(draft, other_names.taken(key, tool.defaults[key]), "its default there")
    settings = other_names.taken(key, given[key])
    if settings is None:
        return False
    # Targets are joined in the end.
    others = [ours for ours in settings if ours in taken and ours != "adapter.targets"]
    other = next((taken[ours] for ours in others if draft.values[ours] != settings[ours]), None)
    if other:
        draft.notes.append(f"To be decided: {_shown(key, given[key])}, beside {_shown(other, given[other])}")
        return True
    done = _take(draft, settings, key)
    taken |= dict.fromkeys(settings, key) if done else {}
    return done


def _take(draft: Draft, settings: other_names.KeyValues | None, reason: str) -> bool:
    """Add settings to the draft and return True, or return False where the config would not be valid with them."""
    if settings is None:  # a default may have no counterpart
        return False
    more = Draft(values=draft.values | settings)
    try:
        _ = more.config
    except ValidationError:
        return False
    for key, value in settings.items():
        draft.take(key, value, "" if reason == key.partition(".")[2] else reason)
    return True


def _take_last(draft: Draft, key: str, value: Any) -> bool:
    """Set a key that depends on others; return whether it could be."""
    if key == "lora_target_parameters":
        targets = draft.values.get("adapter.targets", [])
        if not isinstance(value, list) or not isinstance(targets, list):
            return False
        # There the end of a full name, such as mlp.experts.gate_up_proj; here the last two names of it.
        fused = [".".join(str(name).split(".")[-2:]) for name in value]
        return _take(draft, {"adapter.targets": [*targets, *fused]}, key)
    return value == {"dataset_train_split": "train", "dataset_test_split": "test"}[key]


def _take_batch(draft: Draft, tool: Tool, given: Mapping[str, Any]) -> None:
    rows = next((given[key] for key in _BATCH[:2] if key in given), tool.rows)
    steps = given.get(_BATCH[2]) or max(1, given.get(_BATCH[3], rows) // rows)
    _take(draft, {"training.batch_size": rows * steps}, f"{rows} x {steps} on one GPU")
    _take(draft, {"training.micro_batch": rows}, "")


def _take_data(draft: Draft, key: str, given: Mapping[str, Any], others: list[str]) -> bool:
    """Set the data sets that a key names; return whether it could be read. Its other parts are added to `others`."""
    if key not in given or key == "dataset_dir":
        return True
    sources = data_sets.sources(key, given)
    if not sources:
        return False
    others += [f"{key}.{_shown(name, value)}" for name, value in data_sets.unknown(given[key])]
    if key == "pretraining_dataset":
        draft.take("data.format", "text", key)
        draft.take("data.too_long", "split", key)
    ours = "data.eval" if key in ("test_datasets", "eval_dataset") else "data.train"
    return _take(draft, {ours: sources[0] if len(sources) == 1 else sources}, key)


def _apply_implicit_defaults(draft: Draft, name: str, given: Mapping[str, Any], taken: Mapping[str, str]) -> None:
    """Apply the other tool's defaults: training of all weights, unquantized base, no evaluation set."""
    full = TOOLS[name].full
    if full and full not in given:
        draft.take("adapter.kind", "none", f"{name} trains every weight without `{full}`")
    quantizes = any(given.get(key) for key in ("load_in_4bit", "load_in_8bit", "quantization_bit"))
    if not quantizes and given.get("adapter") != "qlora":
        draft.take("quantization.kind", "none", f"not quantized in {name}")
    if name == "TRL" and given.get("load_in_4bit") and "quantization.double" not in draft.values:
        draft.take("quantization.double", False, "its default there")
    _apply_adapter_defaults(draft, given)
    if name == "TRL" and given.get("eval_strategy", "no") not in ("no", False):
        draft.values.setdefault("data.eval", "auto")
    if not {"data.eval", "data.eval_share"} & set(draft.values):
        draft.take("data.eval", "none", f"none in {name}")
    if given.get("bf16") is False and not any(given.get(key) for key in ("fp16", "float16", "bfloat16")):
        draft.take("training.precision", "fp32", "bf16: false")
    _leave_out_ignored(draft, taken)
    _note_undecided(draft, name, given)


def _apply_adapter_defaults(draft: Draft, given: Mapping[str, Any]) -> None:
    if draft.values.get("adapter.kind") == "none":
        for key in [key for key in draft.values if key.startswith("adapter.") and key != "adapter.kind"]:
            del draft.values[key]
    elif given.get("lora_target_linear") is True:
        draft.take("adapter.targets", "all-linear", "lora_target_linear")
    if "adapter.alpha" not in draft.values and "adapter.rank" in draft.values:
        _take(draft, {"adapter.alpha": 2 * draft.values["adapter.rank"]}, "twice the rank")


def _leave_out_ignored(draft: Draft, taken: Mapping[str, str]) -> None:
    """Drop values that the config would ignore; those of a preference objective are noted."""
    ignored = [*ignored_keys(draft.config.model_dump(), CHOICES)]
    if draft.values.get("distributed.kind") in ("fsdp", "deepspeed"):  # the result is the same without
        ignored += ["kernels.fused", "kernels.compile"]
    for key in ignored:
        value = draft.values.pop(key, None)
        if value and key.startswith("preference.") and key in taken:
            draft.notes.append(f"Left out, as `{_objective(draft)}` ignores it: {_shown(taken[key], value)}")


def _note_undecided(draft: Draft, name: str, given: Mapping[str, Any]) -> None:
    """Note what the other tool's file leaves open and its defaults decide in another way than those here."""
    if "data.train" not in draft.values:
        draft.notes.append("No data set is named: write `data.train`")
    if name != "TRL":
        return
    of_answers = any(given.get(key) for key in ("assistant_only_loss", "completion_only_loss"))
    if _objective(draft) == "supervised" and not of_answers:
        draft.notes.append("To be decided: `data.loss_on`; of messages, TRL trains `all` tokens")
    if given.get("use_peft") and "adapter.targets" not in draft.values:
        draft.notes.append("To be decided: `adapter.targets`, which PEFT chooses there, often [q_proj, v_proj]")


def _objective(draft: Draft) -> Any:
    return draft.values.get("training.objective", "supervised")


def _note_the_rest(draft: Draft, left: Mapping[str, Any], others: list[str]) -> None:
    """Note the keys that were not taken: those with a counterpart, those that may change the result, harmless ones."""
    ours = {key: other_names.meant(key, left[key]) for key in left}
    harmless = [key for key in left if other_names.without_effect(key, left[key])]
    for key in left:
        if ours[key] and key not in harmless:
            draft.notes.append(f"To be decided: {_shown(key, left[key])}, here {ours[key]}")
    others = [*(_shown(key, left[key]) for key in left if not ours[key] and key not in harmless), *others]
    others = list(dict.fromkeys(others))
    if others:
        draft.notes.append(f"May change the result, and has no counterpart here: {', '.join(others)}")
    if any(other.partition(".")[2].startswith(("field", "message_", "type")) for other in others):
        draft.notes.append("Columns of other names are given in `data.columns`; `finetune data` shows what is read")
    if harmless:
        shown = ", ".join(_shown(key, left[key]) for key in harmless)
        draft.notes.append(f"Left out, as it does not change the result: {shown}")
