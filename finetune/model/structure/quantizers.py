"""transformers' quantizers, extended to experts, but excluding routers and weights that are read directly.

Those of packed weights (`forms.packed`) keep the bytes of a base that is published so, or make them from its
16-bit weights.

This module imports transformers, so import it only where weights are loaded.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import bitsandbytes as bnb
import regex
import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer, get_keys_to_not_convert
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils.quantization_config import FineGrainedFP8Config

from finetune.config.field_types import shown
from finetune.errors import ArtifactError
from finetune.forms import FORMS, Form, packed
from finetune.model.source import catalog, gguf_base
from finetune.model.structure import (
    composite,
    eight_bit,
    experts,
    linear_layers,
    quantization,
    recipes,
    sequence_head,
)
from finetune.runtime import libraries, patches
from finetune.storage import weight_files


@contextlib.contextmanager
def used() -> Iterator[None]:
    """In the block, transformers loads models with the quantizers of this module. Raises ArtifactError for the first
    published weight that is damaged.
    """
    failures: list[ArtifactError] = []
    known = {
        name: type(kind.__name__, (kind,), {"failures": failures}) if issubclass(kind, _Packed) else kind
        for name, kind in _QUANTIZERS.items()
    }
    packed_kinds = [name for name, kind in _QUANTIZERS.items() if issubclass(kind, _Packed)]
    others = {name: quantization.config_class(name) for name in packed_kinds}
    configs = {**auto.AUTO_QUANTIZATION_CONFIG_MAPPING, **others}
    with patches.QUANTIZERS.by({**auto.AUTO_QUANTIZER_MAPPING, **known}), patches.QUANTIZATION_CONFIGS.by(configs):
        try:
            yield
        except (RuntimeError, ArtifactError):  # one for all weights, which does not say what is wrong with them
            if failures:
                raise failures[0] from None
            raise


def prepare(model: Any, config: Any, published: Any = None) -> None:
    """Replace layers of a model on the meta device as a quantization config says, like transformers before loading.

    `published` is what config.json says of a base that is published in the form of `config`.
    """
    model.hf_quantizer = _quantizer(config, published)
    model.hf_quantizer.preprocess_model(model, device_map=None)
    model.hf_quantizer.postprocess_model(model)


def packed_names(model: Any, config: Any, published: Any = None) -> set[str]:
    """Names of the parameters that `prepare` packs; none for bitsandbytes."""
    quantizer = _quantizer(config, published)
    return set(quantizer.forms(model)) if isinstance(quantizer, _Packed) else set()


def packable(model: Any) -> Iterator[str]:
    """The name of each weight that could be packed if blocks divided its rows."""
    return (name for name, _, _ in _quantizer(FineGrainedFP8Config(), None).targets(model))


def undivided(model: Any, block: int) -> Iterator[tuple[str, int]]:
    """Name and number of inputs of each layer that could be packed if blocks of this size divided its inputs."""
    for name, module, own in _quantizer(FineGrainedFP8Config(), None).targets(model):
        if (inputs := _columns(module, own)) % block:
            yield name.removesuffix(".weight"), inputs


def without_place(model: Any, form: str, stored: Collection[str] = ()) -> str | None:
    """In words, why safetensors files have no place for weights of `model` in a form; None if they have.

    Some forms have one for experts that gpt-oss reads transposed. `stored`: the names of the tensors in the base's
    files, as far as they are known.
    """
    files = FORMS[form].codec.files
    if any(isinstance(module, Conv1D) for module in model.modules()):
        return "has layers that hold their weights transposed, as GPT-2's do"
    on_experts = list(experts.weights(model))
    if any(_is_transposed(module) for _, module, _ in on_experts):
        known = model.config.get_text_config().model_type == "gpt_oss"
        return None if known and files.of_experts else "has experts that it reads transposed"
    if on_experts and not files.experts_in_one:
        # Weights that transformers makes from a tensor of files for each expert.
        taken_apart = [
            target
            for one in get_model_conversion_mapping(model)
            if isinstance(one, WeightConverter) and any("*" in source for source in one.source_patterns)
            for target in one.target_patterns
        ]
        for name, _, _ in on_experts:
            if experts.is_whole(name, stored) or not any(re.search(target, name) for target in taken_apart):
                return "has all experts of a layer in one tensor of its files"
    return None


def _quantizer(config: Any, published: Any) -> Any:
    with used():
        if published:
            config = auto.AutoHfQuantizer.merge_quantization_configs(published, config)
        return auto.AutoHfQuantizer.from_config(config, pre_quantized=bool(published))


def kept_modules(model: Any) -> list[str]:
    """Modules that stay in 16 bit: the output head (as in the QLoRA paper and in transformers), routers, and layers
    whose weight the model's code reads directly, and the models beside the language model.
    """
    beside = composite.beside_language(model)
    return [*get_keys_to_not_convert(model), *experts.routers(model), *linear_layers.read_directly(model), *beside]


@dataclass(frozen=True)
class Rounding:
    """The rounding of a weight of a quantized base.

    `parameter` is that of the base on the meta device. `transposed`: the file has it as GPT-2's layers do (inputs,
    outputs), and it is transposed before it is quantized.
    """

    parameter: torch.Tensor
    transposed: bool

    def trained_against(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight` quantized and dequantized again, in its own type: what an adapter on it is trained against."""
        if self.transposed:
            return replace(self, transposed=False).trained_against(weight.T.contiguous()).T.contiguous()
        if how := packed.packing_of(self.parameter):
            return packed.values(packed.pack(how.form, weight, transposed=how.transposed))
        if isinstance(self.parameter, bnb.nn.Int8Params):
            return eight_bit.dequantized(*eight_bit.quantize(weight), weight.dtype)
        libraries.correct_dequantization()
        kind: Any = type(self.parameter)
        four_bit = kind(weight, requires_grad=False, **self.parameter.__dict__).to(weight.device)
        return bnb.functional.dequantize_4bit(four_bit.data, four_bit.quant_state)


