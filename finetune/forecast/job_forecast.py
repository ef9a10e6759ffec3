"""The forecast of a job: the memory of a run on a device, by phase and by category, and the seconds of a step.

For CUDA the trace's allocations are replayed through the model of the caching allocator, which gives the reserved
memory; for a CPU the live tensors count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from finetune.data.batching import LargestBatch
from finetune.forecast.device import DISK_READ_BYTES, DISK_WRITE_BYTES, RANKS_OF_A_MACHINE, Device
from finetune.forecast.replay import Point, Ranks, RunSetting, outside_by_category, replayed
from finetune.forecast.trace import CATEGORIES, Trace, Work
from finetune.model.structure.mixture import Mixture
from finetune.runtime.memory_monitor import Peak
from finetune.storage.records import Difference, UpTo

KV_CACHE = "kv_cache"
"""The category of answers beside those of a step."""
PHASES = ("load", "reference", "forward", "backward", "optimizer", "evaluation", "save", "merge")
WORDS = {
    **CATEGORIES,
    "context": "context and libraries",
    "communicators": "NCCL communicators",
    "allocator_slack": "allocator slack",
}
"""Categories of the forecast: the key in JSON and the words for a person, in the order of a picture's layers."""


@dataclass(frozen=True)
class ReferencePass:
    """Scoring the rows once, before the first step: seconds are bounds from below, and None where unknown.

    `work` is that of a micro-batch. `row_seconds` are those of a row of the largest micro-batch, `seconds` of all
    `rows`. `in_step_seconds`: the time to compute the same in every step and evaluation of the run.
    """

    work: Work = field(repr=False)
    row_seconds: float | None = None
    rows: int | None = None
    seconds: float | None = None
    in_step_seconds: float | None = None


@dataclass(frozen=True)
class Experts:
    """The experts of a base. `mixture` says how they are stored; None for a base without any.

    Memory that is `routed` depends on what their router decides, and is forecast for the worst case.
    `evenly_routed_bytes` are needed if each gets equally many tokens.
    """

    mixture: Mixture | None = None
    routed: bool = False
    evenly_routed_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory that something takes on a device. All sizes in bytes.

    `phases` gives allocated and reserved bytes (on a CPU the same) without the context; `categories` adds up, at the
    moment of the peak, to what is compared with the budget. `host_bytes` lie in host memory. With `returns_segments` it
    fits only as the caching allocator gives idle segments back.
    """

    device: Device
    attention: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    host_bytes: int
    phases: dict[str, dict[str, int]]
    categories: dict[str, int]
    returns_segments: bool = False

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


@dataclass(frozen=True, kw_only=True)
class Forecast(DeviceMemory):
    """The memory and time of a job on a device; with several GPUs all figures except `disk_bytes` are those of one.

    `work`, `tokens` and `seconds`, a bound from below for ranking settings, are those of one optimizer step. `curve`
    shows the memory over a step. `by_length`: what short micro-batches recompute, where less than the config says;
    memory is then the most of any. `reference` is the pass that scores the reference, where there is one.
    """

    batch: LargestBatch
    disk_bytes: int
    work: Work
    tokens: int
    seconds: float
    curve: tuple[Point, ...] = field(repr=False, default=())
    experts: Experts = Experts()
    ranks: Ranks = field(default_factory=Ranks)
    by_length: tuple[UpTo, ...] = ()
    reference: ReferencePass | None = None

    @property
    def gpus(self) -> int:
        """How many share a step."""
        return self.ranks.gpus

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step over its seconds: a bound from above."""
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """The forecast as JSON values."""
        work, experts, ranks = self.work, self.experts, self.ranks
        own = ("peak_allocated_bytes", "peak_reserved_bytes", "host_bytes", "disk_bytes", "phases", "categories")
        shown = {
            "fits": self.fits,
            "device": self.device.name,
            "expandable_segments": self.device.software.expandable_segments,
            "budget_bytes": self.budget_bytes,
            "needed_bytes": self.needed_bytes,
            **{name: getattr(self, name) for name in own},
            "batch": self.batch.as_dict(),
            "attention": self.attention,
            "flops": work.flops,
            "moved_bytes": work.moved_bytes,
            "calls": work.calls,
            "seconds": round(self.seconds, 4),
            "mixture": experts.mixture and asdict(experts.mixture),
        }
        if experts.evenly_routed_bytes:
            shown["evenly_routed_bytes"] = experts.evenly_routed_bytes
        if self.reference and self.reference.row_seconds is not None:
            shown["reference"] = {name: value for name, value in asdict(self.reference).items() if name != "work"}
        if self.by_length:
            shown["by_length"] = [asdict(each) for each in self.by_length]
        if ranks.gpus > 1 or ranks.sharing:
            shown |= {"gpus": ranks.gpus, "sharding": ranks.sharing}
            shown |= {name: getattr(work, name) for name in ("sent_bytes", "copied_bytes", "swapped_bytes")}
        return shown

    def differences(self, peaks: Mapping[str, Peak]) -> list[Difference]:
        """The phases that were both forecast and measured, in the same measure.

        On CUDA these are allocated and reserved bytes as the allocator counts them. On a CPU it is the bytes of
        tensors, where they were counted (`finetune.runtime.live_tensors`), and not the resident size, which also holds
        what libraries keep for themselves.
        """
        return [
            Difference(phase, measure, predicted[measure], measured)
            for phase, predicted in self.phases.items()
            for measure, measured in peaks.get(phase, {}).items()
            if measure in predicted
        ]

    def beside(self, peaks: Mapping[str, Peak]) -> dict[str, Any]:
        """The contents of forecast.json: the forecast and, once something was measured, the measurements beside it."""
        differences = [{**asdict(each), "relative": round(each.relative, 5)} for each in self.differences(peaks)]
        return {**self.as_dict(), "measured": peaks, "differences": differences}


