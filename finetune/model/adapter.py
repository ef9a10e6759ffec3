"""The LoRA adapter (arXiv 2106.09685): low-rank updates of a frozen base; without one, every weight is trained."""

from __future__ import annotations

import contextlib
import json
import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.config import AdapterSection
from finetune.config.fields import is_pattern, unknown
from finetune.config.sections import RANKS
from finetune.errors import ArtifactError, ConfigError, first_line
from finetune.model import direct_reads, experts
from finetune.model.base import TRAINED_DTYPES
from finetune.model.locate import hub_call, weights_directory
from finetune.runtime import libraries
from finetune.storage import weight_files


def attach(base: Any, section: AdapterSection, base_name: str, seed: int, revision: str | None = None) -> Any:
    """Make `base` trainable: returns a PeftModel, or the base itself for `kind: none`.

    The same seed gives the same adapter. Raises ConfigError naming the candidates if a target matches nothing.
    """
    if section.kind == "none":
        return base.to(TRAINED_DTYPES[section.dtype]).requires_grad_(True)
    torch.manual_seed(seed)
    model = adapted(base, section)
    if section.init == "loftq":
        _start_from_quantization_error(model, base_name, revision)
    set_trained_dtype(model, section)
    return model


def adapted(base: Any, section: AdapterSection, *, inference_mode: bool = False, **options: Any) -> Any:
    """`base` with a new adapter as `section` describes it; see `attach`."""
    from peft import get_peft_model

    config = lora_config(base, section)
    config.inference_mode = inference_mode
    with _targets_as_named():
        try:
            return get_peft_model(base, config, **options)
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(
                f"`adapter.targets`: PEFT cannot adapt these layers of {type(base).__name__} ({first_line(error)}); "
                "choose others"
            ) from error


def lora_config(base: Any, section: AdapterSection) -> Any:
    """PEFT's LoraConfig for `section`, with targets checked against the modules of `base`."""
    _check_extra_modules(base, section)
    modules, parameters = _targets(base, section)
    if section.ranks:
        ranks(base, section)  # that each key has its layers
    # The PiSSA paper's fast initialisation by randomised SVD, with 16 iterations.
    start = "pissa_niter_16" if section.init == "pissa" else True
    return _lora(section, target_modules=modules, target_parameters=parameters or None, init_lora_weights=start)


def check_rank(base: Any, section: AdapterSection) -> None:
    """Raise ConfigError for a rank above the smaller side of every layer that has it, where an update is a full one."""
    if section.kind == "none":
        return
    lora_config(base, section)
    largest: dict[int, int] = {}
    for name, rank in ranks(base, section).items():
        layer = base.get_submodule(name)
        largest[rank] = max(largest.get(rank, 0), min(layer.in_features, layer.out_features))
    for rank, side in largest.items():
        if rank > side:
            raise ConfigError(
                f"`adapter.rank{'' if rank == section.rank else 's'}`: {rank} is more than the smaller side of each "
                f"layer it would adapt, {side} at most, where nothing is saved; {RANKS} is usual"
            )


def ranks(base: Any, section: AdapterSection) -> dict[str, int]:
    """Full names of the linear layers that get an adapter, with their ranks.

    Raises ConfigError for a key of `adapter.ranks` that matches none of them.
    """
    from peft.utils.other import get_pattern_key

    targets = _targets(base, section)[0]
    layers = [
        name
        for name in linear_but(base)
        if targets == "all-linear" or name in targets or any(name.endswith(f".{target}") for target in targets)
    ]
    keys = {name: get_pattern_key(section.ranks, name) for name in layers}
    for key in section.ranks:
        if not any(get_pattern_key([key], name) == key for name in layers):
            _refuse_rank_of_none(key, layers)
    return {name: section.ranks.get(key, section.rank) for name, key in keys.items()}


def _refuse_rank_of_none(key: str, layers: list[str]) -> None:
    if is_pattern(key):
        near = f", such as `{layers[0]}`" if layers else ""
        raise ConfigError(f"`adapter.ranks`: `{key}` matches the full name, or an end of it, of no adapted layer{near}")
    _check([key], list(dict.fromkeys(name.rpartition(".")[2] for name in layers)), "adapter.ranks")


def _lora(section: AdapterSection, **more: Any) -> Any:
    """PEFT's LoraConfig from `section` and the arguments in `more`."""
    from peft import LoraConfig

    return LoraConfig(
        r=section.rank,
        rank_pattern=dict(section.ranks),
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        modules_to_save=list(section.extra_modules) or None,
        use_rslora=section.rslora,
        use_dora=section.dora,
        task_type="CAUSAL_LM",
        **more,
    )


