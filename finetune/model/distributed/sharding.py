"""Sharding: each rank holds a shard of every weight, and a whole layer only while it computes it (torch's FSDP2).

The weights of a unit are gathered together. Each decoder layer is one, the embeddings are one, and so is the head with
the last norm; all else, and embeddings that are the head as well, belong to the model itself. A weight of shape
(rows, ...) is divided into one shard of rows a rank, all of the same size but the last ones, which may be shorter or
empty. What is computed from whole weights is the same as without sharding, at any number of ranks.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from finetune.errors import ConfigError, MachineError
from finetune.model.distributed import gradient_norm, optimizer_states
from finetune.model.distributed.engine import OneProcess, on_host
from finetune.model.distributed.optimizer_states import States
from finetune.model.recompute import checkpointing
from finetune.model.structure import experts, linear_layers
from finetune.runtime import patches, ranks


@dataclass(frozen=True)
class Shards:
    """The division of a tensor's rows (first dimension): `rows` in all, `each` in every full shard."""

    rows: int
    each: int
    mesh: DeviceMesh

    @classmethod
    def of(cls, rows: int, mesh: DeviceMesh) -> Shards:
        """Divide rows as FSDP2 does."""
        return cls(rows, -(-rows // mesh.size()), mesh)

    def by_block(self, numbers: int, block: int) -> Shards:
        """The shards of a tensor with one number for each `block` of this one's `numbers`."""
        return Shards(-(-numbers // block), -(-self.each * (numbers // self.rows) // block), self.mesh)

    def mine(self, whole: Tensor) -> Tensor:
        """This rank's rows (a view)."""
        start = self.each * self.mesh.get_local_rank()
        return whole[start : start + self.each]

    def whole(self, mine: Tensor) -> Tensor:
        """All rows, from those of each rank; every rank must call it."""
        padded = mine.new_zeros(self.each, *mine.shape[1:], device=self.mesh.device_type)
        padded[: len(mine)] = mine
        gathered = padded.new_empty(self.each * self.mesh.size(), *mine.shape[1:])
        dist.all_gather(list(gathered.chunk(self.mesh.size())), padded, self.mesh.get_group())
        return gathered[: self.rows]


@dataclass(frozen=True)
class Sharding:
    """The placement of one model over the ranks of `mesh`, a fake process group included.

    With `keep_whole` a layer's weights stay whole from its forward to its backward pass. With `offload` shards,
    gradients and what an optimizer makes for them are in host memory.
    """

    mesh: DeviceMesh
    keep_whole: bool = False
    offload: bool = False
    _loaded: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary, compare=False)
    """The `Shards` of each weight that `keep_part` has reduced to this rank's, until `apply`."""
    _in_layers: weakref.WeakKeyDictionary[Any, set[nn.Module]] = field(
        default_factory=weakref.WeakKeyDictionary, compare=False
    )
    """The modules in the layers of each model that is loaded."""

    @classmethod
    def over_ranks(
        cls, device: torch.device, group: dist.ProcessGroup | None = None, *, keep_whole: bool, offload: bool
    ) -> Sharding:
        """Over all ranks, or over those of `group`."""
        if group is None:
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        else:
            # torch takes meshes with the same names and ranks for one another (DTensor's cache, torch 2.13).
            mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(group.group_name,))
        return cls(mesh, keep_whole=keep_whole, offload=offload)

    @contextlib.contextmanager
    def while_loading(self) -> Iterator[None]:
        """In the block, transformers loads weights one at a time, and each rank keeps its shard of those in layers."""
        from transformers import core_model_loading

        load = core_model_loading.set_param_for_module

        def load_and_keep(model: Any, name: str, *arguments: Any) -> None:
            linear_layers.read_directly(model)  # now, as afterwards a forward pass needs all ranks
            load(model, name, *arguments)
            self.keep_part(model, model.get_submodule(name.rpartition(".")[0]))

        before = os.environ.get(_ONE_AT_A_TIME)
        os.environ[_ONE_AT_A_TIME] = "1"
        try:
            with patches.SET_PARAMETER.by(load_and_keep), patches.LOADING_WARMUP.by(lambda *_: None):
                yield
        finally:
            del os.environ[_ONE_AT_A_TIME]
            if before is not None:
                os.environ[_ONE_AT_A_TIME] = before

    def keep_part(self, model: Any, module: nn.Module) -> None:
        """Keep this rank's shard of the weight of a linear layer in a decoder layer, until `apply`."""
        if model not in self._in_layers:
            _check(model)
            layers = checkpointing.layers(model)
            self._in_layers[model] = {part for layer in layers for part in layer.modules()}
        weight: Any = module.weight if isinstance(module, nn.Linear) else None
        if weight is None or self.is_part(weight) or module not in self._in_layers[model]:
            return
        shards = self._loaded[weight] = Shards.of(len(weight), self.mesh)
        device = "cpu" if self.offload else weight.device
        weight.data = shards.mine(weight.data).to(device, copy=True)

    def is_part(self, weight: Tensor) -> bool:
        """Whether only this rank's shard of a weight is left, before `apply`."""
        return weight in self._loaded

    def apply(self, model: Any) -> None:
        """Shard all weights of `model` that are not sharded yet, with one layer whole at a time.

        Raises ConfigError for a model without layers that transformers can recompute, or with experts in 4 bit;
        MachineError for a quantized one with torch 2.11, whose shards of integers want a gradient.
        """
        _check(model)
        embeddings, last = _ends(model)
        for layer in checkpointing.layers(model):
            self._shard([layer], keep_whole=self.keep_whole)
        if embeddings:
            unit = self._shard([embeddings], keep_whole=self.keep_whole)
            unit.set_unshard_in_backward(False)  # their gradient takes no weights
        if last:  # needed first in the backward pass
            self._shard(last, keep_whole=True)
        self._shard([model], keep_whole=True)
        for module in model.modules():
            if state := getattr(module, "quant_state", None):  # bitsandbytes gives it to gathered weights
                module.weight.quant_state = state

    def _shard(self, unit: list[nn.Module], *, keep_whole: bool) -> FSDPModule:
        """Make `unit` one; with `keep_whole` its weights stay whole from its forward to its backward pass."""
        for weight in (weight for part in unit for weight in part.parameters()):
            if shards := self._loaded.pop(weight, None):
                weight.data = shards.whole(weight.data)
            elif not isinstance(weight, DTensor):  # PEFT puts an adapter where it finds the shard
                weight.data = weight.data.to(self.mesh.device_type)
        for name, module in (named for part in unit for named in part.named_modules()):
            if (
                isinstance(module, nn.Linear)
                and module.weight.is_floating_point()
                and (len(module.weight) < module.out_features)
            ):  # it is trained in full, and PEFT has copied the shard alone
                raise ConfigError(
                    f"`adapter.extra_modules`: `{name}` is in a sharded layer, where only adapters can be trained; "
                    "remove it, or set `distributed.kind: ddp`"
                )
        policy = CPUOffloadPolicy(pin_memory=self.mesh.device_type != "cpu") if self.offload else OffloadPolicy()
        fully_shard(unit, mesh=self.mesh, reshard_after_forward=not keep_whole, offload_policy=policy)
        return cast(FSDPModule, unit[0])


def _ends(model: Any) -> tuple[nn.Module | None, list[nn.Module]]:
    """The embeddings, and the last norm with the head; nothing where the two share weights.

    The loss reads the head's weight without calling the head, so that it is gathered when the norm is called (torch
    2.13, `fully_shard`: a group that runs only in part).
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embeddings is None or head is None or set(embeddings.parameters()) & set(head.parameters()):
        return None, []

    def check_gathered(*_: object) -> None:
        if isinstance(head.weight, DTensor):
            raise ConfigError(
                f"`distributed.kind: fsdp`: {type(model).__name__} does not use the norm after its layers, with which "
                "its head is gathered; set `ddp`"
            )

    layers = checkpointing.layers(model)
    for decoder in model.modules():
        parts = list(decoder.children())
        last = next((n for n, one in enumerate(parts) if isinstance(one, nn.ModuleList) and layers[-1] in one), None)
        if last is not None:
            norm = next((one for one in parts[last + 1 :] if any(True for _ in one.parameters())), None)
            if norm is not None:
                decoder.register_forward_hook(check_gathered)
            return embeddings, [norm, head] if norm is not None else []
    return embeddings, []


def _check(model: Any) -> None:
    quantized = any(not weight.is_floating_point() for weight in model.parameters())
    if quantized and Version(torch.__version__).release < (2, 12):
        raise MachineError(
            f"`distributed.kind: fsdp` shards a quantized base with torch 2.12 or newer, and this is "
            f"{torch.__version__}: pip install -U torch, or set `ddp`"
        )
    if not checkpointing.layers(model):
        raise ConfigError(
            f"`distributed.kind: fsdp` shards a model by its decoder layers, which transformers does not mark in "
            f"{type(model).__name__}; set `ddp`"
        )
    if experts.are_4_bit(model):
        raise ConfigError(
            "`distributed.kind: fsdp` cannot shard experts in 4 bit; set `ddp`, or `quantization.kind: none`"
        )


_ONE_AT_A_TIME = "HF_DEACTIVATE_ASYNC_LOAD"


# -- what a rank holds -------------------------------------------------------------------------------------------------


def shards_of(weight: Tensor) -> Shards | None:
    """The division of a weight; None if this rank holds it whole."""
    return Shards.of(len(weight), weight.device_mesh) if isinstance(weight, DTensor) else None


def held(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; shares its memory."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def mine(whole: Tensor, weight: Tensor) -> Tensor:
    """This rank's part of a tensor that is divided like `weight`."""
    shards = shards_of(weight)
    return shards.mine(whole) if shards else whole


# -- what an optimizer updates -----------------------------------------------------------------------------------------

_whole_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The weight of each parameter that `updated_by_optimizer` made for its shard."""


def updated_by_optimizer(weight: nn.Parameter) -> nn.Parameter:
    """The parameter to give to an optimizer: of a sharded weight, this rank's shard as an ordinary one.

    bitsandbytes' optimizers read a tensor's memory and know no DTensor.
    """
    if not isinstance(weight, DTensor):
        return weight
    shard = nn.Parameter(held(weight))
    _whole_of[shard] = weight
    return shard


def whole_of(parameter: nn.Parameter) -> nn.Parameter:
    """The weight that an optimizer updates through `parameter`: itself, or the one whose shard it is."""
    weight: nn.Parameter = _whole_of.get(parameter, parameter)
    return weight


def connect(optimizer: torch.optim.Optimizer) -> None:
    """Give the shards that `optimizer` updates their gradients for the time of each update."""
    shards = [one for one in optimizer_states.parameters(optimizer) if one in _whole_of and one.numel()]
    if not shards:
        return

    def lend(*_: Any) -> None:
        for one in shards:
            gradient = whole_of(one).grad
            one.grad = None if gradient is None else held(gradient)

    def take_back(*_: Any) -> None:
        for one in shards:
            one.grad = None

    optimizer.register_step_pre_hook(lend)
    optimizer.register_step_post_hook(take_back)


# -- the engine --------------------------------------------------------------------------------------------------------


class Sharded(OneProcess):
    """The engine of a rank that holds shards of a model's weights, whose optimizer `connect` has prepared.

    `block_of` gives, by the key of an optimizer's state, how many numbers of a weight share one of the state (of others
    each has its own), or None for a state that is the same on all ranks.
    """

    repeatable = False
    holds_parts = True

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, block_of: Mapping[str, int | None], world_size: int
    ) -> None:
        super().__init__(model, optimizer, world_size=world_size)
        self._block_of = block_of

    def _clip(self, max_norm: float) -> Tensor:
        weights = self._trained()
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        sharded = next((gradient for gradient in gradients if isinstance(gradient, DTensor)), None)
        if sharded is None:
            return super()._clip(max_norm)
        # Given DTensors, torch's functions would exchange one number for each weight.
        parts = [held(gradient) for gradient in gradients]
        square = gradient_norm.total(parts, self.device_type).square().to(sharded.device_mesh.device_type)
        dist.all_reduce(square, group=sharded.device_mesh.get_group())
        norm = square.sqrt().float()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).to(parts[0].device)
        for part in parts:
            part.mul_(factor)
        return norm

    def whole(self, weight: Tensor) -> Tensor:
        shards = shards_of(weight)
        return shards.whole(held(weight)) if shards else weight

    def write(self, whole: Tensor, into: Tensor) -> None:
        held(into).copy_(mine(whole, into))

    def optimizer_state(self) -> States:
        described, tensors = optimizer_states.read(self.optimizer)
        # If a weight has few rows, the last ranks hold neither a row nor a state.
        described, made = ranks.main_does(
            lambda: (described, {name: (held.dtype, held.shape[1:]) for name, held in tensors.items()})
        )
        on_main = {}
        for name, (dtype, row) in made.items():
            number, _, key = name.partition(".")
            parameter = self.weights[int(number)]
            part = tensors.get(name, torch.empty(0, *row, dtype=dtype, device=parameter.device))
            shards = self._shards_of_state(parameter, key)
            whole = shards.whole(part) if shards else part
            if ranks.is_main():
                on_main[name] = on_host(whole)
        return described, on_main

    def restore_optimizer(self, states: Sequence[Mapping[str, Any]]) -> None:
        parts: list[dict[str, Any]] = []
        for parameter, values in zip(self.weights, states, strict=True):
            part: dict[str, Any] = {}
            for key, value in values.items() if parameter.numel() else ():
                shards = self._shards_of_state(parameter, key) if isinstance(value, Tensor) else None
                part[key] = shards.mine(value) if shards else value
            parts.append(part)
        super().restore_optimizer(parts)

    def _shards_of_state(self, parameter: nn.Parameter, key: str) -> Shards | None:
        """The division of an optimizer's state; None for one that all ranks have in common."""
        weight, block = whole_of(parameter), self._block_of.get(key, 1)
        shards = shards_of(weight)
        if shards is None or block is None:
            return None
        return shards.by_block(weight.numel(), block) if block > 1 else shards
