"""Finds linear layers whose weight the model's code reads directly instead of calling the layer.

Mamba multiplies by `dt_proj.weight` and passes `out_proj.weight` to a fused kernel; Gemma 3n clamps the weight of
`prediction_coefs` in place. Such a layer cannot be quantized, because the code would read packed bytes, and an adapter
on it would not be trained, because PEFT adds it in the layer's forward pass. The same holds for subclasses of
`nn.Linear` that compute something else, such as the grouped projection of DeepSeek V4.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from finetune.model import experts
from finetune.runtime import libraries

_PROBE_TOKENS = 4


def names(model: Any) -> frozenset[str]:
    """Full names of these layers in `model`, found by a short forward pass in training mode.

    The first call must come before the model is quantized; the model may be on the meta device. The result is cached
    on the model.
    """
    if not hasattr(model, "direct_reads"):
        model.direct_reads = _probe(model)
    return model.direct_reads


def _probe(model: Any) -> frozenset[str]:
    head = model.get_output_embeddings()
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }
    read: set[nn.Linear] = set()
    # Data-dependent code fails on the meta device; reads in the layers before it have been recorded.
    with contextlib.suppress(Exception):
        _pass(model, list(linear.values()), read)
    # Layers of the same kind are treated alike, including those after the one in which the pass failed.
    kinds = {_kind(model, name) for name, module in linear.items() if module in read}
    return frozenset(name for name in linear if _kind(model, name) in kinds)


def _pass(model: Any, layers: list[nn.Linear], read: set[nn.Linear]) -> None:
    """Run a forward pass in training mode that adds to `read` the `layers` whose weight is read directly."""
    from transformers import masking_utils

    was_training = model.training
    devices = [model.device] if model.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.no_grad(),
        # As in an exported graph: the mask does not depend on the data.
        libraries.replaced(masking_utils, "is_tracing", lambda tensor=None: True),
        _watched(layers, read),
        _without_experts(model),
    ):
        model.train()
        try:
            model(input_ids=torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=model.device), use_cache=False)
        finally:
            model.train(was_training)


def _kind(model: nn.Module, name: str) -> tuple[type, str]:
    """The class of the parent module, and the layer's name in it."""
    parent, _, last = name.rpartition(".")
    return type(model.get_submodule(parent)), last


@contextlib.contextmanager
def _watched(layers: list[nn.Linear], read: set[nn.Linear]) -> Iterator[None]:
    """In the block, add to `read` each layer whose weight is read outside its own forward pass, or whose output does
    not have the shape of a linear layer's.
    """
    classes = {layer: type(layer) for layer in layers}
    inside: set[nn.Linear] = set()

    def weight(layer: Any) -> Any:
        if layer not in inside:
            read.add(layer)
        return dict(layer.named_parameters(recurse=False))["weight"]

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        inside.add(layer)
        try:
            output = classes[layer].forward(layer, *args, **kwargs)
        finally:
            inside.discard(layer)
        hidden = next((given for given in (*args, *kwargs.values()) if isinstance(given, torch.Tensor)), None)
        if (
            hidden is None
            or not isinstance(output, torch.Tensor)
            or output.shape != (*hidden.shape[:-1], layer.out_features)
        ):
            read.add(layer)
        return output

    patch = {"weight": property(weight), "forward": forward}
    watching = {known: type(known.__name__, (known,), patch) for known in set(classes.values())}
    for layer, known in classes.items():
        layer.__class__ = watching[known]
    try:
        yield
    finally:
        for layer, known in classes.items():
            layer.__class__ = known


@contextlib.contextmanager
def _without_experts(model: nn.Module) -> Iterator[None]:
    """In the block, experts return zeros, because routing cannot be computed on the meta device."""
    with contextlib.ExitStack() as stack:
        for known in {type(module) for _, module, _ in experts.weights(model)}:
            stack.enter_context(libraries.replaced(known, "forward", _zeros))
        yield


def _zeros(module: nn.Module, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros_like(hidden_states)
