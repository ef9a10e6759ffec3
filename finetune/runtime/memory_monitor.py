"""Measures the peak memory of each phase of a step.

On CUDA: the caching allocator's peaks of allocated and reserved bytes, and the bytes in use on the whole device, the
only figure that includes paged optimizer states (managed memory); it is read at the end of the phase, because the
driver records no peak. On a CPU: the process's peak resident size, which Linux resets through /proc/self/clear_refs
(proc(5)), or the resident size at the end if it cannot be reset; where tensors are counted (`live_tensors`), their peak
too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import weakref

    import torch

    from finetune.runtime.live_tensors import TensorCount

PHASES = ("load", "reference", "forward", "backward", "optimizer", "evaluation", "save")

Peak = dict[str, int]
"""Bytes by measure: allocated_bytes, reserved_bytes and device_bytes; on a CPU resident_bytes, and allocated_bytes
where tensors were counted."""


class Meter(Protocol):
    """Measures one device's peak between `reset` and `read`."""

    def reset(self) -> None: ...

    def read(self) -> Peak: ...


class CudaMeter:
    """Peaks of the current CUDA device. The counters are on the host, so no synchronisation is needed."""

    def reset(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def read(self) -> Peak:
        import torch

        free, total = torch.cuda.mem_get_info()
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_bytes": total - free,
        }


class HostMeter:
    """Peak resident size of this process."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._status = proc / "status"
        self._clear = proc / "clear_refs"
        self.resets = True
        try:
            self.reset()
            self.resets = self._status.is_file()
        except OSError:
            self.resets = False

    def reset(self) -> None:
        if self.resets:
            self._clear.write_text("5")  # sets the peak back to the current size (proc(5), clear_refs)

    def read(self) -> Peak:
        if not self.resets:
            import psutil

            return {"resident_bytes": psutil.Process().memory_info().rss}
        for line in self._status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return {"resident_bytes": int(line.split()[1]) * 1024}
        raise AssertionError("every Linux process's status has VmHWM")


def meter_for(device_type: str) -> Meter:
    return CudaMeter() if device_type == "cuda" else HostMeter()


class Monitor:
    """Peak memory by phase, for the current step and for the whole run.

    One phase is open at a time: `enter` closes the previous one. A phase that is entered several times in a step (once
    per micro-batch) keeps its largest peak. Tensors that exist before the monitor (a notebook's, an earlier run's) are
    not counted, except those of a model that is included.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._others: list[weakref.ref[torch.Tensor]] | None = None
        if isinstance(meter, HostMeter):
            from finetune.runtime import live_tensors  # imports torch

            self._others = live_tensors.living()
        self._open: str | None = None
        self._count: TensorCount | None = None
        self._step: dict[str, Peak] = {}
        self.peaks: dict[str, Peak] = {}
        """The peaks of the run so far, by phase."""

    def include(self, model: torch.nn.Module) -> None:
        """Count the weights of the run's model also where an earlier run has loaded them."""
        if self._others:
            from finetune.runtime import live_tensors

            self._others = live_tensors.without(self._others, [*model.parameters(), *model.buffers()])

    def enter(self, phase: str) -> None:
        """Start measuring `phase`, one of PHASES."""
        assert phase in PHASES, phase
        self.leave()
        self._meter.reset()
        self._open = phase
        if self._count:
            self._count.enter(phase)

    def leave(self) -> Peak:
        """Close the open phase, if any, and return its peak."""
        if self._open is None:
            return {}
        peak = self._meter.read()
        for peaks in (self._step, self.peaks):
            peaks[self._open] = _largest(peaks.get(self._open, {}), peak)
        self._open = None
        if self._count:
            self._count.enter("")
        return peak

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Measure the block as one phase."""
        self.enter(phase)
        try:
            yield
        finally:
            self.leave()

    @contextlib.contextmanager
    def counting_tensors(self, apart_bytes: int = 0) -> Iterator[None]:
        """In the block, measure `allocated_bytes` of each phase on a CPU as well; a CUDA device always counts them.

        `apart_bytes` of the tensors that exist before the block are not counted.
        """
        from finetune.runtime import live_tensors  # imports torch

        if self._others is None or not live_tensors.can_count():
            yield
            return
        self._count = count = live_tensors.TensorCount(self._others)
        try:
            with count.counting(apart_bytes):
                yield
        finally:
            self._count = None
        for phase, size_bytes in count.peaks.items():
            for peaks in (self._step, self.peaks):
                peaks[phase] = _largest(peaks.get(phase, {}), {"allocated_bytes": size_bytes})

    def take_step(self) -> dict[str, Peak]:
        """The peaks by phase since the last call."""
        taken, self._step = self._step, {}
        return taken

    def take(self, phase: str) -> Peak:
        """Remove and return one phase's peak of the current step."""
        return self._step.pop(phase, {})


def headline(peaks: dict[str, Peak]) -> int:
    """The headline figure: the largest reserved (CUDA) or resident (CPU) bytes over the phases."""
    return max((peak.get("reserved_bytes", peak.get("resident_bytes", 0)) for peak in peaks.values()), default=0)


def _largest(one: Peak, other: Peak) -> Peak:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


class LeakWatch:
    """Detects memory leaks: a peak that keeps growing at the same batch shape.

    A shape is reported once, after `SIGHTINGS` consecutive peaks, each larger than the previous one by at least
    `GRAIN_BYTES`. Resident size also grows because libraries cache code for each new matrix shape (oneDNN compiles
    kernels), so on a CPU a new shape resets all counts; the CUDA allocator only counts tensors.
    """

    SIGHTINGS = 5
    GRAIN_BYTES: ClassVar = {"allocated_bytes": 2**20, "resident_bytes": 2**24}

    def __init__(self) -> None:
        self._peaks: dict[tuple[int, ...], list[int]] = {}
        self._reported: set[tuple[int, ...]] = set()

    def see(self, shape: tuple[int, ...], peak: Peak) -> int:
        """Record a peak; return by how many bytes it has grown when it first counts as a leak, else 0."""
        measure = "allocated_bytes" if "allocated_bytes" in peak else "resident_bytes"
        if measure == "resident_bytes" and shape not in self._peaks:
            for peaks in self._peaks.values():
                peaks.clear()
        peaks = self._peaks.setdefault(shape, [])
        if peaks and peak[measure] < peaks[-1] + self.GRAIN_BYTES[measure]:
            peaks.clear()
        peaks.append(peak[measure])
        if len(peaks) < self.SIGHTINGS or shape in self._reported:
            return 0
        self._reported.add(shape)
        return peaks[-1] - peaks[0]
