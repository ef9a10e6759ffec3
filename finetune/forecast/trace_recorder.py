"""Record what a step allocates, frees and computes while it runs on fake tensors.

A fake tensor (torch's `FakeTensorMode`) has a shape and a type but no data, so a step of a 70B model runs here in
seconds and almost without memory. `TraceRecorder` sits below autograd and above the fake mode and sees every operator.
A new storage in an operator's output is an allocation, and the end of that storage is a free, at the same point at
which the real one would be freed.

The decoder's layers are alike, so a step of a shallow model is recorded, and `extrapolate` repeats a layer's part of
it. For that, each `Stretch` of the recording has its phase and its layer.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from finetune.forecast import operators
from finetune.forecast.fake_values import Answers, KnownValues
from finetune.forecast.operator_costs import DeviceOperators
from finetune.forecast.operators import flat
from finetune.forecast.trace import Stretch, Trace, TracedBlock
from finetune.runtime import patches
from finetune.runtime.memory_monitor import Monitor, Peak

_TURNED_TO = ("adapter", "gradients")
_WEIGHTS = ("base_weights", "quantization_state", "adapter")
_aten, _DEVICE = torch.ops.aten, torch.ops.prim.device.default
# Derivatives do these in place, but never for a subclass of Tensor (torch 2.13, derivatives.yaml `max`,
# FunctionsManual.cpp `index_backward`).
_IN_PLACE = {"aten::scatter.src": _aten.scatter_.src, "aten::index_put": _aten.index_put_.default}
# Operators that make the buffers which FSDP2 gathers weights into and scatters gradients from (torch 2.13,
# _fsdp_collectives.py).
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


def _all_but_a_slice(args: Any) -> int:
    """Bytes that a rank sends to gather or scatter a tensor: the larger of the two less the smaller."""
    return abs(args[0].nbytes - args[1].nbytes)


def _all_but_its_part(args: Any) -> int:
    size = dist.ProcessGroup.unbox(args[2]).size()
    return args[1].nbytes * (size - 1) // size


_SENT_BYTES = {
    "c10d::_allgather_base_": _all_but_a_slice,
    "c10d::_reduce_scatter_base_": _all_but_a_slice,
    "c10d::alltoall_base_": _all_but_its_part,
}


@dataclass(frozen=True)
class State:
    """A point in a recording: numbers of blocks and stretches, and the living storages with their blocks."""

    blocks: int
    stretches: int
    living: Mapping[int, int | None]


class _Call:
    """A call of an operator. With `over_layers` its inputs are lists of several layers' tensors."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = func.name()
        self.inputs = [argument for argument in flat(args) if isinstance(argument, torch.Tensor)]
        self.over_layers = False

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)


@dataclass(frozen=True)
class _TensorForm:
    """A tensor's shape, layout and type, and the number of elements of its storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    elements: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _TensorForm:
        elements = tensor.untyped_storage().nbytes() // tensor.itemsize
        return cls(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, elements)

    def made(self) -> torch.Tensor:
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        if made.untyped_storage().nbytes() == self.elements * made.itemsize:
            return made
        return torch.empty(self.elements, dtype=self.dtype).as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class _Program:
    """The recording of a kernel that is written in Python: its outputs with the numbers of their blocks, the bytes and
    layer of each block, and its stretches.

    Blocks are numbered from the first of the recording. A layer is an index into the layers of the call: its own, and
    those of its inputs.
    """

    outputs: Any
    numbers: Sequence[int]
    blocks: Sequence[tuple[int, int]]
    stretches: Sequence[tuple[int, Stretch]]
    ends_on: int


_OF_WORKSPACE = ("finetune::decode_packed_",)
"""Programs whose outputs are freed with the product that they are made for."""


def _alike(value: Any) -> Hashable:
    """The part of an argument that decides a kernel's work."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((key, _alike(each)) for key, each in value.items())
    return tuple(map(_alike, value)) if isinstance(value, (tuple, list)) else value


