"""The precisions that a job can train in (`training.precision`), and which one `auto` is. A new one is an entry in
PRECISIONS, and for `auto` in `native`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from finetune.config import Config, contradictions
from finetune.errors import MachineError


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


class Arithmetic(NamedTuple):
    """The precisions that a device computes natively, the fastest first, and `why` the first one is that."""

    native: tuple[str, ...]
    why: str


def of_card(name: str, capability: tuple[int, int]) -> Arithmetic:
    """The arithmetic of a GPU with this compute capability.

    bfloat16 came with 8.0. Before it, float16 has tensor cores or twice the rate of float32 from 7.0 on and on 6.0, and
    at most 1/64 of that rate on other cards (CUDA C++ Programming Guide, throughput of arithmetic instructions).
    """
    if capability >= (8, 0):
        return Arithmetic(("bf16", "fp16", "fp32"), f"{name} has bfloat16 arithmetic")
    if capability >= (7, 0) or capability == (6, 0):
        return Arithmetic(("fp16", "fp32"), f"{name} has no bfloat16 arithmetic")
    return Arithmetic(("fp32",), f"{name} has no fast 16-bit arithmetic")


def of_cpu() -> Arithmetic:
    """The arithmetic of this machine's CPU: without instructions for bfloat16, oneDNN converts to float32 and back."""
    has = torch.cpu.get_capabilities()  # `bf16` is that of ARM
    if torch.backends.mkldnn.is_available() and any(map(has.get, ("avx512_bf16", "amx_bf16", "bf16"))):
        return Arithmetic(("bf16", "fp32"), "this CPU has bfloat16 arithmetic")
    return Arithmetic(("fp32",), "this CPU has no bfloat16 arithmetic")


def of_device(device: torch.device) -> Arithmetic:
    """The arithmetic of this process's device."""
    if device.type == "cpu":
        return of_cpu()
    return of_card(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def fastest(config: Config, of_ranks: Sequence[Arithmetic]) -> tuple[str, str]:
    """What `training.precision: auto` is, and the reason for it.

    It is the fastest that the devices of all ranks compute natively and that no other key rules out.
    """
    least = min(of_ranks, key=lambda each: len(each.native))
    known, why = contradictions(config), least.why
    for name in least.native:
        broken = contradictions(config, {"training.precision": name})
        ruled_out = [message for one in broken if one not in known for message in one[1:]]
        if not ruled_out:
            break
        why += f"; {ruled_out[0].partition(';')[0]}"
    return name, why


def check(precision: str, device_type: str, arithmetic: Arithmetic) -> None:
    """Raise MachineError for a precision in which a device of this type and arithmetic cannot train."""
    cure = "set `training.precision: auto`; a run goes on in the one that it was started in, on a device that has it"
    if precision == "fp16" and device_type == "cpu":
        raise MachineError(f"`training.precision: fp16` needs a CUDA device for its loss scaling; {cure}")
    if precision == "bf16" and device_type == "cuda" and "bf16" not in arithmetic.native:
        raise MachineError(f"`training.precision: bf16`: {arithmetic.why}; {cure}")
