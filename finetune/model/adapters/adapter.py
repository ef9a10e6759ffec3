"""The LoRA adapter (arXiv 2106.09685): low-rank updates of a frozen base; without one, every weight is trained."""

from __future__ import annotations

import contextlib
import re
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from finetune.config import AdapterSection
from finetune.config.field_types import is_pattern, unknown
from finetune.config.sections import RANKS
from finetune.errors import ArtifactError, ConfigError, first_line
from finetune.model.adapters import new_rows
from finetune.model.base import TRAINED_DTYPES
from finetune.model.precision import PRECISIONS
from finetune.model.source import identity
from finetune.model.source.locate import weights_directory
from finetune.model.structure import composite, experts, linear_layers, sequence_head
from finetune.runtime import patches
from finetune.storage import weight_files


def attach(base: Any, section: AdapterSection, base_name: str, seed: int, revision: str | None = None) -> Any:
    """Make `base` trainable: a PeftModel, the same for the same seed; or the base itself for `kind: none`."""
    if section.kind == "none":
        new_rows.start(base, section.new_rows)
        whole = base.to(TRAINED_DTYPES[section.dtype]).requires_grad_(True)
        torch.manual_seed(seed)
        sequence_head.start(whole)
        return whole
    torch.manual_seed(seed)
    model = adapted(base, section)
    new_rows.start(model, section.new_rows)
    sequence_head.start(model)
    if section.init == "loftq":
        _start_from_quantization_error(model, base_name, revision)
    set_trained_dtype(model, section)
    return model


def adapted(base: Any, section: AdapterSection, *, inference_mode: bool = False, **options: Any) -> Any:
    """`base` with a new adapter as `section` describes it; see `attach`."""
    from peft import get_peft_model
    from peft.tuners import lora as peft_lora

    from finetune.model.adapters.expert_adapter import ParamWrapper

    config = lora_config(base, section)
    config.inference_mode = inference_mode
    task = config.task_type
    if sequence_head.is_classifier(base):  # PEFT's class for them would train modules of other names as well
        config.task_type = None
    # PEFT would take linear layers of a mixture of experts for transformers 4's experts of the same names.
    as_named = patches.CONVERT_ADAPTER_CONFIG.by(lambda *args, **kwargs: None)
    with as_named, patches.PARAM_WRAPPER.by(ParamWrapper), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # PEFT sets it by the class of each layer
        # It compares the keys with modules alone, and those of experts name parameters; `ranks` checks the others.
        warnings.filterwarnings("ignore", "The following rank_pattern keys did not match any targeted module")
        try:
            model = get_peft_model(base, config, **options)
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(
                f"`adapter.targets`: PEFT cannot adapt these layers of {type(base).__name__} ({first_line(error)}); "
                "choose others"
            ) from error
    config.task_type = task
    new_rows.complete(model)
    if composite.is_language_alone(base) or composite.beside_language(base):
        # A part of a name may mean layers of the other models as well.
        config.target_modules = {
            name
            for name, part in model.get_base_model().named_modules()
            if isinstance(part, peft_lora.LoraLayer) and not isinstance(part, peft_lora.ParamWrapper)
        }
    return model


def lora_config(base: Any, section: AdapterSection) -> Any:
    """PEFT's LoraConfig for `section`, with targets and extra modules checked against those of `base`."""
    seen = composite.beside_language(base)  # their parts, such as a projector, may be trained whole
    trainable = (
        name
        for name, module in base.named_modules()
        if (own := list(module.parameters(recurse=any(f"{name}.".startswith(f"{part}.") for part in seen))))
        and all(tensor.is_floating_point() for tensor in own)
    )
    _check(section.extra_modules, sorted(set(map(_last, trainable))), "adapter.extra_modules")
    modules, parameters = _targets(base, section)
    if section.ranks:
        ranks(base, section)  # raises for a key without layers
    # The PiSSA paper's fast initialisation by randomised SVD, with 16 iterations.
    start = "pissa_niter_16" if section.init == "pissa" else True
    config = lora_settings(
        section, target_modules=modules, target_parameters=list(parameters) or None, init_lora_weights=start,
        trainable_token_indices=new_rows.by_module(base, section.new_rows, section.extra_modules),
    )  # fmt: skip
    # PEFT takes the first pattern that matches, and patterns of `ranks` are meant for linear layers.
    rank = section.rank_of_experts(experts.active(base))
    of_experts = {name: rank for name, weight in parameters.items() if _is_of_experts(weight)}
    if section.ranks or {*of_experts.values()} - {section.rank}:
        config.rank_pattern = {**of_experts, **section.ranks}
    return config


