"""A Hugging Face model as a GGUF file, tensor by tensor.

The container, its quantization and the names of tensors are the `gguf` package's. What each architecture needs besides
is here: hyperparameters, and the tensors that llama.cpp stores otherwise. A setting of an architecture that llama.cpp
would compute otherwise is refused (checked against src/models/ and conversion/ of ggml-org/llama.cpp, 2026).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from finetune.errors import ConfigError
from finetune.export import gguf_recipes, gguf_vocabulary
from finetune.export.gguf_types import TYPES
from finetune.model import bounds
from finetune.storage import weight_files

# Elements that are converted at a time, as float32.
_CHUNK = 2**24

Refuse = Callable[[Any], str | None]


@dataclass(frozen=True)
class Family:
    """One of transformers' model types as one of llama.cpp's.

    `refuse` says what of a configuration llama.cpp would compute otherwise (None: nothing), `add` adds the keys that
    other families have not. `permuted`: query and key rows are stored in the order of llama.cpp's rotary embedding.
    `norm_shift` is added to each norm's weight. `activation` is the only one that llama.cpp has for it.
    """

    arch: str
    refuse: Refuse = lambda config: None
    add: Callable[[Any, Any], None] = lambda writer, config: None
    permuted: bool = False
    norm_shift: float = 0.0
    activation: str = "silu"


def _refuse_windows(config: Any) -> str | None:
    return "uses a sliding window" if getattr(config, "use_sliding_window", False) else None


def _refuse_gemma2(config: Any) -> str | None:
    if config.attn_logit_softcapping is None or config.final_logit_softcapping is None:
        return "has no soft capping"
    return _refuse_gemma(config, every=2, wide_layers=46)


def _refuse_gemma3(config: Any) -> str | None:
    sliding = config.rope_parameters["sliding_attention"]
    if sliding.get("rope_type", "default") != "default" or sliding["rope_theta"] != 10_000:
        return "has another rotary embedding in layers with a sliding window"
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "use_bidirectional_attention", False):
        return "has another attention"
    return _refuse_gemma(config, every=6, wide_layers=62)


def _refuse_gemma(config: Any, every: int, wide_layers: int) -> str | None:
    """`every`: one layer of so many attends to all tokens; `wide_layers`: depth of the model with another scale."""
    layers = config.num_hidden_layers
    if any((kind == "full_attention") != (place % every == every - 1) for place, kind in enumerate(config.layer_types)):
        return f"has other layers with a sliding window than {every - 1} of {every}"
    scale = config.hidden_size // config.num_attention_heads if layers == wide_layers else config.head_dim
    return None if config.query_pre_attn_scalar == scale else "scales attention by another factor"


def _add_gemma(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_phi3(writer: Any, config: Any) -> None:
    writer.add_rope_scaling_orig_ctx_len(config.max_position_embeddings)
    writer.add_sliding_window(0)  # which llama.cpp has not for this architecture; see `context`


_GELU = "gelu_pytorch_tanh"

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", permuted=True),
    "mistral": Family("llama", permuted=True),
    "qwen2": Family("qwen2", refuse=_refuse_windows),
    "qwen3": Family("qwen3", refuse=_refuse_windows),
    "gemma2": Family("gemma2", _refuse_gemma2, _add_gemma, norm_shift=1.0, activation=_GELU),
    "gemma3_text": Family("gemma3", _refuse_gemma3, _add_gemma, norm_shift=1.0, activation=_GELU),
    "phi3": Family("phi3", add=_add_phi3),
}


_SCALINGS = ("default", "linear", "llama3", "yarn")
_YARN = {"attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"}
"""Settings of YaRN for which llama.cpp has its defaults."""


def family(config: Any) -> Family:
    """The family of a transformers configuration. Raises ConfigError if llama.cpp would compute it otherwise."""
    found = FAMILIES.get(config.model_type)
    if found is None:
        raise ConfigError(
            f"GGUF of a `{config.model_type}` model is not written here, only of {', '.join(FAMILIES)}; export "
            "`merged` and give it to llama.cpp's convert_hf_to_gguf.py"
        )
    activation = getattr(config, "hidden_act", None) or config.hidden_activation
    why = found.refuse(config)
    if activation != found.activation:
        why = f"uses the activation {activation}"
    kind = (rope := _rope(config))["rope_type"]
    if kind not in _SCALINGS or (kind == "yarn" and (found.arch == "phi3" or rope.keys() & _YARN)):
        why = f"scales its rotary embedding by `{kind}`, which is not written here"
    elif kind == "llama3" and found.arch != "llama":  # the one architecture that reads its factors
        why = "scales its rotary embedding by `llama3`"
    if why:
        raise ConfigError(f"this `{config.model_type}` model {why}, which llama.cpp's `{found.arch}` cannot express")
    return found


def write(
    folder: Path, config: Any, tokenizer: Any, file: Path, kind: str, *, starts_with_bos: bool, end_of_turn: int | None
) -> list[str]:
    """Write the model in `folder` (safetensors) to `file`, its matrices in the type `kind` (a key of `TYPES`).

    Takes the memory of one tensor. Returns what llama.cpp is known to do otherwise, as sentences. Raises ConfigError
    for a model that llama.cpp cannot express, OSError for a disk without room.
    """
    import gguf

    found = family(config)
    with _written(gguf.GGUFWriter(file, found.arch)) as writer:
        writer.add_type("model")
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_file_type(gguf.LlamaFileType[TYPES[kind].file_type])
        known = _add_parameters(writer, config, found)
        known += gguf_vocabulary.add(
            writer, tokenizer, config.vocab_size, starts_with_bos=starts_with_bos, end_of_turn=end_of_turn
        )
        tensors = list(_tensors(folder, config, found))
        places = [(name, _type(name, shape, kind, config), shape) for name, shape, _ in tensors]
        _write_tensors(writer, file, places, (make for _, _, make in tensors))
    return known


def write_lora(config: Any, pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], rank: int, file: Path) -> None:
    """Write a LoRA adapter for llama.cpp: `pairs` are A (rank, in) and B (out, rank), scale included, by module name.

    Raises ConfigError as `write` does.
    """
    import gguf

    found = family(config)
    with _written(gguf.GGUFWriter(file, found.arch)) as writer:
        writer.add_type("adapter")
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
        names = _names(config, found)
        made = {}
        for module, (down, up) in pairs.items():
            name = _name_of(names, f"{module}.weight", found)
            made[f"{name}.lora_a"] = down
            made[f"{name}.lora_b"] = _stored(f"{module}.weight", up, config, found)
        places = [(name, gguf.GGMLQuantizationType.F32, list(tensor.shape)) for name, tensor in made.items()]
        _write_tensors(writer, file, places, (functools.partial(torch.clone, tensor) for tensor in made.values()))


# -- hyperparameters -------------------------------------------------------------------------------------------------


def _add_parameters(writer: Any, config: Any, found: Family) -> list[str]:
    longest, known = context(config)
    rope = _rope(config)
    head = _head_size(config)
    writer.add_context_length(longest)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    found.add(writer, config)
    return known


def context(config: Any) -> tuple[int, list[str]]:
    """The context in tokens: up to where llama.cpp, which has no window for Mistral and Phi 3, computes the same."""
    window = getattr(config, "sliding_window", None)
    longest: int = bounds.positions(config) or config.max_position_embeddings
    if config.model_type in ("mistral", "phi3") and window and window < longest:
        said = f"llama.cpp has no sliding window for this model, so the file allows only its {window:,} tokens"
        return window, [said]
    return longest, []


def _rope(config: Any) -> dict[str, Any]:
    """The parameters of the rotary embedding, of the layers that attend to all tokens where there are two kinds."""
    parameters = config.rope_parameters
    parameters = parameters.get("full_attention", parameters)
    return {"rope_type": "default", **parameters}


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


# -- tensors ---------------------------------------------------------------------------------------------------------

Tensor = tuple[str, list[int], Callable[[], torch.Tensor]]


def _tensors(folder: Path, config: Any, found: Family) -> Iterator[Tensor]:
    """Name, shape and a function that loads each tensor of the GGUF file."""
    from safetensors import safe_open

    names = _names(config, found)
    if _rope(config)["rope_type"] == "llama3":
        factors = _frequency_factors(config)
        yield "rope_freqs.weight", list(factors.shape), lambda: factors
    for file in sorted(folder.glob("*.safetensors")):
        weight_files.check(file)
        for name, shape in weight_files.shapes(file).items():
            # Tied to the embeddings; a buffer that old Llama checkpoints hold.
            if (name == "lm_head.weight" and config.tie_word_embeddings) or name.endswith(".rotary_emb.inv_freq"):
                continue

            def load(file: Path = file, name: str = name) -> torch.Tensor:
                with safe_open(file, framework="pt") as stored:
                    return _stored(name, stored.get_tensor(name), config, found)

            yield _name_of(names, name, found), shape, load


def _names(config: Any, found: Family) -> Any:
    import gguf

    [arch] = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == found.arch]
    return gguf.get_tensor_name_map(arch, config.num_hidden_layers)


def _name_of(names: Any, name: str, found: Family) -> str:
    place: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if place is None:
        raise ConfigError(f"the tensor `{name}` has no place in llama.cpp's `{found.arch}`; export `merged` instead")
    return place


def _stored(name: str, tensor: torch.Tensor, config: Any, found: Family) -> torch.Tensor:
    """A tensor as llama.cpp stores it; for the rows of a weight, a bias or a LoRA's B alike."""
    if found.norm_shift and name.endswith("norm.weight"):
        return tensor.float() + found.norm_shift
    if found.permuted and ".self_attn." in name:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            # From halves of each head (transformers) to pairs (llama.cpp).
            return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
    return tensor


