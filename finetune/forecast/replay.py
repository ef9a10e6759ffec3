"""The forecast: the memory of a traced step on a device, by phase and by category.

For CUDA the trace's allocations are replayed through the model of the caching allocator, which gives the reserved
memory; for a CPU the live tensors count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from finetune.data.batching import Batch
from finetune.forecast import operator_costs
from finetune.forecast.allocator import CachingAllocator, CapacityError
from finetune.forecast.devices import DISK_READ_BYTES, DISK_WRITE_BYTES, RANKS_OF_A_MACHINE, Device
from finetune.forecast.trace import CATEGORIES, Stretch, Trace, TracedBlock, Work
from finetune.measure.monitor import Peak
from finetune.model.structure.experts import Mixture
from finetune.storage.records import Difference, UpTo

PHASES = ("load", "reference", "forward", "backward", "optimizer", "evaluation", "save", "merge")
WORDS = {
    **CATEGORIES,
    "context": "context and libraries",
    "communicators": "NCCL communicators",
    "allocator_slack": "allocator slack",
}
"""Categories of the forecast: the key in JSON and the words for a person, in the order of a picture's layers."""

_CURVE_POINTS = 600
_TRANSIENT = ("activations", "loss", "workspace")
_STEP = ("forward", "backward", "optimizer")
# Adapters, and the slices that loading left, become a sharded model; without slices, adapters are made.
_SHOWN_AS = {"attach": "load", "adapter": "optimizer"}


@dataclass(frozen=True)
class Point:
    """One moment of the step: its phase, live bytes by category, and reserved bytes."""

    phase: str
    categories: dict[str, int]
    reserved_bytes: int


@dataclass(frozen=True)
class ReferencePass:
    """Scoring the rows once, before the first step: seconds are bounds from below.

    `row_seconds` are those of a row of the largest micro-batch, `seconds` of all `rows`; None where these are unknown.
    `in_step_seconds`: what it would take to compute the same in every step and evaluation of the run.
    """

    row_seconds: float
    rows: int | None = None
    seconds: float | None = None
    in_step_seconds: float | None = None


