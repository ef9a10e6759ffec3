"""The adapter: low-rank updates on a frozen base (LoRA, arXiv 2106.09685), or every weight where there is none."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune import weight_files
from finetune.config import AdapterSection
from finetune.config.fields import unknown
from finetune.errors import ArtifactError, ConfigError, MachineError
from finetune.model.base import TRAINED_DTYPES
from finetune.model.locate import hub_call, weights_directory


def attach(base: Any, section: AdapterSection, base_name: str, seed: int, revision: str | None = None) -> Any:
    """`base` with its trained weights in place: a PeftModel, or the base itself for `kind: none`.

    The same seed gives the same adapter. Raises ConfigError naming the candidates when a target matches nothing.
    """
    if section.kind == "none":
        return base.to(TRAINED_DTYPES[section.dtype]).requires_grad_(True)
    from peft import get_peft_model

    if section.dora and getattr(base, "is_loaded_in_8bit", False) and base.device.type == "cpu":
        # peft 0.21 `dequantize_module_weight` loses the scales of an 8-bit weight that stays on the CPU.
        raise MachineError("`adapter.dora` on an int8 base needs a CUDA device; set `quantization.kind: nf4`")
    torch.manual_seed(seed)
    model = get_peft_model(base, lora_config(base, section))
    if section.init == "loftq":
        _start_from_quantization_error(model, base_name, revision)
    set_trained_dtype(model, section)
    return model


def lora_config(base: Any, section: AdapterSection) -> Any:
    """PEFT's LoraConfig for `section`, its targets checked against the modules of `base`."""
    from peft import LoraConfig

    # The fast initialisation of the PiSSA paper: a randomised SVD, here with 16 iterations.
    start: Any = "pissa_niter_16" if section.init == "pissa" else True
    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=_targets(base, section),
        modules_to_save=_extra_modules(base, section) or None,
        use_rslora=section.rslora,
        use_dora=section.dora,
        init_lora_weights=start,
        task_type="CAUSAL_LM",
    )


def casts_by_autocast(model: Any, section: AdapterSection, precision: str) -> contextlib.AbstractContextManager[None]:
    """Within the block autocast alone casts the inputs of LoRA layers, and PEFT does not.

    PEFT casts each input to the adapter's float32, and autocast casts it back: two copies of every activation, to the
    same numbers (peft 0.21, lora/layer.py; lora/bnb.py where CUDA's autocast is off). DoRA keeps the cast: its norms of
    the weights take the input's type.
    """
    from peft.helpers import disable_input_dtype_casting

    active = precision != "fp32" and not section.dora
    found: contextlib.AbstractContextManager[None] = disable_input_dtype_casting(model, active=active)
    return found


def set_trained_dtype(model: Any, section: AdapterSection) -> None:
    """Put every trained weight into `section.dtype`.

    TRL casts adapters on a quantized base to bfloat16, whatever was asked for (trl 1.16, SFTTrainer.__init__), so
    this is called after it as well. DoRA's magnitudes stay in float32: their updates are below bfloat16's grain.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            magnitude = "lora_magnitude_vector" in name
            parameter.data = parameter.data.to(torch.float32 if magnitude else TRAINED_DTYPES[section.dtype])


def trained_parameters(model: Any) -> int:
    """Number of parameters that receive gradients."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _targets(base: Any, section: AdapterSection) -> str | list[str]:
    if section.targets == "all-linear":
        return "all-linear"
    candidates = _linear_names(base)
    _check(section.targets, candidates, "adapter.targets")
    return list(section.targets)


def _extra_modules(base: Any, section: AdapterSection) -> list[str]:
    trainable = (
        name
        for name, module in base.named_modules()
        if (own := list(module.parameters(recurse=False))) and all(tensor.is_floating_point() for tensor in own)
    )
    names = {name.rpartition(".")[2] for name in trainable}
    _check(section.extra_modules, sorted(names), "adapter.extra_modules")
    return list(section.extra_modules)


def _check(wanted: list[str], candidates: list[str], key: str) -> None:
    for name in wanted:
        if name not in candidates:
            raise ConfigError(f"`{key}`: {unknown(name, candidates)}")