def make(trace: Trace, device: Device, batch: LargestBatch, attention: str, run: RunSetting) -> Forecast:
    """The forecast of a run, from the trace of one micro-batch and two updates."""
    replay = replayed(trace, device, lambda replay: replay.train(run))
    step = trace.work(("forward", "backward")) * run.micro_batches + trace.work(("optimizer",)) * 0.5
    if run.ranks.copied:
        # Gradients are averaged in the last micro-batch only.
        step.sent_bytes += averaging_bytes(sum(replay.sizes("adapter")), run.ranks.gpus)
    phases = {name: replay.phases[name] for name in PHASES if name in replay.phases}
    if run.merge_bytes:
        phases["merge"] = {"allocated_bytes": run.merge_bytes, "reserved_bytes": run.merge_bytes}
    categories, least = replay.at_peak(), run.merge_bytes if run.merges else 0
    if least > replay.peak_reserved_bytes:  # the job's own memory is released before the merge
        categories = {**dict.fromkeys(categories, 0), "base_weights": least, **outside_by_category(device)}
    # The images of this step and the next, and those of one micro-batch again while they are joined.
    waiting = run.pixel_bytes * (2 * run.micro_batches + 1)
    outside = device.outside_bytes if device.type == "cpu" else run.checkpoint_bytes + waiting
    return Forecast(
        device=device,
        attention=attention,
        peak_allocated_bytes=max(replay.peak_allocated_bytes, least),
        peak_reserved_bytes=max(replay.peak_reserved_bytes, least),
        host_bytes=replay.managed_peak_bytes + outside,
        phases=phases,
        categories=categories,
        returns_segments=replay.is_limited,
        batch=batch,
        disk_bytes=run.disk_bytes,
        work=step,
        tokens=run.micro_batches * batch.positions // (run.ranks.sharing["context"] if run.ranks.sharing else 1),
        seconds=_step_seconds(step, device, run.ranks.gpus),
        curve=tuple(replay.curve),
        experts=Experts(trace.base.mixture, trace.routed),
        ranks=run.ranks,
        reference=ReferencePass(trace.work(("reference",))) if "reference" in phases else None,
    )


def on(forecast: Forecast, device: Device) -> Forecast:
    """The forecast on its device as that is now: with other memory free and, on a CPU, other rates and memory held."""
    held = device.outside_bytes - forecast.device.outside_bytes if device.type == "cpu" else 0
    return replace(
        forecast,
        device=device,
        categories={**forecast.categories, **outside_by_category(device)},
        host_bytes=forecast.host_bytes + held,
        seconds=_step_seconds(forecast.work, device, forecast.gpus),
    )


def with_reference(forecast: Forecast, shares: int, rows: int | None, batches: float, in_step: float) -> Forecast:
    """`forecast` with the seconds of the pass, if it has one, that scores `rows` in `batches`, divided into `shares`.

    Steps and evaluations would take `in_step` times as long.
    """
    if not forecast.reference:
        return forecast
    each = _seconds(forecast.reference.work, forecast.device) / shares
    scored = replace(forecast.reference, row_seconds=round(each / len(forecast.batch.by_row), 6))
    if rows is not None:
        seconds, in_step_seconds = (round(each * batches * times, 4) for times in (1, in_step))
        scored = replace(scored, rows=rows, seconds=seconds, in_step_seconds=in_step_seconds)
    return replace(forecast, reference=scored)


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


def _step_seconds(work: Work, device: Device, ranks: int) -> float:
    """Seconds of a step on one of `ranks`, with the time in which states are read from a disk and written back.

    Nothing else runs meanwhile, and the ranks of a machine share the disk.
    """
    disk_rate = DISK_READ_BYTES * DISK_WRITE_BYTES / (DISK_READ_BYTES + DISK_WRITE_BYTES)
    return _seconds(work, device) + work.swapped_bytes * min(ranks, RANKS_OF_A_MACHINE) / disk_rate


def _seconds(work: Work, device: Device) -> float:
    """The sum of arithmetic, traffic and launch times, or the time of what is sent meanwhile, if that is longer.

    Copies between the host and the device have a stream of their own (`model.recompute.offload`), and so have FSDP2's
    gathers of the next layer and its reduced gradients, and DDP's averages.
    """
    rates = device.rates
    computing = (
        (work.flops - work.hidden_flops) / rates.flops
        + work.moved_bytes / rates.bandwidth_bytes
        + work.calls * rates.call_seconds
    )
    if rates.nvlink_bytes:
        return max(computing, work.copied_bytes / rates.pcie_bytes, work.sent_bytes / rates.nvlink_bytes)
    # Copies and messages both go over PCI Express, one after the other.
    return max(computing, (work.copied_bytes + work.sent_bytes) / rates.pcie_bytes)


def averaging_bytes(gradient_bytes: int, ranks: int) -> int:
    """Bytes that each of `ranks` sends to average gradients: 2 (n - 1) / n of them.

    In a ring each rank sends n - 1 of n slices to be summed, and n - 1 sums (nccl-tests, doc/PERFORMANCE.md).
    """
    return 2 * (ranks - 1) * gradient_bytes // ranks