def casts_by_autocast(model: Any, section: AdapterSection, precision: str) -> contextlib.AbstractContextManager[None]:
    """In the block, only autocast casts the inputs of LoRA layers; PEFT does not.

    PEFT casts each input to the adapter's float32 and autocast casts it back: two copies of every activation with the
    same values (peft 0.21, lora/layer.py; lora/bnb.py if CUDA autocast is off). DoRA keeps the cast, because its
    weight norms use the input's dtype.
    """
    from peft.helpers import disable_input_dtype_casting

    active = precision != "fp32" and not section.dora
    return disable_input_dtype_casting(model, active=active)


def set_trained_dtype(model: Any, section: AdapterSection) -> None:
    """Cast trained weights to `section.dtype`.

    DoRA's magnitudes stay in float32: their updates are smaller than bfloat16's resolution.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            magnitude = "lora_magnitude_vector" in name
            parameter.data = parameter.data.to(torch.float32 if magnitude else TRAINED_DTYPES[section.dtype])


def _targets(base: Any, section: AdapterSection) -> tuple[str | list[str], list[str]]:
    """PEFT's `target_modules` and `target_parameters`.

    In a mixture of experts, `all-linear` excludes the routers; the experts are parameters, not linear layers. It also
    excludes layers whose weight the model's code reads directly, bypassing any adapter.
    """
    past = direct_reads.names(base)
    if section.targets == "all-linear":
        others = [*experts.routers(base).values(), *map(base.get_submodule, past)]
        return linear_but(base, *others) if past or experts.is_mixture(base) else "all-linear", []
    linear, parameters = _linear_names(base), _parameter_names(base)
    names = [name for name in section.targets if not is_pattern(name)]
    _check(names, [*linear, *parameters], "adapter.targets")
    matched = matching(base, section)
    direct = {name.rpartition(".")[2] for name in past} & set(names) | set(past) & set(matched)
    if wrong := sorted(direct):
        raise ConfigError(
            f"`adapter.targets`: an adapter on `{'`, `'.join(wrong)}` may not be trained, because this model's code "
            "reads the weight or its dtype outside the layer; remove it, or set `all-linear`, which excludes it"
        )
    chosen = {name: parameters[name] for name in names if name in parameters}
    _refuse_on_parameters(chosen, section)
    return [*(name for name in names if name not in chosen), *matched], list(chosen)


def matching(base: Any, section: AdapterSection) -> list[str]:
    """Full names of the linear layers that the regular expressions among the targets match as a whole.

    Raises ConfigError for one that matches none.
    """
    patterns = [] if section.targets == "all-linear" else [name for name in section.targets if is_pattern(name)]
    linear = linear_but(base) if patterns else []
    for pattern in patterns:
        if not any(re.fullmatch(pattern, name) for name in linear):
            near = f", such as `{linear[0]}`" if linear else ""
            raise ConfigError(f"`adapter.targets`: `{pattern}` matches the full name of no linear layer{near}")
    return [name for name in linear if any(re.fullmatch(pattern, name) for pattern in patterns)]


def left_out(base: Any, section: AdapterSection) -> int:
    """Number of layers that `all-linear` excludes because the model's code reads their weight directly."""
    return len(direct_reads.names(base)) if section.kind == "lora" and section.targets == "all-linear" else 0


def linear_but(base: Any, *others: nn.Module) -> list[str]:
    """Full names of all linear layers except the output head and `others`."""
    kept = {base.get_output_embeddings(), *others}
    return [name for name, module in base.named_modules() if isinstance(module, nn.Linear) and module not in kept]


def _parameter_names(base: Any) -> dict[str, Any]:
    """Expert and router weights outside linear layers, by the last two parts of their names (`gate.weight`)."""
    found = {name: getattr(module, part) for name, module, part in experts.weights(base)}
    found |= {
        f"{name}.weight": module.weight
        for name, module in experts.routers(base).items()
        if not isinstance(module, nn.Linear)
    }
    return {".".join(name.split(".")[-2:]): parameter for name, parameter in found.items()}


def _refuse_on_parameters(chosen: dict[str, Any], section: AdapterSection) -> None:
    """Raise ConfigError for options that PEFT does not support on parameters (peft 0.21, `ParamWrapper`)."""
    for name, parameter in chosen.items():
        if not parameter.is_floating_point() or hasattr(parameter, "quant_state"):
            raise ConfigError(
                f"`adapter.targets`: `{name}` is quantized to 4 bit, and such experts cannot have an adapter; remove "
                "it, or set `quantization.kind` to `int8` or `none`, which keep experts in 16 bit"
            )
        wrong = {
            "dropout": section.dropout,
            "dora": section.dora,
            "init": section.init == "pissa",
            "ranks": section.ranks,
        }
        if asked := [f"`adapter.{key}`" for key, value in wrong.items() if value]:
            raise ConfigError(
                f"`adapter.targets`: `{name}` is a parameter, not a linear layer, so its adapter cannot use "
                f"{', '.join(asked)}; remove one or the other"
            )


