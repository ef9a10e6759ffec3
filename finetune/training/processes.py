"""The processes of one run, as torchrun starts them: each computes its share of a step, the first one writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from finetune.errors import MachineError

T = TypeVar("T")

# The others wait while the first one verifies checkpoints, asks the base, or writes to a slow disk.
_PATIENCE = timedelta(hours=2)


def count() -> int:
    """Number of processes that a launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def number() -> int:
    """That of this process among them, from 0."""
    return int(os.environ.get("RANK", "0")) if count() > 1 else 0


def first() -> bool:
    """Whether this process is the one that writes the run directory."""
    return number() == 0


def choose_gpu() -> None:
    """Give each process of a machine a GPU of its own."""
    if count() > 1 and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def meet(device: torch.device) -> None:
    """Wait until all processes have come here; from then on they can exchange values. Raises MachineError."""
    if count() == 1:
        return
    try:
        PartialState(cpu=device.type == "cpu", timeout=_PATIENCE).wait_for_everyone()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise MachineError(f"the {count()} processes do not find each other: {error}") from None


def first_does(work: Callable[[], T]) -> T:
    """What `work` comes to, which the first process alone does. What it raises is raised in all."""
    if count() == 1:
        return work()
    done: tuple[T | None, Exception | None] | None = None
    if first():
        try:
            done = work(), None
        except Exception as error:
            done = None, error
    value, failed = broadcast_object_list([done])[0]
    if failed:
        raise failed
    return value


def gathered(value: T) -> list[T]:
    """The values of all processes, in their order."""
    if count() == 1:
        return [value]
    values: list[T] = gather_object([value])
    return values


def part() -> None:
    """Leave the others, who are done or go on without this process."""
    if count() > 1:
        PartialState().destroy_process_group()
