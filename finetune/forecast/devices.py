"""The device that a plan is for: a GPU from the table, a memory size, the GPU of this machine, or the CPU."""

from __future__ import annotations

import importlib
import os
import re
import timeit
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import psutil
import torch

from finetune.config import MemorySection
from finetune.config.field_types import parse_size
from finetune.errors import ConfigError, MachineError, OutOfMemoryError
from finetune.forecast import gpus, measured, operator_costs
from finetune.forecast.device import Device, Software
from finetune.forecast.gpus import Rates
from finetune.runtime import control_groups, driver, libraries, patches, segments
from finetune.training import probe_table


def find(name: str, memory: MemorySection) -> Device:
    """The device of `--gpu`: a card's name, a size such as 24GiB, `auto` for what is here, or `cpu`.

    The section's `budget` and `limit` lower what the job may take. Raises ConfigError for a name that is not known,
    MachineError for `auto` where there is no card.
    """
    if name == "cpu":
        return _cpu(memory.budget)  # `memory.limit` is only for GPUs
    budget_bytes = _budget(memory)
    if name == "auto":
        if not torch.cuda.is_available():
            raise MachineError("`--gpu auto` needs a CUDA device here; give a GPU, a size such as 24GiB, or `cpu`")
        return _present(budget_bytes)
    if re.match(r"\s*\d+(\.\d+)?\s*[A-Za-z]*i?B\s*$", name):
        try:
            total = int(parse_size(name.strip()))
        except ValueError as error:
            raise ConfigError(f"--gpu: {error}") from None
        if not total:
            raise ConfigError(f"--gpu: {name} is not the memory of a card; give its size, such as 24GiB")
        return _card(_nearest(total), total, budget_bytes, name)
    gpu = gpus.find(name)
    return _card(gpu, gpu.total_bytes, budget_bytes, gpu.name)


def here(device: torch.device, memory: MemorySection) -> Device:
    """The device that a run is about to use."""
    return _present(_budget(memory)) if device.type == "cuda" else _cpu(memory.budget)


def of_ranks(device: Device, groups: Sequence[int], context: int) -> Device:
    """`device` as one of several ranks uses it, with NCCL's communicators, one for each of the `groups` (their sizes).

    `context` ranks exchange the slices of a row.
    """
    if device.type != "cuda" or not groups:
        return device
    size = sum(map(operator_costs.communicator_bytes, groups))
    if device.rates.nvlink_bytes:
        size += operator_costs.exchange_bytes(context)
    return replace(device, outside_bytes=device.outside_bytes + size, communicator_bytes=size)


def cap(limit_bytes: int | None, device: torch.device) -> None:
    """Let this process take no more than `limit_bytes` of the card, or all of it for None.

    More is out of memory, as on a smaller card. The CUDA context counts, as it does in a forecast's budget (see
    `Device.room_bytes`), so what the caching allocator may reserve is the rest; where its segments grow, torch counts
    the request and maps whole pages, up to 18 MiB more, which fits within the allowance for the context. Managed memory
    (paged optimizer states) is not counted by it (torch.cuda.set_per_process_memory_fraction). Raises OutOfMemoryError
    where the context alone takes the limit.
    """
    if device.type != "cuda":
        return
    card = torch.cuda.get_device_properties(device)
    if not limit_bytes or limit_bytes >= card.total_memory:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    room = limit_bytes - operator_costs.context_bytes(card.multi_processor_count)
    if room <= 0:
        raise OutOfMemoryError(
            f"`memory.limit` leaves nothing besides the CUDA context, which takes up to "
            f"{(limit_bytes - room) / 2**20:.0f} MiB of this card; raise it"
        )
    # torch multiplies the share by the total and rounds down: with the half byte, to `room`.
    torch.cuda.set_per_process_memory_fraction((room + 0.5) / card.total_memory, device)


def _budget(memory: MemorySection) -> int | None:
    return min((size for size in (memory.budget, memory.limit) if size), default=None)


