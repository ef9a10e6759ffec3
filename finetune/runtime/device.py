"""Selects the device of this process."""

from __future__ import annotations

import torch

from finetune.runtime import libraries, ranks, segments


def this_device() -> torch.device:
    """The GPU if there is one, else the CPU; each rank has its own GPU. Also configures the allocator and Triton."""
    ranks.choose_gpu()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpu = torch.cuda.current_device()
    segments.enable(gpu)
    if libraries.triton_obstacle():
        libraries.without_triton()
    return torch.device("cuda", gpu)