def roundings(model: Any) -> dict[str, Rounding]:
    """The rounding of each quantized parameter of a base on the meta device, by name."""
    kinds = (bnb.nn.Params4bit, bnb.nn.Int8Params)
    return {
        f"{path}.{name}".removeprefix("."): Rounding(parameter, getattr(module, "source_cls", None) is Conv1D)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, kinds) or packed.packing_of(parameter)
    }


class _Quantizer:
    @staticmethod
    def get_modules_to_not_convert(model: Any, *arguments: Any, **named: Any) -> list[str]:
        known = Bnb4BitHfQuantizer.get_modules_to_not_convert(model, *arguments, **named)
        return [*known, *kept_modules(model)]

    def preprocess_model(self, model: Any, **named: Any) -> None:
        super().preprocess_model(model, **named)  # type: ignore[misc]
        experts.quantize(model, self.quantization_config)  # type: ignore[attr-defined]
        eight_bit.weight_only(model)


class _FourBit(_Quantizer, Bnb4BitHfQuantizer):
    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return isinstance(model.get_parameter_or_buffer(param_name), bnb.nn.Params4bit)

    def dequantize(self, model: Any, dtype: Any = None) -> Any:
        model = super().dequantize(model, dtype)
        experts.dequantize(model, dtype)
        return model


class _EightBit(_Quantizer, Bnb8BitHfQuantizer):
    pass


class _NamedByFiles(FineGrainedFP8HfQuantizer):
    """A config whose modules to leave in 16 bit have the names of the base's files, which transformers may change."""

    def rename(self, model: Any) -> None:
        """Give them their names in `model`, in the config."""
        self._normalize_modules_to_not_convert(model)


