"""The files of a trained adapter: checked against the run's config, and loaded onto a base."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from finetune.config import AdapterSection
from finetune.config.field_types import is_pattern
from finetune.errors import ArtifactError
from finetune.model.adapters import new_rows, plain_peft
from finetune.model.adapters.adapter import adapted, lora_settings
from finetune.model.source import file_hashes
from finetune.model.source.locate import hub_call
from finetune.storage import records, weight_files

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Keys of adapter_config.json that record its origin, with their types. They are not used here.
ORIGIN = {
    "base_model_name_or_path": str | None,
    "inference_mode": bool,
    "peft_version": str | None,
    "revision": str | None,
}
# Keys that depend on the modules of the base. PEFT sets `fan_in_fan_out` for those of GPT-2, unless they are quantized.
_OF_BASE = {
    "target_modules": list, "target_parameters": list | None, "rank_pattern": dict,
    "trainable_token_indices": dict | None, "fan_in_fan_out": bool,
}  # fmt: skip
_NEEDED = ("peft_type", "r", "lora_alpha", "target_modules", "use_dora", "use_rslora")
_TYPES = ("F32", "BF16")
_AGAIN = "run `finetune train` again, which publishes this run's adapter from its last checkpoint, or restore it"


def weights(model: Any, state: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """The adapter's tensors (not copies), by their names in PEFT's files; `state` has those of a sharded model."""
    from peft import get_peft_model_state_dict

    if state is None:
        # `state_dict` would copy parts of each 4-bit weight's quantization (bitsandbytes 0.50, `QuantState.as_dict`).
        state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    # "auto" would ask the hub whether the vocabulary was resized; `extra_modules` says what else is trained.
    return dict(get_peft_model_state_dict(model, state, save_embedding_layers=False))


def layer_of(name: str) -> str:
    """The full name of the layer that a LoRA tensor of this name adapts."""
    return name.partition(".lora_")[0].removeprefix("base_model.model.")


def scales(model: Any) -> dict[str, float]:
    """The scale of each adapted layer, by its name in PEFT's model."""
    from peft.tuners.lora import LoraLayer

    return {name: layer.scaling["default"] for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}


def published(section: AdapterSection) -> AdapterSection:
    """The section that describes the adapter published after training with `section`.

    PiSSA publishes a plain adapter of twice the rank and the same scale (see `training.publishing`); LoftQ's
    initialisation is contained in the weights.
    """
    if section.init != "pissa":
        return section.model_copy(update={"init": "default"})
    alpha = section.alpha * (2**0.5 if section.rslora else 2)
    ranks = {name: 2 * rank for name, rank in section.ranks.items()}
    return section.model_copy(update={"init": "default", "rank": 2 * section.rank, "ranks": ranks, "alpha": alpha})


def check_files(directory: Path, section: AdapterSection) -> None:
    """Raise ArtifactError unless `directory` has, complete and unchanged, the adapter that training with `section`
    publishes.
    """
    file = directory / CONFIG
    values = stored_config(directory)
    # All other options of PEFT must be unset. Some import a named module, read a named pickle or copy any number of
    # layers (peft 0.21: `megatron_core`, `corda_config`, `layer_replication`).
    free = {name: kind for name, kind in {**ORIGIN, **_OF_BASE}.items() if name != "trainable_token_indices"}
    expected = as_json(lora_settings(published(section)))
    if section.new_rows:  # `_built` checks in which modules
        numbers, stored = [row[0] for row in section.new_rows], values["trainable_token_indices"]
        if isinstance(stored, dict) and stored and all(each == numbers for each in stored.values()):
            expected["trainable_token_indices"] = stored
    if values["target_parameters"]:
        expected["lora_dropout"] = 0.0  # see `plain_peft.settings`
    wrong = [name for name, kind in free.items() if not isinstance(values[name], kind)]
    wrong += [name for name in values if name not in free and not same(values[name], expected.get(name))]
    if not (section.targets == "all-linear" or any(map(is_pattern, section.targets)) or values["target_parameters"]):
        # Full names, or ends of them, where the last part alone means layers without an adapter too.
        last = {name.rpartition(".")[2] if isinstance(name, str) else "" for name in values["target_modules"]}
        wrong += [] if same(list(last), section.targets) else ["target_modules"]
    if wrong:
        differences = ", ".join(f"`{shown(name)}` is {shown(reprlib.repr(values[name]))}" for name in wrong[:3])
        raise ArtifactError(f"{file}: {differences}, which does not match the run's config.yaml; {_AGAIN}")
    check_weights(directory / WEIGHTS, _TYPES)
    kept = records.find(directory / "fingerprint.json", records.FINGERPRINT)
    if kept and "weights" in kept and kept["weights"] != file_hashes.sha256(directory / WEIGHTS):
        raise ArtifactError(f"{directory / WEIGHTS}: not as it was written: damaged or replaced; {_AGAIN}")


