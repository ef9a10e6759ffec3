"""The device that a process computes on."""

from __future__ import annotations

import torch

from finetune.runtime import libraries, ranks, segments


def this_device() -> torch.device:
    """The GPU where there is one, else the CPU; each rank has its own. Its allocator and Triton are set up for it."""
    ranks.choose_gpu()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpu = torch.cuda.current_device()
    segments.settle(gpu)
    if libraries.triton_obstacle():
        libraries.without_triton()
    return torch.device("cuda", gpu)