class _Packed:
    """Replaces the weights of linear layers and experts by packed ones, and loads them from either form of files."""

    form: str
    pre_quantized: bool
    quantization_config: Any
    serialized_names: ClassVar[dict[str, list[str]]]
    failures: ClassVar[list[ArtifactError]] = []
    experts_alone = False
    _files: list[Path]

    def validate_environment(self, **named: Any) -> None:
        """Accept any machine: packed weights need neither a GPU nor kernels."""

    def forms(self, model: Any) -> dict[str, str]:
        """The form of each parameter to be packed, by name."""
        return {name: self.form for name, _, _ in self.targets(model)}

    def published_forms(self) -> Iterable[str]:
        """The forms that weights of the base's files may be in."""
        return (self.form,)

    def targets(self, model: Any) -> Iterator[tuple[str, Any, str]]:
        """(name in the model, module, name in the module) of each parameter that may be packed."""
        config, kept = self.quantization_config, kept_modules(model)
        if config.dequantize:
            return
        experts_alone = self.pre_quantized and self.experts_alone
        if self.pre_quantized:
            if not experts_alone:
                _NamedByFiles(config).rename(model)
            skipped = _resolved(config.modules_to_not_convert or (), [name for name, _ in model.named_modules()])
            _, in_fp16 = catalog.float32_modules(model)
            kept += Bnb4BitHfQuantizer.get_modules_to_not_convert(model, skipped, in_fp16)
        if not experts_alone:
            for name, module in list(model.named_modules()):
                if type(module) in (torch.nn.Linear, Conv1D) and should_convert_module(name, kept):
                    yield f"{name}.weight", module, "weight"
        for name, module, own in list(experts.weights(model)):
            if should_convert_module(name.rpartition(".")[0], kept):
                yield name, module, own

    def place_of(self, name: str) -> Path:
        """The file that has a weight of the model; their folder, if more of them have parts of its layer."""
        layer = name.rpartition(".")[0] + "."
        having = [file for file in self._files if any(layer in stored for stored in weight_files.shapes(file))]
        return having[0] if len(having) == 1 else self._files[0].parent

    def _process_model_before_weight_loading(self, model: Any, **named: Any) -> None:
        self._files = [Path(file) for file in named.get("checkpoint_files") or ()]
        forms = self.forms(model)
        for name, module, own in list(self.targets(model)):
            if name not in forms:
                continue
            path, form = name.removesuffix(".weight"), forms[name]
            if isinstance(module, (torch.nn.Linear, Conv1D)):
                outputs, inputs = (module.nf, module.nx) if isinstance(module, Conv1D) else module.weight.shape
                bias, dtype = module.bias is not None, module.weight.dtype
                layer: Any = packed.PackedLinear(inputs, outputs, bias, "meta", dtype)
                layer.weight = packed.pack(form, layer.weight.data)
                layer.source_cls = type(module)
                model.set_submodule(path, layer.requires_grad_(False))
            elif isinstance(module, torch.nn.Embedding):
                model.set_submodule(path, packed.PackedEmbedding.of(module, packed.pack(form, module.weight.data)))
                model.get_submodule(path).source_cls = type(module)
            else:
                setattr(module, own, packed.pack(form, getattr(module, own).data, transposed=_is_transposed(module)))
                experts.unpack_in_forward(module)

    def param_needs_quantization(self, model: Any, param_name: str, **named: Any) -> bool:
        return packed.packing_of(model.get_parameter_or_buffer(param_name)) is not None

    def get_quantize_ops(self) -> Any:
        return _Encode()

    def get_load_operations(self) -> dict[str, Any]:
        return {"deserialize": _Keep, "dequantize": _Keep}

    def update_weight_conversions(self, weight_conversions: Any, *model: Any) -> Any:
        updated = super().update_weight_conversions(weight_conversions, *model)  # type: ignore[misc]
        for conversion in updated:
            operations = getattr(conversion, "operations", ())
            if operations and isinstance(operations[0], _Keep):
                conversion.operations = [_Keep(self, operations[1:])]
        return updated


class _Own(_Packed, HfQuantizer):
    """A quantizer of this program alone."""

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Whole(_Own):
    """Packs weights whose rows blocks divide, into a form that bases are not published in."""

    def targets(self, model: Any) -> Iterator[tuple[str, Any, str]]:
        for name, module, own in super().targets(model):
            if _columns(module, own) % FORMS[self.form].codec.blocks.columns == 0:
                yield name, module, own