@dataclass(frozen=True)
class Forecast:
    """The memory and time of a job on a device. All sizes in bytes.

    `phases` gives allocated and reserved bytes (on a CPU the same) without the context; `categories` adds up, at the
    moment of the peak, to what is compared with the budget. `flops`, `moved_bytes` (where bandwidth is the bound),
    `calls` (kernel launches) and `seconds`, a bound from below for ranking settings, are those of one optimizer step.
    `mixture` says how experts are stored, where the base has some. Memory that is `routed` depends on what their router
    decides, and is that of the worst case; `evenly_routed_bytes` are needed if each gets equally many tokens. With
    several `gpus` all figures are those of one, but for `disk_bytes`; `sharing` is the config's section `distributed`.
    In a step `sent_bytes` go to the others, `copied_bytes` between host and device, and `swapped_bytes`, which a disk
    keeps, are read from it and written back.
    `by_length`: what short micro-batches recompute, where less than the config says; memory is then the most of any.
    `hidden_flops` of `flops` take no time; with `returns_segments` the job fits only as the caching allocator gives
    idle segments back. `scoring` is the work of a micro-batch of the `reference` pass, where there is one.
    """

    device: Device
    attention: str
    batch: Batch
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    host_bytes: int
    disk_bytes: int
    phases: dict[str, dict[str, int]]
    categories: dict[str, int]
    flops: int
    moved_bytes: int
    calls: int
    seconds: float
    tokens: int
    curve: tuple[Point, ...] = field(repr=False, default=())
    mixture: Mixture | None = None
    routed: bool = False
    evenly_routed_bytes: int | None = None
    gpus: int = 1
    sharing: Mapping[str, Any] | None = None
    sent_bytes: int = 0
    copied_bytes: int = 0
    swapped_bytes: int = 0
    by_length: tuple[UpTo, ...] = ()
    hidden_flops: int = 0
    returns_segments: bool = False
    scoring: Work | None = field(default=None, repr=False)
    reference: ReferencePass | None = None

    @property
    def needed_bytes(self) -> int:
        """Reserved memory and what lies outside the allocator."""
        return self.peak_reserved_bytes + self.device.outside_bytes

    @property
    def budget_bytes(self) -> int:
        return self.device.budget_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.budget_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step over its seconds: a bound from above."""
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """The forecast as JSON values."""
        moved = {name: getattr(self, name) for name in ("sent_bytes", "copied_bytes", "swapped_bytes")}
        own = ("peak_allocated_bytes", "peak_reserved_bytes", "host_bytes", "disk_bytes", "phases", "categories")
        return {
            "fits": self.fits,
            "device": self.device.name,
            "expandable_segments": self.device.expandable_segments,
            "budget_bytes": self.budget_bytes,
            "needed_bytes": self.needed_bytes,
            **{name: getattr(self, name) for name in own},
            "batch": self.batch.as_dict(),
            "attention": self.attention,
            "flops": self.flops,
            "moved_bytes": self.moved_bytes,
            "calls": self.calls,
            "seconds": round(self.seconds, 4),
            "mixture": self.mixture and asdict(self.mixture),
            **({"evenly_routed_bytes": self.evenly_routed_bytes} if self.evenly_routed_bytes else {}),
            **({"reference": asdict(self.reference)} if self.reference else {}),
            **({"by_length": [asdict(each) for each in self.by_length]} if self.by_length else {}),
            **({"gpus": self.gpus, "sharding": self.sharing, **moved} if self.gpus > 1 or self.sharing else {}),
        }

    def differences(self, peaks: Mapping[str, Peak]) -> list[Difference]:
        """The phases that were both forecast and measured, in the same measure.

        On CUDA these are allocated and reserved bytes as the allocator counts them. On a CPU it is the bytes of
        tensors, where they were counted (`finetune.measure.tensors`), and not the resident size, which also holds what
        libraries keep for themselves.
        """
        return [
            Difference(phase, measure, predicted[measure], measured)
            for phase, predicted in self.phases.items()
            for measure, measured in peaks.get(phase, {}).items()
            if measure in predicted
        ]

    def beside(self, peaks: Mapping[str, Peak]) -> dict[str, Any]:
        """The contents of forecast.json: the forecast and, once there is something, what was measured."""
        differences = [{**asdict(each), "relative": round(each.relative, 5)} for each in self.differences(peaks)]
        return {**self.as_dict(), "measured": peaks, "differences": differences}


@dataclass(frozen=True)
class RunSetting:
    """The parts of a run around the traced step. All sizes in bytes.

    `micro_batches`: how many make a step on one rank.
    `checkpoint_bytes`: the copy in host memory from which a checkpoint is written. It is there after the last step, and
    with `saves_between` during a forward and backward pass as well.
    `merges`: whether the run merges at its end, so that the merge must fit as well. `merge_bytes` (its device memory)
    and `disk_bytes` are those of `finetune.forecast.file_sizes`.
    `from_files`: whether transformers loads the base whole; else random weights are made, or shards are read.
    `gpus`: how many share a step; the forecast is that of one, which with `copied` holds a copy of the model
    (DistributedDataParallel). `sharing` is the config's section `distributed`, where it matters.
    """

    micro_batches: int = 1
    merge_bytes: int = 0
    disk_bytes: int = 0
    checkpoint_bytes: int = 0
    merges: bool = False
    saves_between: bool = False
    from_files: bool = False
    gpus: int = 1
    sharing: Mapping[str, Any] | None = None
    copied: bool = False


def make(trace: Trace, device: Device, batch: Batch, attention: str, run: RunSetting) -> Forecast:
    """The forecast of a run, from the trace of one micro-batch and two updates."""
    replay = replayed(trace, device, lambda replay: replay.train(run))
    step = trace.work(("forward", "backward")) * run.micro_batches + trace.work(("optimizer",)) * 0.5
    if run.copied:
        step.sent_bytes += averaging_bytes(sum(replay.sizes("adapter")), run.gpus)  # of a step's last micro-batch
    phases = {name: replay.phases[name] for name in PHASES if name in replay.phases}
    if run.merge_bytes:
        phases["merge"] = {"allocated_bytes": run.merge_bytes, "reserved_bytes": run.merge_bytes}
    categories, least = replay.at_peak(), run.merge_bytes if run.merges else 0
    if least > replay.peak_reserved_bytes:  # by then the job's own memory is given back
        categories = {**dict.fromkeys(categories, 0), "base_weights": least, **_outside(device)}
    outside = device.outside_bytes if device.type == "cpu" else run.checkpoint_bytes
    return Forecast(
        device=device,
        attention=attention,
        batch=batch,
        peak_allocated_bytes=max(replay.peak_allocated_bytes, least),
        peak_reserved_bytes=max(replay.peak_reserved_bytes, least),
        host_bytes=replay.managed_peak_bytes + outside,
        disk_bytes=run.disk_bytes,
        phases=phases,
        categories=categories,
        flops=step.flops,
        moved_bytes=step.moved_bytes,
        calls=step.calls,
        seconds=_seconds(step, device) + swapping_seconds(step.swapped_bytes, run.gpus),
        tokens=run.micro_batches * batch.positions // (run.sharing["context"] if run.sharing else 1),
        curve=tuple(replay.curve),
        mixture=trace.mixture,
        routed=trace.routed,
        gpus=run.gpus,
        sharing=run.sharing,
        sent_bytes=step.sent_bytes,
        copied_bytes=step.copied_bytes,
        swapped_bytes=step.swapped_bytes,
        hidden_flops=step.hidden_flops,
        returns_segments=replay.is_limited,
        scoring=trace.work(("reference",)) if "reference" in phases else None,
    )


def on(forecast: Forecast, device: Device) -> Forecast:
    """The forecast on its device as that is now: with other memory free and, on a CPU, other rates and memory held."""
    held = forecast.device.outside_bytes if device.type == "cpu" else 0
    step = Work(**{each.name: getattr(forecast, each.name) for each in fields(Work)})
    return replace(
        forecast,
        device=device,
        categories={**forecast.categories, **_outside(device)},
        host_bytes=forecast.host_bytes - held + (device.outside_bytes if device.type == "cpu" else 0),
        seconds=_seconds(step, device) + swapping_seconds(step.swapped_bytes, forecast.gpus),
    )


def with_reference(forecast: Forecast, shares: int, rows: int | None, batches: float, in_step: float) -> Forecast:
    """`forecast` with the pass, if it has one, that scores `rows` in `batches`, divided into `shares`.

    Steps and evaluations would take `in_step` times as long.
    """
    if not forecast.scoring:
        return forecast
    each = _seconds(forecast.scoring, forecast.device) / shares
    row = ReferencePass(round(each / len(forecast.batch.by_row), 6))
    if rows is None:
        return replace(forecast, reference=row)
    seconds = [round(each * batches * times, 4) for times in (1, in_step)]
    return replace(forecast, reference=ReferencePass(row.row_seconds, rows, *seconds))


def with_shorter(longest: Forecast, shorter: Mapping[UpTo, Forecast]) -> Forecast:
    """`longest` with the memory of the shorter micro-batches where they take more."""
    each = [longest, *shorter.values()]
    most = max(each, key=lambda one: one.needed_bytes)
    phases = {
        name: {key: max(one.phases[name][key] for one in each if name in one.phases) for key in sizes}
        for name, sizes in longest.phases.items()
    }
    return replace(
        longest,
        peak_allocated_bytes=max(one.peak_allocated_bytes for one in each),
        peak_reserved_bytes=most.peak_reserved_bytes,
        host_bytes=max(one.host_bytes for one in each),
        phases=phases,
        categories=most.categories,
        curve=most.curve,
        by_length=tuple(shorter),
    )


def swapping_seconds(swapped_bytes: int, ranks: int) -> float:
    """Seconds to read `swapped_bytes` of each rank from a disk and write them back; nothing else runs meanwhile.

    The ranks of a machine share the disk.
    """
    each_second = DISK_READ_BYTES * DISK_WRITE_BYTES / (DISK_READ_BYTES + DISK_WRITE_BYTES)
    return swapped_bytes * min(ranks, RANKS_OF_A_MACHINE) / each_second


def _seconds(work: Work, device: Device) -> float:
    """The sum of arithmetic, traffic and launch times, or the time of what is sent meanwhile, if that is longer.

    Copies between the host and the device have a stream of their own (`model.recompute.offload`), and so have FSDP2's
    gathers of the next layer and its reduced gradients, and DDP's averages.
    """
    computing = (
        (work.flops - work.hidden_flops) / device.flops
        + work.moved_bytes / device.bandwidth_bytes
        + work.calls * device.call_seconds
    )
    return max(computing, sending_seconds(work.copied_bytes, work.sent_bytes, device))


def sending_seconds(copied_bytes: int, sent_bytes: int, device: Device) -> float:
    """Time of copies between host and device, and of messages to other devices.

    Both go over PCI Express, one after the other, unless the cards have NVLink.
    """
    if device.nvlink_bytes:
        return max(copied_bytes / device.pcie_bytes, sent_bytes / device.nvlink_bytes)
    return (copied_bytes + sent_bytes) / device.pcie_bytes


def averaging_bytes(gradient_bytes: int, ranks: int) -> int:
    """Bytes that each of `ranks` sends to average gradients: 2 (n - 1) / n of them.

    In a ring each rank sends n - 1 of n slices to be summed, and n - 1 sums (nccl-tests, doc/PERFORMANCE.md).
    """
    return 2 * (ranks - 1) * gradient_bytes // ranks


def replayed(
    trace: Trace, device: Device, run: Callable[[Replay], None], categories: Iterable[str] = CATEGORIES
) -> Replay:
    """The replay of `run`, with room for every segment or, where that is too much, with the device's room.

    Before it fails, the allocator gives back the segments that lie idle: a job may fit that would reserve more.
    """
    replay = Replay(trace, device, categories)
    run(replay)
    if device.type == "cuda" and replay.peak_reserved_bytes > device.room_bytes:
        tight = Replay(trace, device, categories, int(device.room_bytes / device.reserved_share))
        with contextlib.suppress(CapacityError):
            run(tight)
            return tight
    return replay


class Replay:
    """Plays a trace, whose blocks are of `categories`, through the device's allocator, and keeps its peaks."""

    def __init__(
        self, trace: Trace, device: Device, categories: Iterable[str], capacity_bytes: int | None = None
    ) -> None:
        self._trace = trace
        self._device = device
        self._allocator = (
            CachingAllocator(capacity_bytes, expandable_segments=device.expandable_segments)
            if device.type == "cuda"
            else None
        )
        self._handles: dict[int, int] = {}
        self._live = dict.fromkeys(categories, 0)
        self.is_limited = capacity_bytes is not None
        self._managed = 0
        self._allocated = 0
        self._peak_live: dict[str, int] = dict(self._live)
        self._peak_allocated = 0
        self._recording = False
        self._seen = self._fullest = 0
        self._stride = 1
        self.phases: dict[str, dict[str, int]] = {}
        self.managed_peak_bytes = 0
        self.curve: list[Point] = []

    def load(self, *, from_files: bool) -> int:
        """Play the loading of the base; returns the index of the first stretch after it."""
        loaded = next(number for number, stretch in enumerate(self._trace.stretches) if stretch.phase != "load")
        if from_files and self._allocator:
            # transformers' warm-up is a block as large as the base, freed at once: the weights are then allocated from
            # its segment (transformers 5.23, modeling_utils.py `caching_allocator_warmup`, `get_total_byte_count`; its
            # ceiling, 1.2 GiB less than the card has, is left out).
            self._allocator.free(self._allocator.allocate(sum(self.sizes("base_weights"))))
        self.play(self._trace.stretches[:loaded])
        if self._allocator:
            self._allocator.empty_cache()  # as `load_base` does
        self._add(self._device.workspace_bytes, "workspace")
        return loaded

    def train(self, run: RunSetting) -> None:
        """The load, a pass of the reference, two steps (the second meets the segments of the first), a save, and the
        evaluation.
        """
        stretches = [stretch for stretch in self._trace.stretches if stretch.phase != "reference"]
        phases = [stretch.phase for stretch in stretches]
        first = phases.index("forward")
        after = [index for index in range(first, len(phases)) if phases[index] not in _STEP]
        last = next((index for index in after if phases[index] != "save"), len(phases))
        end = after[0] if after else last  # from there on what a save still sees is freed
        step = stretches[first:last]
        update = next((index for index in range(first, last) if phases[index] == "optimizer"), last)
        loaded = self.load(from_files=run.from_files)
        if run.copied:
            self._join_processes()
        made = next((index for index in range(loaded, first) if phases[index] == "optimizer"), first)
        self.play(stretches[loaded:made])
        self.play([stretch for stretch in self._trace.stretches if stretch.phase == "reference"])
        self.play(stretches[made:first])
        self.play(step)
        self._begin_again(step)
        self._recording = True
        self._stride = max(1, sum(len(stretch.events) for stretch in step) // _CURVE_POINTS)
        copy_bytes = self._copy_bytes(run)
        with self._saving(copy_bytes if run.saves_between else 0):  # the update waits until the copy is written
            self.play(stretches[first:update])
        self.play(stretches[update:end])
        self._recording = False
        with self._saving(copy_bytes):
            self._see("save")
        self.play(stretches[end:])

    def _copy_bytes(self, run: RunSetting) -> int:
        """Bytes that a checkpoint copies in the device's own memory: on a CPU, which has no other."""
        if self._device.type != "cpu" or not run.checkpoint_bytes:
            return 0
        # Before weights and states are copied, the state of torch's random numbers is (`RandomState`).
        return max(run.checkpoint_bytes, torch.get_rng_state().nbytes)

    def _join_processes(self) -> None:
        """Play the copies that DistributedDataParallel makes of the model, and the buckets that it keeps."""
        before = 0
        for number, size in enumerate([*operator_costs.broadcast_buckets(self.sizes("base_weights", "adapter")), 0], 1):
            self._live["workspace"] += size
            self._allocate(-number, size)
            self._see("load")
            if number > 1:
                self._free(1 - number, before)
            self._live["workspace"] -= before
            before = size
        for size in operator_costs.gradient_buckets(self.sizes("adapter")):
            self._add(size, "gradients")

    def sizes(self, *categories: str) -> list[int]:
        """Bytes of each block that is for one of `categories`."""
        return [block.bytes for block in self._trace.blocks if block.category in categories]

    @contextlib.contextmanager
    def _saving(self, size: int) -> Iterator[None]:
        self._live["workspace"] += size
        self._allocated += size
        yield
        self._live["workspace"] -= size
        self._allocated -= size

    @property
    def reserved_bytes(self) -> int:
        if self._allocator is None:
            return self._allocated
        return int(self._allocator.reserved_bytes * self._device.reserved_share)

    @property
    def peak_allocated_bytes(self) -> int:
        return max(phase["allocated_bytes"] for phase in self.phases.values())

    @property
    def peak_reserved_bytes(self) -> int:
        return max(phase["reserved_bytes"] for phase in self.phases.values())

    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the moment of the most live tensors; the slack is what is reserved beyond them."""
        slack = self.peak_reserved_bytes - sum(self._peak_live.values())
        return {**self._peak_live, **_outside(self._device), "allocator_slack": slack}

    def play(self, stretches: list[Stretch]) -> None:
        """Play these stretches of the trace, in order."""
        for stretch in stretches:
            for event in stretch.events:
                block = self._trace.blocks[abs(event) - 1]
                sign = 1 if event > 0 else -1
                if block.managed and self._device.type == "cuda":
                    self._managed += sign * _on_host(block)
                    self.managed_peak_bytes = max(self.managed_peak_bytes, self._managed)
                    continue
                self._live[block.category] += sign * block.bytes
                self._allocate(abs(event), block.bytes) if sign > 0 else self._free(abs(event), block.bytes)
                if sign > 0:
                    self._see(_SHOWN_AS.get(stretch.phase, stretch.phase))
                if self._recording:
                    self._draw(stretch.phase)

    def _begin_again(self, step: list[Stretch]) -> None:
        """Bring what a pass leaves into the state in which the next one begins."""
        events = {event for stretch in step for event in stretch.events}
        left = [number for number in sorted(events) if number > 0 and -number not in events]
        left = [number for number in left if not self._trace.blocks[number - 1].managed]
        self._free_leftovers(left)
        self._put_into_old_place(left, sorted(-event for event in events if event < 0 and -event not in events))

    def _free_leftovers(self, left: list[int]) -> None:
        """Free activations and the like: the next pass makes its own."""
        for number in left:
            block = self._trace.blocks[number - 1]
            if block.category in _TRANSIENT:
                self._live[block.category] -= block.bytes
                self._free(number, block.bytes)

    def _put_into_old_place(self, left: list[int], freed: list[int]) -> None:
        """Give a state that the optimizer makes anew (transformers' Adafactor) the handle of the one that it freed."""
        old: dict[tuple[str, int], list[int]] = {}
        for number in freed:
            block = self._trace.blocks[number - 1]
            old.setdefault((block.category, block.bytes), []).append(number)
        for number in left:
            block = self._trace.blocks[number - 1]
            same = old.get((block.category, block.bytes))
            if self._allocator and same and block.category not in _TRANSIENT:
                self._handles[same.pop(0)] = self._handles.pop(number)

    def _draw(self, phase: str) -> None:
        """Keep the fullest moment of every `_stride` events of a phase."""
        begins = self._seen % self._stride == 0 or (self.curve and self.curve[-1].phase != phase)
        if begins or self._allocated > self._fullest:
            self.curve[len(self.curve) - (not begins) :] = [Point(phase, dict(self._live), self.reserved_bytes)]
            self._fullest = self._allocated
        self._seen += 1

    def _add(self, size: int, category: str) -> None:
        """A block that stays."""
        self._live[category] += size
        self._allocate(0, size)

    def _allocate(self, number: int, size: int) -> None:
        if self._allocator:
            self._handles[number] = self._allocator.allocate(size)
            self._allocated = self._allocator.allocated_bytes
        else:
            self._allocated += size

    def _free(self, number: int, size: int) -> None:
        if self._allocator:
            self._allocator.free(self._handles.pop(number))
            self._allocated = self._allocator.allocated_bytes
        else:
            self._allocated -= size

    def _see(self, phase: str) -> None:
        peak = self.phases.setdefault(phase, {"allocated_bytes": 0, "reserved_bytes": 0})
        peak["allocated_bytes"] = max(peak["allocated_bytes"], self._allocated)
        peak["reserved_bytes"] = max(peak["reserved_bytes"], self.reserved_bytes)
        if self._allocated > self._peak_allocated:
            self._peak_allocated, self._peak_live = self._allocated, dict(self._live)


def _outside(device: Device) -> dict[str, int]:
    """Bytes outside the allocator, by category."""
    sizes = {"context": device.outside_bytes - device.communicator_bytes}
    return {**sizes, "communicators": device.communicator_bytes} if device.communicator_bytes else sizes


def _on_host(block: TracedBlock) -> int:
    """Bytes of host memory that a managed block takes.

    Layer inputs wait in pinned memory, which torch hands out in powers of two (torch 2.13, ATen/core/
    CachingHostAllocator.h `allocate`; `pinned_max_round_threshold` has no limit unless it is set).
    """
    return 1 << (block.bytes - 1).bit_length() if block.category == "layer_inputs" else block.bytes
