"""Checks on the model itself, before training, that the kernels compute what they replace."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetune.kernels import Attached
from finetune.kernels.room import columns_beside, narrowed
from finetune.model import probes
from finetune.model.probes import marker
from finetune.runtime import patches

# The largest relative difference of results and gradients. Both ways round several times, in different orders: 0.2 to
# 2% in 16 bit in the models tested, 1e-6 in float32. A wrong formula differs by a third or more.
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_16_BIT = 0.1
# The largest difference of one element, relative to its size plus that of its row or column: at most 7% in bfloat16
# and 5e-6 in float32, for ten architectures, three quantizations and widths of 64 and 512 (on a CPU, 2026-11). An
# element that was not written, or written by another tile, differs by as much as it is large.
_ELEMENT_TOLERANCE = {torch.float32: 1e-2}
_ELEMENT_TOLERANCE_16_BIT = 0.25
_LENGTHS = (17, 11)
"""Tokens of the rows that the model looks at: not equal, and none a power of two, so that tiles have ragged ends."""


def prove(model: Any, attached: Attached) -> list[str]:
    """Compare each kind of replaced module with its own code, and undo a kernel that differs by more than rounding.

    One module of each kind runs forward and backward on two short rows of uneven length, under the autocast of a step,
    with an adapter that is not zero. Returns a line for each kernel that was undone.
    """
    if not any(attached.replaced.values()):
        return []
    try:
        with probes.attempt():
            return list(_differences(model, attached))
    except probes.Failed as failed:
        attached.detach()
        return [f"kernels: none is fused: they fail on this model ({failed})"]


def _differences(model: Any, attached: Attached) -> Iterator[str]:
    for module, (kernel, inputs) in _inputs(model, attached).items():
        if module not in attached.replaced[kernel]:  # undone meanwhile
            continue
        with marker.under_way(kernel, model.device), _filled(module):
            fused = _results(module, inputs)
            attached.replaced[kernel].pop(module)()
            plain = _results(module, inputs)
            attached.replace(kernel, module)
        if unlike := difference(fused, plain, plain["output"].dtype, "the modules compute"):
            attached.detach(kernel)
            yield f"kernels: `{kernel}` is off: in {type(module).__name__} {unlike}"


@dataclass(frozen=True)
class _CallInputs:
    """The arguments of a module's call, and the columns of room beside its first tensor (see `kernels.room`)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    room: int


def _inputs(model: Any, attached: Attached) -> dict[nn.Module, tuple[str, _CallInputs]]:
    """One replaced module of each kind, with its kernel and the arguments of its call."""
    chosen: dict[Any, tuple[str, nn.Module]] = {}
    names = {module: name for name, module in model.named_modules()}
    for kernel, replaced in attached.replaced.items():
        for module in replaced:
            chosen.setdefault((kernel, type(module), names[module].rpartition(".")[2]), (kernel, module))
    inputs: dict[nn.Module, tuple[str, _CallInputs]] = {}
    with contextlib.ExitStack() as stack:
        for kernel, module in chosen.values():

            def forward(
                *args: Any, plain: Any = module.forward, module: nn.Module = module, kernel: str = kernel, **kwargs: Any
            ) -> Any:
                first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
                inputs.setdefault(module, (kernel, _CallInputs(args, kwargs, columns_beside(first))))
                with marker.under_way(kernel, model.device):
                    return plain(*args, **kwargs)

            stack.enter_context(patches.MODULE_FORWARD.by(forward, module))
        ids = torch.cat(probes.rows(len(_LENGTHS), max(_LENGTHS), model))
        # The shorter row is padded as in a batch.
        mask = torch.arange(max(_LENGTHS), device=ids.device) < torch.tensor(_LENGTHS, device=ids.device)[:, None]
        probes.logits(model, input_ids=ids, attention_mask=mask.long())
    return inputs


@contextlib.contextmanager
def _filled(module: nn.Module) -> Iterator[None]:
    """In the block, the adapters of `module` are not zero: random, about as large as what they are added to."""
    kept = {
        name: (one, one.detach().clone())
        for name, one in module.named_parameters()
        if one.requires_grad and "lora_B" in name
    }
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one, _ in kept.values():
            one.copy_(torch.randn(one.shape, generator=generator) * (0.5 / one.shape[-1] ** 0.5))
    try:
        yield
    finally:
        with torch.no_grad():
            for one, before in kept.values():
                one.copy_(before)


def _results(module: nn.Module, called: _CallInputs) -> dict[str, Tensor]:
    """The output of `module`, and the gradients of its first input and its adapters."""
    given: dict[Any, Any] = {**dict(enumerate(called.args)), **called.kwargs}
    key, hidden = next((key, value) for key, value in given.items() if isinstance(value, Tensor))
    leaf = hidden.detach().requires_grad_()
    given[key] = _copied(leaf, called.room)
    positional = [given[index] for index in range(len(called.args))]
    output = module(*positional, **{name: given[name] for name in called.kwargs})
    output = output[0] if isinstance(output, tuple) else output
    generator = torch.Generator().manual_seed(1)
    outer = torch.randn(output.shape, generator=generator).to(output)
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    inputs = [leaf, *trained.values()]
    gradients = torch.autograd.grad(output, inputs, outer, allow_unused=True)
    named = zip(["the input", *trained], gradients, strict=True)
    return {"output": output.detach(), **{f"gradient of {name}": each for name, each in named if each is not None}}


def _copied(hidden: Tensor, room: int) -> Tensor:
    """A copy of `hidden` with its strides, and with `room` columns of zeros beside its rows (see `ops.rms_norm`).

    It has a graph, as in training: a norm treats a leaf otherwise.
    """
    width = hidden.shape[-1]
    if room:
        copy = narrowed(hidden.new_zeros(*hidden.shape[:-1], width + room), width)
    else:
        copy = torch.empty_strided(hidden.shape, hidden.stride(), dtype=hidden.dtype, device=hidden.device)
    return copy.copy_(hidden)


def difference(fused: dict[str, Tensor], plain: dict[str, Tensor], dtype: torch.dtype, origin: str) -> str | None:
    """One sentence on the largest difference of `fused` from `plain`, or None if rounding in `dtype` explains it.

    `origin` completes the sentence: who computes `plain`.
    """
    distances = {name: _distance(fused[name], value) for name, value in plain.items()}
    where = _largest(distances)
    if not distances[where] <= _TOLERANCE.get(dtype, _TOLERANCE_16_BIT):
        return f"its {where} differs by {distances[where]:.1%} from what {origin}, more than rounding explains"
    elements = {name: _element_distance(fused[name], value) for name, value in plain.items()}
    where = _largest(elements)
    if elements[where] <= _ELEMENT_TOLERANCE.get(dtype, _ELEMENT_TOLERANCE_16_BIT):
        return None
    return f"an element of its {where} differs by {elements[where]:.1%} from what {origin}, more than rounding explains"


def _largest(distances: dict[str, float]) -> str:
    return max(distances, key=lambda name: math.inf if math.isnan(distances[name]) else distances[name])


def _element_distance(result: Tensor, expected: Tensor) -> float:
    """The largest difference of one element, relative to its size plus the root mean square of its row or column.

    The larger of the two: the first token's row, and some columns, of a trained model are far larger than all others.
    """
    result, expected = (one.float().reshape(-1, one.shape[-1]) for one in (result, expected))
    squares = expected.square()
    ordinary = torch.maximum(squares.mean(0, keepdim=True), squares.mean(1, keepdim=True)).sqrt().clamp(min=1e-30)
    return float(((result - expected).abs() / (expected.abs() + ordinary)).max())


def _distance(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))
