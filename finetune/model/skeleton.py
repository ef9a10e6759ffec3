"""A base without its files: all modules on the meta device, and for random weights filled one module at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from finetune.config import QuantizationSection
from finetune.config.field_types import shortened
from finetune.errors import ArtifactError, ConfigError, FinetuneError, first_line
from finetune.forms import FORMS
from finetune.forms.packed import pack, packing_of
from finetune.model.attention import backends as attentions
from finetune.model.attention import packing
from finetune.model.distributed.placement import Placement
from finetune.model.source import catalog, prequantized
from finetune.model.source.locate import hub_call
from finetune.model.structure import composite, experts, linear_layers
from finetune.model.structure.mixture import Mixture
from finetune.model.structure.quantization import QUANTIZATIONS, library_config
from finetune.model.structure.recipes import RECIPES, remember
from finetune.runtime import patches


def random_base(
    architecture: Any, quantization: QuantizationSection, *, attention: str, dtype: torch.dtype, device: torch.device,
    remote_code: str | None = None, placement: Placement | None = None, whole: bool = False,
) -> Any:  # fmt: skip
    """The architecture with random weights, materialised and quantized one module at a time; see `base.load_base`.

    Peak memory is the finished model plus one module's unquantized weights. Weights have the model's own
    initialisation, or zero where it defines none.
    """
    model = weightless_base(
        architecture, quantization, attention=attention, dtype=dtype, remote_code=remote_code, whole=whole
    )
    models, owner = _owners(model)
    for name, module in list(model.named_modules()):
        own = {f"{name}.{weight}" for weight, _ in module.named_parameters(recurse=False, remove_duplicate=False)}
        if not own or not own <= model.all_tied_weights_keys.keys():  # a tied head is the embedding
            _materialise(owner[module], module, dtype, device)
            if placement:
                placement.keep_part(model, module)
    for inner in reversed(models):
        initialise(inner, inner)  # needs its submodules, so it comes last
    model.tie_weights()
    model.hf_device_map = {"": device}
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model


def make_buffers(model: Any, device: torch.device) -> Any:
    """`model` (on the meta device) with buffers on `device`, computed as the model does, such as rotary frequencies."""
    models, owner = _owners(model)
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            setattr(module, name, torch.zeros_like(buffer, device=device))
        if buffers:
            initialise(owner[module], module)
        # A probe on the meta device left the frequencies of rows beyond the original context, which are no buffer
        # (transformers 5.24, `longrope_frequency_update`); without them, they are computed again.
        for name in [name for name in vars(module) if name.endswith("long_inv_freq")]:
            delattr(module, name)
    for inner in reversed(models):  # as in `random_base`
        initialise(inner, inner)
    return model


def _owners(model: Any) -> tuple[list[Any], dict[nn.Module, Any]]:
    """The models inside `model`, itself first, and for each module the innermost, which initialises it."""
    from transformers import PreTrainedModel

    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return models, {module: inner for inner in models for module in inner.modules()}


def weightless_base(
    architecture: Any, quantization: QuantizationSection, *, attention: str, dtype: torch.dtype,
    remote_code: str | None = None, shorten: Callable[[Any], None] = lambda model: None, whole: bool = False,
) -> Any:  # fmt: skip
    """The base on the meta device, with quantized linear layers and experts; `shorten` may remove layers first.

    `whole`: with the model of images of a composite one.
    """
    code = _code_arguments(architecture, remote_code)
    packing.register()
    with torch.device("meta"):
        model = hub_call(
            f"the architecture `{architecture.model_type}`",
            lambda: _made(
                deepcopy(architecture),
                whole=whole,
                attn_implementation=attentions.of_parts(attention, architecture),
                dtype=dtype,
                **code,
            ),
        )
    give_layers(model)
    # Probed before layers, which may depend on each other, are removed or quantized.
    not_adaptable = linear_layers.probe(model)
    linear_layers.remember(model, not_adaptable)
    published = prequantized.stated(architecture, quantization)
    _remember_forms(model, quantization.kind, published)
    shorten(model)
    linear_layers.remember(model, not_adaptable)
    quantization_config = library_config(quantization, dtype, published)
    if quantization_config is not None:
        from finetune.model.structure import quantizers

        quantizers.prepare(model, quantization_config, published)
        keep_training_layout(model)
    _cast_as_loaded(model, dtype)
    model.config.use_cache = False
    return model.eval()


def _code_arguments(architecture: Any, remote_code: str | None) -> dict[str, Any]:
    """transformers' arguments on Python code shipped with the model, without which it would prompt on the terminal.

    Raises ConfigError for a model that transformers does not know as a language model, unless its own code may run.
    """
    known = catalog.model_class(architecture)
    if not remote_code and known is None:
        text = architecture.get_text_config().model_type
        what = f"`model.name`: transformers has no causal language model of type `{architecture.model_type}`"
        if text == architecture.model_type or architecture.is_encoder_decoder:
            raise ConfigError(f"{what}; use a decoder")
        raise ConfigError(
            f"{what}, which is for more than text, and its text model, of type `{text}`, is not taken out of it here; "
            "use a base that is published for text alone"
        )
    if known is not None and not known.__module__.startswith("transformers."):
        return {}  # the code of this revision ran before, and transformers knows its class since
    return {"trust_remote_code": True, "code_revision": remote_code} if remote_code else {"trust_remote_code": False}


def _remember_forms(model: Any, kind: str, published: Mapping[str, Any] | None) -> None:
    """Remember the form of each weight of a base of mixed forms, which recipes choose by the number of all layers.

    Raises ArtifactError for a form that a GGUF file's folder says a weight is in, and that it cannot be in.
    """
    if kind in RECIPES:
        from finetune.model.structure import quantizers

        remember(model, quantizers.recipe_of(model, kind))
    if kind == "gguf" and published:
        forms, weights = published["modules_to_convert"], model.state_dict()
        for name, form in forms.items():
            if name not in weights or weights[name].shape[-1] % FORMS[form].codec.blocks.columns:
                raise ArtifactError(
                    f"`model.name`: its config.json says that {shortened(name, 60)!a} is in {form}, as no such weight "
                    "can be; remove its folder, which is then made again of the GGUF file"
                )
        remember(model, forms)


def _made(architecture: Any, **arguments: Any) -> Any:
    """The model of a config. Raises ArtifactError if transformers' code fails, most often for a value or a package."""
    try:
        return composite.from_config(architecture, **arguments)
    except (OSError, MemoryError, FinetuneError):
        raise
    except Exception as error:
        raise ArtifactError(
            f"`model.name`: transformers cannot make a model of type `{architecture.model_type}` by its config.json "
            f"({type(error).__name__}: {first_line(error)}); install what it lacks, or use another base"
        ) from error


