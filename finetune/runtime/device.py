"""Selects the device of this process."""

from __future__ import annotations

import torch

from finetune.errors import MachineError
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


def require_default_stream(device: torch.device) -> None:
    """Raise MachineError if the caller has chosen another stream than CUDA's default one.

    bitsandbytes 0.50 updates weights on the default stream, for which torch's other streams do not wait.
    """
    if device.type == "cuda" and torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        raise MachineError("training needs CUDA's default stream; call it outside of `with torch.cuda.stream(...)`")
