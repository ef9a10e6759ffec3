"""Counts the bytes of live tensors on a CPU by phase, from the profiler's account of every allocation.

A forecast is compared with these figures. A CPU has no caching allocator to ask, and a process's resident size also
includes libraries and heap that glibc keeps, but not the pages of a tensor that is never written. Allocations of other
threads and outside torch (bitsandbytes' kernels, Python) are not counted.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import autograd
from torch.autograd.profiler import profile, record_function
from torch.profiler import ProfilerActivity, RecordScope
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from finetune.runtime import ranks

_MARK = "finetune phase: "


class TensorCount:
    """The peak bytes of tensors by phase, in `peaks` once `counting` has ended without an error.

    Tensors in `others`, which belong to the process and not to the run, are not counted.
    """

    def __init__(self, others: Sequence[weakref.ref[torch.Tensor]] = ()) -> None:
        self._others = others
        self.peaks: dict[str, int] = {}

    @contextlib.contextmanager
    def counting(self, apart_bytes: int = 0) -> Iterator[None]:
        """Count in the block, which takes 0.2 s more (2 cores, 2026-11): only allocations are recorded, no operators.

        `apart_bytes` of the tensors that exist before the block are not counted.
        """
        live = live_bytes(self._others) - apart_bytes
        # torch 2.13 has no public name for a profiler of chosen scopes: one of all takes twice a small step's time.
        prepare, enable, disable = autograd._prepare_profiler, autograd._enable_profiler, autograd._disable_profiler  # noqa: SLF001
        activities, config = {ProfilerActivity.CPU}, profile(profile_memory=True).config()
        prepare(config, activities)
        enable(config, activities, {RecordScope.USER_SCOPE})
        try:
            yield
        finally:
            events = disable().events()
        phase = ""
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name().startswith(_MARK):
                phase = event.name().removeprefix(_MARK)
            elif event.name() == "[memory]":
                live += event.nbytes()
                self.peaks[phase] = max(self.peaks.get(phase, 0), live)
        self.peaks.pop("", None)

    @staticmethod
    def enter(phase: str) -> None:
        """Count what follows as part of `phase`; of no phase if it is empty."""
        with record_function(_MARK + phase):
            pass


def can_count() -> bool:
    """True unless the caller runs a profiler or there are several ranks: gloo's threads free what this allocates."""
    return ranks.world_size() == 1 and not is_profiling()


def is_profiling() -> bool:
    """Whether a profiler runs; torch allows one at a time."""
    return autograd._profiler_enabled()  # noqa: SLF001 -- torch 2.13 has no public name for it


def living() -> list[weakref.ref[torch.Tensor]]:
    """References to all tensors that Python holds."""
    return [weakref.ref(tensor) for tensor in _tensors()]


def without(
    references: Iterable[weakref.ref[torch.Tensor]], own: Iterable[torch.Tensor]
) -> list[weakref.ref[torch.Tensor]]:
    """The references to living tensors that share no storage with one of `own`."""
    storages = _storage_bytes(own).keys()
    return [
        each for each in references if (tensor := each()) is not None and not _storage_bytes([tensor]).keys() & storages
    ]


def live_bytes(others: Sequence[weakref.ref[torch.Tensor]] = ()) -> int:
    """The bytes of the CPU storages of all tensors that Python holds, except those of `others`.

    Between two phases no other tensors exist: autograd holds none.
    """
    storages = _storage_bytes(_tensors())
    for pointer in _storage_bytes(tensor for each in others if (tensor := each()) is not None):
        storages.pop(pointer, None)
    return sum(storages.values())


def _tensors() -> Iterator[torch.Tensor]:
    for each in gc.get_objects():
        # `isinstance` may run foreign code, that of a proxy.
        if issubclass(type(each), torch.Tensor) and not is_traceable_wrapper_subclass(each):
            yield each


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """The bytes of the CPU's storages behind `tensors`, by address."""
    storages = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and (storage := tensor.untyped_storage()).device.type == "cpu":  # fake: meta
            with contextlib.suppress(RuntimeError):  # those that torch.compile traces with have no memory (torch 2.13)
                storages[storage.data_ptr()] = storage.nbytes()
    return storages
