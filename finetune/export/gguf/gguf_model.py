"""A Hugging Face model as a GGUF file, tensor by tensor.

The container, its quantization and the names of tensors are the `gguf` package's. What each architecture needs besides
is in `model.source.gguf_families`. The file of a multimodal model holds its language model.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn

from finetune.config import QuantizationSection
from finetune.errors import ArtifactError, ConfigError
from finetune.export.gguf import gguf_packed, gguf_recipes, gguf_vocabulary
from finetune.export.gguf.gguf_packed import GgufTensor
from finetune.export.gguf.gguf_types import TYPES
from finetune.forms import FORMS
from finetune.forms import packed as packing
from finetune.model import bounds
from finetune.model.skeleton import weightless_base
from finetune.model.source import chat_template, gguf_families, gguf_names, identity
from finetune.model.source.gguf_families import Family
from finetune.model.structure import streamed
from finetune.storage import weight_files

# Elements that are converted at a time, as float32.
_CHUNK = 2**24


def check(config: Any, tokenizer: Any) -> Family:
    """The family of a model. Raises ConfigError if llama.cpp cannot express that or the tokenizer."""
    family, size = gguf_families.family(config), gguf_families.text(config).vocab_size
    writer = gguf.GGUFWriter(None, family.arch)
    gguf_vocabulary.add(writer, tokenizer, size, starts_with_bos=False, end_of_turn=None)
    return family


def write(
    folder: Path, config: Any, tokenizer: Any, file: Path, kind: str, *, starts_with_bos: bool,
    packed: Mapping[str, nn.Parameter] = {},
) -> list[str]:  # fmt: skip
    """Write the model in `folder` (safetensors) to `file`, its matrices in the type `kind` (a key of `TYPES`).

    `packed` weights, by the model's names, take the place of the folder's, and their bytes are written as they are;
    all others are then written in the folder's own type, but for those that cannot be packed (`OTHER_COLUMNS`).
    Takes the memory of one tensor. Returns the known differences of llama.cpp, as sentences. Raises ConfigError for a
    model that llama.cpp cannot express, OSError if the disk lacks room.
    """
    family, text = gguf_families.family(config), gguf_families.text(config)
    with contextlib.closing(gguf.GGUFWriter(file, family.arch)) as writer:
        writer.add_type("model")
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(gguf.LlamaFileType[TYPES[kind].name])
        known = _add_parameters(writer, text, family)
        known += gguf_vocabulary.add(
            writer, tokenizer, text.vocab_size,
            starts_with_bos=starts_with_bos, end_of_turn=chat_template.end_of_turn(tokenizer),
        )  # fmt: skip
        tensors = list(_tensors(folder, config, family, kind, packed))
        _write_tensors(writer, file, tensors)
    if text is not config:
        known.append("the file holds the language model alone; what sees or hears stays with `merged`")
    return known


def write_lora(config: Any, pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], rank: int, file: Path) -> None:
    """Write a LoRA adapter for llama.cpp; `pairs`: A (rank, in) and B (out, rank) with the scale, by module name."""
    family, text = gguf_families.family(config), gguf_families.text(config)
    with contextlib.closing(gguf.GGUFWriter(file, family.arch)) as writer:
        writer.add_type("adapter")
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
        names, own_names = gguf_names.mapped(text, family), gguf_names.own([f"{module}.weight" for module in pairs])
        made = {}
        for module, (down, up) in pairs.items():
            own = own_names.get(f"{module}.weight", "")
            # Another order of columns would change A.
            whole = own and not own.endswith(gguf_families.OTHER_COLUMNS)
            stored = gguf_names.stored(own, up, text, family) if whole else {}
            name = gguf_names.name_of(names, own, family) if stored.keys() == {own} else ""
            if not name or name.endswith("_norm.weight"):  # llama.cpp would silently skip a norm
                raise ConfigError(f"llama.cpp has no form for a LoRA on `{module}`; export `merged` instead")
            made[f"{name}.lora_a"] = down
            made[f"{name}.lora_b"] = stored[own]
        exact = gguf.GGMLQuantizationType.F32
        _write_tensors(
            writer, file,
            [(name, list(one.shape), exact, functools.partial(torch.clone, one)) for name, one in made.items()],
        )  # fmt: skip


def _add_parameters(writer: Any, config: Any, family: Family) -> list[str]:
    longest, known = context(config)
    rope, head = gguf_families.rope(config), gguf_families.head_size(config)
    # Layers of one model may differ in these (Gemma 4).
    inside = gguf_families.per_layer(config, "intermediate_size")
    key_heads = gguf_families.per_layer(config, "num_key_value_heads")
    writer.add_context_length(longest)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if inside is not None:
        writer.add_feed_forward_length(inside)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    # A rotation of a part of the head may be written in factors of frequencies instead.
    rotated = 1.0 if rope["rope_type"] == "proportional" else rope.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(head * rotated))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    family.add(writer, config)
    return known


def context(config: Any) -> tuple[int, list[str]]:
    """The context in tokens, and its limits as sentences: llama.cpp has no sliding window for Mistral and Phi 3."""
    config = gguf_families.text(config)
    window = getattr(config, "sliding_window", None)
    longest: int = bounds.positions(config) or config.max_position_embeddings
    if config.model_type in ("mistral", "phi3") and window and window < longest:
        said = f"llama.cpp has no sliding window for this model, so the file allows only its {window:,} tokens"
        return window, [said]
    return longest, []


# Small matrices that decide much, or that llama.cpp takes in float32 alone.
SIXTEEN_BIT = {torch.bfloat16: "bf16", torch.float16: "f16"}
_EXACT = (".bias", ".scale", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight")


ModelWeight = tuple[str, str, torch.Tensor, Callable[[], torch.Tensor]]
"""A weight's name, that in the language model alone, the weight on the meta device, and a function that loads it."""


