"""The precisions that a job can train in (`training.precision`). A new one is an entry in PRECISIONS."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """The types of a job's computation.

    `dtype`: of products under autocast, and of the unquantized weights of a frozen base. `merged`: of the weights of a
    merged model.
    """

    dtype: torch.dtype
    merged: torch.dtype

    @property
    def autocasts(self) -> bool:
        """Whether products are computed in fewer bits than float32, which autocast casts their factors to."""
        return self.dtype is not torch.float32


PRECISIONS = {
    "bf16": Precision(torch.bfloat16, merged=torch.bfloat16),
    "fp16": Precision(torch.float16, merged=torch.float16),
    "fp32": Precision(torch.float32, merged=torch.bfloat16),
}


def autocast(name: str, device: torch.device) -> torch.autocast:
    """The autocast context of a forward pass in the precision of this name."""
    precision = PRECISIONS[name]
    return torch.autocast(device.type, precision.dtype, enabled=precision.autocasts)
