"""Mixtures of experts: identifying experts and routers, and 4-bit experts.

transformers 5 stores all experts of a layer in a few parameters of shape (experts, ..., ...), which neither
bitsandbytes' replacement of linear layers nor PEFT's `all-linear` handles. In 4 bit such a parameter is a `Params4bit`,
like the weight of a `Linear4bit`. The module's forward pass dequantizes the experts, frees them when it returns, and
dequantizes them again for the backward pass.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn

from finetune.forms.packed import packing_of
from finetune.model.structure.mixture import Mixture

_ROUTER_CLASS = re.compile("Router|TopKGating")
# Config attributes for the number of experts, and for how many of them a token visits (transformers 5.24).
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")


def mixture(model: nn.Module, kind: str, quantized: Set[str]) -> Mixture:
    """Describe a mixture whose parameters named in `quantized` are, or will be, quantized to `kind`."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    kept = tuple(f"{name}." for name in routers(model))
    inside = {
        name
        for path, module in model.named_modules()
        if _holds_experts(path, module)
        for name, parameter in module.named_parameters(prefix=path)
        if parameter.dim() > 1 and "bias" not in name and not name.startswith(kept)
    }
    return Mixture(
        experts=max((_experts_in(path, module) for path, module in model.named_modules()), default=0),
        active=active(model),
        kind=kind,
        quantized_experts=sum(sizes[name] for name in inside & quantized) / sum(sizes[name] for name in inside),
        unquantized=sum(size for name, size in sizes.items() if name not in quantized),
        parameters=sum(sizes.values()),
    )


def weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name in the model, module, name in the module) of each parameter that holds all experts of a layer: of
    three dimensions, in a class whose name contains `Expert`.
    """
    for path, module in model.named_modules():
        if "Expert" in type(module).__name__:
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if len(shape(parameter)) == 3:
                    yield f"{path}.{name}", module, name


def is_whole(name: str, stored: Collection[str]) -> bool:
    """Whether files with tensors of these names have a weight of experts as the model does, in one tensor or, packed,
    in several that are named after it.
    """
    last_two = ".".join(name.split(".")[-2:])
    return any(each.endswith(f".{last_two}") or f".{last_two}_" in each for each in stored)


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with a routing matrix, by name. They are not quantized, and excluded from `all-linear`.

    Their class is named `...Router...` or `...TopKGating`, or they are linear layers next to experts with one output
    per expert, or a single output (the gate of a shared expert).
    """
    if not is_mixture(model):
        return {}
    routing: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if _ROUTER_CLASS.search(type(module).__name__):
            for name, part in module.named_modules(prefix=path):
                weight = getattr(part, "weight", None)
                if isinstance(weight, nn.Parameter) and weight.dim() == 2:
                    routing[name] = part
        experts = {count for name, child in module.named_children() if (count := _experts_in(name, child))}
        if experts:
            routing |= {
                f"{path}.{name}": child
                for name, child in module.named_children()
                if isinstance(child, nn.Linear) and child.out_features in {1, *experts}
            }
    return routing


def active(model: nn.Module) -> int:
    """The number of experts that each token visits; 1 if the config names it otherwise."""
    config: Any = model.config
    text = config.get_text_config()
    return max(next((int(count) for name in _ACTIVE if (count := getattr(text, name, None))), 1), 1)


def count(text: Any) -> int:
    """The number of experts of a layer by a model's config; 0 for a dense model."""
    return next((int(number) for name in _EXPERTS if (number := getattr(text, name, None))), 0)


