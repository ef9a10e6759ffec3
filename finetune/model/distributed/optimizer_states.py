"""The states of an optimizer as JSON values and tensors, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from bitsandbytes.optim.optimizer import Optimizer8bit
from torch import Tensor, nn

States = tuple[dict[str, Any], dict[str, Tensor]]
"""JSON values of an optimizer's weights and groups, and the tensors that they name."""


def parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that `optimizer` updates, group by group."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each group, without its weights."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def read(optimizer: torch.optim.Optimizer) -> States:
    """The states as they are, tensors not copied; one that several weights share, such as a quantization map, is there
    once.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    weights = []
    for number, weight in enumerate(parameters(optimizer)):
        values: dict[str, Any] = {}
        for key, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, Tensor):
                name = names.setdefault(id(value), f"{number}.{key}")
                tensors[name] = value
                value = {"tensor": name}
            values[key] = value
        weights.append(values)
    return {"weights": weights, "groups": groups(optimizer)}, tensors


def restore(optimizer: torch.optim.Optimizer, states: Sequence[Mapping[str, Any]]) -> None:
    """Give each weight its states, with the dtype, device and paging of each. Raises ValueError if they do not fit."""
    if isinstance(optimizer, Optimizer8bit):
        _restore_bitsandbytes(optimizer, states)
        return
    # torch restores devices, but casts states to their weight's dtype, so the original dtype is restored after it.
    numbered = {number: dict(values) for number, values in enumerate(states) if values}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})
    for weight, values in zip(parameters(optimizer), states, strict=True):
        made = optimizer.state[weight] if values else {}
        for key, value in values.items():
            if isinstance(value, Tensor) and made[key].dtype != value.dtype:
                made[key] = value.to(made[key].device)


def make_empty(optimizer: Optimizer8bit) -> None:
    """Create the states as bitsandbytes does at a weight's first update (0.50, `Optimizer8bit.step`)."""
    for group_number, group in enumerate(optimizer.param_groups):
        for number, weight in enumerate(group["params"]):
            if weight.requires_grad and not optimizer.state[weight]:
                optimizer.init_state(group, weight, group_number, number)


def _restore_bitsandbytes(optimizer: Optimizer8bit, states: Sequence[Mapping[str, Any]]) -> None:
    """Create bitsandbytes' own buffers and fill them: its `load_state_dict` would move paged states to GPU memory."""
    stored = iter(states)
    for group_number, group in enumerate(optimizer.param_groups):
        for number, weight in enumerate(group["params"]):
            if not (values := next(stored)):
                continue
            optimizer.init_state(group, weight, group_number, number)
            made = optimizer.state[weight]
            if other := sorted(set(values) ^ set(made)):
                raise ValueError(f"the states of a weight differ in {len(other)} names such as `{other[0]}`")
            for key, value in values.items():
                into = made[key]
                if not isinstance(value, Tensor):
                    if type(value) is not type(into):
                        raise ValueError(f"{key} is {type(value).__name__} instead of {type(into).__name__}")
                    made[key] = value
                    continue
                if (value.shape, value.dtype) != (into.shape, into.dtype):
                    raise ValueError(
                        f"{key} is {value.dtype} of {tuple(value.shape)} instead of {into.dtype} of {tuple(into.shape)}"
                    )
                into.copy_(value)