def _of_form(form: Form) -> Any:
    """The quantizer of a form that all packed weights have: transformers' own extended, if it has one."""
    files = form.codec.files
    if not files.layouts:
        return type(f"_{form.name}", (_Whole,), {"form": form.name})
    parameters, plain = (("gate_up_proj", "down_proj"), ()) if files.experts_alone else (("weight",), ("",))
    endings = dict.fromkeys((*plain, *(ending for layout in files.layouts for ending in layout.endings)))
    fields = {
        "form": form.name,
        "experts_alone": files.experts_alone,
        "serialized_names": {one: [*(one + ending for ending in endings), *files.beside] for one in parameters},
    }
    bases = (_Packed, auto.AUTO_QUANTIZER_MAPPING[form.name]) if files.of_library else (_Own,)
    return type(f"_{form.name}", bases, fields)


class _Mixed(_Own):
    """Gives each weight the form that a recipe says, also the embedding and the head."""

    def forms(self, model: Any) -> dict[str, str]:
        known = recipes.of_modules(model)
        return known or recipe_of(model, self.quantization_config.quant_method)

    def targets(self, model: Any) -> Iterator[tuple[str, Any, str]]:
        if self.quantization_config.dequantize:
            return
        yield from super().targets(model)
        tables = _tables(model)
        for name, module in list(model.named_modules()):
            if module in tables:
                yield f"{name}.weight", module, "weight"

    def _process_model_before_weight_loading(self, model: Any, **named: Any) -> None:
        super()._process_model_before_weight_loading(model, **named)
        for name, other in model.all_tied_weights_keys.items():
            if packed.packing_of(weight := model.get_parameter(other)):
                path, _, own = name.rpartition(".")
                setattr(model.get_submodule(path), own, weight)


class _Gguf(_Mixed):
    """Gives each weight the form that a GGUF file has it in, which config.json names (`source.gguf_base`)."""

    form = "gguf"
    serialized_names: ClassVar = {
        name: [name, *(f"{name}_{form}" for form in gguf_base.TYPES.values())]
        for name in ("weight", "gate_up_proj", "down_proj")
    }

    def forms(self, model: Any) -> dict[str, str]:
        return recipes.of_modules(model) or dict(self.quantization_config.modules_to_convert)

    def published_forms(self) -> Iterable[str]:
        return gguf_base.TYPES.values()


_MATCHING_SECONDS = 10


def _resolved(names: Iterable[str], modules: list[str]) -> list[str]:
    """`names` of modules, with those of `modules` that a regular expression matches in its place.

    Expressions come with a base, and may take forever. Raises ArtifactError for one that does, or is none.
    """
    end, found = time.monotonic() + _MATCHING_SECONDS, []
    for name in names:
        if re.fullmatch(r"[\w.-]*", name):
            found.append(name)
            continue
        try:
            pattern = regex.compile(rf"(?:{name[:1000]})(?:(?<=\.)|(?=\.|$))")  # as in `should_convert_module`
            for module in modules:
                if pattern.match(module, timeout=max(end - time.monotonic(), 0.001)):
                    found.append(re.escape(module) + "$")
        except (regex.error, TimeoutError, RecursionError, OverflowError) as error:
            why = "takes too long" if isinstance(error, TimeoutError) else f"is no regular expression ({error})"
            raise ArtifactError(
                f"config.json of the base: {shown(name)}, among the modules that its quantization leaves out, {why}; "
                "download the base again, or use another"
            ) from None
    return found


def recipe_of(model: Any, kind: str) -> dict[str, str]:
    """The form of each weight of `model`, unquantized on the meta device, in a file of a recipe, by name."""
    quantizer = _Mixed(FineGrainedFP8Config(quant_method=kind), pre_quantized=False)
    tables, text, forms = _tables(model), model.config.get_text_config(), dict[str, str]()
    for name, module, own in quantizer.targets(model):
        if form := recipes.form_of(tables.get(module, name), _columns(module, own), kind, text):
            forms[name] = form
    return forms


def _tables(model: Any) -> dict[torch.nn.Module, str]:
    """The embedding and the head of `model`, and an embedding of each layer (Gemma), with llama.cpp's names of them."""
    tables = {
        module: "per_layer_token_embd.weight"
        for name, module in model.named_modules()
        if name.endswith("embed_tokens_per_layer")
    }
    head = model.get_output_embeddings()
    if type(head) is torch.nn.Linear and not sequence_head.is_classifier(model):  # a classifier's head is trained
        tables[head] = recipes.HEAD
    return {**tables, model.get_input_embeddings(): recipes.EMBEDDING}


