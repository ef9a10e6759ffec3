"""Layer inputs that checkpointing saves, in pinned host memory until their layer is recomputed.

Copies overlap with computation: an input goes to the host while its layer computes, and comes back while the layer
above is recomputed. Neither stream reuses a block of memory before the other is done with it: the stream that holds the
tensor waits first. (`Tensor.record_stream` would leave that to the allocator, which holds the block for as long as the
host runs ahead of the device.)
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Copies:
    """Copies between a device and the host, each with an event to wait for; on a CPU, immediate copies."""

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """`tensor` in host memory; it must live until the copy was waited for."""
        return tensor.clone(), None

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        """`host` in device memory, to be read or freed once the copy was waited for."""
        return host.clone(), None

    def wait(self, copy: Any) -> None:
        """Order all later computation after `copy`."""


class StreamCopies(Copies):
    """Copies on a GPU stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        return self._copied(tensor, torch.empty_like(tensor, device="cpu", pin_memory=True))

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        return self._copied(host, torch.empty_like(host, device=self._device))

    def wait(self, copy: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(copy)

    def _copied(self, source: Tensor, target: Tensor) -> tuple[Tensor, Any]:
        # Queued work may still write the source, or read what was in the target's memory before.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return target, self._stream.record_event()


@functools.cache
def copies_of(device: torch.device) -> Copies:
    """The kind of copies for `device`."""
    return StreamCopies(device) if device.type == "cuda" else Copies()


@dataclass(eq=False)
class _Saved:
    """A layer's input on the host, and that of the checkpointed layer below while its graph lives."""

    host: Tensor
    device: torch.device
    below: weakref.ref[_Saved] | None


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """Keeps on the host what is saved within it: open around the forward pass of each checkpointed layer.

    `copies` are used instead of the device's own, by a trace.
    """

    def __init__(self, copies: Copies | None = None) -> None:
        super().__init__(self._pack, self._unpack)
        self._copies_of = copies_of if copies is None else lambda device: copies
        self._leaving: list[tuple[Tensor, Any]] = []
        self._coming: tuple[_Saved, Tensor, Any] | None = None
        self._newest: weakref.ref[_Saved] | None = None

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        for tensor, copy in self._leaving:
            self._copies_of(tensor.device).wait(copy)
        self._leaving.clear()

    def _pack(self, tensor: Tensor) -> _Saved | Tensor:
        if not tensor.numel():  # torch 2.11 saves an empty one before a checkpoint's inputs
            return tensor
        self._drop()
        host, copy = self._copies_of(tensor.device).to_host(tensor)
        if self._leaving:  # only the first tensor of a layer, its hidden states, is fetched ahead
            saved = _Saved(host, tensor.device, None)
        else:
            saved = _Saved(host, tensor.device, self._newest)
            self._newest = weakref.ref(saved)
        self._leaving.append((tensor, copy))
        return saved

    def _unpack(self, saved: _Saved | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        copies = self._copies_of(saved.device)
        if self._coming and self._coming[0] is saved:
            (_, tensor, copy), self._coming = self._coming, None
        else:
            tensor, copy = copies.to_device(saved.host)
        copies.wait(copy)
        if saved.below and (below := saved.below()):
            self._drop()
            self._coming = below, *copies.to_device(below.host)
        return tensor

    def _drop(self) -> None:
        """Free an input that was fetched ahead and never used, because a backward pass ended early."""
        if self._coming:
            saved, _, copy = self._coming
            self._copies_of(saved.device).wait(copy)
            self._coming = None