def give_layers(model: Any) -> None:
    """Make `model.base_model` the model without its head if the class names an attribute for it that does not exist.

    transformers 5.24 does so for Llama 4 and Mllama, to load them from the files of the composite models that they are
    part of.
    """
    from transformers import PreTrainedModel

    inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    if model.base_model is model and len(inner) == 1:
        vars(model)[model.base_model_prefix] = inner[0]  # not a submodule, or there would be two


def _cast_as_loaded(model: Any, dtype: torch.dtype) -> None:
    """Give weights the dtypes that loading gives them in a model of `dtype`.

    bitsandbytes' layers are created in float32, and a weight is dequantized to the dtype it was quantized from
    (bitsandbytes 0.50, `QuantState.dtype`). Unquantized weights that the model names as too sensitive for `dtype` are
    in float32; a name is a part of the weight's (transformers 5.24, `_get_dtype_plan` and `build_glob_alternation`).
    """
    import bitsandbytes as bnb

    for module in model.modules():
        if isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
            module.weight.data = module.weight.data.to(dtype)
            if module.bias is not None:
                module.bias = nn.Parameter(module.bias.to(dtype), requires_grad=False)
    in_16_bit, in_fp16 = catalog.float32_modules(model)
    named = set(in_16_bit if dtype in (torch.float16, torch.bfloat16) else ())
    named |= set(in_fp16 if dtype is torch.float16 else ())
    pattern = re.compile("|".join(named).replace("*", ".*"))
    for name, weight in model.state_dict(keep_vars=True).items() if named else ():
        quantized = isinstance(weight, (bnb.nn.Params4bit, bnb.nn.Int8Params)) or packing_of(weight)
        if weight.is_floating_point() and not quantized and pattern.search(name):
            weight.data = weight.data.float()