class TraceRecorder(TorchDispatchMode):
    """Records a step that runs on fake tensors; enter it inside a FakeTensorMode.

    `operators` adds what the device's kernels allocate inside an operator. `answers` stands in for the data of fake
    tensors where a program reads it. A product with fewer operations a byte than `flops_per_byte`, the device's
    arithmetic over its bandwidth, is bandwidth-bound.
    """

    def __init__(self, operators: DeviceOperators, answers: Answers, flops_per_byte: float = 0.0) -> None:
        super().__init__()
        self._operators = operators
        self._flops_per_byte = flops_per_byte
        self.answers = answers
        self._blocks: list[TracedBlock] = []
        self._stretches: list[Stretch] = []
        self._living: dict[int, list[Any]] = {}
        self._made_by = WeakTensorKeyDictionary()  # names of operators, by their results of one element
        self._programs: dict[Hashable, _Program] = {}
        self._by_layer_of_input = self._turn = False
        self.phase = "load"
        self.layer: int | None = None
        self.category = "activations"
        self.managed = self.shards_on_host = False

    def trace(self) -> Trace:
        return Trace(list(self._blocks), list(self._stretches))

    # -- what is recorded once for several traces ------------------------------------------------------------------

    def state(self) -> State:
        """This point of the recording, for `rewind`; the phase must change after it."""
        return State(
            len(self._blocks), len(self._stretches), {key: number for key, (number, _) in self._living.items()}
        )

    def rewind(self, state: State) -> bool:
        """Forget what was recorded since `state`; False if other blocks are alive than then."""
        if self.state().living != state.living:
            return False
        del self._blocks[state.blocks :], self._stretches[state.stretches :]
        return True

    def since(self, state: State) -> Trace | None:
        """The recording since `state`, to `repeat`; None if it left blocks alive or freed others' blocks."""
        blocks, stretches = self._blocks[state.blocks :], self._stretches[state.stretches :]
        freed = {-event - 1 for stretch in stretches for event in stretch.events if event < 0}
        if freed != set(range(state.blocks, len(self._blocks))):
            return None
        return Trace(list(map(replace, blocks)), [stretch.moved(-state.blocks) for stretch in stretches])

    def repeat(self, recorded: Trace) -> None:
        """Record again what `since` returned."""
        first = len(self._blocks)
        self._blocks += map(replace, recorded.blocks)
        self._stretches += [stretch.moved(first) for stretch in recorded.stretches]
        self.phase, self.layer = recorded.stretches[-1].phase, None

    def block(self, tensor: torch.Tensor) -> TracedBlock | None:
        """The block of a tensor, if it was recorded."""
        return None if (number := self._number(tensor)) is None else self._blocks[number]

    # -- what surrounds the operators ------------------------------------------------------------------------------

    def keep(self, tensor: torch.Tensor, category: str, layer: int | None = None) -> None:
        """Count a tensor that exists already: a weight, a gradient."""
        self.layer = layer
        self._allocate(tensor, category)

    def mark(self, tensor: torch.Tensor | None, category: str, *, managed: bool = False) -> None:
        """Change the category of a recorded block."""
        if tensor is not None and (number := self._number(tensor)) is not None:
            self._blocks[number].category = category
            self._blocks[number].managed = managed

    def omit(self, tensor: torch.Tensor | None) -> None:
        """Let a recorded block take no memory."""
        if tensor is not None and (number := self._number(tensor)) is not None:
            self._blocks[number].bytes = 0

    def turn_to(self, layer: int | None) -> None:
        """Assign what follows to this layer, until the next turn or an operator over several layers."""
        self.layer, self._turn = layer, True

    def copied(self, source: torch.Tensor, category: str, *, managed: bool) -> torch.Tensor:
        """Copy `source` to the other side of the bus: with `managed` to host memory, else to the device.

        A fake CPU tensor does not say on which side it is.
        """
        target = torch.empty_like(source)
        self.mark(target, category, managed=managed)
        self.transfers(copied_bytes=source.nbytes)
        return target

    def transfers(self, *, copied_bytes: int = 0, sent_bytes: int = 0, swapped_bytes: int = 0) -> None:
        """Count transfers that no operator makes."""
        work = self._stretch().work
        work.copied_bytes += copied_bytes
        work.sent_bytes += sent_bytes
        work.swapped_bytes += swapped_bytes

    @contextlib.contextmanager
    def follow_layers(self) -> Iterator[None]:
        """In the context, assign operators to the layer of their input, as an optimizer goes from weight to weight."""
        self._by_layer_of_input = True
        try:
            yield
        finally:
            self._by_layer_of_input = self._turn = False
            self.layer = None

    # -- operators -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # called as often as all others together
            return func(*args)
        call = _Call(func, args, kwargs or {})
        if DTensor in types:  # only views are taken of a DTensor, but torch tries them out on tensors of its own
            return call.run()
        if call.name == "aten::_local_scalar_dense":
            return self._read(call)
        call.over_layers = self._by_layer_of_input and bool(call.inputs) and self._follow(call)
        if call.name in self._operators.python:
            return self._run_in_python(call)
        # transformers' attention adds a mask to scores where no fused kernel takes the mask, such as a learnt one, and
        # torch does so in place (torch 2.13, attention.cpp `_scaled_dot_product_attention_math`).
        if call.name == "aten::add.Tensor" and (
            _accumulates_in_place(call.args) or _caller().f_code.co_name == "sdpa_attention_forward"
        ):
            held = call.args[0].add_(call.args[1])
            self._count(_aten.add_.Tensor, call.args, call.kwargs, held)
            return held
        known = self.answers.known
        sized_by_values = torch.Tag.dynamic_output_shape in call.func.tags
        if known and sized_by_values and known.know_all([call.args, call.kwargs]):
            return self._run_on_values(call, known)
        scratch = self._before(call)
        out = call.run()
        if known:
            known.follow(call.func, call.args, call.kwargs, out)
        self._after(call, out, scratch)
        return out

    def _before(self, call: _Call) -> list[int]:
        """Count what a call transfers, and allocate what its kernel needs beside the outputs."""
        if call.name in _IN_PLACE and _called_by_autograd():
            call.func = _IN_PLACE[call.name]
        if call.name in self.answers.shapes:
            call.func, call.args = self.answers.shapes[call.name](call.func, call.args)
        sizes = self._operators.scratch(call.func, call.args, call.kwargs)
        if self.shards_on_host and call.name in _CROSSING:
            sizes = [sum(slice_.nbytes for slice_ in flat(_CROSSING[call.name](call.args)))]
            self.transfers(copied_bytes=sizes[0])
        if call.name in _SENT_BYTES:
            self.transfers(sent_bytes=_SENT_BYTES[call.name](call.args))
        return [self._open(size, "workspace") for size in sizes]

    def _after(self, call: _Call, out: Any, scratch: list[int]) -> None:
        """Allocate the outputs whose storage is new, free the kernel's own memory, and count what was computed."""
        outputs, category, fresh = list(flat(out)), self.category, False
        # A weight in another type is made for one product: it is the arithmetic's need, not an activation.
        casts_weight = call.name == "aten::_to_copy" and self._category_of(call.inputs[0]) in _WEIGHTS
        if casts_weight or call.func.namespace == "bitsandbytes":
            category = "workspace"
        for buffer in _BUFFERS[call.name](call.args, call.kwargs) if call.name in _BUFFERS else ():
            self.mark(buffer, "workspace")
        # torch's operators on lists have an output for each tensor.
        each = self._by_layer_of_input and call.name.startswith("aten::_foreach") and len(call.inputs) >= len(outputs)
        for index, output in enumerate(outputs):
            if isinstance(output, torch.Tensor):
                if each:
                    self.layer = self._layer_of(call.inputs[index])
                fresh |= self._allocate(output, category)
                if output.dim() == 0:
                    self._made_by[output] = call.name
        for number in scratch:
            self._close(number)
        if (fresh or operators.schema(call.func).is_mutable) and not operators.launches_nothing(call.func):
            self._count(call.func, call.args, call.kwargs, out, call.inputs if call.over_layers else ())

    # -- operators that are not recorded as they are called --------------------------------------------------------

    def _read(self, call: _Call) -> Any:
        """The value of a tensor of one element, which fake tensors do not have."""
        known = self.answers.known and self.answers.known.number(call.args[0])
        if known is not None:
            return known
        return self.answers.scalar(call.args[0], self._made_by.get(call.args[0]))

    def _run_in_python(self, call: _Call) -> Any:
        """Run a kernel that is written in Python and record what it allocates, or repeat its recording.

        What its operators make is workspace, except its output, which has the present category; that of `_OF_WORKSPACE`
        is workspace too.
        """
        category = "workspace" if call.name in _OF_WORKSPACE else self.category

        # A recording is repeated for calls whose arguments have the same shapes, spread over layers in the same way.
        followed = call.inputs if self._by_layer_of_input else ()  # inner operators are assigned to the layers of these
        layers = [self.layer, *map(self._layer_of, followed)]
        turns = [self._category_of(tensor) in _TURNED_TO for tensor in followed] if self._turn else ()
        places = (*map(layers.index, layers),), (*turns,), bool(followed)
        key = (call.name, _alike(call.args), _alike(call.kwargs), places)
        known = self.answers.known
        anew = known and any(known.of(tensor) is not None for tensor in call.inputs)  # values may decide sizes
        if not anew and (program := self._programs.get(key)):
            out = self._repeat_program(program, layers)
        else:
            first, outer = len(self._blocks), (self._stretches, self.category)
            asked, turn = self.answers.asked, self._turn
            if call.name == "aten::_grouped_mm" and call.args[1].dim() == 3:
                sizes = call.args[0].shape[0], call.args[1].shape[0]
                call.kwargs = {**call.kwargs, "busiest": lambda: self.answers.busiest(*sizes)}
            self._stretches, self.category = [], "workspace"
            try:
                with self:  # the operators in the program are recorded
                    out = self._operators.python[call.name](*call.args, **call.kwargs)
            finally:
                recorded, (self._stretches, self.category) = self._stretches, outer
                ends_on = self.layer
                self._append(recorded)
                self.layer = ends_on
            # What depends on the batch, or turned to another layer, is run again each time.
            if not anew and (asked, turn) == (self.answers.asked, self._turn):
                self._keep_program(key, layers, first, recorded, out)

        for part in flat(out):
            self.mark(part, category)
        return out

    def _keep_program(
        self, key: Hashable, layers: list[int | None], first: int, recorded: Sequence[Stretch], out: Any
    ) -> None:
        """Keep a recording to repeat, if all blocks in it are its own and only those of its outputs live on."""
        own = [stretch.moved(-first) for stretch in recorded]
        events = [event for stretch in own for event in stretch.events]
        lasting = {event - 1 for event in events if event > 0} - {-event - 1 for event in events if event < 0}
        outputs = [output for output in flat(out) if isinstance(output, torch.Tensor)]
        numbers = [number - first for output in outputs if (number := self._number(output)) is not None]
        at = {layer: number for number, layer in reversed(list(enumerate(layers)))}
        blocks = self._blocks[first:]
        if (
            lasting == set(numbers)
            and len(lasting) == len(outputs)
            and all(abs(event) > first for stretch in recorded for event in stretch.events)
            and {stretch.layer for stretch in own} | {block.layer for block in blocks} | {self.layer} <= at.keys()
        ):
            self._programs[key] = _Program(
                tree_map_only(torch.Tensor, _TensorForm.of, out),
                numbers,
                [(block.bytes, at[block.layer]) for block in blocks],
                [(at[stretch.layer], stretch) for stretch in own],
                at[self.layer],
            )

    def _repeat_program(self, program: _Program, layers: Sequence[int | None]) -> Any:
        first = len(self._blocks)
        self._blocks += [TracedBlock(size, "workspace", layers[at], self.managed) for size, at in program.blocks]
        self._append(
            [replace(stretch.moved(first), phase=self.phase, layer=layers[at]) for at, stretch in program.stretches]
        )
        self.layer = layers[program.ends_on]
        out = tree_map_only(_TensorForm, _TensorForm.made, program.outputs)
        outputs = [output for output in flat(out) if isinstance(output, torch.Tensor)]
        for number, output in zip(program.numbers, outputs, strict=True):
            self._watch(output, first + number)
        return out

    def _append(self, stretches: Iterable[Stretch]) -> None:
        for stretch in stretches:
            self.layer = stretch.layer
            last = self._stretch()
            last.events += stretch.events
            last.work += stretch.work

    def _run_on_values(self, call: _Call, known: KnownValues) -> Any:
        """Run an operator whose result has a size that follows from known values."""

        def made(value: torch.Tensor) -> torch.Tensor:
            fake = torch.empty(value.shape, dtype=value.dtype)
            known.know(fake, value)
            return fake

        with self:
            return tree_map_only(torch.Tensor, made, known.computed(call.func, call.args, call.kwargs))

    # -- what an operator computes ---------------------------------------------------------------------------------

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, over_layers: Sequence[torch.Tensor] = ()) -> None:
        """Add what an operator computes; `over_layers` are its inputs where they belong to several layers."""
        if over_layers:
            self.layer = None
        work, name = self._stretch().work, func.name()
        work.calls += self._operators.launches.get(name, 1)
        moved_bytes = operators.moved_bytes(func, args, kwargs, out)
        if formula := self._operators.flops.get(name) or flop_registry.get(func.overloadpacket):
            flops = int(formula(*args, **kwargs, out_val=out))
            work.flops += flops
            if flops >= moved_bytes * self._flops_per_byte:
                return
            work.hidden_flops += flops
        if not over_layers:
            work.moved_bytes += moved_bytes
            return
        whole = max(1, sum(tensor.nbytes for tensor in over_layers))
        for tensor in over_layers:  # each layer gets its share, which `extrapolate` repeats
            self.layer = self._layer_of(tensor)
            self._stretch().work.moved_bytes += moved_bytes * tensor.nbytes // whole

    # -- blocks ----------------------------------------------------------------------------------------------------

    def _stretch(self) -> Stretch:
        if not self._stretches or (self._stretches[-1].phase, self._stretches[-1].layer) != (self.phase, self.layer):
            self._stretches.append(Stretch(self.phase, self.layer))
        return self._stretches[-1]

    def _allocate(self, tensor: torch.Tensor, category: str) -> bool:
        """Open a block for the tensor's storage; False if it has one already."""
        storage = tensor.untyped_storage()
        key = id(storage)  # one object for as long as the storage lives
        if key in self._living:
            return False
        self._watch(tensor, self._open(storage.nbytes(), category))
        return True

    def _watch(self, tensor: torch.Tensor, number: int) -> None:
        """Close a block when the storage of the tensor, whose block it is, is freed."""
        storage = tensor.untyped_storage()
        key = id(storage)

        def died(_: Any, key: int = key) -> None:
            if (number := self._living.pop(key)[0]) is not None:
                self._close(number)

        self._living[key] = [number, weakref.ref(storage, died)]

    @contextlib.contextmanager
    def following_resizes(self) -> Iterator[None]:
        """In the context, resizing a storage frees or allocates it, as FSDP2 does with gathered weights."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: Any, size_bytes: int) -> Any:
            if (entry := self._living.get(id(storage))) is not None:
                if entry[0] is not None:
                    self._close(entry[0])
                entry[0] = self._open(size_bytes, "workspace") if size_bytes else None
            return plain(storage, size_bytes)

        with patches.STORAGE_RESIZE.by(resize):
            yield

    def _open(self, size_bytes: int, category: str) -> int:
        self._blocks.append(TracedBlock(size_bytes, category, self.layer, self.managed))
        self._stretch().events.append(len(self._blocks))
        return len(self._blocks) - 1

    def _close(self, number: int) -> None:
        before = self.layer
        if self._by_layer_of_input:  # a list over several layers is freed at once
            self.layer = self._blocks[number].layer
        self._stretch().events.append(-number - 1)
        self.layer = before

    def _number(self, tensor: torch.Tensor) -> int | None:
        entry = self._living.get(id(tensor.untyped_storage()))
        return entry[0] if entry else None

    def _follow(self, call: _Call) -> bool:
        """Turn to the layer of a call's first input; for lists over several layers turn to none and return True."""
        if call.args and isinstance(call.args[0], (list, tuple)):
            layers = {self._layer_of(tensor) for tensor in call.inputs}
            over_layers = len(layers) > 1
            self.layer, self._turn = None if over_layers else layers.pop(), False
            return over_layers
        if not self._turn or self._category_of(call.inputs[0]) in _TURNED_TO:
            self.layer = self._layer_of(call.inputs[0])
        return False

    def _category_of(self, tensor: torch.Tensor) -> str | None:
        number = self._number(tensor)
        return self._blocks[number].category if number is not None else None

    def _layer_of(self, tensor: torch.Tensor) -> int | None:
        number = self._number(tensor)
        return self._blocks[number].layer if number is not None else None


def _accumulates_in_place(args: Any) -> bool:
    """Whether autograd would add this gradient in place into the one it already holds.

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
    """Whether autograd's engine called the operator without Python code in between."""
    return _caller().f_code.co_name == "_engine_run_backward"


def _caller() -> FrameType:
    """The frame of the Python code that called the operator."""
    frame: Any = inspect.currentframe()
    while frame.f_code.co_filename == __file__ or frame.f_code.co_filename.endswith(("_compile.py", "eval_frame.py")):
        frame = frame.f_back
    return frame


class TracedMonitor(Monitor):
    """Hands the phases that a step announces to the recorder instead of measuring."""

    def __init__(self, recorder: TraceRecorder) -> None:
        super().__init__(SimpleNamespace(reset=lambda: None, read=dict))
        self._recorder = recorder

    def enter(self, phase: str) -> None:
        super().enter(phase)
        self._recorder.phase = phase

    def leave(self) -> Peak:
        self._recorder.layer = None
        return super().leave()
