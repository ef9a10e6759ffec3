"""A device as a forecast takes it: its memory, its rates, and what its software allows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from finetune.forecast.gpus import Rates
from finetune.runtime import libraries

if TYPE_CHECKING:
    from finetune.forecast.operator_costs import DeviceOperators
    from finetune.model.precision import Arithmetic


@dataclass(frozen=True)
class Software:
    """What the driver and the libraries of a machine allow, and how they are set."""

    expandable_segments: bool = False
    """Whether the caching allocator's segments grow (`runtime.segments`)."""
    cublas_workspace: str = ""
    """The setting `CUBLAS_WORKSPACE_CONFIG`."""
    managed_memory: bool = True
    """Whether paged optimizer states work (`runtime.driver`)."""
    triton: bool = True
    """Whether Triton's kernels run; where not, the loss uses torch's own operators (`runtime.libraries`)."""
    kernels_off: tuple[str, ...] = ()
    """Fused kernels, or `loss`, that are not used (`training.probe_table`)."""


@dataclass(frozen=True)
class Device:
    """The hardware that a job would run on.

    The job may take `budget_bytes`, context included. `outside_bytes` is what it takes besides tensors: the CUDA
    context and `communicator_bytes` of NCCL, or on a CPU what the process holds before it begins.
    """

    type: str
    name: str
    budget_bytes: int
    outside_bytes: int
    rates: Rates
    software: Software = Software()
    capability: tuple[int, int] = (0, 0)
    communicator_bytes: int = 0
    measured_workspace_bytes: int = 0
    """`workspace_bytes` by measurement; 0 where nothing was measured."""

    @property
    def room_bytes(self) -> int:
        """The most that the caching allocator may reserve: the budget without the context.

        `cap` enforces this where `memory.limit` bounds the budget.
        """
        return self.budget_bytes - self.outside_bytes

    @property
    def arithmetic(self) -> Arithmetic:
        """What it computes natively; for a CPU, what this machine's does."""
        from finetune.model import precision

        return precision.of_card(self.name, self.capability) if self.type == "cuda" else precision.of_cpu()

    @property
    def operators(self) -> DeviceOperators:
        from finetune.forecast import operator_costs

        return operator_costs.cuda(triton=self.software.triton) if self.type == "cuda" else operator_costs.cpu()

    @property
    def workspace_bytes(self) -> int:
        """Library workspaces inside the caching allocator."""
        if self.measured_workspace_bytes:
            return self.measured_workspace_bytes
        if self.type == "cpu":
            return 0
        from finetune.forecast import operator_costs

        return operator_costs.workspace_bytes(self.capability, self.software.cublas_workspace)

    def in_float32(self) -> Device:
        """The device as a job without 16-bit products uses it."""
        return replace(self, rates=replace(self.rates, flops=self.rates.fp32_flops))

    def deterministic(self) -> Device:
        """The device with the workspace that cuBLAS needs for deterministic products, unless one is set."""
        if self.software.cublas_workspace:
            return self
        software = replace(self.software, cublas_workspace=libraries.DETERMINISTIC_CUBLAS)
        return replace(self, software=software, measured_workspace_bytes=0)

    def without(self, kernels: Collection[str]) -> Device:
        """The device where these fused kernels, and no others, are not used."""
        return replace(self, software=replace(self.software, kernels_off=tuple(sorted(kernels))))


DISK_READ_BYTES, DISK_WRITE_BYTES = 7e9, 5e9
"""Bytes a second of a fast local disk, one way: Samsung's data sheet of the 980 PRO of 1 TB (PCI Express 4.0 x4),
sequential reads of up to 7,000 and writes of up to 5,000 MB/s."""
RANKS_OF_A_MACHINE = 8
"""How many GPUs of a plan share a disk at most."""
