"""An adapter to start from: located, checked against the job before weights are loaded, and copied into the new one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from finetune.config import AdapterSection
from finetune.errors import ArtifactError, ConfigError
from finetune.model.adapters import adapter, adapter_files
from finetune.model.source import file_hashes
from finetune.model.source.locate import hub_call
from finetune.model.structure import linear_layers
from finetune.storage import weight_files

_TYPES = ("F32", "BF16", "F16")
_KEYS = {
    "r": "rank", "lora_alpha": "alpha", "rank_pattern": "ranks", "use_rslora": "rslora", "use_dora": "dora",
    "modules_to_save": "extra_modules",
}  # fmt: skip
# Targets are compared by the tensors; how the earlier training was initialised and regularised does not matter.
_FREE = {
    *adapter_files.ORIGIN, "target_modules", "target_parameters", "exclude_modules", "layers_to_transform",
    "layers_pattern", "lora_dropout", "init_lora_weights", "loftq_config", "fan_in_fan_out", "task_type",
    "auto_mapping",
}  # fmt: skip
# Initializations that belong to another base than the one on disk.
_OF_ANOTHER_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


def folder_of(name: str) -> Path:
    """The folder of an adapter: a local one, or of the hub's cache. Raises ArtifactError or MachineError."""
    from huggingface_hub import snapshot_download

    path = Path(name)
    if path.is_dir():
        if (path / "adapter").is_dir() and not (path / adapter_files.CONFIG).exists():
            raise ArtifactError(f"`adapter.start_from`: {name} is a run; its adapter is {path / 'adapter'}")
        return path
    if path.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise ArtifactError(f"`adapter.start_from`: {name}: no such folder")
    files = [adapter_files.CONFIG, adapter_files.WEIGHTS]
    return Path(hub_call(f"adapter `{name}`", lambda: snapshot_download(name, allow_patterns=files)))


def sha256(section: AdapterSection) -> str | None:
    """SHA-256 (hex) of the weights to start from; None for a new adapter."""
    return section.start_from and file_hashes.sha256(folder_of(section.start_from) / adapter_files.WEIGHTS)


def trained_on(section: AdapterSection) -> str | None:
    """The base that the adapter to start from names."""
    assert section.start_from
    return adapter_files.stored_config(folder_of(section.start_from))["base_model_name_or_path"]


def check(base: Any, section: AdapterSection) -> None:
    """Check that the adapter to start from is the one that `section` describes, and fits `base`.

    `base` is weightless and unquantized, and gets an adapter. Raises ConfigError with all the keys to set if the
    adapter is another one or does not fit the base; ArtifactError if it is missing or damaged, MachineError if the hub
    cannot be reached.
    """
    if section.start_from is None:
        return
    folder, what = folder_of(section.start_from), f"`adapter.start_from`: the adapter in {section.start_from}"
    stored = adapter_files.stored_config(folder)
    adapter_files.check_weights(folder / adapter_files.WEIGHTS, _TYPES)
    linear, untrained = adapter.linear_but(base), linear_layers.untrained(base)
    adapted = adapter.adapted(base, section, low_cpu_mem_usage=True)
    made = adapter_files.as_json(adapted.peft_config["default"])
    # Null, empty and false are the same.
    other = {
        name: value
        for name, value in stored.items()
        if name not in _FREE and (value or made.get(name)) and not adapter_files.same(value, made.get(name))
    }
    if str(stored["init_lora_weights"]).lower().startswith(_OF_ANOTHER_BASE):
        other["init_lora_weights"] = stored["init_lora_weights"]
    if unknown := [f"`{name}: {_shown(other[name])}`" for name in other if name not in _KEYS]:
        raise ConfigError(f"{what} has {', '.join(unknown)}, which has no counterpart here; merge it into its base")
    # PEFT writes null for no modules; a config has an empty list.
    values = {name: [] if value is None else value for name, value in other.items()}
    to_set = [f"`adapter.{_KEYS[name]}: {_shown(value)}`" for name, value in values.items()]
    theirs = weight_files.shapes(folder / adapter_files.WEIGHTS)
    ours = {name: list(weight.shape) for name, weight in adapter_files.weights(adapted).items()}
    if strange := sorted(_layers(theirs) & untrained):
        raise ConfigError(
            f"{what} adapts `{strange[0]}`, which rows of text do not train; merge it into its base, or start from "
            "another"
        )
    if _layers(theirs) != _layers(ours):
        to_set.append(_targets(sorted(_layers(theirs)), [name for name in linear if name not in untrained]))
    if to_set:
        raise ConfigError(f"{what} is another one than this section describes; set {', '.join(to_set)}")
    if wrong := sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)):
        has, wants = theirs.get(wrong[0], "missing"), ours.get(wrong[0], "nothing")
        named = str(stored["base_model_name_or_path"] or "a base that it does not name")
        raise ConfigError(
            f"{what} does not fit `model.name`: `{adapter_files.shown(wrong[0])}` is {has} instead of {wants}; it was "
            f"trained on {adapter_files.shown(named)}"
        )


def fill(model: Any, section: AdapterSection) -> None:
    """Copy the weights to start from into the adapter of `model`, after `check`."""
    if section.start_from is not None:
        adapter_files.fill(model, folder_of(section.start_from))


def _shown(value: Any) -> str:
    """An untrusted value as YAML."""
    return adapter_files.shown(json.dumps(value))


def _layers(names: Iterable[str]) -> set[str]:
    return {adapter_files.layer_of(name) for name in names if ".lora_" in name}


def _targets(theirs: list[str], linear: list[str]) -> str:
    """The key to set, and to what, for an adapter on the layers `theirs`; `linear` are those of the base."""
    if strange := [name for name in theirs if name not in linear]:
        return f"`model.name` to a base with a linear layer `{adapter_files.shown(strange[0])}`, which it adapts"
    names = sorted({name.rpartition(".")[2] for name in theirs})
    if theirs == sorted(name for name in linear if name.rpartition(".")[2] in names):
        return f"`adapter.targets: [{', '.join(names)}]`"
    return f"`adapter.targets` to a regular expression for the {len(theirs)} layers it adapts, such as `{theirs[0]}`"