def check_weights(file: Path, types: Sequence[str]) -> None:
    """Raise ArtifactError unless `file` is complete and has finite tensors of these types alone."""
    weight_files.check(file)
    with safe_open(file, framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118 -- not a dict
            if (kind := stored.get_slice(name).get_dtype()) not in types:
                raise ArtifactError(f"{file}: `{shown(name)}` has type {kind}; expected {' or '.join(types)}")
            if not weight_files.is_finite(stored.get_tensor(name)):
                raise ArtifactError(f"{file}: `{shown(name)}` has values that are not finite")


class StoredAdapter:
    """The tensors of the adapter saved in `directory`, read one by one."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / WEIGHTS
        self._names = set(weight_files.shapes(self._file))

    def name(self, parameter: str) -> str:
        """The name in the file of a parameter of the model with the adapter."""
        name = parameter.replace(".modules_to_save.default.", ".").replace(".default.", ".")
        if name.endswith(new_rows.TRAINED):
            name = name.removesuffix(".default")
            # A tied head has the rows of the embedding.
            return name if name in self._names else next(own for own in self._names if own.endswith("_tokens_delta"))
        return name if name in self._names else name.removesuffix(".weight")  # a magnitude of DoRA

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the file."""
        with safe_open(self._file, framework="pt") as stored:
            tensor: torch.Tensor = stored.get_tensor(name)
        return tensor


def weightless_adapter(base: Any, directory: Path, section: AdapterSection) -> Any:
    """`base` (on the meta device) with the adapter in `directory`, whose weights stay there. Raises ArtifactError."""
    return _built(base, directory, section, low_cpu_mem_usage=True)


def load_adapter(base: Any, directory: Path, section: AdapterSection) -> Any:
    """`base` with the adapter saved in `directory`, which must be exactly what training with `section` publishes.

    PEFT's own loading takes the settings from the file, skips tensors that the model lacks and initialises those that
    the file lacks (peft 0.21, `set_peft_model_state_dict`). Here the adapter is built from `section` and then filled.
    Raises ArtifactError if the adapter is missing, damaged or a different one.
    """
    check_files(directory, section)
    model = _built(base, directory, section)
    fill(model, directory)
    return model.eval()


@torch.no_grad()
def fill(model: Any, directory: Path) -> None:
    """Copy the weights in `directory`, which were checked, into the adapter of `model`."""
    with safe_open(directory / WEIGHTS, framework="pt") as stored:
        for name, weight in weights(model).items():
            weight.copy_(stored.get_tensor(name))


def _built(base: Any, directory: Path, section: AdapterSection, **options: Any) -> Any:
    """`base` with a new adapter as `section` publishes it, after checking that the one in `directory` fits it."""
    model = hub_call(f"adapter {directory}", lambda: adapted(base, published(section), inference_mode=True, **options))
    settings, made = stored_config(directory), as_json(plain_peft.settings(model))
    for name in _OF_BASE:
        unquantized = name == "fan_in_fan_out" and not settings[name]  # a quantized run's base, to be merged
        if not (same(settings[name] or None, made[name] or None) or unquantized):
            raise ArtifactError(
                f"{directory / CONFIG}: `{name}` is {shown(reprlib.repr(settings[name]))}, but this base has "
                f"{shown(reprlib.repr(made[name]))}; {_AGAIN}"
            )
    stored = weight_files.shapes(directory / WEIGHTS)
    expected = {name: list(weight.shape) for name, weight in weights(model).items()}
    wrong = sorted(name for name in stored.keys() | expected.keys() if stored.get(name) != expected.get(name))
    if wrong:
        first = wrong[0]
        raise ArtifactError(
            f"{directory / WEIGHTS}: {len(wrong)} tensors do not fit this base and config, such as "
            f"`{shown(first)}`: {stored.get(first, 'missing')} instead of {expected.get(first, 'nothing')}; {_AGAIN}"
        )
    return model


def stored_config(directory: Path) -> dict[str, Any]:
    """The contents of adapter_config.json, with PEFT's defaults for missing keys. Raises ArtifactError."""
    from peft import LoraConfig

    file = directory / CONFIG
    if not file.is_file():
        raise ArtifactError(f"{directory}: no adapter here (no {file.name}); did training finish?")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("not a JSON object")
        if missing := [name for name in _NEEDED if name not in settings]:
            raise ValueError(f"{', '.join(missing)} missing")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{file}: damaged: {shown(str(error))}; train again") from None
    return {**as_json(LoraConfig(task_type="CAUSAL_LM")), **settings}


def as_json(config: Any) -> dict[str, Any]:
    """A LoraConfig as JSON values."""
    values = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    return dict(json.loads(json.dumps(values)))


def same(value: Any, expected: Any) -> bool:
    """Whether two JSON values are equivalent: 32 equals 32.0 (but not true), and lists of names are unordered."""
    if isinstance(value, list) and isinstance(expected, list):
        return all(isinstance(name, str) for name in value) and sorted(value) == sorted(expected)
    if isinstance(expected, float) and type(value) is int:
        return value == expected
    return type(value) is type(expected) and value == expected


def shown(text: str) -> str:
    """Text of an untrusted file for an error message: escaped and shortened."""
    return ascii(text)[1:-1][:100]
