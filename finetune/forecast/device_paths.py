"""Patches that make libraries take the code paths of a real step on a device while one is traced on fake tensors.

Each allocates what the real code would, where the recorder sees it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from finetune.forecast import fake_model
from finetune.forecast.device import Device
from finetune.forecast.trace_recorder import TraceRecorder
from finetune.model.recompute import offload
from finetune.runtime import patches
from finetune.runtime.randomness import RandomState


@contextlib.contextmanager
def like(device: Device, recorder: TraceRecorder, mode: FakeTensorMode | None = None) -> Iterator[FakeTensorMode]:
    """A fake mode (`mode` if given) in which libraries take the code paths of a real step on `device`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patches.IS_TRACING.by(lambda tensor=None: False))
        stack.enter_context(_known_values(recorder))
        stack.enter_context(fake_model.for_dora())
        stack.enter_context(device.operators.as_there())
        if device.type == "cpu":  # the generator states that checkpointing keeps for each layer; on CUDA on the host
            size_bytes = torch.get_rng_state().nbytes
            stack.enter_context(patches.GET_RNG_STATE.by(lambda: torch.empty(size_bytes, dtype=torch.uint8)))
            stack.enter_context(patches.SET_RNG_STATE.by(lambda state: None))
        yield mode or FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restore torch's random state on exit and silence the fake-tensor log.

    A new adapter seeds the random state, and a traced run must draw the same numbers as any other. The log is of
    operators that fail on fake tensors: the error that is raised says the same.
    """
    state, logger = RandomState(), logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
        state.restore()


@contextlib.contextmanager
def _known_values(recorder: TraceRecorder) -> Iterator[None]:
    """Let programs read lists of values that the recorder knows, and make tensors of such values."""
    plain_tensor, plain_list = torch.tensor, FakeTensor.tolist

    def tensor(data: Any, **kwargs: Any) -> torch.Tensor:
        return plain_tensor(tree_map_only(FakeTensor, FakeTensor.item, data), **kwargs)

    def listed(self: FakeTensor) -> Any:
        values = recorder.answers.known and recorder.answers.known.listed(self)
        return plain_list(self) if values is None else values

    # At its first use in a process, torch's device context lists the functions that obey it. It must list its own
    # `torch.tensor`: by that transformers finds out whether a model is made without weights, and if not, takes the
    # buffers of a base that is loaded later for filled (torch 2.13, `_device_constructors`).
    with torch.device("meta"):
        torch.empty(0)
    with patches.TENSOR.by(tensor), patches.FAKE_LIST.by(listed):
        yield


class TracedCopies(offload.Copies):
    """Copies of layer inputs to host memory that a recorder sees."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self._recorder.copied(tensor, "layer_inputs", managed=True), None

    def to_device(self, host: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self._recorder.copied(host, "layer_inputs", managed=False), None
