"""Regional torch.compile of the decoder layers that no fused kernel is attached to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from finetune.kernels import Attached
from finetune.model.recompute import checkpointing
from finetune.runtime import patches

_COMPILERS = ("g++", "clang++")


def attach(model: Any, attached: Attached) -> list[str]:
    """Compile the training pass of each decoder layer without an `attached` kernel; returns lines on those left out.

    A layer whose checkpointing keeps some tensors is left out too: torch 2.13 cannot compile it. Layers of one kind
    share their code, and so the compiled code. The numbers of rows and tokens are symbolic: a micro-batch of any length
    takes the same code, and one of a single row its own.
    """
    layers = checkpointing.layers(model)
    fused = {module for modules in attached.replaced.values() for module in modules}
    left = {
        "are fused": [layer for layer in layers if fused & set(layer.modules())],
        "keep tensors": [layer for layer in layers if checkpointing.keeps(layer)],
    }
    for layer in layers:
        if not any(layer in others for others in left.values()):
            patches.MODULE_FORWARD.put(_in_training(layer, layer.forward), layer)
    return [
        f"kernels: {len(others)} of {len(layers)} layers {why}, and are not compiled"
        for why, others in left.items()
        if others
    ]


def _in_training(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, compiled for training only: evaluation and sample answers would each compile another variant."""
    compiled = torch.compile(forward, dynamic=True)
    return lambda *args, **kwargs: (compiled if layer.training else forward)(*args, **kwargs)


def obstacle() -> str | None:
    """Why torch cannot compile for this machine's CPU (torch/_inductor/cpp_builder.py); None if it can."""
    if any(map(shutil.which, [os.environ.get("CXX", ""), *_COMPILERS])):
        return None
    return f"no C++ compiler: neither `CXX` nor {' nor '.join(f'`{name}`' for name in _COMPILERS)} is one"
