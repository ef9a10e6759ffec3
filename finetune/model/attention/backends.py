"""Attention implementations. A new one is one entry in ATTENTIONS."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finetune.errors import MachineError
from finetune.model.source import catalog
from finetune.runtime import libraries

# The compute capability from which SDPA has a flash kernel.
_FLASH = (8, 0)


@dataclass(frozen=True)
class Attention:
    """One implementation, and its name in transformers.

    `missing(config, device, precision)` says why it cannot be used here (None if it can), from the model's config, the
    torch device type, and bf16, fp16 or fp32.
    """

    help: str
    implementation: str
    missing: Callable[[Any, str, str], str | None]


def choose(
    name: str, config: Any, device: str, precision: str, *, packed: bool = False, longest: int = 0
) -> tuple[str, str]:
    """The transformers implementation for `name` ("auto" or a key of ATTENTIONS), and the reason in one clause.

    A `config` of None stands for an ordinary model. `packed` selects its variant for packed rows, and `longest`, the
    tokens of the longest row, that for rows longer than a layer's window. Raises MachineError if the named
    implementation cannot be used with this model on this device.
    """
    if name != "auto":
        reason = "as configured"
        if obstacle := ATTENTIONS[name].missing(config, device, precision):
            raise MachineError(f"`model.attention: {name}` cannot be used here: {obstacle}; set `auto`")
    else:
        obstacles: list[str] = []
        for name in _AUTO_ORDER:  # the last, eager, has no requirement
            obstacle = ATTENTIONS[name].missing(config, device, precision)
            if obstacle is None:
                break
            obstacles.append(f"no {name}: {obstacle}")
        reason = "; ".join(obstacles) or "the fastest available"
    capability = _capability() if device == "cuda" else None
    return _for_rows(ATTENTIONS[name].implementation, config, precision, capability, packed, longest), reason


def planned(
    name: str, config: Any, device: str, precision: str, *, capability: tuple[int, int] | None = None,
    packed: bool = False, longest: int = 0,
) -> str:  # fmt: skip
    """The implementation assumed for a device that may be absent; all fused kernels save the same tensors.

    `capability` is that of the GPU, None for a CPU.
    """
    if name == "auto":
        name = "eager" if _sdpa(config, device, precision) else "sdpa"
    fused = "eager" if name == "eager" else "sdpa"
    variant = _for_rows(fused, config, precision, capability, packed, longest)
    return variant if variant != fused else ATTENTIONS[name].implementation


def of_parts(implementation: str, config: Any) -> str | dict[str, str]:
    """transformers' argument for a model whose text is computed with `implementation`.

    The other parts of a composite model, which may not support it, choose their own.
    """
    text = config.get_text_config()
    part = next((name for name in config.sub_configs if getattr(config, name, None) is text), None)
    return {"": implementation, part: implementation} if part else implementation


def _for_rows(
    implementation: str, config: Any, precision: str, capability: tuple[int, int] | None, packed: bool, longest: int
) -> str:
    if not packed and not longest:
        return implementation
    from finetune.model.attention import packing  # imports what computes masks, which checking a config does not need

    varlen = capability is not None and has_flash(precision, capability)
    if packed:
        return packing.variant(implementation, config, varlen=varlen)
    return packing.windowed(implementation, config, longest, varlen=varlen)


def _capability() -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability()


def _flash(
    config: Any, device: str, precision: str, *, version: int, package: str, capability: tuple[int, int]
) -> str | None:
    if device != "cuda":
        return "it needs a CUDA device"
    from transformers import utils

    from finetune.model.precision import PRECISIONS

    if not PRECISIONS[precision].autocasts:
        return "it computes in 16 bit, but `training.precision` is fp32"
    if _capability() < capability:
        return f"the GPU is below compute capability {capability[0]}.{capability[1]}"
    if not _supports(config, "_supports_flash_attn"):
        return "this model has no flash attention in transformers"
    installed = getattr(utils, f"is_flash_attn_{version}_available")()
    return None if installed else f"the package {package} is not installed"


def has_flash(precision: str, capability: tuple[int, int] | None) -> bool:
    """Whether SDPA has a flash kernel, which supports grouped-query attention, on a GPU or (None) a CPU."""
    return capability is None or (capability >= _FLASH and precision != "fp32")


def _sdpa(config: Any, device: str, precision: str) -> str | None:
    if config is not None and any(cap is not None for cap in catalog.values(config, "attn_logit_softcapping")):
        return "this model caps attention logits, which SDPA does not support"
    return None if _supports(config, "_supports_sdpa") else "this model has no SDPA in transformers"


def _flex(config: Any, device: str, precision: str) -> str | None:
    if device != "cuda":
        return "it needs a CUDA device"
    if obstacle := libraries.triton_obstacle():
        return f"it compiles Triton kernels, which does not work here ({obstacle})"
    return None if _supports(config, "_supports_flex_attn") else "this model has no flex_attention in transformers"


def without_fla(config: Any, device: str) -> str | None:
    """A sentence on the cost of gated linear attention without its kernels; None if they or the layers are absent."""
    recurrent = any("gated_delta_rule" in name for name in catalog.text_code(config) or {})
    if device != "cuda" or not recurrent or importlib.util.find_spec("fla"):
        return None
    return (
        "linear attention: flash-linear-attention is not installed, so these layers run in plain PyTorch in float32, "
        "with which a step of Qwen3.5 took 1.7 times as long (transformers#48718); install flash-linear-attention"
    )


def shares_keys(config: Any) -> bool:
    """Whether heads share keys and values in any layer."""
    shared, heads = (catalog.values(config, name) for name in ("num_key_value_heads", "num_attention_heads"))
    return any(count not in (None, all_heads) for count, all_heads in zip(shared, heads, strict=True))


def _supports(config: Any, attribute: str) -> bool:
    """Whether the model's class in transformers claims support; True for a model with its own code, and for any."""
    model_class = None if config is None else catalog.model_class(config)
    return model_class is None or catalog.says(model_class, attribute)


ATTENTIONS: dict[str, Attention] = {
    "flash_attention_3": Attention(
        "the flash-attn-3 package, compute capability 9 and newer", "flash_attention_3",
        functools.partial(_flash, version=3, package="flash-attn-3", capability=(9, 0)),
    ),
    "flash_attention_2": Attention(
        "the flash-attn package, compute capability 8 and newer", "flash_attention_2",
        functools.partial(_flash, version=2, package="flash-attn", capability=(8, 0)),
    ),
    "sdpa": Attention("PyTorch's scaled_dot_product_attention with its own flash kernels", "sdpa", _sdpa),
    "flex": Attention("PyTorch's flex_attention, compiled", "flex_attention", _flex),
    "eager": Attention("plain matrix products; keeps the whole score matrix", "eager", lambda *_: None),
}  # fmt: skip

# flex must be chosen by name: it compiles a kernel for each new shape, and batches here have many.
_AUTO_ORDER = ("flash_attention_3", "flash_attention_2", "sdpa", "eager")