def _targets_as_named() -> contextlib.AbstractContextManager[None]:
    """Keep PEFT from mistaking linear layers of a mixture of experts for transformers 4's experts of the same names.

    To convert adapters made with transformers 4, peft 0.21 (`convert_peft_config_for_transformers`) would move an
    adapter on the `gate_proj` of shared experts or dense layers to the fused experts, at twice the rank.
    """
    from peft.utils import transformers_weight_conversion

    return libraries.replaced(
        transformers_weight_conversion, "convert_peft_config_for_transformers", lambda *args, **kwargs: None
    )


def _check_extra_modules(base: Any, section: AdapterSection) -> None:
    trainable = (
        name
        for name, module in base.named_modules()
        if (own := list(module.parameters(recurse=False))) and all(tensor.is_floating_point() for tensor in own)
    )
    names = {name.rpartition(".")[2] for name in trainable}
    _check(section.extra_modules, sorted(names), "adapter.extra_modules")


def _check(wanted: list[str], candidates: list[str], key: str) -> None:
    for name in wanted:
        if name not in candidates:
            several = [part.strip() for part in name.split(",")]
            if len(several) > 1 and set(several) <= set(candidates):
                raise ConfigError(f"`{key}`: write several as a list: [{', '.join(several)}]")
            raise ConfigError(f"`{key}`: {unknown(name, candidates)}")


