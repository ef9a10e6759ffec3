"""Play the allocations of a traced step, and of what a run does around it, on a device.

For CUDA they go through the model of the caching allocator; for a CPU the live tensors count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.forecast.allocator import CachingAllocator, CapacityError
from finetune.forecast.device import Device
from finetune.forecast.trace import CATEGORIES, Stretch, Trace, TracedBlock

_CURVE_POINTS = 600
_TRANSIENT = ("activations", "loss", "workspace")
_STEP = ("forward", "backward", "optimizer")
# Adapters, and the shards that loading left, become a sharded model; without shards, adapters are made.
_SHOWN_AS = {"attach": "load", "adapter": "optimizer"}


@dataclass(frozen=True)
class Point:
    """One moment of the step: its phase, live bytes by category, and reserved bytes."""

    phase: str
    categories: dict[str, int]
    reserved_bytes: int


@dataclass(frozen=True)
class Ranks:
    """How many `gpus` share a step; a forecast is that of one.

    `sharing` is the config's section `distributed`, where it matters. With `copied` each holds a copy of the model
    (DistributedDataParallel).
    """

    gpus: int = 1
    sharing: Mapping[str, Any] | None = None
    copied: bool = False


@dataclass(frozen=True)
class RunSetting:
    """The parts of a run around the traced step. All sizes in bytes.

    `micro_batches`: how many make a step on one rank.
    `checkpoint_bytes`: the copy in host memory from which a checkpoint is written. It is there after the last step, and
    with `saves_between` during a forward and backward pass as well.
    `pixel_bytes`: those of a micro-batch's images, which wait in host memory for a step and for the next one.
    `merges`: whether the run merges at its end, so that the merge must fit as well. `merge_bytes` (its device memory)
    and `disk_bytes` are those of `finetune.forecast.file_sizes`.
    `from_files`: whether transformers loads the base whole; else random weights are made, or shards are read.
    """

    micro_batches: int = 1
    merge_bytes: int = 0
    disk_bytes: int = 0
    checkpoint_bytes: int = 0
    pixel_bytes: int = 0
    merges: bool = False
    saves_between: bool = False
    from_files: bool = False
    ranks: Ranks = Ranks()


def replayed(
    trace: Trace, device: Device, run: Callable[[Replay], None], categories: Iterable[str] = CATEGORIES
) -> Replay:
    """The replay of `run`, with room for every segment or, where that is too much, with the device's room.

    Before it fails, the allocator gives back the segments that lie idle: a job may fit that would reserve more.
    """
    replay = Replay(trace, device, categories)
    run(replay)
    if device.type == "cuda" and replay.peak_reserved_bytes > device.room_bytes:
        tight = Replay(trace, device, categories, device.room_bytes)
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
            CachingAllocator(capacity_bytes, expandable_segments=device.software.expandable_segments)
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
        self._seen = self._fullest = 0  # events so far, and the most bytes among the last `_stride` of them
        self._stride = 1
        self.phases: dict[str, dict[str, int]] = {}
        self.managed_peak_bytes = 0
        self.curve: list[Point] = []

    def load(self, *, from_files: bool) -> int:
        """Play the loading of the base; returns the index of the first stretch after it."""
        loaded = next(number for number, stretch in enumerate(self._trace.stretches) if stretch.phase != "load")
        if from_files and self._allocator:
            # transformers' warm-up is a block as large as the base, freed at once: the weights are then allocated from
            # its segment (transformers 5.24, modeling_utils.py `caching_allocator_warmup`, `get_total_byte_count`; its
            # ceiling, 1.2 GiB less than the card has, is left out).
            self._allocator.free(self._allocator.allocate(sum(self.sizes("base_weights"))))
        self.play(self._trace.stretches[:loaded])
        if self._allocator:
            self._allocator.empty_cache()  # `load_base` does the same
        self._add(self._device.workspace_bytes, "workspace")
        return loaded

    def train(self, run: RunSetting) -> None:
        """Play the load, the pass of the reference, two steps (the second meets the segments of the first), a save, and
        the evaluation.
        """
        stretches = [stretch for stretch in self._trace.stretches if stretch.phase != "reference"]
        phases = [stretch.phase for stretch in stretches]
        first = phases.index("forward")
        after = [index for index in range(first, len(phases)) if phases[index] not in _STEP]
        last = next((index for index in after if phases[index] != "save"), len(phases))
        end = after[0] if after else last  # the end of the last stretch whose blocks a save sees
        step = stretches[first:last]
        update = next((index for index in range(first, last) if phases[index] == "optimizer"), last)
        loaded = self.load(from_files=run.from_files)
        if run.ranks.copied:  # DistributedDataParallel copies the model as it sends it, and keeps buckets of gradients
            from finetune.forecast import operator_costs

            sent = 0
            buckets = operator_costs.broadcast_buckets(self.sizes("base_weights", "adapter"))
            for number, size in enumerate([*buckets, 0], 1):
                self._live["workspace"] += size
                self._allocate(-number, size)
                self._see("load")
                if number > 1:
                    self._free(1 - number, sent)
                self._live["workspace"] -= sent
                sent = size
            for size in operator_costs.gradient_buckets(self.sizes("adapter")):
                self._add(size, "gradients")
        made = next((index for index in range(loaded, first) if phases[index] == "optimizer"), first)
        self.play(stretches[loaded:made])
        self.play([stretch for stretch in self._trace.stretches if stretch.phase == "reference"])
        self.play(stretches[made:first])
        self.play(step)
        self._begin_again(step)
        self._recording = True
        self._stride = max(1, sum(len(stretch.events) for stretch in step) // _CURVE_POINTS)
        copy_bytes = 0
        if self._device.type == "cpu" and run.checkpoint_bytes:  # a checkpoint copies within the device's own memory
            # The state of torch's random numbers is copied before weights and states are (`RandomState`).
            import torch

            copy_bytes = max(run.checkpoint_bytes, torch.get_rng_state().nbytes)
        with self._saving(copy_bytes if run.saves_between else 0):  # the update waits until the copy is written
            self.play(stretches[first:update])
        self.play(stretches[update:end])
        self._recording = False
        with self._saving(copy_bytes):
            self._see("save")
        self.play(stretches[end:])

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
        return self._allocator.reserved_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        return max(phase["allocated_bytes"] for phase in self.phases.values())

    @property
    def peak_reserved_bytes(self) -> int:
        return max(phase["reserved_bytes"] for phase in self.phases.values())

    def at_peak(self) -> dict[str, int]:
        """Bytes by category at the moment of the most live tensors; the slack is what is reserved beyond them."""
        slack = self.peak_reserved_bytes - sum(self._peak_live.values())
        return {**self._peak_live, **outside_by_category(self._device), "allocator_slack": slack}

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
                if sign > 0:
                    self._allocate(event, block.bytes)
                    self._see(_SHOWN_AS.get(stretch.phase, stretch.phase))
                else:
                    self._free(-event, block.bytes)
                if not self._recording:
                    continue
                # The curve has the fullest moment of every `_stride` events of a phase.
                begins = self._seen % self._stride == 0 or (self.curve and self.curve[-1].phase != stretch.phase)
                if begins or self._allocated > self._fullest:
                    point = Point(stretch.phase, dict(self._live), self.reserved_bytes)
                    self.curve[len(self.curve) - (not begins) :] = [point]
                    self._fullest = self._allocated
                self._seen += 1

    def _begin_again(self, step: list[Stretch]) -> None:
        """Bring what a step leaves into the state in which the next one begins."""
        events = {event for stretch in step for event in stretch.events}
        left = [number for number in sorted(events) if number > 0 and -number not in events]
        left = [number for number in left if not self._trace.blocks[number - 1].managed]

        # The next pass makes its own activations and the like.
        for number in left:
            block = self._trace.blocks[number - 1]
            if block.category in _TRANSIENT:
                self._live[block.category] -= block.bytes
                self._free(number, block.bytes)
        if self._allocator is None:
            return

        # A state that the optimizer makes anew (transformers' Adafactor) gets the handle of the one that it freed.
        old: dict[tuple[str, int], list[int]] = {}
        for number in sorted(-event for event in events if event < 0 and -event not in events):
            block = self._trace.blocks[number - 1]
            old.setdefault((block.category, block.bytes), []).append(number)
        for number in left:
            block = self._trace.blocks[number - 1]
            same = old.get((block.category, block.bytes))
            if same and block.category not in _TRANSIENT:
                self._handles[same.pop(0)] = self._handles.pop(number)

    def _add(self, size: int, category: str) -> None:
        """Allocate a block that stays."""
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


def outside_by_category(device: Device) -> dict[str, int]:
    """Bytes outside the allocator, by category."""
    sizes = {"context": device.outside_bytes - device.communicator_bytes}
    return {**sizes, "communicators": device.communicator_bytes} if device.communicator_bytes else sizes


def _on_host(block: TracedBlock) -> int:
    """Bytes of host memory that a managed block takes.

    Layer inputs wait in pinned memory, which torch hands out in powers of two (torch 2.13, ATen/core/
    CachingHostAllocator.h `allocate`; `pinned_max_round_threshold` has no limit unless it is set).
    """
    return 1 << (block.bytes - 1).bit_length() if block.category == "layer_inputs" else block.bytes