def check_rank(base: Any, section: AdapterSection) -> None:
    """Raise ConfigError for a rank above the smaller side of every layer that has it: the update is of full rank; of
    any layer, if the adapter starts from singular values, of which a layer has no more.
    """
    if section.kind == "none":
        return
    lora_config(base, section)
    largest: dict[tuple[str, int], int] = {}
    too_narrow: dict[str, tuple[int, int]] = {}
    for name, rank in ranks(base, section).items():
        layer = base.get_submodule(name)
        # GPT-2's layers have other names for their input and output features.
        sides = (layer.nx, layer.nf) if hasattr(layer, "nf") else (layer.in_features, layer.out_features)
        key = "rank" if rank == section.rank else "ranks", rank
        largest[key] = max(largest.get(key, 0), min(sides))
        if min(sides) < too_narrow.get(_last(name), (rank, rank))[1]:  # the narrowest layer of each name
            too_narrow[_last(name)] = rank, min(sides)
    for weight in adapted_experts(base, section).values():
        key = "expert_rank", section.rank_of_experts(experts.active(base))
        largest[key] = max(largest.get(key, 0), min(experts.shape(weight)[1:]))
    for (name, rank), side in largest.items():
        if rank > side:
            raise ConfigError(
                f"`adapter.{name}`: {rank} is more than the smaller side of each layer it would adapt, {side} at most, "
                f"where nothing is saved; {RANKS} is usual"
            )
    if too_narrow and section.init != "default":
        name, (rank, side) = min(too_narrow.items(), key=lambda one: one[1][1])
        sides_of = ", ".join(f"{name}: {side}" for name, (_, side) in too_narrow.items())
        raise ConfigError(
            f"`adapter.init`: {section.init} starts from {rank} singular values, the rank, and `{name}` has no more "
            f"than its smaller side, {side}; set `adapter.ranks: {{{sides_of}}}` or less, `adapter.rank` to {side} or "
            "less, or `init: default`"
        )


def adapted_experts(base: Any, section: AdapterSection) -> dict[str, Any]:
    """The weights of experts that get an adapter, by the last two parts of their names."""
    if section.kind == "none":
        return {}
    return {name: weight for name, weight in _targets(base, section)[1].items() if _is_of_experts(weight)}


def ranks(base: Any, section: AdapterSection) -> dict[str, int]:
    """Ranks of the linear layers that get an adapter, by full name. Raises ConfigError for a key that matches none."""
    from peft.utils.other import get_pattern_key

    targets = _targets(base, section)[0]
    layers = [
        name
        for name in linear_but(base)
        if targets == "all-linear" or name in targets or any(name.endswith(f".{target}") for target in targets)
    ]
    keys = {name: get_pattern_key(section.ranks, name) for name in layers}
    for key in section.ranks:
        if any(get_pattern_key([key], name) == key for name in layers):
            continue
        if is_pattern(key):
            near = f", such as `{layers[0]}`" if layers else ""
            raise ConfigError(
                f"`adapter.ranks`: `{key}` matches the full name, or an end of it, of no adapted layer{near}"
            )
        _check([key], list(dict.fromkeys(map(_last, layers))), "adapter.ranks")
    return {name: section.ranks.get(key, section.rank) for name, key in keys.items()}


def lora_settings(section: AdapterSection, **more: Any) -> Any:
    """PEFT's LoraConfig from `section` alone, which does not know the targets, and the arguments in `more`."""
    from peft import LoraConfig

    return LoraConfig(
        r=section.rank,
        rank_pattern=dict(section.ranks),
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        modules_to_save=list(section.extra_modules) or None,
        use_rslora=section.rslora,
        use_dora=section.dora,
        task_type="SEQ_CLS" if sequence_head.HEAD in section.extra_modules else "CAUSAL_LM",
        **more,
    )


def casts_by_autocast(model: Any, section: AdapterSection, precision: str) -> contextlib.AbstractContextManager[None]:
    """In the block, only autocast casts the inputs of LoRA layers; PEFT does not.

    PEFT casts each input to the adapter's float32 and autocast casts it back: two copies of every activation with the
    same values (peft 0.21, lora/layer.py; lora/bnb.py if CUDA autocast is off). DoRA keeps the cast, because its
    weight norms use the input's dtype.
    """
    from peft.helpers import disable_input_dtype_casting

    active = PRECISIONS[precision].autocasts and not section.dora
    return disable_input_dtype_casting(model, active=active)


