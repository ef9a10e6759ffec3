"""The ranks of a run, as started by torchrun: each computes its share of a step, and rank 0 writes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed import DistError, PrefixStore, Store, rendezvous

from finetune import errors
from finetune.errors import FinetuneError, MachineError, OutOfMemoryError, Terminated, first_line
from finetune.runtime import rank_watch
from finetune.runtime.rank_watch import Lost, Watch

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

# A collective's own time-out does not say which rank it waited for, so it comes after the watch's.
_TIMEOUT = timedelta(seconds=rank_watch.MAIN_BEHIND_SECONDS + 600)
# The longest time between the first and the last rank to start: one may import its libraries from a cold network disk.
_START = timedelta(minutes=10)
_POLL_SECONDS = 0.05

_watch: Watch | None = None


def world_size() -> int:
    """Number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The rank of this process, from 0."""
    return int(os.environ.get("RANK", "0")) if world_size() > 1 else 0


def is_main() -> bool:
    """True on rank 0, which writes the run directory."""
    return rank() == 0


def is_local_main() -> bool:
    """True on the rank that prints for all ranks on its machine."""
    return world_size() == 1 or os.environ.get("LOCAL_RANK", "0") == "0"


def choose_gpu() -> None:
    """Give each rank its own GPU, a single process the first. Raises MachineError for fewer GPUs than ranks."""
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
def refusing() -> Iterator[None]:
    """A block before `together`: an error that any rank raises in it is raised by all ranks, with one message."""
    try:
        yield
    except FinetuneError as error:
        if world_size() > 1:
            _start(error)
        raise


def _start(error: FinetuneError | None) -> Store:
    """Connect to the other ranks and return their store; if any rank has an `error`, all raise the first one."""
    try:
        store, _, _ = next(rendezvous("env://", timeout=_START))
        attempt, failures = _exchanged(store, json.dumps([_kind(error).__name__, str(error)] if error else None))
    except (RuntimeError, ValueError) as failed:
        raise error or MachineError(f"the {world_size()} processes cannot connect to each other: {failed}") from None
    _raise_first(
        [getattr(errors, failure[0])(failure[1]) if failure else None for failure in map(json.loads, failures)]
    )
    return PrefixStore(attempt, store)


def _exchanged(store: Store, said: str) -> tuple[str, list[str]]:
    """The name of this attempt to start, drawn by rank 0, and what each rank says, in rank order.

    When torchrun starts the ranks again it keeps its store, with the keys of earlier attempts, and nothing in the
    environment tells attempts apart: TORCHELASTIC_RESTART_COUNT differs among nodes (torch 2.13). So each rank asks
    under a key that it draws, which rank 0 answers with the name; the answer to an earlier attempt's key is never read.
    """
    attempt, key = secrets.token_hex(8), f"asked/{secrets.token_hex(8)}"
    store.set(f"asked/{rank()}", key)
    everyone, until = range(world_size()), time.monotonic() + _START.total_seconds()
    missing = list(everyone)
    while missing:
        if time.monotonic() > until:
            raise MachineError(f"ranks {missing} have not started within {_START.seconds // 60} minutes of this one")
        if is_main():
            for asked in filter(lambda asked: store.check([asked]), map("asked/{}".format, everyone)):
                store.set(store.get(asked).decode(), attempt)
        missing = [0]
        if store.check([key]):
            attempt = store.get(key).decode()
            store.set(f"{attempt}/said/{rank()}", said)
            missing = [other for other in everyone if not store.check([f"{attempt}/said/{other}"])]
        time.sleep(_POLL_SECONDS)
    everything = [store.get(f"{attempt}/said/{other}").decode() for other in everyone]
    store.set(f"{attempt}/read/{rank()}", "")
    if is_main():  # its process may hold the store, which the others must have read before it ends
        with contextlib.suppress(DistError):
            store.wait([f"{attempt}/read/{other}" for other in everyone], timedelta(seconds=30))
    return attempt, everything


def _raise_first(failures: list[FinetuneError | None]) -> None:
    """Raise on all ranks the first of their errors, in rank order; it names its rank unless all have the same."""
    for rank, error in enumerate(failures):
        if error:
            alike = all(str(other) == str(error) for other in failures)
            raise shared(error if alike else _kind(error)(f"rank {rank}: {error}"))


def _kind(error: FinetuneError) -> type[FinetuneError]:
    """The class in `finetune.errors` that `error` is an instance of; its own class may be a subclass elsewhere."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)


