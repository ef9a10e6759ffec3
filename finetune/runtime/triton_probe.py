"""A minimal Triton kernel that tests whether kernels can be built and launched. Importing this module needs Triton."""

from __future__ import annotations

import torch
import triton


@triton.jit
def _nothing(number):
    pass


def run() -> None:
    """Build the kernel and run it on the current GPU, without allocating memory. Raises whatever goes wrong."""
    _nothing[(1,)](7)
    torch.cuda.synchronize()
