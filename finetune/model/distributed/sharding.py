"""Sharding: each rank holds a slice of every weight, and a whole layer only while it computes it (torch's FSDP2).

The weights of a unit are gathered together. Each decoder layer is one, the embeddings are one, and so is the head with
the last norm; all else, and embeddings that are the head as well, belong to the model itself. A weight of shape
(rows, ...) is cut into one slice of rows a rank, all of the same size but the last ones, which may be shorter or empty.
What is computed from whole weights is the same as without sharding, at any number of ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from finetune.errors import ConfigError
from finetune.model.distributed import zero
from finetune.model.recompute import checkpointing
from finetune.model.structure import experts, linear_layers
from finetune.runtime import patches


@dataclass(frozen=True)
class Slices:
    """How the rows (first dimension) of a tensor are cut: `rows` in all, `each` in every slice that is full."""

    rows: int
    each: int
    mesh: DeviceMesh

    @classmethod
    def of(cls, rows: int, mesh: DeviceMesh) -> Slices:
        """As FSDP2 cuts."""
        return cls(rows, -(-rows // mesh.size()), mesh)

    def by_block(self, numbers: int, block: int) -> Slices:
        """How something is cut that there is one of for each `block` of the tensor's `numbers`."""
        return Slices(-(-numbers // block), -(-self.each * (numbers // self.rows) // block), self.mesh)

    def mine(self, whole: Tensor) -> Tensor:
        """This rank's rows (a view)."""
        start = self.each * self.mesh.get_local_rank()
        return whole[start : start + self.each]

    def whole(self, mine: Tensor) -> Tensor:
        """All rows, from those of each rank; every rank must call it."""
        padded = mine.new_zeros(self.each, *mine.shape[1:], device=self.mesh.device_type)
        padded[: len(mine)] = mine
        found = padded.new_empty(self.each * self.mesh.size(), *mine.shape[1:])
        dist.all_gather(list(found.chunk(self.mesh.size())), padded, self.mesh.get_group())
        return found[: self.rows]


@dataclass(frozen=True)
class Sharding:
    """The sharding of one model over the ranks of `mesh`, a fake process group included.

    With `keep_whole` a layer's weights stay whole from its forward to its backward pass. With `offload` slices,
    gradients and what an optimizer makes for them are in host memory.
    """

    mesh: DeviceMesh
    keep_whole: bool = False
    offload: bool = False

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

    def cut(self, module: nn.Module) -> None:
        """Keep this rank's slice of a linear layer's weight, until `apply`; nothing else is changed."""
        weight: Any = module.weight if isinstance(module, nn.Linear) else None
        if weight is None or hasattr(weight, "slices"):
            return
        weight.slices = Slices.of(len(weight), self.mesh)
        device = "cpu" if self.offload else weight.device
        weight.data = weight.slices.mine(weight.data).to(device, copy=True)

    def apply(self, model: Any) -> None:
        """Shard all weights of `model`, of which some may have been cut before; one layer at a time is whole.

        Raises ConfigError for a model without layers that transformers can recompute, or with experts in 4 bit.
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
            if slices := vars(weight).pop("slices", None):
                weight.data = slices.whole(weight.data)
            elif not isinstance(weight, DTensor):  # PEFT puts an adapter where it finds the slice
                weight.data = weight.data.to(self.mesh.device_type)
        for part in unit:
            _refuse_copies(part)
        policy = CPUOffloadPolicy(pin_memory=self.mesh.device_type != "cpu") if self.offload else OffloadPolicy()
        fully_shard(unit, mesh=self.mesh, reshard_after_forward=not keep_whole, offload_policy=policy)
        return cast(FSDPModule, unit[0])


def _ends(model: Any) -> tuple[nn.Module | None, list[nn.Module]]:
    """The embeddings, and the last norm with the head; nothing where the two share weights.

    The loss reads the head's weight without calling the head, so that it is gathered when the norm is called (torch
    2.13, `fully_shard`: a group of which only a part runs).
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embeddings is None or head is None or set(embeddings.parameters()) & set(head.parameters()):
        return None, []
    layers = checkpointing.layers(model)
    for decoder in model.modules():
        parts = list(decoder.children())
        place = next((n for n, one in enumerate(parts) if isinstance(one, nn.ModuleList) and layers[-1] in one), None)
        if place is not None:
            norm = next((one for one in parts[place + 1 :] if any(True for _ in one.parameters())), None)
            if norm is not None:
                decoder.register_forward_hook(lambda *_: _check_gathered(head, model))
            return embeddings, [norm, head] if norm is not None else []
    return embeddings, []


def _check_gathered(head: Any, model: Any) -> None:
    if isinstance(head.weight, DTensor):
        raise ConfigError(
            f"`distributed.kind: fsdp`: {type(model).__name__} does not use the norm after its layers, with which its "
            "head is gathered; set `ddp`"
        )


def _check(model: Any) -> None:
    if not checkpointing.layers(model):
        raise ConfigError(
            f"`distributed.kind: fsdp` shards a model by its decoder layers, which transformers does not mark in "
            f"{type(model).__name__}; set `ddp`"
        )
    if experts.are_4_bit(model):
        raise ConfigError(
            "`distributed.kind: fsdp` cannot shard experts in 4 bit; set `ddp`, or `quantization.kind: none`"
        )


def _refuse_copies(unit: nn.Module) -> None:
    """PEFT copies a module that is trained in full, and of a weight that was cut only the slice."""
    for name, module in unit.named_modules():
        if (
            isinstance(module, nn.Linear)
            and module.weight.is_floating_point()
            and (len(module.weight) < module.out_features)
        ):
            raise ConfigError(
                f"`adapter.extra_modules`: `{name}` is in a sharded layer, where only adapters can be trained; remove "
                "it, or set `distributed.kind: ddp`"
            )


@contextlib.contextmanager
def cut_while_loading(sharding: Sharding | None) -> Iterator[None]:
    """In the block, transformers loads weights one at a time, and each rank keeps its slice of those in layers."""
    if sharding is None:
        yield
        return
    from transformers import core_model_loading

    load = core_model_loading.set_param_for_module
    cut_layers = layer_cutter(sharding)

    def load_and_cut(model: Any, name: str, *arguments: Any) -> None:
        linear_layers.read_directly(model)  # now, as afterwards a forward pass needs all ranks
        load(model, name, *arguments)
        cut_layers(model, model.get_submodule(name.rpartition(".")[0]))

    before = os.environ.get(_ONE_AT_A_TIME)
    os.environ[_ONE_AT_A_TIME] = "1"
    try:
        with (
            patches.SET_PARAMETER.by(load_and_cut),
            patches.LOADING_WARMUP.by(lambda *_: None),
        ):
            yield
    finally:
        del os.environ[_ONE_AT_A_TIME]
        if before is not None:
            os.environ[_ONE_AT_A_TIME] = before


_ONE_AT_A_TIME = "HF_DEACTIVATE_ASYNC_LOAD"


def layer_cutter(sharding: Sharding | None) -> Callable[[Any, nn.Module], None]:
    """A function that cuts a loaded module of a decoder layer; it is given the model and the module."""
    inside: set[nn.Module] = set()

    def cut(model: Any, module: nn.Module) -> None:
        if sharding is None:
            return
        if not inside:
            _check(model)
            inside.update(part for layer in checkpointing.layers(model) for part in layer.modules())
        if module in inside:
            sharding.cut(module)

    return cut


# -- what a rank holds -------------------------------------------------------------------------------------------------


def is_sharded(model: Any) -> bool:
    """Whether ranks hold slices of this model."""
    return isinstance(model, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Leave this rank its slices alone; to be called after forward passes that no backward pass follows.

    A unit that is not resharded after its forward pass would hold whole weights, beside which its slices are updated.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def slices_of(weight: Tensor) -> Slices | None:
    """How a weight is cut; None if this rank holds it whole."""
    return Slices.of(len(weight), weight.device_mesh) if isinstance(weight, DTensor) else None


def held(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing memory with it."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor; every rank must call it."""
    if zero.is_cut(tensor):
        with zero.gathered(tensor):
            return tensor.detach().clone()
    slices = slices_of(tensor)
    return slices.whole(held(tensor)) if slices else tensor


def write(whole: Tensor, into: Tensor) -> None:
    """Copy a whole tensor to what this rank holds of `into`; every rank must call it."""
    if zero.is_cut(into):
        with zero.gathered(into, write=True):
            into.detach().copy_(whole)
    else:
        held(into).copy_(mine(whole, into))


def mine(whole: Tensor, weight: Tensor) -> Tensor:
    """What this rank holds of a tensor that is cut like `weight`."""
    slices = slices_of(weight)
    return slices.mine(whole) if slices else whole


def clip_grad_norm_(weights: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """torch's function of this name, also for sharded weights, and accurate on a CPU; every rank must call it."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    sharded = next((gradient for gradient in gradients if isinstance(gradient, DTensor)), None)
    if sharded is None:
        norm = _total_norm(gradients).float()
        torch.nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
        return norm
    # On DTensors torch's functions would exchange a number for each weight.
    parts = [held(gradient) for gradient in gradients]
    square = _total_norm(parts).square().to(sharded.device_mesh.device_type)
    dist.all_reduce(square, group=sharded.device_mesh.get_group())
    norm = square.sqrt().float()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).to(parts[0].device)
    for part in parts:
        part.mul_(factor)
    return norm


def adds_in_sequence(device: torch.device) -> bool:
    """Whether this device adds up all squares of a tensor one after the other, rather than in a tree."""
    return device.type == "cpu"


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together; on a CPU in float64.

    torch 2.13 adds up a tensor's squares on a CPU in float32, and is off by 1.4e-3 for 24 million of them. So each row
    has its own sum, and the rows are added in float64. Ranks that hold slices of rows come to the same as one process.
    """
    if not (gradients and adds_in_sequence(gradients[0].device)):
        return torch.nn.utils.get_total_norm(gradients)
    return torch.linalg.vector_norm(torch.stack([_norm_by_rows(gradient) for gradient in gradients]))


def _norm_by_rows(gradient: Tensor) -> Tensor:
    """In float64, of a tensor of any shape; only one in 16 bit, whose norms would have as few digits, is copied."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    parts = torch.atleast_1d(gradient).split(_LONGEST_SUM, dim=-1)
    rows = torch.stack([torch.linalg.vector_norm(part, dim=-1, dtype=dtype) for part in parts])
    return torch.linalg.vector_norm(rows, dtype=torch.float64)


_LONGEST_SUM = 2**14
"""Numbers whose norm is exact to 1e-7 if their squares are added in float32 one after the other."""


# -- what an optimizer updates -----------------------------------------------------------------------------------------


def updated_by_optimizer(weight: nn.Parameter) -> nn.Parameter:
    """The parameter to give to an optimizer: the rank's slice as an ordinary one, which remembers its `sharded` weight.

    bitsandbytes' optimizers read a tensor's memory and know no DTensor.
    """
    if not isinstance(weight, DTensor):
        return weight
    slice_: Any = nn.Parameter(held(weight))
    slice_.sharded = weight
    return slice_


def connect(optimizer: torch.optim.Optimizer) -> None:
    """Give the slices that `optimizer` updates their gradients for the time of each update."""
    slices: list[Any] = [
        one for group in optimizer.param_groups for one in group["params"] if hasattr(one, "sharded") and one.numel()
    ]
    if not slices:
        return

    def lend(*_: Any) -> None:
        for one in slices:
            one.grad = None if one.sharded.grad is None else held(one.sharded.grad)

    def take_back(*_: Any) -> None:
        for one in slices:
            one.grad = None

    optimizer.register_step_pre_hook(lend)
    optimizer.register_step_post_hook(take_back)