def _columns(module: Any, name: str) -> int:
    """Values of a row, over which a weight's products sum."""
    return int(getattr(module, name).shape[-2 if isinstance(module, Conv1D) or _is_transposed(module) else -1])


def _is_transposed(module: Any) -> bool:
    """Whether a module holds experts as (experts, inputs, outputs)."""
    return getattr(module, "is_transposed", False)


class _Encode(ConversionOps):
    """Packs a weight that was loaded in 16 or 32 bit."""

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *, model: Any, **named: Any) -> dict[str, Any]:
        ((name, value),) = input_dict.items()
        value = value[0] if isinstance(value, list) else value
        module, last = get_module_from_name(model, name)
        if module.source_cls is Conv1D:
            value = value.T
        how = packed.known_packing(getattr(module, last))
        return {name: packed.pack(how.form, value, transposed=how.transposed)}


class _Keep(ConversionOps):
    """Makes a packed parameter of published bytes and scales, or their values if the model's parameter is not packed.

    `after` are the model's own conversions, such as the fusion of experts, which bytes and joined scales go through.
    """

    def __init__(self, hf_quantizer: Any, after: Sequence[Any] = ()) -> None:
        self.hf_quantizer, self.after = hf_quantizer, after

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **named: Any) -> dict[str, Any]:
        try:
            return self._kept(input_dict, full_layer_name, model, named)
        except ValueError as error:
            where = self.hf_quantizer.place_of(full_layer_name)
            why = f"{where}: `{full_layer_name}`: {error}; download the base again, or use another"
            self.hf_quantizer.failures.append(ArtifactError(why))
            raise

    @torch.no_grad()
    def _kept(
        self, input_dict: dict[str, Any], full_layer_name: str, model: Any, named: dict[str, Any]
    ) -> dict[str, Any]:
        given = {name: value if isinstance(value, list) else [value] for name, value in input_dict.items()}
        module, last = get_module_from_name(model, full_layer_name)
        parameter = getattr(module, last)
        wanted = packed.packing_of(parameter)
        parts = packed.published(given, self.hf_quantizer.published_forms())
        if not parts and wanted:
            raise ValueError(f"it has no scales, though config.json says that it is in {wanted.form}")
        if not parts:  # the base's authors left this module in 16 bit
            weights = {name: value for name, value in given.items() if not name.endswith("_scale")}
            plain = self._after(weights, full_layer_name, model, named)
            return {name: value.to(parameter.dtype) for name, value in plain.items()}
        codes, scales = dict[str, Any](), dict[str, Any]()
        for name, one in parts.items():
            codes[name], *factors = (given[part] for part in one.names)
            scales[name] = [one.scales(*each) for each in zip(codes[name], *factors, strict=True)]
        (stored,), (joined,) = (self._after(part, full_layer_name, model, named).values() for part in (codes, scales))
        dtype = wanted.dtype if wanted else parameter.dtype
        [form] = {one.form for one in parts.values()}
        transposed = _is_transposed(module)
        made = packed.from_published(form, stored, joined, experts.shape(parameter), dtype, transposed=transposed)
        return {full_layer_name: made if wanted else packed.values(made).contiguous()}

    def _after(self, tensors: dict[str, Any], name: str, model: Any, named: dict[str, Any]) -> dict[str, Any]:
        for operation in self.after:
            tensors = operation.convert(tensors, full_layer_name=name, model=model, **named)
        return {key: value[0] if isinstance(value, list) else value for key, value in tensors.items()}


_QUANTIZERS: dict[str, Any] = {
    "bitsandbytes_4bit": _FourBit,
    "bitsandbytes_8bit": _EightBit,
    **{
        name: _Mixed if form.recipe else _of_form(form)
        for name, form in FORMS.items()
        if form.held and form.arguments is None
    },
    "gguf": _Gguf,
}