def _linear_names(base: Any) -> list[str]:
    """Last parts of the names of all linear layers, quantized ones included, but for the output head."""
    head = base.get_output_embeddings()
    found = {
        name.rpartition(".")[2]: None
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    return list(found)


def _start_from_quantization_error(model: Any, base_name: str, revision: str | None) -> None:
    """LoftQ with one iteration (arXiv 2310.08659, algorithm 1): BA is the best rank-r fit of W - dequantized W.

    PEFT's own version needs CUDA and leaves out the adapter's scaling.
    """
    import bitsandbytes as bnb
    from peft.tuners.lora import Linear4bit

    weights = _StoredWeights(base_name, revision)
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear4bit):
            continue
        quantized = layer.get_base_layer().weight
        stored = weights.read(name.removeprefix("base_model.model.") + ".weight").to(quantized.device, torch.float32)
        error = stored - bnb.functional.dequantize_4bit(quantized.data, quantized.quant_state).float()
        rank = layer.r["default"]
        left, values, right = torch.svd_lowrank(error, q=min(2 * rank, *error.shape), niter=4)
        root = values[:rank].sqrt()
        layer.lora_A["default"].weight.data = (right[:, :rank] * root).T.contiguous()
        layer.lora_B["default"].weight.data = (left[:, :rank] * root).contiguous() / layer.scaling["default"]


class _StoredWeights:
    """Reads single tensors from a model's safetensors files, without loading the rest."""

    def __init__(self, base_name: str, revision: str | None) -> None:
        from safetensors import safe_open

        self._open = safe_open
        self._file_of: dict[str, Path] = {}
        for file in sorted(weights_directory(base_name, revision).glob("*.safetensors")):
            weight_files.check(file)
            with safe_open(file, framework="pt") as stored:
                self._file_of.update(dict.fromkeys(stored.keys(), file))
        self._base_name = base_name

    def read(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise ArtifactError(f"LoftQ: `{name}` is not in the safetensors files of `{self._base_name}`")
        with self._open(self._file_of[name], framework="pt") as stored:
            return stored.get_tensor(name)


# What an adapter of ours may say of itself; what PEFT knows besides must be unset. Among that are imports of a named
# module, reads of a named pickle, and copies of layers without number (peft 0.21: `megatron_core`, `corda_config`,
# `layer_replication`).
_OWN = {
    "base_model_name_or_path", "inference_mode", "init_lora_weights", "lora_alpha", "lora_dropout", "modules_to_save",
    "peft_version", "r", "revision", "target_modules", "use_dora", "use_rslora",
}  # fmt: skip


def check_files(directory: Path) -> None:
    """Refuse an adapter that is no LoRA as this program writes it, before PEFT reads it.

    Raises ArtifactError naming the file: where one is missing or damaged, where the weights are none in safetensors,
    and where adapter_config.json asks for what is not trained here.
    """
    file, weights = directory / "adapter_config.json", directory / "adapter_model.safetensors"
    if not file.is_file():
        raise ArtifactError(f"{directory}: no adapter here (no {file.name}); did training finish?")
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        asked, rank = _unknown_wishes(said), said["r"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"{file}: damaged: {error}; train again") from None
    if asked:
        raise ArtifactError(
            f"{file}: {', '.join(asked)} is nothing that this program trains; use an adapter of its own"
        )
    weight_files.check(weights)
    ranks = weight_files.shapes(weights)
    if not any(".lora_A." in name and shape[:1] == [rank] for name, shape in ranks.items()):
        raise ArtifactError(f"{file}: rank {rank} is not that of the weights in {weights.name}; train again")


def _unknown_wishes(said: dict[str, Any]) -> list[str]:
    """The settings of an adapter_config.json that a plain LoRA does not have."""
    from peft import LoraConfig

    plain = LoraConfig(task_type="CAUSAL_LM").to_dict()
    wrong = [name for name, value in said.items() if name not in _OWN and value != plain.get(name)]
    # A start other than zero reads files or takes the base apart anew; a text as target is a regular expression.
    sound = {"init_lora_weights": bool, "target_modules": list, "modules_to_save": list | None}
    return wrong + [name for name, kind in sound.items() if not isinstance(said.get(name), kind)]


def load_adapter(base: Any, directory: Path) -> Any:
    """`base` with the adapter saved in `directory`. Raises ArtifactError when it is missing or damaged."""
    from peft import PeftModel

    check_files(directory)
    return hub_call(f"adapter {directory}", lambda: PeftModel.from_pretrained(base, str(directory)))
