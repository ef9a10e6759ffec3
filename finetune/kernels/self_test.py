"""Checks on the model itself, before training, that the kernels compute what they replace."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetune.kernels import KERNELS, Attached
from finetune.kernels.room import columns_beside, narrowed
from finetune.model import probes

# The largest relative difference of results and gradients. Both ways round several times, in different orders: 0.2 to
# 2% in 16 bit in the models tested, 1e-6 in float32. A wrong formula differs by a third or more.
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_16_BIT = 0.1


def prove(model: Any, attached: Attached) -> list[str]:
    """Compare each kind of replaced module with its own code, and undo a kernel that differs by more than rounding.

    One module of each kind runs forward and backward on a few tokens, under the autocast of a step, with an adapter
    that is not zero. Returns a line for each kernel that was undone.
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
        with _filled(module):
            fused = _results(module, inputs)
            attached.replaced[kernel].pop(module)()
            plain = _results(module, inputs)
            attached.replaced[kernel][module] = KERNELS[kernel].replace(module)
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

            def seen(module: nn.Module, args: Any, kwargs: Any, kernel: str = kernel) -> None:
                first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
                inputs.setdefault(module, (kernel, _CallInputs(args, kwargs, columns_beside(first))))

            stack.callback(module.register_forward_pre_hook(seen, with_kwargs=True).remove)
        probes.logits(model, input_ids=probes.rows(1, probes.TOKENS, model)[0])
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
    width = hidden.shape[-1]
    given[key] = narrowed(hidden.new_empty(*hidden.shape[:-1], width + called.room), width)
    given[key].copy_(hidden.detach()).requires_grad_()
    positional = [given[index] for index in range(len(called.args))]
    output = module(*positional, **{name: given[name] for name in called.kwargs})
    output = output[0] if isinstance(output, tuple) else output
    generator = torch.Generator().manual_seed(1)
    outer = torch.randn(output.shape, generator=generator).to(output)
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    inputs = [given[key], *trained.values()]
    gradients = torch.autograd.grad(output, inputs, outer, allow_unused=True)
    named = zip(["the input", *trained], gradients, strict=True)
    return {"output": output.detach(), **{f"gradient of {name}": each for name, each in named if each is not None}}


def difference(fused: dict[str, Tensor], plain: dict[str, Tensor], dtype: torch.dtype, origin: str) -> str | None:
    """One sentence on the largest difference of `fused` from `plain`, or None if rounding in `dtype` explains it.

    `origin` completes the sentence: who computes `plain`.
    """
    distances = {name: _distance(fused[name], value) for name, value in plain.items()}
    where = max(distances, key=lambda name: math.inf if math.isnan(distances[name]) else distances[name])
    if distances[where] <= _TOLERANCE.get(dtype, _TOLERANCE_16_BIT):
        return None
    return f"its {where} differs by {distances[where]:.1%} from what {origin}, more than rounding explains"


def _distance(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))
