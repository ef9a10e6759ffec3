"""Probes: short forward passes that reveal how a model treats its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from finetune.errors import MachineError, first_line
from finetune.runtime import ranks

TOKENS = 16


class Failed(Exception):
    """A probe's pass failed; the message has the kind of the error and its first line."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {first_line(error)}")


@contextlib.contextmanager
def attempt(refusal: Callable[[Exception], Exception] = Failed) -> Iterator[None]:
    """Raise `refusal(error)` for errors of a model's or kernel's code, except those of memory and of other ranks.

    Raises MachineError if the block has left a GPU that this process can no longer use.
    """
    try:
        yield
        wait_for_gpu()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # foreign code may raise anything
        if ranks.is_of_exchange(error):
            raise
        if gpu_failed():
            raise MachineError(
                f"the GPU failed in a short pass of this model ({Failed(error)}), and this process cannot use it any "
                "more; start again, without what was tried then, or set `kernels.fused: off` or `model.attention: sdpa`"
            ) from error
        raise refusal(error) from error


def wait_for_gpu() -> None:
    """Wait for what was queued in the GPU, if one is in use: an error of a kernel is raised by a later call only."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def gpu_failed() -> bool:
    """Whether an error has ended this process's CUDA context: then every call raises it once more."""
    try:
        wait_for_gpu()
    except RuntimeError:
        return True
    return False


@contextlib.contextmanager
def _in_mode(model: Any, *, training: bool) -> Iterator[None]:
    was_training = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(was_training)
        from finetune.model.distributed.placement import release_gathered  # imports torch's sharding

        release_gathered(model)


def evaluating(model: Any) -> contextlib.AbstractContextManager[None]:
    """Put the model into eval mode in the block; weights that its passes gathered are freed afterwards."""
    return _in_mode(model, training=False)


@contextlib.contextmanager
def training(model: Any) -> Iterator[None]:
    """Put the model into training mode in the block, where its layers keep no more than a step does; afterwards random
    numbers go on as if there had been no pass, and weights that it gathered are freed.
    """
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _in_mode(model, training=True):
        yield


def rows(count: int, tokens: int, model: Any) -> tuple[torch.Tensor, ...]:
    """`count` rows (1, tokens) of random ids, the same for all models with the same vocabulary size."""
    words = model.config.get_text_config().vocab_size
    return (
        torch.randint(words, (count, 1, tokens), generator=torch.Generator().manual_seed(0)).to(model.device).unbind()
    )


@torch.no_grad()
def logits(model: Any, **inputs: Any) -> torch.Tensor:
    """Logits (1, tokens, vocabulary) in eval mode, minus their mean, which does not affect softmax.

    The single score of a reward model (1, tokens, 1) is left as it is: minus its mean it would always be zero.
    """
    with evaluating(model):
        output = model(use_cache=False, **inputs).logits.float()
    return output if output.shape[-1] == 1 else output - output.mean(-1, keepdim=True)
