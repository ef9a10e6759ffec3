"""The ranks of a run, as started by torchrun: each computes its share of a step, and rank 0 writes."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, reduce

from finetune.errors import FinetuneError, MachineError, Terminated, first_line
from finetune.runtime import rank_watch
from finetune.runtime.rank_watch import Lost, Watch

T = TypeVar("T")

# Other ranks wait while rank 0 verifies checkpoints, generates the base's answers, or writes to a slow disk.
_TIMEOUT = timedelta(hours=2)

_watch: Watch | None = None


def world_size() -> int:
    """Number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The rank of this process, from 0."""
    return int(os.environ.get("RANK", "0")) if world_size() > 1 else 0


def is_main() -> bool:
    """Whether this process is rank 0, which writes the run directory."""
    return rank() == 0


def is_local_main() -> bool:
    """Whether this process prints for all ranks on its machine."""
    return world_size() == 1 or os.environ.get("LOCAL_RANK", "0") == "0"


def choose_gpu() -> None:
    """Give each rank on a machine its own GPU; a single process uses the first one, as in transformers.

    Raises MachineError if there are fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return
    if world_size() > 1 and "LOCAL_RANK" not in os.environ:
        raise MachineError("WORLD_SIZE is set but LOCAL_RANK is not; start several processes with torchrun")
    gpu, visible = (int(os.environ["LOCAL_RANK"]) if world_size() > 1 else 0), torch.cuda.device_count()
    if gpu >= visible:
        raise MachineError(
            f"each process needs its own GPU, but this machine has only {visible} for process {gpu + 1}; set "
            f"--nproc-per-node {visible}, or make more GPUs visible (CUDA_VISIBLE_DEVICES)"
        )
    torch.cuda.set_device(gpu)


def idle_gpus() -> str | None:
    """A note for a single process that leaves visible GPUs idle, or None."""
    if world_size() > 1 or not torch.cuda.is_available() or torch.cuda.device_count() == 1:
        return None
    visible, used = torch.cuda.device_count(), torch.cuda.current_device()
    return (
        f"{visible} GPUs are visible, but this process trains on GPU {used} only; to train on all: torchrun "
        f"--nproc-per-node {visible} -m finetune train CONFIG"
    )


@contextlib.contextmanager
def together(device: torch.device) -> Iterator[None]:
    """In the block, until `leave`, ranks can exchange values; if one is lost, the others end.

    Raises MachineError naming the lost rank, or if the ranks cannot connect to each other.
    """
    global _watch
    if world_size() == 1:
        yield
        return
    try:
        PartialState(cpu=device.type == "cpu", timeout=_TIMEOUT).wait_for_everyone()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise MachineError(f"the {world_size()} processes cannot connect to each other: {error}") from None
    watched = _watch = _connected()
    try:
        yield
    except BaseException as error:
        if named := _lost_rank(watched, error):
            raise named from None
        signalled = isinstance(error, (Terminated, KeyboardInterrupt))
        failure = Lost(rank(), f"ended: {first_line(error)[:500]}", signalled)
        watched.leave(None if getattr(error, "shared", False) else failure)
        raise
    finally:
        watched.leave()


def _connected() -> Watch:
    """Connect this rank's watch."""
    server = rank_watch.host() if is_main() else None
    offer = (server.getsockname()[1], secrets.token_hex(16)) if server else None
    port, token = broadcast_object_list([offer])[0]
    if server is None:
        return rank_watch.connect((os.environ["MASTER_ADDR"], port), token, rank())
    with server:
        return rank_watch.accept(server, token, world_size() - 1)


def _lost_rank(watched: Watch, error: BaseException) -> MachineError | None:
    """An error naming a lost rank if that caused `error`: in a collective, or because the launcher ends all ranks."""
    if isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
        try:
            lost = watched.lost(rank_watch.SILENCE_SECONDS + rank_watch.GRACE_SECONDS)
        except Terminated:
            lost = watched.lost(2 * rank_watch.BEAT_SECONDS)
        return lost.error() if lost else MachineError(f"the ranks lost contact with each other: {error}")
    if isinstance(error, (Terminated, KeyboardInterrupt)):
        lost = watched.lost(2 * rank_watch.BEAT_SECONDS)
        return lost.error() if lost and not lost.signalled else None
    return None


def main_does(work: Callable[[], T]) -> T:
    """The result of `work`, which only rank 0 runs; all ranks raise what it raises."""
    if world_size() == 1:
        return work()
    done: tuple[T | None, Exception | None] | None = None
    if is_main():
        try:
            done = work(), None
        except Exception as error:
            done = None, error
    value, failed = broadcast_object_list([done])[0]
    if failed:
        raise _shared(failed)
    return value


def gathered(value: T) -> list[T]:
    """The values of all ranks, in rank order."""
    if world_size() == 1:
        return [value]
    values: list[T] = gather_object([value])
    return values


def summed(values: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, on the device."""
    if world_size() == 1:
        return values
    total: torch.Tensor = reduce(values, "sum")
    return total


def agree(check: Callable[[list[T]], None], value: T) -> None:
    """Run `check` on the values of all ranks, in rank order; every rank raises what `check` raises."""
    try:
        check(gathered(value))
    except FinetuneError as error:
        raise _shared(error) from None


def _shared(error: Exception) -> Exception:
    if isinstance(error, FinetuneError):
        error.shared = True
    return error


def leave() -> None:
    """Stop watching the other ranks and destroy the process group."""
    if world_size() > 1:
        if _watch:
            _watch.leave()
        PartialState().destroy_process_group()
