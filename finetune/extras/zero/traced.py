"""DeepSpeed's engine in a traced step: what rank 0 allocates, sends and copies, without DeepSpeed.

The step, the optimizer and autograd are real, on fake tensors. Around them stand the buffers of DeepSpeed 0.19.8 with
the config that `engine` gives it, made and freed where its source does (paths below
deepspeed/runtime/zero). A flat buffer has the size that it has for the whole model, although fewer layers are traced.
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
# config.py, `sub_group_size`: numbers of a rank from which stage 3 updates a group in several parts.
_UPDATED_AT_ONCE = 10**9


@dataclass
class Partition:
    """The shard of one group of trained weights that rank 0 updates.

    `numbers` are those of each whole weight in order, including layers that are not traced. With `in_parts` rank 0 has
    a part of every weight (stage3.py), else the beginning of all in a row (stage_1_and_2.py).
    """

    numbers: Sequence[int]
    ranks: int
    in_parts: bool
    parts: list[int] = field(init=False)
    """Numbers of each weight, or part of one, in it."""
    size: int = field(init=False)
    held: int = field(init=False)
    """Numbers of all weights that are at least partly in it."""

    def __post_init__(self) -> None:
        if self.in_parts:  # partition_parameters.py, `_partition_param`
            self.parts = [-(-number // self.ranks) for number in self.numbers]
            self.size = self.held = sum(self.parts)
            return
        # stage_1_and_2.py, `flatten_dense_tensors_aligned` with `nccl_start_alignment_factor`
        self.size = 2 * -(-sum(self.numbers) // (2 * self.ranks))
        self.parts = []
        self.held = 0
        start = 0
        for number in self.numbers:
            if start < self.size:
                self.parts.append(min(number, self.size - start))
                self.held += number
            start += number


class FakeZero(TracedEngine):
    """The engine in the place of `engine.Zero`."""

    reusable = False
    updates_weights = False

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced)
        section, ranks, optimizer = traced.section, traced.ranks, traced.optimizer
        self._base = traced.base
        self._updates = optimizer
        self.optimizer: torch.optim.Optimizer = Rates(list(optimizer.param_groups))
        self._stage = STAGES[section.stage]
        self._cuts_weights = self._stage == STAGES["weights"]
        self.keeps_gradients = self._stage == 1
        self._ranks = ranks
        self._recorder = traced.recorder
        self._layer_of = traced.layer_of
        self._on_gpu = traced.on_gpu
        self._offloads = section.offload != "none"
        self._groups = [list(group["params"]) for group in optimizer.param_groups if group["params"]]
        self._partitions: list[Partition] = []
        self._group_of: list[dict[str, Any]] = []
        for group in (group for group in optimizer.param_groups if group["params"]):
            for numbers in self._updated_together(traced.whole(group["params"])):
                self._partitions.append(Partition(numbers, ranks, self._cuts_weights))
                self._group_of.append(group)
        self._size = sum(one.size for one in self._partitions)
        self._trained_numbers = sum(sum(one.numbers) for one in self._partitions)
        self._bucket_size = min(self._trained_numbers, BUCKET)
        self._on_disk = [section.offload == "nvme" and one.size >= _SWAPPED_FROM for one in self._partitions]
        self._largest = max(max(one.numbers) for one in self._partitions)
        self._kept: list[Any] = []
        self._bucket: Tensor | None = None
        self._reduced: Tensor | None = None
        self._accumulated = False
        self._parts: dict[Tensor, _Part] = {}
        self._nothing: dict[torch.dtype, Tensor] = {}
        self._weights_of: dict[nn.Module, list[Tensor]] = {}
        self._in_backward: dict[nn.Module, list[Tensor]] = {}
        """Modules whose backward pass has begun, each with frozen weights that were gathered to recompute for it."""

    def passes(self) -> contextlib.AbstractContextManager[None]:
        """A context with the linear layers that DeepSpeed installs where it partitions weights."""
        return patches.FUNCTIONAL_LINEAR.by(linear) if self._cuts_weights else contextlib.nullcontext()

    def saved_bytes(self) -> dict[str, int]:
        """The saved bytes of all ranks."""
        states = [
            value.nbytes * sum(one.numbers) // one.size
            for one, state in zip(self._partitions, self._updates.state.values(), strict=True)
            for value in state.values()
            if value.dim()
        ]
        return {"adapter": self._trained_numbers * _FLOAT32, "optimizer_states": sum(states)}

    def _updated_together(self, numbers: list[int]) -> Iterator[list[int]]:
        """stage3.py, `_create_fp16_sub_groups`."""
        if not self._cuts_weights:
            yield numbers
            return
        start = size = 0
        for end, number in enumerate(numbers, 1):
            size += -(-number // self._ranks)
            if size >= _UPDATED_AT_ONCE or end == len(numbers):
                yield numbers[start:end]
                start = end
                size = 0

    # -- the start -----------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Take the model and the optimizer, as `deepspeed.initialize` does; within a recording."""
        if self._cuts_weights:
            self._partition()
        # Else the weights become views of a flat copy, which is made on the host where a card has no room for both.
        # A copy at stage 3 as well: `_create_fp32_partitions` compares a torch.device with a string.
        flats = [nn.Parameter(self._make(one.size, "optimizer_states", host=True)) for one in self._partitions]
        if any(self._on_disk):
            largest = max(one.size for one in self._partitions)
            self._kept = [self._make(largest, "workspace", host=True) for _ in range(_SWAP_BUFFERS)]
        self._flats = flats
        if self._offloads:
            # `initialize_optimizer_states`: their gradients stay.
            for flat in flats:
                flat.grad = self._make(flat.numel(), "gradients", host=True)
            if not self._cuts_weights:
                self._kept += [
                    *(self._make(one.size, "workspace", host=True) for one in self._partitions),
                    self._make(self._largest, "workspace", host=True),  # temp_grad_buffer_for_cpu_offload
                    self._make(self._largest, "workspace"),  # temp_grad_buffer_for_gpu_offload
                ]
            self._swap()
        if self._cuts_weights:
            # stage3.py, `_setup_for_real_optimizer`: the bucket and the shards of gradients stay.
            self._bucket = self._make(self._bucket_size, "gradients")
            self._kept.append(self._make(self._size, "gradients", host=True))
        for weight in self._trained_weights():
            weight.register_post_accumulate_grad_hook(self._reduce)

    def _trained_weights(self) -> Iterator[Tensor]:
        return (weight for group in self._groups for weight in group)

    @contextlib.contextmanager
    def _as(self, category: str, host: bool, layer: int | None) -> Iterator[None]:
        recorder = self._recorder
        before = recorder.category, recorder.managed, recorder.layer
        recorder.category, recorder.layer = category, layer
        recorder.managed = host and self._on_gpu and self._offloads
        try:
            yield
        finally:
            recorder.category, recorder.managed, recorder.layer = before

    def _make(
        self, numbers: int, category: str, dtype: torch.dtype = torch.float32, *, host: bool = False,
        layer: int | None = None,
    ) -> Tensor:  # fmt: skip
        """A buffer on the device, or with `host` where offloaded ones are: in pinned memory, handed out in powers of
        two (torch 2.13, ATen/core/CachingHostAllocator.h).
        """
        with self._as(category, host, layer):
            pinned = self._recorder.managed and numbers
            return torch.empty(1 << (numbers - 1).bit_length() if pinned else numbers, dtype=dtype)[:numbers]

    # -- gradients -----------------------------------------------------------------------------------------------------

    def accumulate(self) -> None:
        """Allocate what the step's micro-batches before the traced one have left."""
        if self._stage == 1:
            self._bucket = self._make(self._bucket_size, "gradients")  # since the first of them (`setup_buckets`)
        elif not self._cuts_weights and not self._offloads:
            self._accumulated = True
            self._reduced = self._make(sum(one.held for one in self._partitions), "gradients")
        elif not self._cuts_weights:
            # accumulated_grads_in_cpu
            self._kept += [self._make(one.held, "gradients", host=True) for one in self._partitions]

    def _reduce(self, weight: Any) -> None:
        """A weight's gradient is there: stage_1_and_2.py `process_gradients`, stage3.py `__add_grad_to_ipg_bucket`."""
        if self._bucket is None:
            self._bucket = self._make(self._bucket_size, "gradients")
            if self._trained_numbers > self._bucket_size and self._stage == 2 and not self._offloads:
                self._gather_reduced()
        self._recorder.mark(weight.grad, "gradients")
        numbers = weight.numel()
        if self._stage == 1:
            return  # until the backward pass is over (`reduce_gradients`)
        sent = numbers * _FLOAT32 * (self._ranks - 1) // self._ranks
        copied = -(-numbers // self._ranks) * _FLOAT32 if self._offloads and self._cuts_weights else 0
        self._recorder.transfers(sent_bytes=sent if self._cuts_weights else 2 * sent, copied_bytes=copied)
        if self._trained_numbers > self._bucket_size:
            # Some weight's gradient fills the bucket; which one depends on the layers that are not traced.
            self._scatter(self._bucket_size, self._recorder.layer)
        weight.grad = None

    def _scatter(self, numbers: int, layer: int | None = None) -> None:
        """Reduce what is in the bucket, in a copy (`_flatten_dense_tensors`, `reduce_scatter_coalesced`).

        At stages 1 and 2 a rank alone has the bucket's own numbers in order. gloo scatters from a copy of its own.
        """
        if self._ranks > 1 or self._cuts_weights:
            copy = self._make(numbers, "workspace", layer=layer)
            if self._cuts_weights and not self._on_gpu:
                self._make(numbers, "workspace", layer=layer)
            del copy

    def _gather_reduced(self) -> None:
        """`copy_grads_in_partition`: the gradients of all weights that are at least partly this rank's."""
        self._reduced = self._make(sum(one.held for one in self._partitions), "gradients")

    def backward(self, loss: Tensor) -> None:
        """The backward pass and its end, `independent_gradient_partition_epilogue`."""
        loss.backward()
        self._recorder.layer = None
        if self._stage == 1:
            for weight in self._trained_weights():
                self._recorder.layer = self._layer_of(weight)
                weight.grad = None
            self._recorder.layer = None
        if self._trained_numbers <= self._bucket_size:
            self._scatter(self._bucket_size)
        largest = max(max(one.parts) for one in self._partitions)
        if self._offloads:
            self._norm(largest)
        elif not self._cuts_weights:
            if self._accumulated:
                # Added to the accumulated gradients afterwards.
                self._make(sum(one.held for one in self._partitions), "workspace")
            elif self._reduced is None:
                self._gather_reduced()
        if not self._cuts_weights:
            self._bucket = None
        while self._in_backward:  # inputs that need no gradient (`release_backward_leftovers`)
            module = next(reversed(self._in_backward))
            self._release(module, self._weights_of[module], forward=False)

    def _norm(self, numbers: int) -> None:
        """One weight's gradient in float64 (`get_norm_dtype`)."""
        self._make(numbers, "workspace", torch.float64)

    # -- the update ----------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Do nothing: `clip` has updated the weights."""

    def clip(self, max_norm: float) -> Any:
        """Clip and update (`step` of both optimizers)."""
        self._recorder.layer = None
        if not self._offloads:
            self._norm(max(max(one.parts) for one in self._partitions))
        for one, flat, group in zip(self._partitions, self._flats, self._group_of, strict=True):
            if not self._offloads:
                flat.grad = self._make(one.size, "gradients")  # the parts in a row
            if one is self._partitions[-1]:
                self._reduced = None
            assert flat.grad is not None
            self._updates.param_groups = [{**group, "params": [flat]}]
            with self._as("optimizer_states", True, None), torch.no_grad():
                flat.grad.mul_(1.0)  # clipping
                self._updates.step()
            if not self._offloads:
                flat.grad = None
            for value in self._updates.state[flat].values():
                self._recorder.mark(value, "optimizer_states", managed=self._on_gpu and self._offloads)
        self._swap()
        self._accumulated = False
        self._send_weights()

    def _swap(self) -> None:
        """Omit states that are on the disk: only the buffers they pass through take memory."""
        for flat, on_disk in zip(self._flats, self._on_disk, strict=True):
            if on_disk:
                for value in (flat, flat.grad, *self._updates.state[flat].values()):
                    self._recorder.omit(value)

    def _send_weights(self) -> None:
        own = self._size * _FLOAT32
        swapped = (
            sum(one.size for one, on_disk in zip(self._partitions, self._on_disk, strict=True) if on_disk) * _FLOAT32
        )
        sent = (self._ranks - 1) * own
        if self._cuts_weights:
            for weight, part in self._parts.items():
                if part.persists:  # gathered once they are updated
                    self._recorder.layer = self._layer_of(weight)
                    whole_bytes = part.numbers * weight.element_size()
                    self._recorder.transfers(sent_bytes=(self._ranks - 1) * whole_bytes // self._ranks)
            self._recorder.layer = None
        else:
            # Stage 1 also sends the gradients once a step.
            copied = 2 * own if self._offloads else 0
            self._recorder.transfers(sent_bytes=3 * sent if self._stage == 1 else sent, copied_bytes=copied)
        states = max(sum(value.dim() > 0 for value in state.values()) for state in self._updates.state.values())
        # Weights and gradients in addition to the states.
        self._recorder.transfers(swapped_bytes=(2 + states) * swapped)

    # -- weights in parts (stage 3) ------------------------------------------------------------------------------------

    def _partition(self) -> None:
        """`Init` and the hooks of parameter_offload.py, `_register_deepspeed_module`."""
        head = self._base.get_output_embeddings().weight  # the loss reads it without calling the head
        for weight in self.model.parameters():
            persists = weight.numel() <= PERSISTENT
            category = "adapter" if weight.requires_grad else "base_weights"
            layer = self._recorder.layer = self._layer_of(weight)
            own = self._make(-(-weight.numel() // self._ranks), category, weight.dtype, host=not persists, layer=layer)
            self._parts[weight] = _Part(own, weight.shape, weight.numel(), persists)
            self._free(weight)
        self._recorder.layer = None
        # The trained ones' in a row (stage3.py, `_create_fp16_partitions_with_defragmentation`).
        flat = self._make(self._size, "adapter", host=True)
        start = 0
        for weight in self._trained_weights():
            numbers = self._parts[weight].own.numel()
            self._recorder.layer = self._layer_of(weight)
            self._parts[weight].own = flat[start : start + numbers]
            start += numbers
        for weight, part in self._parts.items():
            if part.persists:  # gathered except during the update, which takes less memory than a pass
                self._recorder.layer = self._layer_of(weight)
                self._gather([weight])
        self._recorder.layer = None
        for module in self.model.modules():
            weights = list(module.parameters(recurse=False))
            self._watch(module, [*weights, head] if module is self._base else weights)

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
        recorder = self._recorder
        several = []
        for weight in weights:
            part = self._parts[weight]
            own_bytes = part.numbers * weight.element_size() // self._ranks
            crosses = self._offloads and not part.persists
            if self._ranks == 1 and not (crosses and self._on_gpu):
                weight.data = part.own[: part.numbers].view(part.shape)
            else:
                padded = -(-part.numbers // self._ranks) * self._ranks
                if len(weights) > 1 and self._ranks > 1:
                    several.append(self._make(padded, "workspace", weight.dtype, layer=recorder.layer))
                whole = self._make(padded, "workspace", weight.dtype, layer=recorder.layer)
                weight.data = whole[: part.numbers].view(part.shape)
            part.is_whole = True
            recorder.transfers(sent_bytes=(self._ranks - 1) * own_bytes, copied_bytes=own_bytes if crosses else 0)

    def _free(self, weight: Tensor) -> None:
        """`free_param`."""
        weight.data = self._nothing.setdefault(weight.dtype, torch.empty(0, dtype=weight.dtype))
        self._parts[weight].is_whole = False


@dataclass
class _Part:
    """A weight that each rank keeps a part of, its `own`; `used_by` are the modules that now need it whole."""

    own: Tensor
    shape: torch.Size
    numbers: int
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