def mixture(model: Any, quantization: QuantizationSection) -> Mixture | None:
    """The form in which a quantized base will store its experts; None if it has none."""
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    from finetune.model.structure import quantizers

    if not experts.is_mixture(model):
        return None
    kept, names = quantizers.kept_modules(model), set()
    kind = QUANTIZATIONS[quantization.kind]
    if kind.packed:
        published = prequantized.stated(model.config, quantization)
        config = library_config(quantization, model.dtype, published)
        names = quantizers.packed_names(model, config, published)
    elif quantization.kind != "none":
        names = {
            f"{name}.weight"
            for name, module in model.named_modules()
            if type(module) in (nn.Linear, Conv1D) and should_convert_module(name, kept)
        }
    if kind.four_bit:
        names |= {name for name, _, _ in experts.weights(model)}
    return experts.mixture(model, quantization.kind, names)


def _materialise(model: Any, module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Allocate and initialise one module's own weights and buffers."""
    import bitsandbytes as bnb

    from finetune.model.structure import eight_bit

    if isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
        full = nn.Linear(module.in_features, module.out_features, module.bias is not None, device=device, dtype=dtype)
        initialise(model, full)
        if isinstance(module, bnb.nn.Linear8bitLt):
            module.weight = eight_bit.quantized(full.weight.data)
        else:
            settings = module.weight.__dict__
            module.weight = type(module.weight)(full.weight.data, requires_grad=False, **settings).to(device)
        if full.bias is not None:
            module.bias = nn.Parameter(full.bias.data, requires_grad=False)
        return
    own = dict(module.named_parameters(recurse=False))
    packed = {name: one for name, one in own.items() if isinstance(one, bnb.nn.Params4bit) or packing_of(one)}
    if not (own or list(module.buffers(recurse=False))):
        return
    for name, parameter in packed.items():
        values = parameter.data
        if how := packing_of(parameter):
            values = torch.empty(how.shape, dtype=how.dtype, device="meta")
        setattr(module, name, nn.Parameter(values, requires_grad=False))
    module.to_empty(device=device, recurse=False)
    with torch.no_grad():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.zero_()
    initialise(model, module)
    for name, parameter in packed.items():
        values = getattr(module, name).data
        if how := packing_of(parameter):
            setattr(module, name, pack(how.form, values, transposed=how.transposed))
        else:
            setattr(module, name, type(parameter)(values, **parameter.__dict__).to(device))


def initialise(model: Any, module: nn.Module) -> None:
    """Set the weights and buffers of `module` itself as `model`, which it is a part of, does."""
    model._init_weights(module)  # noqa: SLF001 -- transformers' public `init_weights` takes whole models only


def keep_training_layout(model: Any) -> None:
    """Stop bitsandbytes from repacking 4-bit weights for CPU inference.

    On a CPU with AVX512-BF16, a forward pass in eval mode converts them in place and permanently to a layout without a
    backward pass (bitsandbytes 0.50, `Linear4bit.forward`), so training could not continue after an evaluation.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            patches.CPU_LAYOUT.put(False, module)
