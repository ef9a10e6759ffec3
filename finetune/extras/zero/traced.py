"""DeepSpeed's engine in a traced step: what rank 0 allocates, sends and copies, without DeepSpeed.

The step, the optimizer and autograd are real, on fake tensors. Around them stand the buffers of DeepSpeed 0.19.8 with
the config that `engine` gives it, made and freed where its source does (paths below deepspeed/runtime/zero). A flat
buffer has the size that it has for the whole model, although fewer layers are traced.
Not modelled: reuse of memory across streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from finetune.extras.zero.engine import BUCKET, PERSISTENT, STAGES, Rates
from finetune.forecast.traced_engine import Traced, TracedEngine
from finetune.runtime import patches

_FLOAT32 = 4
# offload_config.py, `DeepSpeedZeroOffloadOptimizerConfig.buffer_count`.
_SWAP_BUFFERS = 4
# swap_tensor/optimizer_utils.py, `OptimizerSwapper.is_swappable_tensor`: a megabyte, the default of aio's `block_size`.
_SWAPPED_FROM = 2**18
# config.py, `sub_group_size`: elements of a rank from which stage 3 updates a group in several parts.
_UPDATED_AT_ONCE = 10**9


@dataclass
class Partition:
    """The shard of one group of trained weights that rank 0 updates.

    `numels` are those of each whole weight in order, including layers that are not traced. With `in_parts` rank 0 has
    a part of every weight (stage3.py), else the beginning of all in a row (stage_1_and_2.py).
    """

    group: dict[str, Any]
    """The optimizer's."""
    numels: Sequence[int]
    ranks: int
    in_parts: bool
    parts: list[int] = field(init=False)
    """Elements of each weight, or part of one, in it."""
    numel: int = field(init=False)
    held: int = field(init=False)
    """Elements of all weights that are at least partly in it."""
    flat: nn.Parameter = field(init=False)
    """Its weights in float32, which are updated; made when the engine starts."""

    def __post_init__(self) -> None:
        if self.in_parts:  # partition_parameters.py, `_partition_param`
            self.parts = [-(-numel // self.ranks) for numel in self.numels]
            self.numel = self.held = sum(self.parts)
            return
        # stage_1_and_2.py, `flatten_dense_tensors_aligned` with `nccl_start_alignment_factor`
        self.numel = 2 * -(-sum(self.numels) // (2 * self.ranks))
        self.parts = []
        self.held = 0
        start = 0
        for numel in self.numels:
            if start < self.numel:
                self.parts.append(min(numel, self.numel - start))
                self.held += numel
            start += numel


class Buffers:
    """Makes the buffers of an engine, each of a category and a layer of the trace; some lie in host memory."""

    def __init__(self, traced: Traced) -> None:
        self.recorder = traced.recorder
        self.offloads = traced.section.offload != "none"
        self.apart = self.offloads and traced.on_gpu
        """Whether what is offloaded is not in the device's memory."""

    @contextlib.contextmanager
    def of(self, category: str, *, host: bool, layer: int | None) -> Iterator[None]:
        """In the block, what is allocated is of this category; with `host`, it lies where offloaded tensors do."""
        recorder = self.recorder
        before = recorder.category, recorder.managed, recorder.layer
        recorder.category, recorder.layer = category, layer
        recorder.managed = host and self.apart
        try:
            yield
        finally:
            recorder.category, recorder.managed, recorder.layer = before

    def make(
        self, numel: int, category: str, dtype: torch.dtype = torch.float32, *, host: bool = False,
        layer: int | None = None,
    ) -> Tensor:  # fmt: skip
        """A buffer on the device, or with `host` where offloaded ones are: in pinned memory, handed out in powers of
        two (torch 2.13, ATen/core/CachingHostAllocator.h).
        """
        with self.of(category, host=host, layer=layer):
            pinned = self.recorder.managed and numel
            return torch.empty(1 << (numel - 1).bit_length() if pinned else numel, dtype=dtype)[:numel]


class FakeZero(TracedEngine):
    """The engine in the place of `engine.Zero`."""

    reusable = False
    updates_weights = False

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced)
        section, optimizer = traced.section, traced.optimizer
        self._updates = optimizer
        self.optimizer: torch.optim.Optimizer = Rates(list(optimizer.param_groups))
        self._traced = traced
        self._stage = STAGES[section.stage]
        self.keeps_gradients = self._stage == STAGES["optimizer"]
        self._recorder, self._buffers = traced.recorder, Buffers(traced)
        in_parts = self._stage == STAGES["weights"]
        self._partitioned = PartitionedWeights(traced, self._buffers) if in_parts else None
        self._partitions = [
            Partition(group, numels, traced.ranks, in_parts)
            for group in optimizer.param_groups
            if group["params"]
            for numels in self._updated_together(traced.whole(group["params"]))
        ]
        # Elements that rank 0 updates, and those that all ranks do.
        self._numel = sum(one.numel for one in self._partitions)
        self._trained_numel = sum(sum(one.numels) for one in self._partitions)
        on_disk = section.offload == "nvme"
        self._swapped = [one for one in self._partitions if on_disk and one.numel >= _SWAPPED_FROM]
        """The partitions that are on a disk between the updates."""
        self._weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._gradients = _Gradients(min(self._trained_numel, BUCKET))

    def passes(self) -> contextlib.AbstractContextManager[None]:
        """A context with the linear layers that DeepSpeed installs where it partitions weights."""
        return patches.FUNCTIONAL_LINEAR.by(linear) if self._partitioned else contextlib.nullcontext()

    def saved_bytes(self) -> dict[str, int]:
        """The saved bytes of all ranks."""
        states = [
            value.nbytes * sum(one.numels) // one.numel
            for one, state in zip(self._partitions, self._updates.state.values(), strict=True)
            for value in state.values()
            if value.dim()
        ]
        return {"adapter": self._trained_numel * _FLOAT32, "optimizer_states": sum(states)}

    def _updated_together(self, numels: list[int]) -> Iterator[list[int]]:
        """stage3.py, `_create_fp16_sub_groups`."""
        if not self._partitioned:
            yield numels
            return
        start = size = 0
        for end, numel in enumerate(numels, 1):
            size += -(-numel // self._traced.ranks)
            if size >= _UPDATED_AT_ONCE or end == len(numels):
                yield numels[start:end]
                start = end
                size = 0

    # -- the start -----------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Take the model and the optimizer, as `deepspeed.initialize` does; within a recording."""
        make = self._buffers.make
        if self._partitioned:
            self._partitioned.partition(self._weights, self._numel)
        # Else the weights become views of a flat copy, which is made on the host where a card has no room for both.
        # A copy at stage 3 as well: `_create_fp32_partitions` compares a torch.device with a string.
        for one in self._partitions:
            one.flat = nn.Parameter(make(one.numel, "optimizer_states", host=True))
        kept = self._gradients.kept
        if self._swapped:
            largest = max(one.numel for one in self._partitions)
            kept += [make(largest, "workspace", host=True) for _ in range(_SWAP_BUFFERS)]
        if self._buffers.offloads:
            # `initialize_optimizer_states`: their gradients stay.
            for one in self._partitions:
                one.flat.grad = make(one.numel, "gradients", host=True)
            if not self._partitioned:
                largest = max(max(one.numels) for one in self._partitions)
                kept += [
                    *(make(one.numel, "workspace", host=True) for one in self._partitions),
                    make(largest, "workspace", host=True),  # temp_grad_buffer_for_cpu_offload
                    make(largest, "workspace"),  # temp_grad_buffer_for_gpu_offload
                ]
            self._swap()
        if self._partitioned:
            # stage3.py, `_setup_for_real_optimizer`: the bucket and the shards of gradients stay.
            self._gradients.bucket = make(self._gradients.bucket_numel, "gradients")
            kept.append(make(self._numel, "gradients", host=True))
        for weight in self._weights:
            weight.register_post_accumulate_grad_hook(self._reduce)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Allocate what the step's micro-batches before the traced one have left."""
        make, gradients = self._buffers.make, self._gradients
        if self._stage == STAGES["optimizer"]:
            # Since the first of them (`setup_buckets`).
            gradients.bucket = make(gradients.bucket_numel, "gradients")
        elif not self._partitioned and not self._buffers.offloads:
            gradients.accumulated = True
            self._gather_reduced()
        elif not self._partitioned:
            # accumulated_grads_in_cpu
            gradients.kept += [make(one.held, "gradients", host=True) for one in self._partitions]

    def _reduce(self, weight: Any) -> None:
        """A weight's gradient is there: stage_1_and_2.py `process_gradients`, stage3.py `__add_grad_to_ipg_bucket`."""
        gradients, ranks, offloads = self._gradients, self._traced.ranks, self._buffers.offloads
        overflows = self._trained_numel > gradients.bucket_numel
        if gradients.bucket is None:
            gradients.bucket = self._buffers.make(gradients.bucket_numel, "gradients")
            if overflows and self._stage == STAGES["gradients"] and not offloads:
                self._gather_reduced()
        self._recorder.mark(weight.grad, "gradients")
        if self._stage == STAGES["optimizer"]:
            return  # until the backward pass is over (`reduce_gradients`)
        numel = weight.numel()
        sent = numel * _FLOAT32 * (ranks - 1) // ranks
        copied = -(-numel // ranks) * _FLOAT32 if offloads and self._partitioned else 0
        self._recorder.transfers(sent_bytes=sent if self._partitioned else 2 * sent, copied_bytes=copied)
        if overflows:
            # Some weight's gradient fills the bucket; which one depends on the layers that are not traced.
            self._scatter(gradients.bucket_numel, self._recorder.layer)
        weight.grad = None

    def _scatter(self, numel: int, layer: int | None = None) -> None:
        """Reduce what is in the bucket, in a copy (`_flatten_dense_tensors`, `reduce_scatter_coalesced`).

        At stages 1 and 2 a rank alone has the bucket's own elements in order. gloo scatters from a copy of its own.
        """
        if self._traced.ranks > 1 or self._partitioned:
            copy = self._buffers.make(numel, "workspace", layer=layer)
            if self._partitioned and not self._traced.on_gpu:
                self._buffers.make(numel, "workspace", layer=layer)
            del copy

    def _gather_reduced(self) -> None:
        """`copy_grads_in_partition`: the gradients of all weights that are at least partly this rank's."""
        self._gradients.reduced = self._buffers.make(sum(one.held for one in self._partitions), "gradients")

    def backward(self, loss: Tensor) -> None:
        """The backward pass and its end, `independent_gradient_partition_epilogue`."""
        gradients = self._gradients
        loss.backward()
        self._recorder.layer = None
        if self._stage == STAGES["optimizer"]:
            for weight in self._weights:
                self._recorder.layer = self._traced.layer_of(weight)
                weight.grad = None
            self._recorder.layer = None
        if self._trained_numel <= gradients.bucket_numel:
            self._scatter(gradients.bucket_numel)
        if self._buffers.offloads:
            self._norm()
        elif not self._partitioned:
            if gradients.accumulated:
                # Added to the accumulated gradients afterwards.
                self._buffers.make(sum(one.held for one in self._partitions), "workspace")
            elif gradients.reduced is None:
                self._gather_reduced()
        if self._partitioned:
            self._partitioned.release_leftovers()
        else:
            gradients.bucket = None

    def _norm(self) -> None:
        """The largest part's gradient in float64 (`get_norm_dtype`)."""
        self._buffers.make(max(max(one.parts) for one in self._partitions), "workspace", torch.float64)

    # -- the update ----------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Do nothing: `clip` has updated the weights."""

    def clip(self, max_norm: float) -> Any:
        """Clip and update (`step` of both optimizers)."""
        offloads = self._buffers.offloads
        self._recorder.layer = None
        if not offloads:
            self._norm()
        for one in self._partitions:
            flat = one.flat
            if not offloads:
                flat.grad = self._buffers.make(one.numel, "gradients")  # the parts in a row
            if one is self._partitions[-1]:
                self._gradients.reduced = None
            assert flat.grad is not None
            self._updates.param_groups = [{**one.group, "params": [flat]}]
            with self._buffers.of("optimizer_states", host=True, layer=None), torch.no_grad():
                flat.grad.mul_(1.0)  # clipping
                self._updates.step()
            if not offloads:
                flat.grad = None
            for value in self._updates.state[flat].values():
                self._recorder.mark(value, "optimizer_states", managed=self._buffers.apart)
        self._swap()
        self._gradients.accumulated = False

        own_bytes = self._numel * _FLOAT32
        sent = (self._traced.ranks - 1) * own_bytes
        if self._partitioned:
            self._partitioned.send_updated()
        else:
            # Stage 1 also sends the gradients once a step.
            copied = 2 * own_bytes if offloads else 0
            sent *= 3 if self._stage == STAGES["optimizer"] else 1
            self._recorder.transfers(sent_bytes=sent, copied_bytes=copied)
        states = max(sum(value.dim() > 0 for value in state.values()) for state in self._updates.state.values())
        # Weights and gradients in addition to the states.
        swapped_bytes = sum(one.numel for one in self._swapped) * _FLOAT32
        self._recorder.transfers(swapped_bytes=(2 + states) * swapped_bytes)

    def _swap(self) -> None:
        """Omit states that are on the disk: only the buffers they pass through take memory."""
        for one in self._swapped:
            for value in (one.flat, one.flat.grad, *self._updates.state[one.flat].values()):
                self._recorder.omit(value)


@dataclass
class _Gradients:
    """The buffers of gradients. `reduced` are those of the weights that are partly this rank's; `accumulated` says that
    they are of earlier micro-batches. `kept` only lives as long as the engine.
    """

    bucket_numel: int
    bucket: Tensor | None = None
    reduced: Tensor | None = None
    accumulated: bool = False
    kept: list[Tensor] = field(default_factory=list)


# -- weights in parts (stage 3) ----------------------------------------------------------------------------------------


class PartitionedWeights:
    """The weights of a model of which each rank keeps a part, gathered while a module computes."""

    def __init__(self, traced: Traced, buffers: Buffers) -> None:
        self._traced, self._recorder, self._buffers = traced, traced.recorder, buffers
        self._parts: dict[Tensor, _Part] = {}
        self._nothing: dict[torch.dtype, Tensor] = {}
        self._weights_of: dict[nn.Module, list[Tensor]] = {}
        self._in_backward: dict[nn.Module, list[Tensor]] = {}
        """Modules whose backward pass has begun, each with frozen weights that were gathered to recompute for it."""

    def partition(self, trained: Sequence[Tensor], own_numel: int) -> None:
        """`Init` and the hooks of parameter_offload.py, `_register_deepspeed_module`."""
        make, ranks, layer_of = self._buffers.make, self._traced.ranks, self._traced.layer_of
        model, base = self._traced.model, self._traced.base
        head = base.get_output_embeddings().weight  # the loss reads it without calling the head
        for weight in model.parameters():
            persists = weight.numel() <= PERSISTENT
            category = "adapter" if weight.requires_grad else "base_weights"
            layer = self._recorder.layer = layer_of(weight)
            own = make(-(-weight.numel() // ranks), category, weight.dtype, host=not persists, layer=layer)
            self._parts[weight] = _Part(own, weight.shape, weight.numel(), persists)
            self._free(weight)
        self._recorder.layer = None
        # The trained ones' in a row (stage3.py, `_create_fp16_partitions_with_defragmentation`).
        flat = make(own_numel, "adapter", host=True)
        start = 0
        for weight in trained:
            numel = self._parts[weight].own.numel()
            self._recorder.layer = layer_of(weight)
            self._parts[weight].own = flat[start : start + numel]
            start += numel
        for weight, part in self._parts.items():
            if part.persists:  # gathered except during the update, which takes less memory than a pass
                self._recorder.layer = layer_of(weight)
                self._gather([weight])
        self._recorder.layer = None
        for module in model.modules():
            weights = list(module.parameters(recurse=False))
            self._watch(module, [*weights, head] if module is base else weights)

    def send_updated(self) -> None:
        """Gather the weights that persist, once they are updated."""
        ranks = self._traced.ranks
        for weight, part in self._parts.items():
            if part.persists:
                self._recorder.layer = self._traced.layer_of(weight)
                whole_bytes = part.numel * weight.element_size()
                self._recorder.transfers(sent_bytes=(ranks - 1) * whole_bytes // ranks)
        self._recorder.layer = None

    def release_leftovers(self) -> None:
        """Release modules whose inputs need no gradient (`release_backward_leftovers`)."""
        while self._in_backward:
            module = next(reversed(self._in_backward))
            self._release(module, self._weights_of[module], forward=False)

    def _watch(self, module: nn.Module, weights: list[Tensor]) -> None:
        self._weights_of[module] = weights
        remaining = [0]

        class BeforeBackward(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, output: Tensor) -> Tensor:
                return output.detach()

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                self._fetch(module, weights, forward=False)
                return gradients

        class AfterBackward(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, given: Tensor) -> Tensor:
                if given.requires_grad:
                    remaining[0] += 1
                return given.detach()

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                remaining[0] -= 1
                if remaining[0] == 0:
                    self._release(module, weights, forward=False)
                return gradients

        def before_forward(_: Any, inputs: Any) -> Any:
            remaining[0] = 0
            return _over_tensors(AfterBackward.apply, inputs)

        module.register_forward_pre_hook(lambda *_: self._fetch(module, weights, forward=True))
        module.register_forward_hook(lambda *_: self._release(module, weights, forward=True))
        module.register_forward_hook(lambda _module, _inputs, output: _over_tensors(BeforeBackward.apply, output))
        module.register_forward_pre_hook(before_forward)

    def _fetch(self, module: nn.Module, weights: Sequence[Tensor], *, forward: bool) -> None:
        """partitioned_param_coordinator.py, `fetch_sub_module`."""
        if not forward:
            self._in_backward.setdefault(module, [])
        for weight in weights:
            self._parts[weight].used_by.add(module)
        if missing := [weight for weight in weights if not self._parts[weight].is_whole]:
            self._gather(missing)
        recomputing = forward and torch._C._current_graph_task_id() != -1  # noqa: SLF001 -- as DeepSpeed asks
        if recomputing and self._in_backward:
            last, recomputed = next(reversed(self._in_backward.items()))
            for weight in weights:
                if not weight.requires_grad:
                    recomputed.append(weight)
                    self._parts[weight].used_by.add(last)

    def _release(self, module: nn.Module, weights: Sequence[Tensor], *, forward: bool) -> None:
        """`release_sub_module`."""
        recomputed = [] if forward else self._in_backward.pop(module, [])
        for weight in (*weights, *recomputed):
            part = self._parts[weight]
            part.used_by.discard(module)
            if not part.used_by and not part.persists and part.is_whole:
                self._free(weight)

    def _gather(self, weights: Sequence[Tensor]) -> None:
        """partition_parameters.py, `all_gather_coalesced`: a single weight in place, several in one buffer first."""
        recorder, make, ranks = self._recorder, self._buffers.make, self._traced.ranks
        several = []
        for weight in weights:
            part = self._parts[weight]
            own_bytes = part.numel * weight.element_size() // ranks
            crosses = self._buffers.offloads and not part.persists
            if ranks == 1 and not (crosses and self._traced.on_gpu):
                weight.data = part.own[: part.numel].view(part.shape)
            else:
                padded = -(-part.numel // ranks) * ranks
                if len(weights) > 1 and ranks > 1:
                    several.append(make(padded, "workspace", weight.dtype, layer=recorder.layer))
                whole = make(padded, "workspace", weight.dtype, layer=recorder.layer)
                weight.data = whole[: part.numel].view(part.shape)
            part.is_whole = True
            recorder.transfers(sent_bytes=(ranks - 1) * own_bytes, copied_bytes=own_bytes if crosses else 0)

    def _free(self, weight: Tensor) -> None:
        """`free_param`."""
        weight.data = self._nothing.setdefault(weight.dtype, torch.empty(0, dtype=weight.dtype))
        self._parts[weight].is_whole = False


@dataclass
class _Part:
    """A weight that each rank keeps a part of, its `own`; `used_by` are the modules that now need it whole."""

    own: Tensor
    shape: torch.Size
    numel: int
    persists: bool
    is_whole: bool = True
    used_by: set[nn.Module] = field(default_factory=set)


def linear(given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """linear.py, `zero3_linear_wrap`: like torch's, but it saves the weight itself, even one that is not trained."""
    return _Linear.apply(given, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(given, weight, bias)
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        if given.dim() == 2 and bias is not None:
            return torch.addmm(bias, given, weight.t())
        output = given.matmul(weight.t())
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        (gradient,) = outer
        given, weight, bias = ctx.saved_tensors
        enabled, dtype = ctx.autocast
        gradients: list[Tensor | None] = [None, None, None]
        with torch.autocast("cpu", enabled=enabled, dtype=dtype):
            rows = gradient.reshape(-1, gradient.shape[-1])
            if ctx.needs_input_grad[0]:
                gradients[0] = gradient.matmul(weight)
            if ctx.needs_input_grad[1]:
                gradients[1] = rows.t().matmul(given.reshape(-1, given.shape[-1]))
            if bias is not None and ctx.needs_input_grad[2]:
                gradients[2] = rows.sum(0)
        return tuple(gradients)


def _over_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """zero/utils.py, `apply_to_tensors_only`: `value` with `function` applied to the tensors in it."""
    if isinstance(value, (tuple, list)):
        made = [_over_tensors(function, each) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        for key in value:
            value[key] = _over_tensors(function, value[key])
        return value
    return function(value) if isinstance(value, torch.Tensor) else value