def _sources(folder: Path, config: Any) -> Iterator[ModelWeight]:
    files = identity.loaded_files(folder)
    for file in files:
        weight_files.check(file)
    plain = QuantizationSection(kind="none")
    model = weightless_base(config, plain, attention="eager", dtype=torch.float32)
    weights = streamed.Weights(model, files)
    tied = model.all_tied_weights_keys
    known = model.state_dict()
    for name, own in gguf_names.own(known).items():
        if name not in tied:
            yield name, own, known[name].to("meta"), functools.partial(weights.__getitem__, name)


def _tensors(
    folder: Path, config: Any, family: Family, kind: str, packed: Mapping[str, nn.Parameter]
) -> Iterator[GgufTensor]:
    text = gguf_families.text(config)
    names = gguf_names.mapped(text, family)
    beside = stored_type(folder) if packed else kind
    if (factors := gguf_names.frequency_factors(text)) is not None:
        yield "rope_freqs.weight", list(factors.shape), gguf.GGMLQuantizationType.F32, lambda: factors
    for name, own, shaped, whole in _sources(folder, config):
        store = functools.partial(gguf_names.stored, own, config=text, family=family)
        if name in packed:
            for part, *rest in gguf_packed.tensors(name, packed[name], store):
                yield gguf_names.name_of(names, part, family), *rest
            continue
        for part, each in store(shaped).items():

            def load(whole: Callable[[], torch.Tensor] = whole, store: Any = store, part: str = part) -> torch.Tensor:
                stored: torch.Tensor = store(whole())[part]
                return stored

            stored, shape = gguf_names.name_of(names, part, family), list(each.shape)
            wanted = _type(stored, shape, kind if own.endswith(gguf_families.OTHER_COLUMNS) else beside, text)
            form = FORMS.get(wanted.name.lower())
            if form and form.is_of_safetensors:  # no program of llama.cpp rounds to it
                yield from gguf_packed.rounded(stored, shape, wanted, load)
            else:
                yield stored, shape, wanted, load


def stored_type(folder: Path) -> str:
    """The type that rounds none of the weights in a folder: `bf16`, `f16` or `f32`."""
    types = {dtype for file in identity.loaded_files(folder) for dtype, _ in weight_files.layout_of(file).values()}
    return next((kind for dtype, kind in SIXTEEN_BIT.items() if dtype in types), "f32")


