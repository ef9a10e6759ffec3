"""What a step allocates, frees and computes, recorded while it runs on fake tensors.

A fake tensor (torch's `FakeTensorMode`) has a shape and a type but no data, so a step of a 70B model runs here in
seconds and almost without memory. `Recorder` sits below autograd and above the fake mode and sees every operator. A new
storage in an operator's output is an allocation, and the end of that storage is a free, at the same point at which the
real one would be freed.

The decoder's layers are alike, so a step of a shallow model is recorded, and `extrapolate` repeats a layer's part of
it. For that, each stretch of the recording (a `Run`) knows its phase and its layer.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from finetune.forecast import operators
from finetune.forecast.operator_costs import Kernels
from finetune.forecast.operators import flat
from finetune.measure.monitor import Monitor, Peak
from finetune.model.structure.experts import Mixture
from finetune.runtime import patches

CATEGORIES = {
    "base_weights": "base weights",
    "quantization_state": "quantization state",
    "adapter": "adapter",
    "optimizer_states": "optimizer states",
    "gradients": "gradients",
    "layer_inputs": "layer inputs",
    "activations": "activations",
    "loss": "loss and logits",
    "workspace": "workspace",
}
"""What a block of memory is for: the key in JSON and the words for a person."""

_WEIGHTS = ("base_weights", "quantization_state", "adapter")
_aten = torch.ops.aten
# How "is no place padded?" and "does no row begin within another?" are asked: `mask.all()`, or `mask.sum() ==
# mask.numel()` (transformers 5.23, masking_utils).
_ALL = ("aten::all", "aten::eq.Scalar")
# Derivatives do these in place, but never for a subclass of Tensor (torch 2.13, derivatives.yaml `max`,
# FunctionsManual.cpp `index_backward`).
_IN_PLACE = {"aten::scatter.src": _aten.scatter_.src, "aten::index_put": _aten.index_put_.default}
# What FSDP2 gathers weights into, and scatters gradients from (torch 2.13, _fsdp_collectives.py).
_BUFFERS: dict[str, Any] = {
    "fsdp::all_gather_copy_in": lambda args, named: [args[1]],
    "fsdp::split_with_sizes_copy": lambda args, named: named["out"],
    "fsdp::chunk_cat": lambda args, named: [named["out"]],
}
# Slices that FSDP2 copies from the host before it gathers them, and to the host once gradients are scattered.
_CROSSING: dict[str, Any] = {
    "fsdp::all_gather_copy_in": lambda args: args[0],
    "c10d::_reduce_scatter_base_": lambda args: args[0],
}
# Of what these gather or scatter, each rank sends all but a slice: the larger of their tensors less the smaller.
_COLLECTIVES = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")


@dataclass(slots=True, eq=False)
class Block:
    """One allocation: its size, what it is for, the layer that owns it, and whether it is managed memory.

    Managed memory (paged optimizer states) lies outside the caching allocator and may live on the host.
    """

    bytes: int
    category: str
    layer: int | None
    managed: bool = False


@dataclass
class Work:
    """What a stretch computes: floating-point operations, bytes that bandwidth-bound operators move, kernel launches.

    Operators without a count of operations are bandwidth-bound, and so are products with a low-rank matrix, whose
    operations, `hidden_flops` of `flops`, take no time beside their traffic. `copied_bytes` go between the host and the
    device, `sent_bytes` from this rank to others, and `swapped_bytes` from a disk, to which as many go back.
    """

    flops: int = 0
    moved_bytes: int = 0
    calls: int = 0
    copied_bytes: int = 0
    sent_bytes: int = 0
    hidden_flops: int = 0
    swapped_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __mul__(self, times: float) -> Work:
        return Work(*(int(getattr(self, each.name) * times) for each in fields(self)))


@dataclass
class Run:
    """A stretch of the recording in one phase and one layer (None: outside the layers).

    An event is the number of a block plus one when it is allocated, and the negative of that when it is freed.
    """

    phase: str
    layer: int | None
    events: list[int] = field(default_factory=list)
    work: Work = field(default_factory=Work)

    def moved(self, by: int) -> Run:
        """The same, of blocks whose numbers are that much higher."""
        events = [event + by if event > 0 else event - by for event in self.events]
        return Run(self.phase, self.layer, events, replace(self.work))


@dataclass
class Trace:
    """A recorded step: its blocks, and what happens to them in order.

    `parameters` is the number of them in the whole base, `largest_weight` in the largest weight that may get an
    adapter, `largest_part` in the largest layer, or the head. `mixture` says how the base's experts are stored, where
    it has some. `trained_share` is the share of the trained weights that this rank holds.
    """

    blocks: list[Block]
    runs: list[Run]
    parameters: int = 0
    largest_weight: int = 0
    largest_part: int = 0
    mixture: Mixture | None = None
    trained_share: float = 1.0
    saved_bytes: Mapping[str, int] | None = None

    def timeline(self) -> Iterator[tuple[Run, Block, int]]:
        """(run, block, +1 or -1) for each allocation and free, in order."""
        for run in self.runs:
            for event in run.events:
                yield run, self.blocks[abs(event) - 1], 1 if event > 0 else -1

    def work(self, phases: Iterable[str]) -> Work:
        """What is computed in `phases`."""
        wanted = set(phases)
        return sum((run.work for run in self.runs if run.phase in wanted), Work())


@dataclass(frozen=True)
class State:
    """How far a recording is: numbers of blocks and runs, and which storages are alive, as which blocks."""

    blocks: int
    runs: int
    living: Mapping[int, int | None]


class Recorder(TorchDispatchMode):
    """Records a step that runs on fake tensors; enter it inside a FakeTensorMode.

    `kernels` says what the device's kernels allocate out of an operator's sight. `answers` decides what a program asks
    of data that fake tensors have not. A product with fewer operations a byte than `flops_per_byte`, the device's
    arithmetic over its bandwidth, is bandwidth-bound.
    """

    def __init__(self, kernels: Kernels, answers: Answers, flops_per_byte: float = 0.0) -> None:
        super().__init__()
        self._kernels = kernels
        self._flops_per_byte = flops_per_byte
        self.answers = answers
        self._blocks: list[Block] = []
        self._runs: list[Run] = []
        self._living: dict[int, list[Any]] = {}
        self._made_by = WeakTensorKeyDictionary()  # the operator of each tensor of one element
        self._by_layer_of_input = self._turn = False
        self.phase = "load"
        self.layer: int | None = None
        self.category = "activations"
        self.managed = self.slices_on_host = False

    def trace(self) -> Trace:
        return Trace(list(self._blocks), list(self._runs))

    # -- what is recorded once for several traces ------------------------------------------------------------------

    def state(self) -> State:
        """How far the recording is, to `rewind` to; the next phase is another one."""
        return State(len(self._blocks), len(self._runs), {key: number for key, (number, _) in self._living.items()})

    def rewind(self, state: State) -> bool:
        """Forget what was recorded since `state`; False if not the same blocks are alive as then."""
        if self.state().living != state.living:
            return False
        del self._blocks[state.blocks :], self._runs[state.runs :]
        return True

    def since(self, state: State) -> Trace | None:
        """What was recorded since `state`, to `repeat`; None if that left or freed what is not its own."""
        blocks, runs = self._blocks[state.blocks :], self._runs[state.runs :]
        freed = {-event - 1 for run in runs for event in run.events if event < 0}
        if freed != set(range(state.blocks, len(self._blocks))):
            return None
        return Trace(list(map(replace, blocks)), [run.moved(-state.blocks) for run in runs])

    def repeat(self, recorded: Trace) -> None:
        """Record again what `since` returned."""
        first = len(self._blocks)
        self._blocks += map(replace, recorded.blocks)
        self._runs += [run.moved(first) for run in recorded.runs]
        self.phase, self.layer = recorded.runs[-1].phase, None

    def block(self, tensor: torch.Tensor) -> Block | None:
        """The block of a tensor, if it was recorded."""
        return None if (number := self._number(tensor)) is None else self._blocks[number]

    # -- what surrounds the operators ------------------------------------------------------------------------------

    def keep(self, tensor: torch.Tensor, category: str, layer: int | None = None) -> None:
        """Count a tensor that was there before: a weight, a gradient."""
        self.layer = layer
        self._allocate(tensor, category)

    def mark(self, tensor: torch.Tensor | None, category: str, *, managed: bool = False) -> None:
        """Say what a block that was recorded already is for."""
        if tensor is not None and (number := self._number(tensor)) is not None:
            self._blocks[number].category = category
            self._blocks[number].managed = managed

    def omit(self, tensor: torch.Tensor | None) -> None:
        """Say that a block which was recorded already takes no memory."""
        if tensor is not None and (number := self._number(tensor)) is not None:
            self._blocks[number].bytes = 0

    def turn_to(self, layer: int | None) -> None:
        """What follows is done for a weight of this layer, until the next turn or an operator over several layers."""
        self.layer, self._turn = layer, True

    def copies(self, tensor: torch.Tensor) -> None:
        """Count a copy between the host and the device."""
        self._run().work.copied_bytes += tensor.numel() * tensor.element_size()

    def transfers(self, *, copied_bytes: int = 0, sent_bytes: int = 0, swapped_bytes: int = 0) -> None:
        """Count what is done by no operator."""
        work = self._run().work
        work.copied_bytes += copied_bytes
        work.sent_bytes += sent_bytes
        work.swapped_bytes += swapped_bytes

    def launched(self, moved_bytes: int) -> None:
        """Count a kernel that is no operator."""
        work = self._run().work
        work.calls += 1
        work.moved_bytes += moved_bytes

    @contextlib.contextmanager
    def follow_layers(self) -> Iterator[None]:
        """Within the block an operator belongs to the layer of its input: an optimizer goes from weight to weight."""
        self._by_layer_of_input = True
        try:
            yield
        finally:
            self._by_layer_of_input = self._turn = False
            self.layer = None

    # -- operators -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.name()
        if name == "prim::device":
            return func(*args, **kwargs)
        if DTensor in types:  # only views are taken of them, but torch tries those out on tensors of its own
            return func(*args, **kwargs)
        if name == "aten::_local_scalar_dense":
            return self.answers.scalar(args[0], self._made_by.get(args[0]))
        inputs = [argument for argument in flat(args) if isinstance(argument, torch.Tensor)]
        over_layers = False
        if self._by_layer_of_input and inputs:
            over_layers = self._follow(inputs, in_lists=bool(args) and isinstance(args[0], (list, tuple)))
        if inside := self._kernels.python.get(name):
            if name == "aten::_grouped_mm" and args[1].dim() == 3:
                kwargs = {**kwargs, "busiest": self.answers.busiest(args[0].shape[0], args[1].shape[0])}
            return self._inside(inside, args, kwargs)
        if name == "aten::add.Tensor" and _accumulates_in_place(args):
            held = args[0].add_(args[1])
            self._count(_aten.add_.Tensor, args, kwargs, held)
            return held
        if name in _IN_PLACE and _called_by_autograd():
            func = _IN_PLACE[name]
        if name in self.answers.shapes:
            func, args = self.answers.shapes[name](func, args)
        sizes = self._kernels.scratch(func, args, kwargs)
        if self.slices_on_host and name in _CROSSING:
            sizes = [sum(slice_.nbytes for slice_ in flat(_CROSSING[name](args)))]
            self._run().work.copied_bytes += sizes[0]
        if name in _COLLECTIVES:
            self._run().work.sent_bytes += abs(args[0].nbytes - args[1].nbytes)
        if name == "c10d::alltoall_base_":  # all but the part that stays here
            size = dist.ProcessGroup.unbox(args[2]).size()
            self._run().work.sent_bytes += args[1].nbytes * (size - 1) // size
        scratch = [self._open(size, "workspace") for size in sizes]
        out = func(*args, **kwargs)
        outputs = list(flat(out))
        category = self._category(func, inputs)
        fresh = False
        if name in _BUFFERS:
            self._turn_into_workspace(_BUFFERS[name](args, kwargs))
        # torch's operators on lists have an output for each tensor.
        each = self._by_layer_of_input and name.startswith("aten::_foreach") and len(inputs) >= len(outputs)
        for place, output in enumerate(outputs):
            if isinstance(output, torch.Tensor):
                if each:
                    self.layer = self._layer_of(inputs[place])
                fresh |= self._allocate(output, category)
                if output.dim() == 0:
                    self._made_by[output] = name
        for number in scratch:
            self._close(number)
        if (fresh or operators.schema(func).is_mutable) and not operators.launches_nothing(func):
            self._count(func, args, kwargs, out, inputs if over_layers else ())
        return out

    def _inside(self, kernel: Any, args: Any, kwargs: Any) -> Any:
        """Run a kernel that is written in Python, so that what it allocates is seen; its output is no workspace."""
        outer, self.category = self.category, "workspace"
        try:
            with self:
                out = kernel(*args, **kwargs)
        finally:
            self.category = outer
        for part in flat(out):
            self.mark(part, outer)
        return out

    def _category(self, func: Any, inputs: list[torch.Tensor]) -> str:
        if func.namespace == "bitsandbytes":
            return "workspace"
        if func.name() == "aten::_to_copy" and self._category_of(inputs[0]) in _WEIGHTS:
            # A weight in another type, made for one product: the arithmetic's need, not an activation.
            return "workspace"
        return self.category

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, over_layers: Sequence[torch.Tensor] = ()) -> None:
        """Add what an operator computes; `over_layers` are its inputs where they belong to several layers."""
        if over_layers:
            self.layer = None
        work, name = self._run().work, func.name()
        work.calls += self._kernels.launches.get(name, 1)
        moved_bytes = operators.moved_bytes(func, args, kwargs, out)
        if formula := self._kernels.flops.get(name) or flop_registry.get(func.overloadpacket):
            flops = int(formula(*args, **kwargs, out_val=out))
            work.flops += flops
            if flops >= moved_bytes * self._flops_per_byte:
                return
            work.hidden_flops += flops
        if not over_layers:
            work.moved_bytes += moved_bytes
            return
        whole = max(1, sum(tensor.nbytes for tensor in over_layers))
        for tensor in over_layers:  # to each layer its share, which `extrapolate` repeats
            self.layer = self._layer_of(tensor)
            self._run().work.moved_bytes += moved_bytes * tensor.nbytes // whole

    # -- blocks ----------------------------------------------------------------------------------------------------

    def _run(self) -> Run:
        if not self._runs or (self._runs[-1].phase, self._runs[-1].layer) != (self.phase, self.layer):
            self._runs.append(Run(self.phase, self.layer))
        return self._runs[-1]

    def _allocate(self, tensor: torch.Tensor, category: str) -> bool:
        """Whether the tensor's storage is new."""
        storage = tensor.untyped_storage()
        key = id(storage)  # one object for as long as the storage lives
        if key in self._living:
            return False
        number = self._open(storage.nbytes(), category)

        def died(_: Any, key: int = key) -> None:
            if (number := self._living.pop(key)[0]) is not None:
                self._close(number)

        self._living[key] = [number, weakref.ref(storage, died)]
        return True

    @contextlib.contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Within the block, resizing a storage frees or allocates it: so FSDP2 does with gathered weights."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: Any, size_bytes: int) -> Any:
            if (entry := self._living.get(id(storage))) is not None:
                if entry[0] is not None:
                    self._close(entry[0])
                entry[0] = self._open(size_bytes, "workspace") if size_bytes else None
            return plain(storage, size_bytes)

        with patches.STORAGE_RESIZE.by(resize):
            yield

    def _turn_into_workspace(self, buffers: Iterable[torch.Tensor]) -> None:
        for buffer in buffers:
            self.mark(buffer, "workspace")

    def _open(self, size_bytes: int, category: str) -> int:
        self._blocks.append(Block(size_bytes, category, self.layer, self.managed))
        self._run().events.append(len(self._blocks))
        return len(self._blocks) - 1

    def _close(self, number: int) -> None:
        before = self.layer
        if self._by_layer_of_input:  # a list over several layers is freed at once
            self.layer = self._blocks[number].layer
        self._run().events.append(-number - 1)
        self.layer = before

    def _number(self, tensor: torch.Tensor) -> int | None:
        entry = self._living.get(id(tensor.untyped_storage()))
        return entry[0] if entry else None

    def _follow(self, inputs: list[torch.Tensor], *, in_lists: bool) -> bool:
        """Go to the layer of an operator's first input; to none, and return True, for lists over several layers."""
        if in_lists:
            found = {self._layer_of(tensor) for tensor in inputs}
            over_layers = len(found) > 1
            self.layer, self._turn = None if over_layers else found.pop(), False
            return over_layers
        if not self._turn or self._category_of(inputs[0]) in ("adapter", "gradients"):
            self.layer = self._layer_of(inputs[0])
        return False

    def _category_of(self, tensor: torch.Tensor) -> str | None:
        number = self._number(tensor)
        return self._blocks[number].category if number is not None else None

    def _layer_of(self, tensor: torch.Tensor) -> int | None:
        number = self._number(tensor)
        return self._blocks[number].layer if number is not None else None


