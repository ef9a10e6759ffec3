"""The table of KV caches that answers can be generated with. A new one is an entry in CACHES.

All are transformers' own. Layers that attend to a window keep no more than the window, whatever the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune.config.fields import unknown
from finetune.errors import ConfigError, MachineError


def _any(architecture: Any) -> None:
    """Every model has this cache."""


def _fp8(architecture: Any) -> None:
    from transformers import cache_utils

    if not hasattr(cache_utils, "Fp8QuantizedLayer"):  # 5.17 has only quanto and hqq, further packages
        raise MachineError(
            "the quantized KV cache needs a newer transformers (5.23 has it): pip install -U transformers"
        )
    try:
        cache_utils.QuantizedCache("fp8", architecture)
    except ValueError:
        raise ConfigError(
            "the quantized KV cache is only for models whose layers all attend to the whole row; choose dynamic, which "
            "keeps no more than the window of the others"
        ) from None


def _windows(architecture: Any) -> None:
    from transformers import DynamicCache

    if not any(DynamicCache(config=architecture).is_sliding):
        raise ConfigError(
            "no layer of this model attends to a window, so a sliding KV cache would change its answers; choose dynamic"
        )


@dataclass(frozen=True)
class KVCache:
    """A kind of KV cache: `arguments` are those of transformers' `generate`.

    `check` takes the architecture and raises ConfigError or MachineError where a model cannot have it.
    """

    help: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[Any], None] = _any


CACHES: dict[str, KVCache] = {
    "dynamic": KVCache("grows with the answers"),
    # Compiled decoding, transformers' default for it on a GPU, would take minutes, and quantized layers have none.
    "static": KVCache(
        "allocated once for prompt and longest answer", {"cache_implementation": "static", "disable_compile": True}
    ),
    "quantized": KVCache(
        "8-bit floats, with one scale a layer from the prompts, so that an answer depends on its batch",
        {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
        _fp8,
    ),
    "offloaded": KVCache(
        "in host memory but for one layer and the next; on a CPU the same as dynamic",
        {"cache_implementation": "offloaded"},
    ),
    "sliding": KVCache("dynamic, refused unless layers attend to a window", check=_windows),
}


def find(name: str, architecture: Any, device_type: str) -> Mapping[str, Any]:
    """The arguments of `generate` for the KV cache `name`.

    Raises ConfigError for an unknown kind or one that the model cannot have, MachineError for one that needs another
    version of transformers.
    """
    if name not in CACHES:
        raise ConfigError(f"KV cache {unknown(name, CACHES)}")
    kind = CACHES[name]
    kind.check(architecture)
    if name == "offloaded" and device_type == "cpu":  # transformers asks CUDA for a stream
        return CACHES["dynamic"].arguments
    return kind.arguments


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