def differing(folder: Path, config: Any, file: Path, given: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """The `count` of weights in `file`, and of those whose values, decoded by the gguf package, are `differing`.

    They are compared with those of the model in `folder`, or the given ones, by the model's names. Raises ArtifactError
    if one that is given packed differs.
    """
    family, text = gguf_families.family(config), gguf_families.text(config)
    names = gguf_names.mapped(text, family)
    written = {one.name: one for one in gguf.GGUFReader(file).tensors}
    found = {"count": 0, "differing": 0}
    for name, own, _, whole in _sources(folder, config):
        weight = given.get(name)
        is_packed = weight is not None and packing.packing_of(weight) is not None
        values = whole() if weight is None else (packing.exact(weight) if is_packed else weight.detach()).cpu()
        for part, expected in gguf_names.stored(own, values, text, family).items():
            count = _unequal(written, gguf_names.name_of(names, part, family), expected.float().numpy())
            if count and is_packed:
                raise ArtifactError(f"{count:,} values of `{name}` in {file.name} are not those that were trained")
            found = {"count": found["count"] + expected.numel(), "differing": found["differing"] + count}
    return found


def _unequal(written: Mapping[str, Any], name: str, expected: np.ndarray) -> int:
    """How many values of a tensor are not the expected ones; a factor rounds the last place of a float32."""
    one = written[name]
    values = gguf.dequantize(one.data, one.tensor_type).reshape(expected.shape)
    scale = written.get(name.removesuffix("weight") + "scale")
    form = FORMS.get(one.tensor_type.name.lower())
    if scale is not None and form and form.module and form.codec.gguf.factor:
        values = values * scale.data.reshape(-1, *[1] * (values.ndim - 1 if values.ndim > 2 else 1))
        return int((np.abs(values - expected) > 2.0**-22 * np.abs(expected)).sum())
    return int((values != expected).sum())


def _type(name: str, shape: list[int], kind: str, config: Any) -> Any:
    """The type of a tensor: vectors and `_EXACT` stay in float32, and rows that blocks do not divide in float16."""
    if len(shape) < 2 or name.endswith(_EXACT):
        return gguf.GGMLQuantizationType.F32
    mixed = kind in TYPES and TYPES[kind].mixed
    wanted = gguf_recipes.type_of(name, kind, config) if mixed else gguf.GGMLQuantizationType[kind.upper()]
    for candidate in (wanted, gguf_recipes.fallback(wanted)):
        if candidate is not None and shape[-1] % gguf.GGML_QUANT_SIZES[candidate][0] == 0:
            return candidate
    return gguf.GGMLQuantizationType.F16


def _write_tensors(writer: Any, file: Path, tensors: list[GgufTensor]) -> None:
    """Write header, keys and then each tensor, one in memory at a time."""
    total = 0
    for name, shape, kind, _ in tensors:
        stored = gguf.quant_shape_to_byte_shape(shape, kind)
        size = int(np.prod(stored))
        total += size
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), size, raw_dtype=kind)
    if shutil.disk_usage(file.parent).free < total:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {total:,} bytes are needed")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, _, kind, load in tensors:
        writer.write_tensor_data(_encoded(name, load(), kind))


def _encoded(name: str, tensor: torch.Tensor, kind: Any) -> np.ndarray:
    """The bytes of a tensor in a GGUF type, converted a few rows at a time; those of a packed one are given."""
    if tensor.dtype is torch.uint8:
        return tensor.numpy()
    matrix = tensor.reshape(-1, tensor.shape[-1])
    encoded = np.empty(gguf.quant_shape_to_byte_shape(matrix.shape, kind), dtype=np.uint8)
    rows = max(1, _CHUNK // matrix.shape[-1])
    for start in range(0, len(matrix), rows):
        values = np.ascontiguousarray(matrix[start : start + rows].float().numpy())
        with np.errstate(over="ignore"):
            part = gguf_recipes.quantize(values, kind) if kind in gguf_recipes.BY_GGML else gguf.quantize(values, kind)
        if part.dtype == np.float16 and not np.isfinite(part).all():
            raise ConfigError(f"`{name}` has values beyond the range of float16; use `--type bf16`")
        encoded[start : start + rows] = part.view(np.uint8)
    return encoded
