"""What is tried on a device, one entry of TRIALS each. A trial runs in the child process and raises Refuted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from finetune import kernels
from finetune.certificate import sizes
from finetune.certificate.comparing import Comparing
from finetune.certificate.small_model import TriedJob
from finetune.config import MemorySection
from finetune.data.batching import LargestBatch
from finetune.forecast import devices, job_forecast
from finetune.forecast.allocator import CachingAllocator
from finetune.forecast.replay import RunSetting
from finetune.forecast.traced_step import StepSetting, trace_step
from finetune.kernels import KERNELS, ops, self_test
from finetune.model.precision import PRECISIONS
from finetune.model.probes import packed_rows
from finetune.runtime import driver, segments
from finetune.storage.records import TrialResult
from finetune.training import optimizers

LOSS = "loss"
FUSED = (*KERNELS, LOSS)
"""What `kernels.fused` turns on, by the names of their trials."""

# A kernel is off if it takes this many times as long as the modules it replaces; less is within the noise.
_SLOWER = 1.1
# Rows and tokens of the calls that are compared element by element: with ragged ends, and several programs of a grid.
_COMPARED = ((1, 16), (3, 17), (1, 1000))
_STEPS = 10
# The learning rate at which the losses of ten steps are compared, for all jobs.
_RATE = 2e-4
# One more than a signed number of 32 bits can count.
_LARGE_ELEMENTS = 2**31
# Kernels with an operator that is tried on a result of that size.
LARGE = ("norm", "mlp")
# The largest relative difference between the losses of ten steps that two ways of computing the same may have.
_LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}


class Refuted(Exception):
    """The trial shows that something is wrong; the message completes "X is off: ...". `slower` if only its time is."""

    def __init__(self, reason: str, *, slower: bool = False) -> None:
        super().__init__(reason)
        self.slower = slower


class Skipped(Exception):
    """The trial is not possible on this device; the message says why."""


@dataclass(frozen=True)
class Trial:
    """One trial: what it `tries`, the time it may take, and what it `costs` to do without.

    `run` returns figures by name; it is given the names of the trials that did not hold. `applies`: the configs, as
    JSON values, for which it is made. `of_others`: its result follows from those of the other trials as well;
    `of_device`: a forecast uses its figures for other jobs as well.
    """

    tries: str
    run: Callable[[TriedJob, Collection[str]], dict[str, float]]
    costs: str = ""
    limit_seconds: float = 20.0
    on: Collection[str] = field(default=("cpu", "cuda"))
    applies: Callable[[dict[str, Any]], bool] = lambda config: True
    of_others: bool = False
    of_device: bool = False


# -- memory and optimizer ----------------------------------------------------------------------------------------------


def _segments(job: TriedJob, off: Collection[str]) -> dict[str, float]:
    """Grow a segment; a driver may announce the calls for it and refuse them (pytorch#192330, under WSL2)."""
    blocks = [torch.full((2**count,), 7, dtype=torch.uint8, device=job.device) for count in (22, 23, 26)]
    if any(int(block.sum(dtype=torch.int64)) != 7 * block.numel() for block in blocks):
        raise Refuted("what was written to a growing segment was read back as other values")
    return {}


def _reserved(job: TriedJob, off: Collection[str]) -> dict[str, float]:
    """The caching allocator beside its model, before anything else has left blocks in it."""
    if torch.cuda.memory_reserved(job.device):
        raise Skipped("another trial has left memory in the allocator")
    reserved, forecast = sizes.reserved_bytes(
        lambda size: torch.empty(size, dtype=torch.uint8, device=job.device),
        lambda: torch.cuda.memory_reserved(job.device),
        CachingAllocator(expandable_segments=segments.grow(torch.cuda.current_device())),
    )
    return {"reserved_bytes": reserved, "forecast_reserved_bytes": forecast}


def _chosen_optimizer(job: TriedJob) -> str:
    """The optimizer that a run would use on this device."""
    managed = job.device.type == "cuda" and driver.shares_managed_memory(torch.cuda.current_device())
    return optimizers.choose(job.config.optimizer, job.device.type, managed_memory=managed)[0]


def _optimizer(job: TriedJob, off: Collection[str]) -> dict[str, float]:
    """Two updates by the job's optimizer beside its twin without paging, with the states read on the host between."""
    name = _chosen_optimizer(job)
    twin = optimizers.OPTIMIZERS[name].unpaged or name
    updated = [_updated(job, kind) for kind in (name, twin)]
    if not all(map(torch.equal, *updated)):
        raise Refuted(f"its updates differ from those of `{twin}`")
    return {}


def _updated(job: TriedJob, kind: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 128, bias=False).to(job.device)
    optimizer = optimizers.make(kind, job.config.optimizer, 1e-3, model)
    for _ in range(2):
        model.weight.grad = torch.sin(torch.arange(model.weight.numel(), device=job.device).view_as(model.weight))
        optimizer.step()
        job.wait()
        states = [state for state in optimizer.state[model.weight].values() if isinstance(state, Tensor)]
        on_host = [state.cpu().clone() for state in states]
    return [model.weight.detach(), *on_host]


# -- kernels -----------------------------------------------------------------------------------------------------------


def _attention_implementation(job: TriedJob, off: Collection[str]) -> dict[str, float]:
    """Rows of uneven lengths, some longer than a window, beside eager attention."""
    text = job.architecture.get_text_config()
    window = getattr(text, "sliding_window", None) or 0
    inputs = job.inputs(3, min(max(64, window + 17), 4200))
    tokens = inputs["input_ids"].shape[1]
    lengths = torch.tensor([tokens, tokens - 17, 16], device=job.device)[:, None]
    inside = torch.arange(tokens, device=job.device) < lengths
    inputs |= {"attention_mask": inside.long(), "labels": inputs["labels"].masked_fill(~inside, -100)}
    chosen = job.results(job.model(), inputs)
    try:
        eager = job.results(job.model("eager"), inputs)
    except torch.OutOfMemoryError:  # it keeps all scores: no reason to train with it
        return {}
    _compare(chosen, eager, job, "the eager computation gives")
    return {}


def _packing(job: TriedJob, off: Collection[str]) -> dict[str, float]:
    """Packed rows beside single ones."""
    model = job.model()
    with job.passes(model):
        packed_rows.prove(model)
    return {}


def _kernel(name: str) -> Callable[[TriedJob, Collection[str]], dict[str, float]]:
    """The trial of one entry of KERNELS, alone: each of its operators, the gradients, and the time."""

    def run(job: TriedJob, off: Collection[str]) -> dict[str, float]:
        model, others = job.model(), set(KERNELS) - {name}
        attached = kernels.attach(model, "auto", triton=job.has_triton, without=others)
        if not any(attached.replaced.values()):
            return {}
        for rows, tokens in (*_COMPARED, (job.rows, job.tokens)):
            with Comparing() as compared:
                fused = job.results(model, job.inputs(rows, tokens))
            if compared.problem:
                raise Refuted(f"{compared.problem} ({rows} rows of {tokens} tokens)")
        inputs = job.inputs(job.rows, job.tokens)
        attached.detach()
        _compare(fused, job.results(model, inputs), job, "the modules compute")

        def seconds(fused: bool) -> float:
            attached = kernels.attach(model, "auto" if fused else "off", triton=job.has_triton, without=others)
            least = job.seconds(lambda: job.results(model, inputs))
            attached.detach()
            return least

        return _times(seconds)

    return run


def _large(job: TriedJob, off: Collection[str]) -> dict[str, float]:
    """Results of more elements than 32 bits can count: rows that are all equal must have equal results."""
    dtype = PRECISIONS[job.config.training.precision].dtype
    width = getattr(job.architecture.get_text_config(), "hidden_size", 4096)
    rows = _LARGE_ELEMENTS // width + 1
    needed = 2 * rows * width * dtype.itemsize
    if job.device.type == "cuda" and needed > job.total_bytes:
        raise Skipped(f"it takes {needed / 2**30:.0f} GiB, and this GPU has {job.total_bytes / 2**30:.0f}")
    if job.device.type == "cuda" and needed > torch.cuda.mem_get_info(job.device)[0]:
        raise Skipped(f"it takes {needed / 2**30:.0f} GiB, which are not free")
    row = torch.randn(1, width, generator=torch.Generator().manual_seed(0)).to(job.device, dtype)
    for name, compute in (
        ("rms_norm", lambda x: ops.rms_norm(x, row[0], 1e-6)[0]),
        ("gated", lambda x: ops.gated(x, x, "silu")),
    ):
        one = compute(row)
        if not all(torch.equal(part, one.expand_as(part)) for part in compute(row.expand(rows, width)).split(2**16)):
            raise Refuted(f"`{name}` computes other elements beyond the first {_LARGE_ELEMENTS:,}")
    return {}


def _offload(job: TriedJob, off: Collection[str]) -> dict[str, float]:
    """Gradients with layer inputs in host memory, copied beside the arithmetic, and with all of them on the GPU."""
    inputs = job.inputs(job.rows, job.tokens)
    on_gpu, offloaded = (
        job.results(job.model(memory=MemorySection(checkpointing="all", offload=offload)), inputs)
        for offload in ("none", "checkpoints")
    )
    if unequal := [name for name, one in on_gpu.items() if not torch.equal(one, offloaded[name])]:
        raise Refuted(f"{unequal[0]} is another one, as are {len(unequal) - 1} more")
    return {}


def _loss(job: TriedJob, off: Collection[str]) -> dict[str, float]:
    """The fused loss beside TRL's, in several tiles."""
    model = job.model()
    for rows, tokens in (*_COMPARED, (job.rows, job.tokens)):
        inputs = job.inputs(rows, tokens)
        first, again = (job.results(model, inputs, fused_loss=True) for _ in range(2))
        _compare(first, job.results(model, inputs), job, "TRL computes")
        if not all(torch.equal(again[key], value) for key, value in first.items()):
            raise Refuted("it gives another result the second time")
    return _times(lambda fused: job.seconds(lambda: job.results(model, inputs, fused_loss=fused)))


def _model(job: TriedJob, off: Collection[str]) -> dict[str, float]:
    """Ten steps by the path of the config, beside the plain modules with nothing recomputed and nothing paged."""
    plain = _steps(job, MemorySection(checkpointing="none"), FUSED, paged=False)
    steps = _steps(job, job.config.memory, off, paged=True)
    _compare(steps.results, plain.results, job, "the plain modules give")
    tolerance = _LOSS_TOLERANCE[PRECISIONS[job.config.training.precision].dtype]
    for step, (loss, expected) in enumerate(zip(steps.losses, plain.losses, strict=True), start=1):
        if not abs(loss - expected) <= tolerance * abs(expected):
            raise Refuted(f"the loss of step {step} of a small model is {loss:.5g} instead of {expected:.5g}")
    return {"seconds": steps.seconds, "plain_seconds": plain.seconds}


class _TenSteps(NamedTuple):
    """The loss and gradients before ten optimizer steps, the loss of each, and the seconds of the fastest."""

    results: dict[str, Tensor]
    losses: list[float]
    seconds: float


def _steps(
    job: TriedJob, memory: MemorySection, off: Collection[str], *, paged: bool,
    seen: Callable[[str], None] = lambda phase: None,
) -> _TenSteps:  # fmt: skip
    """Ten steps of the small model; `seen` is called at the end of each phase of a step."""
    model = job.model(memory=memory)
    kernels.attach(model, "auto", triton=job.has_triton, without=off)
    section, training = job.config.optimizer, job.config.training
    name = _chosen_optimizer(job)
    name = name if paged else optimizers.OPTIMIZERS[name].unpaged or name
    optimizer = optimizers.make(name, section, _RATE, model)
    inputs, losses, seconds = job.inputs(job.rows, job.tokens), [], []
    results = job.results(model, inputs, fused_loss=LOSS not in off)

    def step() -> None:
        with job.passes(model, fused_loss=LOSS not in off):
            loss = job.loss(model, inputs)
        seen("forward")
        loss.backward()
        seen("backward")
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        seen("optimizer")
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    for _ in range(_STEPS):
        seconds.append(job.timed(step))
    return _TenSteps(results, losses, min(seconds))


def _memory(job: TriedJob, off: Collection[str]) -> dict[str, float]:
    """The peaks of the small model's steps beside the forecast's, by phase; and what lies outside the allocator."""
    peaks: dict[str, int] = {}

    def seen(phase: str) -> None:
        job.wait()
        for measure in ("allocated", "reserved"):
            name = f"{phase}_{measure}_bytes"
            peaks[name] = max(getattr(torch.cuda, f"max_memory_{measure}")(job.device), peaks.get(name, 0))
        torch.cuda.reset_peak_memory_stats(job.device)

    torch.cuda.reset_peak_memory_stats(job.device)
    _steps(job, job.config.memory, off, paged=True, seen=seen)
    forecast = forecast_of_small_model(
        job, replace(devices.here(job.device, job.config.memory), kernels_off=tuple(off))
    )
    predicted = {
        f"forecast_{phase}_{measure}": size
        for phase, sizes in forecast.phases.items()
        for measure, size in sizes.items()
        if f"{phase}_{measure}" in peaks
    }
    context = sizes.context_bytes(job.free_bytes, job.device)  # now that the kernels of a step are loaded
    return {**peaks, **predicted, **({} if context is None else {"context_bytes": context})}


def forecast_of_small_model(job: TriedJob, device: devices.Device) -> job_forecast.Forecast:
    """The forecast of the steps of the small model on `device`."""
    config, architecture = job.shortened
    batch = LargestBatch(job.rows, job.tokens, padded=False, trained_tokens=job.rows * (job.tokens - 1))
    trace = trace_step(StepSetting(config, architecture, batch, None, device, job.attention, 1))
    return job_forecast.make(trace, device, batch, job.attention, RunSetting(micro_batches=1, from_files=False))


def _rates(job: TriedJob, off: Collection[str]) -> dict[str, float]:
    """Operations and bytes a second, which rank the settings of a plan, and the workspaces of products."""
    dtype = PRECISIONS[job.config.training.precision].dtype
    left = torch.randn(4096, 4096, device=job.device).to(dtype)
    wide = torch.ones(2**26, device=job.device)
    products, copies = job.seconds(lambda: left @ left), job.seconds(lambda: wide.clone())
    return {
        "fp32_flops" if dtype is torch.float32 else "flops": 2 * 4096**3 / products,
        "bandwidth_bytes": 2 * wide.numel() * 4 / copies,
        "workspace_bytes": sizes.workspace_bytes(left.dtype, job.device),
    }  # fmt: skip


def _compare(tried: dict[str, Tensor], plain: dict[str, Tensor], job: TriedJob, origin: str) -> None:
    if unlike := self_test.difference(tried, plain, PRECISIONS[job.config.training.precision].dtype, origin):
        raise Refuted(unlike)


def _times(seconds: Callable[[bool], float]) -> dict[str, float]:
    """The seconds of a step with and without a kernel; what is slower twice is not noise."""
    for _ in range(2):
        fused, plain = seconds(True), seconds(False)
        if fused <= _SLOWER * plain:
            return {"seconds": fused, "plain_seconds": plain}
    raise Refuted(f"a step takes {fused / plain:.2f} times as long with it", slower=True)


_MODULES = "the model's own modules compute it, with more memory traffic and time"


def _fuses(config: dict[str, Any]) -> bool:
    return bool(config["kernels"]["fused"] != "off")


TRIALS: dict[str, Trial] = {
    "reserved": Trial("the allocator beside its model", _reserved, on=("cuda",), of_device=True),
    "segments": Trial(
        "growing segments", _segments, "the allocator reserves more than the tensors need", on=("cuda",),
        of_device=True,
    ),
    "optimizer": Trial(
        "a paged optimizer", _optimizer, "its states stay in the GPU's memory, where a long row may not fit beside them"
    ),
    "attention_implementation": Trial(
        "the chosen attention", _attention_implementation,
        "eager attention keeps all scores, in memory and time, and packs no rows",
    ),
    "packing": Trial(
        "packing", _packing, "rows are padded instead, and what is computed for padding is lost",
        applies=lambda config: bool(config["data"]["packing"]),
    ),
    "offload": Trial(
        "offloading beside the arithmetic", _offload, "layer inputs stay in the GPU's memory", on=("cuda",)
    ),
    **{name: Trial(f"kernel `{name}`", _kernel(name), _MODULES, applies=_fuses) for name in KERNELS},
    LOSS: Trial("the fused loss", _loss, "TRL's function computes the logits once more", applies=_fuses),
    "large": Trial(
        "results of more than 2^31 elements", _large, f"kernels `{'` and `'.join(LARGE)}` are off: {_MODULES}",
        on=("cuda",), applies=_fuses,
    ),
    "model": Trial(
        "a model of two layers", _model, f"no kernel is fused: {_MODULES}", limit_seconds=30.0, of_others=True
    ),
    "memory": Trial(
        "the forecast beside the measured peaks", _memory, limit_seconds=30.0, on=("cuda",), of_others=True,
        of_device=True,
    ),
    "rates": Trial("the rates of the GPU", _rates, limit_seconds=10.0, on=("cuda",), of_device=True),
}  # fmt: skip


def missing(request: dict[str, Any], kept: Iterable[TrialResult]) -> list[str]:
    """The names of the trials of a request, in their order, without those whose results are kept."""
    there = {result.trial for result in kept}
    device_type = request["device"].partition(":")[0]
    return [
        name
        for name, trial in TRIALS.items()
        if name not in there and device_type in trial.on and trial.applies(request["config"])
    ]


def lasting(results: Iterable[TrialResult]) -> list[TrialResult]:
    """The results to keep: not the transient ones and, if there are any, none that follow from other results."""
    results = list(results)
    passing = any(result.transient for result in results)
    return [one for one in results if not (one.transient or (passing and TRIALS[one.trial].of_others))]