def balancing_loss(router_logits: Any, text: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The load-balancing loss of a mixture with the config `text` (arXiv 2101.03961), which all families share.

    Of the micro-batch `inputs`, padding does not count, and a token that sequences share (`attention.packing`) counts
    once for each of them.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    weights = inputs.get("attention_mask")
    if "key_parts" in inputs:
        sizes, order = inputs["key_parts"]
        logits = router_logits[0]  # (tokens, experts)
        weights = torch.cat([logits.new_full((size,), order.count(part)) for part, size in enumerate(sizes)])
    loss: torch.Tensor = load_balancing_loss_func(router_logits, count(text), text.num_experts_per_tok, weights)
    return loss


@contextlib.contextmanager
def without_balancing(model: Any) -> Iterator[None]:
    """In the block, a mixture returns no router logits, so that no load-balancing loss is computed.

    Set in its config, because not all models take the option as an argument, nor does `generate`.
    """
    text = model.config.get_text_config()
    asked = getattr(text, "output_router_logits", False)
    if asked:
        text.output_router_logits = False
    try:
        yield
    finally:
        if asked:
            text.output_router_logits = asked


def is_mixture(model: nn.Module) -> bool:
    """Whether any layer has experts, in any form."""
    return any(_holds_experts(path, module) for path, module in model.named_modules())


def quantize(model: nn.Module, config: Any) -> None:
    """Replace experts of a model on the meta device by 4-bit parameters, which loading will fill.

    With int8 they stay unquantized: bitsandbytes 0.50 has 8-bit linear layers, but no other 8-bit parameters.
    """
    if not config.load_in_4bit:
        return
    import bitsandbytes as bnb

    for _, module, name in list(weights(model)):
        packed = bnb.nn.Params4bit(
            getattr(module, name).data,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
        )
        setattr(module, name, packed)
        unpack_in_forward(module)


def unpack_in_forward(module: Any) -> None:
    """Dequantize the packed parameters of `module` for the time of its forward pass."""
    if not hasattr(module, _UNPACKING):
        module.source_cls = type(module)  # transformers reads this from quantized modules
        unpacking = _Unpacking()
        setattr(module, _UNPACKING, unpacking)  # a copy of the module has copies of it and of the hooks
        module.register_forward_pre_hook(unpacking.enter)
        # Called also if the pass ends early, as in recomputation by activation checkpointing.
        module.register_forward_hook(unpacking.leave, always_call=True)


def are_4_bit(model: nn.Module) -> bool:
    """Whether `quantize` made any experts of `model` 4-bit parameters."""
    return any(hasattr(module, _UNPACKING) for module in model.modules())


def dequantize(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert 4-bit experts to plain parameters in `dtype`, one parameter at a time."""
    for _, module, name in list(weights(model)):
        if is_packed(parameter := getattr(module, name)):
            setattr(module, name, nn.Parameter(_dequantized(parameter).to(dtype), requires_grad=False))


def have_biases(layer: nn.Module) -> bool:
    """Whether the fused experts of `layer` have biases (gpt-oss), as transformers notes on their module."""
    return any(getattr(module, "has_bias", False) for module in layer.modules())


def is_packed(parameter: Any) -> bool:
    """Whether a parameter holds 4-bit values, or others in the form of a published base."""
    return getattr(parameter, "quant_state", None) is not None or packing_of(parameter) is not None


def checkpointed(layer: nn.Module, on: bool) -> None:
    """Set whether activation checkpointing decides what the experts of `layer` save for the backward pass.

    Without it they save the packed experts and dequantize them again, as bitsandbytes' linear layers do. Inside a
    checkpointed layer nothing is saved, and saved-tensor hooks would interfere with those of checkpointing.
    """
    for module in layer.modules():
        if unpacking := getattr(module, _UNPACKING, None):
            unpacking.saves_packed = not on


_UNPACKING = "finetune_unpacking"
"""The attribute of a module with 4-bit experts that is its `_Unpacking`."""


class _Unpacking:
    """Hooks that dequantize the 4-bit experts of a module for the time of its forward pass."""

    def __init__(self) -> None:
        self.saves_packed = True
        """Whether autograd saves the packed experts for the dequantized ones; see `checkpointed`."""
        self._undo = contextlib.ExitStack()

    def enter(self, module: Any, inputs: Any) -> None:
        packed = {name: one for name, one in module.named_parameters(recurse=False) if is_packed(one)}
        self._undo = contextlib.ExitStack()
        for name, one in packed.items():
            self._undo.callback(setattr, module, name, one)
            setattr(module, name, nn.Parameter(_dequantized(one), requires_grad=False))
        if self.saves_packed and torch.is_grad_enabled():
            # Views of dequantized experts are saved as the packed experts and the view's shape.
            by_storage = {_storage(getattr(module, name)): one for name, one in packed.items()}

            def pack(tensor: torch.Tensor) -> Any:
                own = by_storage.get(_storage(tensor))
                return tensor if own is None else (own, tensor.shape, tensor.stride(), tensor.storage_offset())

            def unpack(saved: Any) -> torch.Tensor:
                if isinstance(saved, torch.Tensor):
                    return saved
                one, shape, stride, offset = saved
                return _dequantized(one).as_strided(shape, stride, offset)

            self._undo.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))

    def leave(self, module: Any, inputs: Any, output: Any) -> None:
        self._undo.close()


def _storage(tensor: torch.Tensor) -> int:
    return id(tensor.untyped_storage())  # the same object for the lifetime of the storage


def _dequantized(parameter: Any) -> torch.Tensor:
    if how := packing_of(parameter):
        return how.decoded(parameter.data)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, parameter.quant_state)


def shape(parameter: Any) -> torch.Size:
    """The logical shape of a parameter, packed or not."""
    state = packing_of(parameter) or getattr(parameter, "quant_state", None)
    return parameter.shape if state is None else state.shape


def _holds_experts(path: str, module: nn.Module) -> bool:
    return "Expert" in type(module).__name__ or path.rpartition(".")[2] == "experts"


def _experts_in(name: str, module: nn.Module) -> int:
    """Number of experts in a module itself, as parameters or (before transformers 5) as submodules."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and _holds_experts(name, module):
        return len(module)
    return max((shape(getattr(one, inner))[0] for _, one, inner in weights(module) if one is module), default=0)
