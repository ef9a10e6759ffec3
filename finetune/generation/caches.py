"""The table of KV caches that answers can be generated with. A new one is an entry in CACHES.

All are transformers' own. Layers that attend to a window keep no more than the window, whatever the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from finetune.config.field_types import pick
from finetune.errors import ConfigError, MachineError


def _dynamic(architecture: Any, length: int) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=architecture)


def _static(architecture: Any, length: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=architecture, max_cache_len=length)


def _quantized(architecture: Any, length: int) -> Any:
    import torch
    from transformers import cache_utils

    if torch.tensor(1e4).to(torch.float8_e4m3fn).float().isnan():  # what later tokens exceed the first ones by
        raise MachineError(
            f"the quantized KV cache needs torch 2.13, whose 8-bit floats have no NaN for large numbers; this is "
            f"{torch.__version__}: pip install -U torch, or choose dynamic"
        )
    try:
        return cache_utils.QuantizedCache("fp8", architecture)
    except ValueError:
        raise ConfigError(
            "the quantized KV cache is only for models whose layers all attend to the whole row; choose dynamic, which "
            "keeps no more than the window of the others"
        ) from None


def _offloaded(architecture: Any, length: int) -> Any:
    import torch
    from transformers import DynamicCache

    # transformers asks CUDA for a stream; without a GPU, the cache is in host memory anyway.
    return DynamicCache(config=architecture, offloading=torch.cuda.is_available())


def _sliding(architecture: Any, length: int) -> Any:
    cache = _dynamic(architecture, length)
    if not any(cache.is_sliding):
        raise ConfigError(
            "no layer of this model attends to a window, so a sliding KV cache would change its answers; choose dynamic"
        )
    return cache


@dataclass(frozen=True)
class KVCache:
    """A kind of KV cache: `make` makes one of transformers' for an architecture and rows of a length in tokens."""

    help: str
    make: Callable[[Any, int], Any]


CACHES: dict[str, KVCache] = {
    "dynamic": KVCache("grows with the answers", _dynamic),
    "static": KVCache("allocated at once for prompt and longest answer", _static),
    "quantized": KVCache("8-bit floats, with one scale a layer, so that an answer depends on its batch", _quantized),
    "offloaded": KVCache("in host memory but for a layer and the next; on a CPU the same as dynamic", _offloaded),
    "sliding": KVCache("dynamic, refused unless layers attend to a window", _sliding),
}


def make(name: str, architecture: Any, length: int) -> Any:
    """An empty KV cache `name` for rows of `length` tokens. Raises ConfigError or MachineError if it cannot be had."""
    return pick(CACHES, name, "KV cache").make(architecture, length)


def keeps(model: Any) -> bool:
    """Whether `generate` of transformers 5.24 can go on from a cache of `model`.

    A model with heads of attention asks its cache how many tokens it has, which only layers of attention know (Kimi
    Linear or Qwen3-Next may have none). Mamba has no such heads and does not ask.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import CacheLayerMixin

    base = model.get_base_model() if hasattr(model, "peft_config") else model
    config = base.config.get_text_config()
    layers = DynamicCache(config=config).layers
    asked = hasattr(config, "num_attention_heads")
    return not (asked and layers) or any(isinstance(layer, CacheLayerMixin) for layer in layers)


def tensors(cache: Any) -> Iterator[tuple[int, Any]]:
    """(layer, tensor) for all that a cache of transformers holds."""
    for number, layer in enumerate(getattr(cache, "layers", ())):
        for value in vars(layer).values():
            yield from ((number, tensor) for tensor in _tensors(value))


def size_bytes(cache: Any) -> int:
    """Bytes of the tensors that a cache holds, wherever they are."""
    storages = {id(store := tensor.untyped_storage()): store.nbytes() for _, tensor in tensors(cache)}
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):  # states of linear attention, by number
        yield from _tensors(list(value.values()))