def _linear_names(base: Any) -> list[str]:
    """Last name components of all linear layers, including quantized ones, except the output head."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linear_but(base)))


def _start_from_quantization_error(model: Any, base_name: str, revision: str | None) -> None:
    """LoftQ with one iteration (arXiv 2310.08659, algorithm 1): BA is the best rank-r approximation of the error
    W - dequantized W.

    PEFT's own implementation needs CUDA and ignores the adapter's scaling.
    """
    import bitsandbytes as bnb
    from peft.tuners.lora import Linear4bit

    file_of: dict[str, Path] = {}
    for file in sorted(weights_directory(base_name, revision).glob("*.safetensors")):
        weight_files.check(file)
        with _opened(file) as opened:
            file_of.update(dict.fromkeys(opened.keys(), file))
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear4bit):
            continue
        quantized = layer.get_base_layer().weight
        key = name.removeprefix("base_model.model.") + ".weight"
        if key not in file_of:
            raise ArtifactError(f"LoftQ: `{key}` is not in the safetensors files of `{base_name}`")
        with _opened(file_of[key]) as opened:
            stored = opened.get_tensor(key).to(quantized.device, torch.float32)
        error = stored - bnb.functional.dequantize_4bit(quantized.data, quantized.quant_state).float()
        rank = layer.r["default"]
        left, values, right = torch.svd_lowrank(error, q=min(2 * rank, *error.shape), niter=4)
        root = values[:rank].sqrt()
        layer.lora_A["default"].weight.data = (right[:, :rank] * root).T.contiguous()
        layer.lora_B["default"].weight.data = (left[:, :rank] * root).contiguous() / layer.scaling["default"]


# -- what was saved --------------------------------------------------------------------------------------------------

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_CONFIG_BYTES = 2**22
# Keys of adapter_config.json that record its origin, with their types. They are not used here.
ORIGIN = {
    "base_model_name_or_path": str | None,
    "inference_mode": bool,
    "peft_version": str | None,
    "revision": str | None,
}
# Keys that depend on the base's modules.
_OF_BASE = {"target_modules": list, "target_parameters": list | None}
_NEEDED = ("peft_type", "r", "lora_alpha", "target_modules", "use_dora", "use_rslora")
_TYPES = ("F32", "BF16")


def weights(model: Any) -> dict[str, torch.Tensor]:
    """The adapter's tensors (not copies), by their names in PEFT's adapter file."""
    from peft import get_peft_model_state_dict

    # Its `state_dict` would copy parts of each 4-bit weight's quantization (bitsandbytes 0.50, `QuantState.as_dict`).
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    # "auto" would ask the hub whether the vocabulary was resized; `extra_modules` says what else is trained.
    return dict(get_peft_model_state_dict(model, state, save_embedding_layers=False))


def published(section: AdapterSection) -> AdapterSection:
    """The section that describes the adapter published after training with `section`.

    PiSSA publishes a plain adapter of twice the rank and the same scale (see `finetune.training.run`); LoftQ's
    initialisation is contained in the weights.
    """
    if section.init != "pissa":
        return section.model_copy(update={"init": "default"})
    alpha = section.alpha * (2**0.5 if section.rslora else 2)
    ranks = {name: 2 * rank for name, rank in section.ranks.items()}
    return section.model_copy(update={"init": "default", "rank": 2 * section.rank, "ranks": ranks, "alpha": alpha})


def check_files(directory: Path, section: AdapterSection) -> None:
    """Check, without the base, that `directory` has the adapter that training with `section` publishes.

    Raises ArtifactError naming a file that is missing or damaged, has weights that are not finite, or, for
    adapter_config.json, differs from `section`.
    """
    file = directory / CONFIG
    values = stored_config(directory)
    # All other options of PEFT must be unset. Some import a named module, read a named pickle or copy any number of
    # layers (peft 0.21: `megatron_core`, `corda_config`, `layer_replication`).
    free, expected = {**ORIGIN, **_OF_BASE}, as_json(_lora(published(section)))
    wrong = [name for name, kind in free.items() if not isinstance(values[name], kind)]
    wrong += [name for name in values if name not in free and not same(values[name], expected.get(name))]
    if not (section.targets == "all-linear" or any(map(is_pattern, section.targets)) or values["target_parameters"]):
        wrong += [] if same(values["target_modules"], section.targets) else ["target_modules"]
    if wrong:
        differences = ", ".join(f"`{shown(name)}` is {shown(reprlib.repr(values[name]))}" for name in wrong[:3])
        raise ArtifactError(
            f"{file}: {differences}, which does not match the run's config.yaml; restore this run's adapter, or train "
            "again"
        )
    check_weights(directory / WEIGHTS, _TYPES)


def check_weights(file: Path, types: Sequence[str]) -> None:
    """Raise ArtifactError unless `file` is complete and has finite tensors of these types alone."""
    weight_files.check(file)
    with _opened(file) as stored:
        for name in stored.keys():  # noqa: SIM118 -- not a dict
            if (kind := stored.get_slice(name).get_dtype()) not in types:
                raise ArtifactError(f"{file}: `{shown(name)}` has type {kind}; expected {' or '.join(types)}")
            if not weight_files.is_finite(stored.get_tensor(name)):
                raise ArtifactError(f"{file}: `{shown(name)}` has values that are not finite")


class Stored:
    """The tensors of the adapter saved in `directory`, read one by one."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / WEIGHTS
        self._names = set(weight_files.shapes(self._file))

    def name(self, parameter: str) -> str:
        """The name in the file of a parameter of the model with the adapter."""
        name = parameter.replace(".modules_to_save.default.", ".").replace(".default.", ".")
        return name if name in self._names else name.removesuffix(".weight")  # a magnitude of DoRA

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the file."""
        with _opened(self._file) as stored:
            tensor: torch.Tensor = stored.get_tensor(name)
        return tensor


def weightless_adapter(base: Any, directory: Path, section: AdapterSection) -> Any:
    """`base` (on the meta device) with the adapter saved in `directory`, whose weights stay there.

    Raises ArtifactError for an adapter whose targets, tensors or shapes do not fit `base` and `section`.
    """
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
    with _opened(directory / WEIGHTS) as stored:
        for name, weight in weights(model).items():
            weight.copy_(stored.get_tensor(name))


def _built(base: Any, directory: Path, section: AdapterSection, **options: Any) -> Any:
    """`base` with a new adapter as `section` publishes it, after checking that the one in `directory` fits it."""
    model = hub_call(f"adapter {directory}", lambda: adapted(base, published(section), inference_mode=True, **options))
    settings, made = stored_config(directory), as_json(model.peft_config["default"])
    for name in _OF_BASE:
        if not same(settings[name] or None, made[name] or None):
            raise ArtifactError(
                f"{directory / CONFIG}: `{name}` is {shown(reprlib.repr(settings[name]))}, but this base has "
                f"{shown(reprlib.repr(made[name]))}; restore this run's adapter, or train again"
            )
    found = weight_files.shapes(directory / WEIGHTS)
    expected = {name: list(weight.shape) for name, weight in weights(model).items()}
    wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if wrong:
        first = wrong[0]
        raise ArtifactError(
            f"{directory / WEIGHTS}: {len(wrong)} tensors do not fit this base and config, such as "
            f"`{shown(first)}`: {found.get(first, 'missing')} instead of {expected.get(first, 'nothing')}; restore "
            "this run's adapter, or train again"
        )
    return model


def stored_config(directory: Path) -> dict[str, Any]:
    """The contents of adapter_config.json, with PEFT's defaults for missing keys. Raises ArtifactError."""
    from peft import LoraConfig

    file = directory / CONFIG
    if not file.is_file():
        raise ArtifactError(f"{directory}: no adapter here (no {file.name}); did training finish?")
    try:
        if file.stat().st_size > _CONFIG_BYTES:
            raise ValueError("too large")
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


def _opened(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, framework="pt")


def shown(text: str) -> str:
    """Text of an untrusted file for an error message: escaped and shortened."""
    return ascii(text)[1:-1][:100]