@contextlib.contextmanager
def agreeing() -> Iterator[None]:
    """A block in which ranks exchange nothing; an error of any rank is raised by all at its end, with one message."""
    failed: FinetuneError | None = None
    try:
        yield
    except FinetuneError as error:
        if world_size() == 1:
            raise
        failed = error
    _raise_first(gathered(failed))


@contextlib.contextmanager
def together(device: torch.device) -> Iterator[None]:
    """A block in which, until `leave`, ranks can exchange values; if one is lost, the others end.

    Raises MachineError naming the lost rank, or if the ranks cannot connect to each other; and what `refusing` raises
    on another rank.
    """
    global _watch
    if world_size() == 1:
        yield
        return
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    store = _start(None)
    try:
        group = {"store": store, "rank": rank(), "world_size": world_size(), "timeout": _TIMEOUT}
        PartialState(cpu=device.type == "cpu", **group).wait_for_everyone()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise MachineError(f"the {world_size()} processes cannot connect to each other: {error}") from None
    # Rank 0 accepts the connections of this rank's watch over the others.
    server = rank_watch.host() if is_main() else None
    offer = (server.getsockname()[1], secrets.token_hex(16)) if server else None
    port, token = broadcast_object_list([offer])[0]
    if server:
        with server:
            watched = _watch = rank_watch.accept(server, token, world_size() - 1)
    else:
        watched = _watch = rank_watch.connect((os.environ["MASTER_ADDR"], port), token, rank())
    try:
        yield
    except BaseException as error:
        if named := _lost_rank(watched, error):
            raise named from None
        signalled = isinstance(error, (Terminated, KeyboardInterrupt))
        failure = Lost(rank(), f"ended: {first_line(error)[:500]}", signalled)
        if isinstance(error, OutOfMemoryError):
            failure = replace(failure, out_of_memory=True, next_start=error.next_start)
        watched.leave(None if isinstance(error, FinetuneError) and error.shared else failure)
        raise
    finally:
        watched.leave()


def is_of_exchange(error: BaseException) -> bool:
    """Whether an exchange between ranks raised `error`; gloo raises a RuntimeError when another rank has ended."""
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _lost_rank(watched: Watch, error: BaseException) -> FinetuneError | None:
    """An error naming a lost rank if that caused `error`: in a collective, or because the launcher ends all ranks."""
    if is_of_exchange(error):
        try:
            lost = watched.lost(rank_watch.SILENCE_SECONDS + rank_watch.GRACE_SECONDS)
        except Terminated:
            lost = watched.lost(2 * rank_watch.BEAT_SECONDS)
        return lost.error() if lost else MachineError(f"the ranks lost contact with each other: {error}")
    if isinstance(error, (Terminated, KeyboardInterrupt)):
        lost = watched.lost(2 * rank_watch.BEAT_SECONDS)
        return lost.error() if lost and not lost.signalled else None
    return None


def advance() -> None:
    """Count a sync point: every rank calls this where it waits for the others or they wait for it."""
    if _watch:
        _watch.passed += 1


def main_does(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 only and return its result on all ranks; all raise what it raises."""
    if world_size() == 1:
        return work()
    from accelerate.utils import broadcast_object_list

    advance()
    done: tuple[T | None, Exception | None] | None = None
    if is_main():
        try:
            done = work(), None
        except Exception as error:
            done = None, error
    value, failed = broadcast_object_list([done])[0]
    if failed:
        raise shared(failed)
    return value


def gathered(value: T) -> list[T]:
    """The values of all ranks, in rank order."""
    if world_size() == 1:
        return [value]
    from accelerate.utils import gather_object

    advance()
    return gather_object([value])


def summed(values: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, on the device."""
    if world_size() == 1:
        return values
    from accelerate.utils import reduce

    advance()
    return reduce(values, "sum")


def group_of(size: int) -> torch.distributed.ProcessGroup | None:
    """This rank's group of `size` consecutive ranks; None if `size` is 1. Every rank must call it."""
    return torch.distributed.new_subgroups(size, timeout=_TIMEOUT)[0] if size > 1 else None


def agree(check: Callable[[list[T]], None], value: T) -> None:
    """Run `check` on the values of all ranks, in rank order; every rank raises what `check` raises."""
    try:
        check(gathered(value))
    except FinetuneError as error:
        raise shared(error) from None


def shared(error: E) -> E:
    """Mark a FinetuneError that all ranks raise, so that only one of them reports it; return the error."""
    if isinstance(error, FinetuneError):
        error.share()
    return error


def leave() -> None:
    """Stop watching the other ranks and destroy the process group."""
    if world_size() > 1:
        if _watch:
            _watch.leave()
        from accelerate import PartialState

        PartialState().destroy_process_group()
