"""Loads the base model: from a name to weights on the device, in their final dtype, ready for an adapter.

transformers streams the files tensor by tensor and quantizes each one as it arrives; random weights are created and
quantized one module at a time. Neither holds a second copy. Embeddings, norms and output head keep their 16-bit dtype:
nothing is cast to float32 as `prepare_model_for_kbit_training` would (0.5 to 2 GiB on a 7B model, for no benefit).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from finetune.config import AdapterSection, ModelSection, QuantizationSection
from finetune.config.field_types import shortened
from finetune.errors import ArtifactError, ConfigError, NumbersError
from finetune.model.attention import backends as attentions
from finetune.model.attention import packing
from finetune.model.distributed.placement import Placement
from finetune.model.precision import PRECISIONS
from finetune.model.skeleton import give_layers, keep_training_layout, random_base
from finetune.model.source import catalog, identity, prequantized, rope
from finetune.model.source.locate import hub_call, locate, pinned_code, remote_code, weights_directory
from finetune.model.structure import composite, sequence_head
from finetune.model.structure.quantization import QUANTIZATIONS, library_config
from finetune.runtime import libraries, patches, ranks
from finetune.storage import weight_files

TRAINED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def base_dtype(adapter: AdapterSection, precision: str) -> torch.dtype:
    """The dtype of unquantized base weights; without an adapter, that of trained weights."""
    return TRAINED_DTYPES[adapter.dtype] if adapter.kind == "none" else PRECISIONS[precision].dtype


def load_architecture(section: ModelSection, *, listed: bool = False) -> Any:
    """The transformers config of the base, with its rotary scaling, and as a sequence classifier's with `model.labels`.

    It is from the catalog, if that has the name, where weights are random, or always with `listed`: a plan then needs
    neither network nor a licence. Raises ConfigError for a base whose files are quantized in a form that is not kept,
    and for a sequence classifier where none is wanted.
    """
    if (listed or section.weights == "random") and catalog.find(section.name):
        architecture = catalog.config(section.name)
    else:
        architecture = hub_call(f"model `{section.name}`", lambda: _known(section))
        _refuse_kernels(architecture, section.name)
        try:
            architecture.get_text_config()
        except ValueError:  # a composite model that reads one text and writes another, such as MusicGen
            raise ConfigError(
                f"`model.name`: a model of type `{architecture.model_type}` has several models of text in it, none of "
                "them a language model by itself; use a decoder"
            ) from None
        if section.weights == "pretrained":
            prequantized.refuse(section, architecture)
        if getattr(architecture, "rescale_every", 0):
            # RWKV rescales weights in place between training and evaluation, for fp16; this breaks quantization and
            # LoRA.
            architecture.rescale_every = 0

    if section.vocabulary:
        text = architecture.get_text_config()
        if section.vocabulary < (size := getattr(text, "vocab_size", 0)):
            raise ConfigError(f"`model.vocabulary`: {section.vocabulary} is less than the {size} rows of the base")
        text.vocab_size = section.vocabulary
    architecture = rope.scaled(architecture, section)

    if section.labels:
        return sequence_head.want(architecture, section.labels)
    if sequence_head.is_wanted(architecture):
        raise ConfigError(
            f"`model.name`: {section.name} is a sequence classifier, which predicts no tokens; name the language model "
            "that it was made from"
        )
    return architecture


def _known(section: ModelSection) -> Any:
    """transformers' config of the base. Raises ArtifactError for a model type that the installed transformers lacks."""
    import transformers

    where: dict[str, Any] = {"revision": section.revision}
    try:
        return transformers.AutoConfig.from_pretrained(locate(section.name), **where, **pinned_code(section))
    except ValueError as error:
        if "does not recognize this architecture" not in str(error):
            raise
    values, _ = transformers.PreTrainedConfig.get_config_dict(locate(section.name), **where)
    saved_by, installed = re.match(r"\d+\.\d+", str(values.get("transformers_version"))), transformers.__version__
    newer = saved_by[0] if saved_by and _numbers(saved_by[0]) > _numbers(installed) else None
    raise ArtifactError(
        f"model `{section.name}`: transformers {installed} does not know models of type "
        f"`{shortened(str(values.get('model_type')), 60)}`; install "
        + (f"transformers {newer}, which wrote its config.json, or newer" if newer else "a newer transformers")
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


def _refuse_kernels(architecture: Any, name: str) -> None:
    """Raise ArtifactError for a config.json that names a compiled kernel on the hub, which transformers 5.24 would
    download and run if the package `kernels` is installed (`hub_kernels.is_kernel`).
    """
    for part in (architecture, *(getattr(architecture, key, None) for key in architecture.sub_configs)):
        for key in ("attn_implementation", "experts_implementation"):
            if isinstance(kernel := getattr(part, f"_{key}", None), str) and "/" in kernel:
                raise ArtifactError(
                    f"{name}: its config.json asks for the kernel {kernel!a} (`{key}`), code from the hub that "
                    "no revision pins; remove that line"
                )


def load_base(
    section: ModelSection, quantization: QuantizationSection, architecture: Any, *, attention: str,
    dtype: torch.dtype, device: torch.device, placement: Placement | None = None,
) -> Any:  # fmt: skip
    """The base model on `device`; with a `placement`, of the decoder layers' linear weights only this rank's part.

    `attention` is the name of a transformers implementation; `dtype` is that of unquantized weights, and the compute
    dtype of quantized ones.
    Raises ArtifactError or MachineError if weights are missing or damaged.
    """
    if QUANTIZATIONS[quantization.kind].four_bit:
        libraries.correct_dequantization()
    if section.weights == "random":
        if ranks.world_size() > 1:  # all make the same weights, and scales of quantized ones
            torch.manual_seed(0)
        model = random_base(
            architecture, quantization, attention=attention, dtype=dtype, device=device,
            remote_code=remote_code(section), placement=placement, whole=section.vision != "none",
        )  # fmt: skip
    else:
        with placement.while_loading() if placement else contextlib.nullcontext():
            model = _pretrained(section, architecture, quantization, attention, dtype, device)
        keep_training_layout(model)
    rope.forget_longer_batches(model)
    if section.vision == "adapter":
        composite.adapt_images(model)
    libraries.return_freed_memory()
    return model


def _pretrained(
    section: ModelSection, architecture: Any, quantization: QuantizationSection, attention: str, dtype: torch.dtype,
    device: torch.device,
) -> Any:  # fmt: skip
    from finetune.model.structure import quantizers

    packing.register()
    published = prequantized.stated(architecture, quantization)
    in_files = deepcopy(architecture)  # loading writes the quantization into it
    if published:
        in_files.quantization_config = dict(published)
    if section.vocabulary:
        stored = load_architecture(section.model_copy(update={"vocabulary": None}))
        in_files.get_text_config().vocab_size = stored.get_text_config().vocab_size
    with quantizers.used():
        model, report = hub_call(
            f"model `{section.name}`",
            lambda: from_safetensors(
                locate(section.name),
                whole=section.vision != "none",
                config=in_files,
                revision=section.revision,
                **pinned_code(section),
                quantization_config=library_config(quantization, dtype, published),
                attn_implementation=attentions.of_parts(attention, architecture),
                dtype=dtype,
                device_map={"": device},
                output_loading_info=True,
            ),
        )
    remedy = "the download is incomplete, or the files belong to another architecture"
    new = sequence_head.new_weights(model)
    for name in new.keys() & set(report["missing_keys"]):
        model.get_parameter(name).data.zero_()
    refuse_missing({"missing_keys": set(report["missing_keys"]) - new.keys()}, f"model `{section.name}`", remedy)
    if section.vocabulary:
        model.resize_token_embeddings(section.vocabulary, mean_resizing=False)
    give_layers(model)
    model.config.use_cache = False
    return model


def refuse_missing(report: dict[str, Any], what: str, remedy: str) -> None:
    """Raise ArtifactError for missing weights, which `from_pretrained` initialises at random."""
    if missing := sorted(report["missing_keys"]):
        raise ArtifactError(f"{what}: {len(missing)} weights are not in its files, such as `{missing[0]}`; {remedy}")


def from_safetensors(name: str, *, whole: bool = False, **arguments: Any) -> Any:
    """`from_pretrained` of `composite.loader`, restricted to safetensors files of `name`, a folder or a hub name.

    Raises ArtifactError for any other file, for one outside its folder or rejected by `weight_files.check`, and for an
    adapter beside the model, which transformers would load as well, or load the adapter's base instead.
    """
    from transformers import AutoConfig
    from transformers.utils import find_adapter_config_file

    if adapter := find_adapter_config_file(name, revision=arguments.get("revision")):
        raise ArtifactError(f"{adapter}: an adapter next to the base is not supported; use a base without one")
    if "config" not in arguments:
        arguments["config"] = AutoConfig.from_pretrained(name, trust_remote_code=False)
        _refuse_kernels(arguments["config"], name)
    if os.path.isdir(name):
        identity.refuse_parts_of_checkpoint(Path(name))
    # Each file is checked after transformers has located it (locally or in the hub's cache) and before it is read.
    # `use_safetensors` is not enough: an index may name pickles or other folders, and config.json may name an
    # `adapter_model.bin` (transformers 5.24, `_get_resolved_checkpoint_files`, `get_checkpoint_shard_files`).
    find = patches.CHECKPOINT_FILES.value

    def find_and_check(*positional: Any, **named: Any) -> Any:
        files, index = find(*positional, **named)
        for file in map(os.path.normpath, files):
            if os.path.isdir(name) and not Path(file).is_relative_to(os.path.normpath(name)):
                raise ArtifactError(f"{name}: its index names {file}, outside its folder; download the model again")
            if not file.endswith(weight_files.SUFFIX):
                raise ArtifactError(
                    f"{file}: only {weight_files.SUFFIX} files are supported; convert it, or use another base"
                )
            weight_files.check(Path(file))
        return files, index

    known = composite.loader(arguments["config"], whole=whole)
    with patches.CHECKPOINT_FILES.by(find_and_check):
        return known.from_pretrained(name, use_safetensors=True, **arguments)


def refuse_not_finite(section: ModelSection) -> None:
    """Raise ArtifactError for the first weight of the base that is not finite; reads all files that are loaded."""
    if section.weights == "random":
        return
    for file in identity.loaded_files(weights_directory(section.name, section.revision)):
        if names := weight_files.not_finite(file):
            raise ArtifactError(
                f"{file}: `{names[0]}` of the base has values that are not finite"
                + (f", as do {len(names) - 1} more tensors" if names[1:] else "")
                + "; download the base again, or use another"
            )


@contextlib.contextmanager
def blaming_base(model: ModelSection) -> Iterator[None]:
    """In the block, raise ArtifactError in place of NumbersError if weights of the base are not finite.

    A lower learning rate would not help then.
    """
    try:
        yield
    except NumbersError:
        refuse_not_finite(model)
        raise
