"""Patches that make libraries take the code paths of a real step on a device while one is traced on fake tensors.

Each allocates what the real code would, where the recorder sees it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from trl.kernels import chunked_logprob

from finetune.forecast import fake
from finetune.forecast.devices import Device
from finetune.forecast.trace import Recorder
from finetune.model.recompute import offload
from finetune.runtime.libraries import replaced
from finetune.runtime.randomness import RandomState


@contextlib.contextmanager
def like(device: Device, recorder: Recorder, mode: FakeTensorMode | None = None) -> Iterator[FakeTensorMode]:
    """A fake mode, `mode` if given, under which the libraries take the paths of a real step on `device`."""
    from transformers import masking_utils

    copies = _TracedCopies(recorder)
    # transformers takes fake tensors for a graph that is exported, and builds every mask.
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(masking_utils, "is_tracing", lambda tensor=None: False))
        stack.enter_context(fake.for_dora())
        stack.enter_context(device.kernels.as_there())
        if device.type == "cpu":
            stack.enter_context(_random_states())
        if device.type == "cuda":
            stack.enter_context(_loss_on_cuda(device.triton, recorder))
            stack.enter_context(replaced(offload, "copies_of", lambda device: copies))
        yield mode or FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Leave the process as it was found, its random numbers; nor is anything logged."""
    with _random_state_kept(), _unlogged():
        yield


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """torch logs an operator that fails on fake tensors, with its traceback; the error that it raises says as much."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """An adapter seeds what it finds; a run must draw the same numbers whether it was traced or not."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def _random_states() -> Iterator[None]:
    """The state of torch's generator as a tensor like others: checkpointing keeps one for each layer.

    On CUDA such tensors lie in the host's memory.
    """
    size_bytes = torch.get_rng_state().nbytes
    with (
        replaced(torch, "get_rng_state", lambda: torch.empty(size_bytes, dtype=torch.uint8)),
        replaced(torch, "set_rng_state", lambda state: None),
    ):
        yield


@contextlib.contextmanager
def _loss_on_cuda(triton: bool, recorder: Recorder) -> Iterator[None]:
    """TRL's tiled loss, only on labelled positions, with its Triton kernels, which work in place (trl 1.16).

    Without `triton` it is as `libraries.without_triton` leaves it: the same tiles, folded by torch's operators.
    """
    from trl.trainer import utils

    tiles = chunked_logprob

    def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        # On CUDA one product that adds into `total`; here one as large, into a part of it, so that it is counted.
        torch.mm(left, right, out=total.view(left.dtype)[:, : total.shape[1]])

    with (
        replaced(tiles, "_use_triton", lambda device: triton),
        replaced(utils, "_use_triton", lambda device: True),
        replaced(tiles, "triton", SimpleNamespace(cdiv=lambda number, grain: -(-number // grain))),
        replaced(tiles, "_forward_kernel", _OverTile(recorder, passes=1)),
        replaced(tiles, "_backward_kernel", _OverTile(recorder, passes=2)),
        replaced(tiles, "_addmm_fp32", add_product),
    ):
        yield


class _OverTile:
    """A Triton kernel as Python sees it, `kernel[grid](tile, ...)`: it allocates nothing, and goes over the tile."""

    def __init__(self, recorder: Recorder, passes: int) -> None:
        self._recorder = recorder
        self._passes = passes

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda tile, *args, **kwargs: self._recorder.launched(self._passes * tile.nbytes)


class _TracedCopies(offload.Copies):
    """Copies whose host memory a fake CPU tensor does not tell from the device's."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self._copied(tensor, managed=True), None

    def to_device(self, host: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self._copied(host, managed=False), None

    def _copied(self, source: torch.Tensor, *, managed: bool) -> torch.Tensor:
        target = torch.empty_like(source)
        self._recorder.mark(target, "layer_inputs", managed=managed)
        self._recorder.copies(source)
        return target