def _frequency_factors(config: Any) -> torch.Tensor:
    """What llama.cpp divides each rotary frequency by, for `llama3` scaling: (head size / 2,)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    head = _head_size(config)
    plain = 1.0 / _rope(config)["rope_theta"] ** (torch.arange(0, head, 2, dtype=torch.float32) / head)
    return plain / scaled


def _type(name: str, shape: list[int], kind: str, config: Any) -> Any:
    """The type of a tensor: vectors stay in float32, and rows that blocks do not divide in float16."""
    import gguf

    if len(shape) < 2:
        return gguf.GGMLQuantizationType.F32
    wanted = gguf_recipes.type_of(name, kind, config) if TYPES[kind].recipe else gguf.GGMLQuantizationType[kind.upper()]
    for found in (wanted, gguf_recipes.fallback(wanted)):
        if found is not None and shape[-1] % gguf.GGML_QUANT_SIZES[found][0] == 0:
            return found
    return gguf.GGMLQuantizationType.F16


@contextlib.contextmanager
def _written(writer: Any) -> Iterator[Any]:
    try:
        yield writer
    finally:
        writer.close()


def _write_tensors(
    writer: Any, file: Path, places: list[tuple[str, Any, list[int]]], tensors: Iterator[Callable[[], torch.Tensor]]
) -> None:
    """Write header, keys and then each tensor, one in memory at a time. Raises OSError for a disk without room."""
    import gguf

    total = 0
    for name, kind, shape in places:
        stored = gguf.quant_shape_to_byte_shape(shape, kind)
        size = int(np.prod(stored))
        total += size
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), size, raw_dtype=kind)
    if shutil.disk_usage(file.parent).free < total:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {total:,} bytes are needed")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (name, kind, _), load in zip(places, tensors, strict=True):
        writer.write_tensor_data(_encoded(name, load(), kind))


def _encoded(name: str, tensor: torch.Tensor, kind: Any) -> np.ndarray:
    """The bytes of a tensor in a GGUF type, converted a few rows at a time."""
    import gguf

    matrix = tensor.reshape(-1, tensor.shape[-1])
    encoded = np.empty(gguf.quant_shape_to_byte_shape(matrix.shape, kind), dtype=np.uint8)
    rows = max(1, _CHUNK // matrix.shape[-1])
    for start in range(0, len(matrix), rows):
        values = np.ascontiguousarray(matrix[start : start + rows].float().numpy())
        with np.errstate(over="ignore"):
            part = gguf_recipes.quantize(values, kind) if gguf_recipes.fallback(kind) else gguf.quantize(values, kind)
        if part.dtype == np.float16 and not np.isfinite(part).all():
            raise ConfigError(f"`{name}` has values beyond the range of float16; use `--type bf16`")
        encoded[start : start + rows] = part.view(np.uint8)
    return encoded
