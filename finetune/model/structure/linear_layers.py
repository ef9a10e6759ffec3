"""Finds the linear layers that an adapter cannot be trained on, by short passes of text through a base without weights.

Layers whose weight the model's code reads directly instead of calling the layer: Mamba multiplies by `dt_proj.weight`
and passes `out_proj.weight` to a fused kernel; Gemma 3n clamps the weight of `prediction_coefs` in place. Such a layer
cannot be quantized, because the code would read packed bytes, and an adapter on it would not be trained, because PEFT
adds it in the layer's forward pass. The same holds for subclasses of `nn.Linear` that compute something else, such as
the grouped projection of DeepSeek V4.

Layers to whose weight the logits of text have no gradient: the towers and projectors for images and sound of a
composite model, attention to an encoder that is not there, the indexers of sparse attention (DeepSeek V3.2, GLM-5),
whose output only selects keys. Likewise the experts that rows of text do not visit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from finetune.model.source.catalog import attention_of
from finetune.model.structure import experts
from finetune.runtime import patches

_FEW_TOKENS = 4
# More than the blocks of tokens that sparse attention compresses (DeepSeek V4: 128).
_MANY_TOKENS = 256


@dataclass(frozen=True)
class NotAdaptable:
    """The layers that an adapter cannot be trained on."""

    read: frozenset[nn.Module]
    untrained: frozenset[nn.Module]


_names_of: WeakKeyDictionary[nn.Module, tuple[frozenset[str], frozenset[str]]] = WeakKeyDictionary()
"""For each model that was probed, the names of the layers in it that are read directly, and of the untrained ones."""
_probed: dict[Hashable, tuple[list[str], list[str]]] = {}
"""The same for each class, config, attention implementation and list of linear layers."""


def read_directly(model: Any) -> frozenset[str]:
    """Full names of the layers in `model` whose weight its code reads directly.

    The first call must come before the model is quantized, and is remembered; the model may be on the meta device.
    """
    return _names(model)[0]


def untrained(model: Any) -> frozenset[str]:
    """Full names of the layers that rows of text do not train; as `read_directly`. Empty if the code fails first."""
    return _names(model)[1]


def trained_by_images(model: Any, part: str) -> None:
    """From now on count the layers of `part`, the name of a module in `model`, as trained: rows have images."""
    read, untrained = _names(model)
    _names_of[model] = read, frozenset(name for name in untrained if not name.startswith(f"{part}."))


def after_layers(model: Any) -> list[str]:
    """Full names of the layers that text passes between the model's last decoder layer and its head, such as BERT's."""
    inside, head, beside = set(model.base_model.modules()), model.get_output_embeddings(), untrained(model)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and module not in inside and name not in beside
    ]


def _names(model: Any) -> tuple[frozenset[str], frozenset[str]]:
    if model not in _names_of:
        remember(model, probe(model))
    return _names_of[model]


def remember(model: Any, layers: NotAdaptable) -> None:
    """Remember the result of `probe` for `model`, by the names that the layers have now."""
    names = {module: name for name, module in model.named_modules()}
    read, untrained = (
        frozenset(names[layer] for layer in kind if layer in names) for kind in (layers.read, layers.untrained)
    )
    _names_of[model] = read, untrained


def probe(model: Any) -> NotAdaptable:
    """Pass text through `model` if it is on the meta device, else through a copy that is.

    So a plan, a run and an export get the same result, on any device and with any weights. It is the same for all
    models of one class and config, and is computed once in a process.
    """
    key = type(model), repr(model.config.to_dict()), attention_of(model.config), tuple(_linear(model))
    if key not in _probed:
        weightless = model
        if not all(parameter.is_meta for parameter in model.parameters()):
            with torch.device("meta"):
                weightless = type(model)(deepcopy(model.config))
        _probed[key] = _probe(weightless)
    return NotAdaptable(*(frozenset(map(model.get_submodule, kind)) for kind in _probed[key]))


def _linear(model: Any) -> dict[str, nn.Linear]:
    """The linear layers but the head, by full name."""
    head = model.get_output_embeddings()
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    }


def _probe(weightless: Any) -> tuple[list[str], list[str]]:
    """Full names of the layers that are read directly, and of the untrained ones."""
    linear = _linear(weightless)
    layers, read = list(linear.values()), set[nn.Module]()
    fused = {name.rpartition(".")[0]: module for name, module, _ in experts.weights(weightless)}
    trained: set[nn.Module] = {*layers, *fused.values()}
    # Data-dependent code fails on the meta device; reads in the layers before it have been recorded.
    with contextlib.suppress(Exception):
        reached = _pass(weightless, layers, read, _FEW_TOKENS)
        if not trained <= reached | read:  # layers may be skipped at random in training, or wait for longer rows
            longest = getattr(weightless.config.get_text_config(), "max_position_embeddings", None) or _MANY_TOKENS
            reached |= _pass(weightless, layers, set(), min(_MANY_TOKENS, longest), training=False)
        trained = reached
    # Layers with one name in parents of one class are treated alike, also those after the one where the pass failed.
    kind_of = {
        name: (type(weightless.get_submodule(parent)), last)
        for name in linear
        for parent, _, last in [name.rpartition(".")]
    }
    kinds = {kind_of[name] for name, module in linear.items() if module in read}
    return (
        [name for name in linear if kind_of[name] in kinds],
        [name for name, module in [*linear.items(), *fused.items()] if module not in trained],
    )


def _pass(
    model: Any, layers: list[nn.Linear], read: set[nn.Module], tokens: int, *, training: bool = True
) -> set[nn.Module]:
    """The `layers` to whose weight the logits of a row have a gradient, and the experts that computed; layers that are
    read directly are added to `read`.
    """
    was_training = model.training
    with (
        torch.random.fork_rng([]),
        torch.enable_grad(),
        patches.IS_TRACING.by(lambda tensor=None: True),
        _unvalidated(),
        _watched(layers, read),
        _without_experts(model) as computed,
    ):
        model.train(training)
        try:
            row = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
            logits = model(input_ids=row, use_cache=False).logits
        finally:
            model.train(was_training)
    reached = leaves(logits)
    return {layer for layer in layers if layer.weight in reached} | computed


@contextlib.contextmanager
def _unvalidated() -> Iterator[None]:
    """In the block, distributions take tensors of the meta device, which have no values to validate, such as Gemma
    3n's normal one; afterwards they validate again unless the program had turned that off.
    """
    from torch.distributions import Distribution

    validated = Distribution._validate_args  # noqa: SLF001 -- torch has a setter, but no getter
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(validated)


def leaves(output: torch.Tensor) -> set[torch.Tensor]:
    """The leaf tensors that `output` has a gradient to."""
    variables: set[torch.Tensor] = set()
    seen: set[Any] = set()
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            variables.add(node.variable)
        waiting += [before for before, _ in node.next_functions]
    return variables


@contextlib.contextmanager
def _watched(layers: list[nn.Linear], read: set[nn.Module]) -> Iterator[None]:
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
    with contextlib.ExitStack() as stack:
        for layer, known in classes.items():
            stack.enter_context(patches.LAYER_CLASS.by(watching[known], layer))
        yield


@contextlib.contextmanager
def _without_experts(model: nn.Module) -> Iterator[set[nn.Module]]:
    """In the block, experts return zeros, because routing cannot be computed on the meta device. Yields those that did.

    The zeros have a gradient to all inputs of the experts, so that their router counts as trained.
    """
    computed = set[nn.Module]()

    def zeros(module: nn.Module, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        computed.add(module)
        given = [value for value in (*arguments, *named.values()) if isinstance(value, torch.Tensor)]
        return hidden_states * 0 + sum(value.sum() * 0 for value in given if value.is_floating_point())

    with contextlib.ExitStack() as stack:
        for known in {type(module) for _, module, _ in experts.weights(model)}:
            stack.enter_context(patches.EXPERTS_FORWARD.by(zeros, known))
        yield computed