def _accumulates_in_place(args: Any) -> bool:
    """Whether autograd would add this gradient into the one it already holds.

    It does where nothing else holds that one, but never for a subclass of Tensor such as a fake tensor (torch 2.13,
    torch/csrc/autograd/input_buffer.cpp `can_accumulate_inplace`).
    """
    held, gradient = args[0], args[1]
    if not (
        isinstance(held, torch.Tensor)
        and isinstance(gradient, torch.Tensor)
        and held.shape == gradient.shape
        and held.dtype is gradient.dtype
        and torch.empty_like(held).stride() == held.stride()  # so only where it is dense and overlaps nowhere
    ):
        return False
    # torch 2.13 counts references under no public name.
    uses = held._use_count(), torch._C._storage_Use_Count(held.untyped_storage()._cdata)  # noqa: SLF001
    return uses[0] <= _HELD_BY_AUTOGRAD_ALONE and uses[1] <= _STORED_FOR_ONE_TENSOR and _called_by_autograd()


# Counted in a dispatch: the engine's own reference, and those of the call itself.
_HELD_BY_AUTOGRAD_ALONE, _STORED_FOR_ONE_TENSOR = 4, 2


def _called_by_autograd() -> bool:
    """Whether no Python code stands between autograd's engine and the operator."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.endswith(("_compile.py", "eval_frame.py")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


class Answers:
    """What the worst batch answers where a program looks into its data.

    `uneven`: whether attention needs a mask, of padding or of packed rows. `trained_tokens`: how many places have a
    label. `tokens`: how many places there are; 0 where each expert gets as many of them.
    """

    def __init__(self, uneven: bool, trained_tokens: int, tokens: int = 0) -> None:
        self.uneven = uneven
        self.trained_tokens = trained_tokens
        self.tokens = tokens
        self.shapes = {
            "aten::index.Tensor": self._index,
            "aten::nonzero": self._nonzero,
            "aten::bincount": self._bincount,
        }

    def scalar(self, tensor: torch.Tensor, source: Any) -> Any:
        """The value of a tensor of one element: an integer is 1, a float one half, a truth value true.

        The exception is "is every place alike?", which the batch answers. One half, because an optimizer may divide by
        a number that it reads or by one minus it (NAdam's `mu_product`).
        """
        if tensor.dtype is torch.bool:
            return not self.uneven if source in _ALL else True
        return 0.5 if tensor.dtype.is_floating_point else 1

    def busiest(self, rows: int, experts: int) -> int:
        """How many of `rows`, each token's as often as it has experts, go to one expert at most: every token once."""
        return max(min(rows, self.tokens), -(-rows // experts))

    def _index(self, func: Any, args: Any) -> tuple[Any, Any]:
        """Selecting by a mask takes as many rows as there are trained tokens."""
        source, indices = args
        if len(indices) == 1 and indices[0] is not None and indices[0].dtype is torch.bool:
            mask = indices[0]
            flat = source.reshape(-1, *source.shape[mask.dim() :])
            return func, (flat, [mask.new_zeros(min(self.trained_tokens, mask.numel()), dtype=torch.long)])
        return func, args

    def _nonzero(self, func: Any, args: Any) -> tuple[Any, Any]:
        """Code that goes from expert to expert finds one, of a list of them, and every token in its turn to it."""
        mask = args[0]
        return _aten.full.default, ([1 if mask.dim() == 1 else mask.numel(), mask.dim()], 0)

    def _bincount(self, func: Any, args: Any) -> tuple[Any, Any]:
        """Tokens of each expert: as many counts as the call asks for at least (transformers up to 5.22)."""
        return _aten.full.default, ([args[2]], 0)


class TracedMonitor(Monitor):
    """Takes the phases that a step announces, and hands them to the recorder instead of measuring."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(SimpleNamespace(reset=lambda: None, read=dict))
        self._recorder = recorder

    def enter(self, phase: str) -> None:
        super().enter(phase)
        self._recorder.phase = phase

    def leave(self) -> Peak:
        self._recorder.layer = None
        return super().leave()