def set_trained_dtype(model: Any, section: AdapterSection) -> None:
    """Cast trained weights to `section.dtype`, except DoRA's magnitudes: their updates are too small for bfloat16."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            magnitude = "lora_magnitude_vector" in name
            parameter.data = parameter.data.to(torch.float32 if magnitude else TRAINED_DTYPES[section.dtype])


def _targets(base: Any, section: AdapterSection) -> tuple[str | list[str], dict[str, Any]]:
    """PEFT's `target_modules`, and its `target_parameters` with an example of each.

    `all-linear` excludes the layers that rows of text do not train, those whose weight the model's code reads directly,
    bypassing any adapter, and in a mixture of experts the routers; fused experts are parameters, not linear layers. A
    name or a regular expression also excludes the layers that rows of text do not train. Raises ConfigError for a
    target that then has no layer.
    """
    direct, untrained = linear_layers.read_directly(base), linear_layers.untrained(base)
    parameters = _parameter_names(base)
    if section.targets == "all-linear":
        others = [*experts.routers(base).values(), *map(base.get_submodule, direct | untrained)]
        modules = linear_but(base, *others) if others or experts.is_mixture(base) else "all-linear"
        chosen = {name: weight for name, weight in parameters.items() if section.expert_rank and _is_of_experts(weight)}
        _refuse_on_parameters(base, chosen, section)
        return modules, chosen
    names = [name for name in section.targets if not is_pattern(name)]
    _check(names, [*dict.fromkeys(map(_last, linear_but(base))), *parameters], "adapter.targets")
    matched = matching(base, section)
    refused = set(map(_last, direct)) & set(names) | set(direct) & set(matched)
    if wrong := sorted(refused):
        raise ConfigError(
            f"`adapter.targets`: an adapter on `{'`, `'.join(wrong)}` may not be trained, because this model's code "
            "reads the weight or its dtype outside the layer; remove it, or set `all-linear`, which excludes it"
        )
    chosen = {name: parameters[name] for name in names if name in parameters}
    _refuse_on_parameters(base, chosen, section)
    plain: list[str] = []
    for target in names:
        if target in chosen:
            continue
        named = [name for name in linear_but(base) if _last(name) == target]
        kept = [name for name in named if name not in untrained]
        if not kept:
            _refuse_untrained(target, named[0], base)
        # The name alone does for PEFT if no other module has it.
        is_enough = len(kept) == sum(_last(name) == target for name, _ in base.named_modules())
        plain += [target] if is_enough else kept
    return [*plain, *matched], chosen


def _refuse_untrained(target: str, name: str, base: Any) -> NoReturn:
    raise ConfigError(
        f"`adapter.targets`: rows of text train no layer of {type(base).__name__} that `{target}` matches, such as "
        f"`{name}`; remove it, or set `all-linear`, which takes the layers that they train"
    )


def matching(base: Any, section: AdapterSection) -> list[str]:
    """Full names of the trained linear layers that a regular expression among the targets fully matches."""
    patterns = [] if section.targets == "all-linear" else [name for name in section.targets if is_pattern(name)]
    linear = linear_but(base) if patterns else []
    untrained = linear_layers.untrained(base) if patterns else frozenset()
    for pattern in patterns:
        matched = [name for name in linear if re.fullmatch(pattern, name)]
        if not matched:
            near = f", such as `{linear[0]}`" if linear else ""
            raise ConfigError(f"`adapter.targets`: `{pattern}` matches the full name of no linear layer{near}")
        if untrained.issuperset(matched):
            _refuse_untrained(pattern, matched[0], base)
    trained = [name for name in linear if name not in untrained]
    return [name for name in trained if any(re.fullmatch(pattern, name) for pattern in patterns)]


def left_out(base: Any, section: AdapterSection) -> dict[str, int]:
    """Numbers of layers that the targets match but that get no adapter, by the reason in one clause."""
    if section.kind == "none":
        return {}
    direct, untrained = linear_layers.read_directly(base), linear_layers.untrained(base)
    if section.targets != "all-linear":
        direct = frozenset()
        untrained = frozenset(
            name
            for name in untrained
            if any(re.fullmatch(one, name) if is_pattern(one) else _last(name) == one for one in section.targets)
        )
    untrained -= direct
    seeing = tuple(f"{part}." for part in composite.beside_language(base))
    frozen = frozenset(name for name in untrained if name.startswith(seeing))
    reasons = {
        "whose weights the model's code reads directly": direct,
        "of the model of images, which stay as they are": frozen,
        "that rows of text do not train": untrained - frozen,
    }
    return {reason: len(names) for reason, names in reasons.items() if names}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def linear_but(base: Any, *others: nn.Module) -> list[str]:
    """Full names of all linear layers except the output head and `others`."""
    from transformers.pytorch_utils import Conv1D

    # The types that PEFT's `all-linear` matches.
    kept, linear = {base.get_output_embeddings(), *others}, (nn.Linear, Conv1D)
    return [name for name, module in base.named_modules() if isinstance(module, linear) and module not in kept]


def _parameter_names(base: Any) -> dict[str, Any]:
    """Expert and router weights outside linear layers, by the last two parts of their names (`gate.weight`).

    Without the experts that rows of text do not train; those of another layer with such a name have their full names.
    """
    untrained = linear_layers.untrained(base)
    fused = {name: getattr(module, part) for name, module, part in experts.weights(base)}
    left_out = {_last_two(name) for name in fused if name.rpartition(".")[0] in untrained}
    weights = {
        name if _last_two(name) in left_out else _last_two(name): weight
        for name, weight in fused.items()
        if name.rpartition(".")[0] not in untrained
    }
    return weights | {
        _last_two(f"{name}.weight"): module.weight
        for name, module in experts.routers(base).items()
        if not isinstance(module, nn.Linear)
    }


def _last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _is_of_experts(weight: Any) -> bool:
    return len(experts.shape(weight)) == 3


def _refuse_on_parameters(base: Any, chosen: dict[str, Any], section: AdapterSection) -> None:
    """Raise ConfigError for options that adapters on the `chosen` parameters cannot have, and for an `expert_rank`
    without experts.
    """
    fused = [name for name, weight in chosen.items() if _is_of_experts(weight)]
    if section.expert_rank not in ("auto", 0) and not fused:
        what = "no experts" if not experts.is_mixture(base) else "no fused experts among the targets"
        raise ConfigError(f"`adapter.expert_rank`: {type(base).__name__} has {what}; remove it")
    if fused and section.expert_rank == 0:
        raise ConfigError(
            f"`adapter.expert_rank`: 0 leaves out experts, and `adapter.targets` names `{fused[0]}`; remove one of them"
        )
    for name in chosen:
        unsupported: dict[str, Any] = {"dora": section.dora, "init": section.init != "default"}
        if name not in fused:
            unsupported |= {"dropout": section.dropout, "ranks": section.ranks}
        if asked := [f"`adapter.{key}`" for key, value in unsupported.items() if value]:
            cure = "remove one or the other"
            if section.targets == "all-linear":
                cure = "remove that, or set `adapter.expert_rank: 0`, which leaves out experts"
            raise ConfigError(
                f"`adapter.targets`: `{name}` is a parameter, not a linear layer, so its adapter cannot use "
                f"{', '.join(asked)}; {cure}"
            )


def _check(wanted: list[str], candidates: list[str], key: str) -> None:
    for name in wanted:
        if name not in candidates:
            several = [part.strip() for part in name.split(",")]
            if len(several) > 1 and set(several) <= set(candidates):
                raise ConfigError(f"`{key}`: write several as a list: [{', '.join(several)}]")
            raise ConfigError(f"`{key}`: {unknown(name, candidates)}")


def _start_from_quantization_error(model: Any, base_name: str, revision: str | None) -> None:
    """LoftQ with one iteration (arXiv 2310.08659, algorithm 1): BA is the best rank-r approximation of the error
    W - dequantized W.

    PEFT's own implementation needs CUDA and ignores the adapter's scaling.
    """
    import bitsandbytes as bnb
    from peft.tuners.lora import Linear4bit
    from safetensors import safe_open
    from transformers.pytorch_utils import Conv1D

    file_of: dict[str, Path] = {}
    for file in identity.loaded_files(weights_directory(base_name, revision)):
        weight_files.check(file)
        with safe_open(file, framework="pt") as opened:
            file_of.update(dict.fromkeys(opened.keys(), file))
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear4bit):
            continue
        quantized = layer.get_base_layer().weight
        key = name.removeprefix("base_model.model.") + ".weight"
        if key not in file_of:
            raise ArtifactError(f"LoftQ: `{key}` is not in the safetensors files of `{base_name}`")
        with safe_open(file_of[key], framework="pt") as opened:
            stored = opened.get_tensor(key).to(quantized.device, torch.float32)
        if getattr(layer.get_base_layer(), "source_cls", None) is Conv1D:  # transposed, and in the file it is not
            stored = stored.T
        error = stored - bnb.functional.dequantize_4bit(quantized.data, quantized.quant_state).float()
        rank = layer.r["default"]
        left, values, right = torch.svd_lowrank(error, q=min(2 * rank, *error.shape), niter=4)
        root = values[:rank].sqrt()
        layer.lora_A["default"].weight.data = (right[:, :rank] * root).T.contiguous()
        layer.lora_B["default"].weight.data = (left[:, :rank] * root).contiguous() / layer.scaling["default"]