def smallest_fitting(needed_bytes: int) -> Device | None:
    """The card of the table with the least memory that still has `needed_bytes` beside its context."""
    for gpu in gpus.smallest_first():
        device = _card(gpu, gpu.total_bytes, None, gpu.name)
        if needed_bytes + device.outside_bytes <= device.budget_bytes:
            return device
    return None


def _card(gpu: gpus.Gpu, total: int, budget: int | None, name: str) -> Device:
    """A GPU like `gpu` with `total` bytes, which need not be in this machine."""
    return Device(
        type="cuda",
        name=name if name == gpu.name else f"{name} (speed and context of {gpu.name})",
        budget_bytes=min(total, budget or total),
        outside_bytes=operator_costs.context_bytes(gpu.multiprocessors),
        rates=gpu.rates,
        software=Software(expandable_segments=segments.grow_elsewhere()),
        capability=gpu.compute_capability,
    )


def _nearest(total_bytes: int) -> gpus.Gpu:
    """The card of the table whose memory is nearest, of those with bfloat16, which all that are sold today have."""
    cards = (gpu for gpu in gpus.smallest_first() if gpu.compute_capability >= (8, 0))
    return min(cards, key=lambda gpu: abs(gpu.total_bytes - total_bytes))


def _present(budget: int | None) -> Device:
    """The GPU of this machine, with what other processes leave free on it, and what was measured on it."""
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    figures = measured.known(device)
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved()
    # Part of what is taken is this process's own context, and torch loads more of it later.
    context = figures.context_bytes or operator_costs.context_bytes(properties.multi_processor_count)
    usable = free + min(properties.total_memory - free, context)
    try:
        known = gpus.find(properties.name)
    except ConfigError:
        known = _nearest(properties.total_memory)
    sheet = _card(known, usable, budget, properties.name)
    cublas_workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    return replace(
        sheet,
        name=properties.name,
        outside_bytes=context,
        rates=replace(
            sheet.rates,
            flops=figures.flops or sheet.rates.flops,
            fp32_flops=figures.fp32_flops or sheet.rates.fp32_flops,
            bandwidth_bytes=figures.bandwidth_bytes or sheet.rates.bandwidth_bytes,
        ),
        software=Software(
            expandable_segments=segments.grow(torch.cuda.current_device()),
            cublas_workspace=cublas_workspace,
            managed_memory=driver.shares_managed_memory(torch.cuda.current_device()),
            triton=libraries.triton_obstacle() is None,
            kernels_off=probe_table.off_on(device),
        ),
        capability=(properties.major, properties.minor),
        measured_workspace_bytes=0 if cublas_workspace else figures.workspace_bytes,
    )


def _cpu(budget: int | None) -> Device:
    rates = _cpu_rates()
    # What a training process holds then: every adapter imports it (20 MiB, without scipy).
    with patches.SCIPY.by(lambda: False):
        importlib.import_module("peft")
    libraries.return_freed_memory()  # as loading the base does; measuring the rates leaves up to 60 MiB
    held = psutil.Process().memory_info().rss
    available = min(psutil.virtual_memory().available, control_groups.left_bytes()) + held
    return Device(
        type="cpu",
        name="CPU",
        budget_bytes=int(min(available, budget or available)),
        outside_bytes=held,
        rates=rates,
        software=Software(kernels_off=probe_table.off_on(torch.device("cpu"))),
    )


@cache
def _cpu_rates() -> Rates:
    """The rates of this CPU, measured in some milliseconds."""

    def seconds(work: Callable[[], object]) -> float:
        work()
        return min(timeit.repeat(work, number=1))

    left = torch.ones(512, 512)
    left_16 = torch.ones(256, 256, dtype=torch.bfloat16)  # without instructions for it, 60 times slower
    wide = torch.ones(2**22)
    one = torch.ones(1)
    return Rates(
        flops=2 * 256**3 / seconds(lambda: left_16 @ left_16),
        fp32_flops=2 * 512**3 / seconds(lambda: left @ left),
        bandwidth_bytes=2 * wide.nbytes / seconds(lambda: wide.clone()),
        call_seconds=seconds(lambda: one + one),
    )
