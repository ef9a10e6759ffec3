"""The engine of a traced step: what rank 0 computes on fake tensors, and what a trace needs besides.

`TracedEngine` is for a rank that holds all of the model. A strategy that shares the model in another way has a subclass
of it in ENGINES of `engines`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finetune.config import DistributedSection
from finetune.forecast.trace_recorder import TraceRecorder
from finetune.model.distributed import optimizer_states
from finetune.model.distributed.engine import OneProcess
from finetune.model.distributed.sharding import Sharded, held, whole_of
from finetune.runtime import patches


@dataclass(frozen=True)
class Traced:
    """A model on fake tensors, with few of its layers, and how rank 0 of `ranks` shares it.

    `layer_of` gives the layer of each trained weight, and `whole` the sizes in elements of a group's weights in the
    whole model. With `on_gpu`, offloaded tensors lie in host memory, which is not the device's.
    """

    model: Any
    base: Any
    optimizer: torch.optim.Optimizer
    section: DistributedSection
    ranks: int
    recorder: TraceRecorder
    layer_of: Callable[[Tensor], int | None]
    whole: Callable[[Sequence[Tensor]], list[int]]
    on_gpu: bool


class TracedEngine(OneProcess):
    """The engine of a step whose model, optimizer and autograd are real, on fake tensors."""

    reusable = True
    """Whether a step leaves the model as it was, so that another can be traced."""
    updates_weights = True
    """Whether the optimizer updates the weights themselves, by their gradients."""
    keeps_gradients = True
    """Whether weights keep whole gradients from one micro-batch to the next."""

    def __init__(self, traced: Traced) -> None:
        OneProcess.__init__(self, traced.model, traced.optimizer)
        self.device_type = "cuda" if traced.on_gpu else "cpu"
        if self.updates_weights:
            layers = {one: traced.layer_of(self.trained_by(one)) for one in optimizer_states.parameters(self.optimizer)}
            self.optimizer.state = _LayerTrackingState(traced.recorder, layers)

    @staticmethod
    def around(recorder: TraceRecorder) -> contextlib.AbstractContextManager[None]:
        """A context in which the model is loaded and the step runs."""
        return contextlib.nullcontext()

    @staticmethod
    def held(tensor: Tensor) -> Tensor:
        """The part of a tensor that rank 0 holds; shares its memory."""
        return tensor

    @staticmethod
    def trained_by(parameter: torch.nn.Parameter) -> Tensor:
        """The weight that the optimizer updates through `parameter`."""
        return parameter

    def attach(self) -> None:
        """Allocate what the engine allocates at its start; within a recording."""

    def passes(self) -> contextlib.AbstractContextManager[None]:
        """A context for the passes and updates of the step."""
        return contextlib.nullcontext()

    def accumulate(self) -> None:
        """Allocate what the step's micro-batches before the traced one have left; within a recording."""

    def saved_bytes(self) -> dict[str, int] | None:
        """Bytes of the trained weights and their states in a checkpoint, by category; None where the trace has them."""
        return None


class TracedShards(TracedEngine, Sharded):
    """The engine of rank 0 of a model that FSDP2 shards as in training, over ranks that do not exist (`fake_ranks`)."""

    reusable = False

    @staticmethod
    @contextlib.contextmanager
    def around(recorder: TraceRecorder) -> Iterator[None]:
        """Let gathered weights be fake quantized ones; `recorder` follows the storages that FSDP2 resizes."""

        def give_state(module: Any) -> None:
            module.weight.quant_state = module.quant_state

        with recorder.following_resizes(), patches.RESTORE_4BIT_STATE.by(give_state):
            yield

    held = staticmethod(held)
    trained_by = staticmethod(whole_of)


class _LayerTrackingState(defaultdict[torch.nn.Parameter, Any]):
    """Optimizer state that reports the layer being updated on each lookup."""

    def __init__(self, recorder: TraceRecorder, layers: Mapping[torch.nn.Parameter, int | None]) -> None:
        super().__init__(dict)
        self._recorder = recorder
        self._layers = layers

    def __getitem__(self, parameter: torch.nn.Parameter) -> Any:
        self._recorder.turn_to(self._layers[parameter])
        return super().__getitem__(parameter)
