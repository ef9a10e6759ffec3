"""The smallest of Triton's kernels, by which it is tried whether kernels can be built and started here.

Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_VALUE = 7


@triton.jit
def _write(place, VALUE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(place, VALUE)


def run() -> None:
    """Build the kernel, start it on the current GPU and look at its result. Raises whatever goes wrong on the way."""
    place = torch.zeros(1, dtype=torch.int32, device="cuda")
    _write[(1,)](place, VALUE=_VALUE)
    if place.item() != _VALUE:
        raise RuntimeError("a kernel ran and wrote nothing")
