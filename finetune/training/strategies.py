"""The ways in which ranks share a model: one entry of STRATEGIES each, from which config, help and tests derive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from finetune import tables
from finetune.config import Config, DistributedSection, contradictions

if TYPE_CHECKING:
    import torch
    from torch import distributed as dist

    from finetune.model.distributed.engine import Engine
    from finetune.model.distributed.placement import Placement


@dataclass(frozen=True)
class Given:
    """The arguments of an engine: a model and its optimizer on this rank, and how they are shared."""

    model: Any
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    section: DistributedSection
    max_grad_norm: float
    device: torch.device


@dataclass(frozen=True)
class Strategy:
    """One strategy. `engine` makes the engine of a step (`model.distributed.engine`).

    `updates`: the smallest part of the model that a rank's optimizer must be able to update without the rest.
    `placement` divides a model from its loading on; without it each rank loads all of the model. `alone`: a single
    process uses it too. `check` raises MachineError for what this machine lacks. `ignores`: keys of the section that do
    not apply to it, and that a config must not set. `clones_group`: its ranks communicate in a second group as well.
    `gathers_experts` tells whether weights are gathered of which no layer is called, as of adapters on experts.
    """

    help: str
    engine: Callable[[Given], Engine]
    updates: Literal["weight", "row", "number"] = "weight"
    placement: Callable[[DistributedSection, torch.device, dist.ProcessGroup | None], Placement] | None = None
    alone: bool = False
    check: Callable[[DistributedSection, torch.device], None] = lambda section, device: None
    ignores: tuple[str, ...] = ()
    clones_group: bool = False
    gathers_experts: Callable[[DistributedSection], bool] = lambda section: True


def _replicas(given: Given) -> Engine:
    from finetune.model.distributed.replicas import Replicas

    return Replicas(given.model, given.optimizer, given.scaler, repeatable=given.section.context == 1)


def _sharded(given: Given) -> Engine:
    from finetune.model.distributed.sharding import Sharded
    from finetune.runtime import ranks
    from finetune.training.optimizers import STATES

    return Sharded(given.model, given.optimizer, STATES, ranks.world_size())


def _sharding(section: DistributedSection, device: torch.device, group: dist.ProcessGroup | None) -> Placement:
    from finetune.model.distributed.sharding import Sharding

    return Sharding.over_ranks(device, group, keep_whole=section.stage == "gradients", offload=section.offload == "cpu")


_OF_PARTS = ("stage", "offload", "nvme_path")

STRATEGIES: dict[str, Strategy] = {
    "auto": Strategy(
        "the first of these that the forecast says fits: `ddp`, `fsdp` with `stage: gradients`, with `stage: weights`; "
        "`ddp` without a forecast",
        _replicas,
        ignores=_OF_PARTS,
    ),
    "ddp": Strategy(
        "a copy of the model on each rank, whose gradients are averaged in the last backward pass of a step",
        _replicas,
        ignores=_OF_PARTS,
    ),
    "fsdp": Strategy(
        "shards of all weights, quantized ones included, of gradients and of optimizer states; layers are gathered one "
        "by one (PyTorch's FSDP2)",
        _sharded,
        updates="row",
        placement=_sharding,
    ),
}


def groups(section: DistributedSection, ranks: int) -> list[int]:
    """The sizes of the process groups in which a rank communicates; none for a single process."""
    if ranks == 1:
        return []
    of_rows = [section.context] if section.context > 1 else []
    return [ranks, *of_rows, *([ranks] if STRATEGIES[section.kind].clones_group else [])]


def least_first(config: Config) -> list[dict[str, str]]:
    """The ways in which several ranks can share this job's model, as changes of its config: from copies to shards."""
    from finetune.training.optimizers import OPTIMIZERS

    ways = [{"distributed.kind": "ddp"}]
    in_parts = [{"distributed.kind": "fsdp", "distributed.stage": stage} for stage in ("gradients", "weights")]
    if OPTIMIZERS[config.optimizer.kind].can_update("row") and not contradictions(config, in_parts[0]):
        ways += in_parts
    return ways


def applies(section: DistributedSection, world_size: int) -> bool:
    """Whether `world_size` ranks share the model, or one process has it in the engine of a strategy."""
    return world_size > 1 or STRATEGIES[section.kind].alone


def loads_parts(section: DistributedSection, world_size: int) -> bool:
    """Whether each of `world_size` ranks loads a part of the weights."""
    return STRATEGIES[section.kind].placement is not None and world_size > 1


def holds_parts(section: DistributedSection, world_size: int) -> bool:
    """Whether each of `world_size` ranks holds only parts of the weights or states, so that none can compute or save
    alone.
    """
    return STRATEGIES[section.kind].updates != "weight" and applies(section, world_size)


def replicates(section: DistributedSection, world_size: int) -> bool:
    """Whether each of `world_size` ranks holds a copy of the model in DistributedDataParallel."""
    return STRATEGIES[section.kind].engine is _replicas and applies(section, world_size)


def placement(
    section: DistributedSection, device: torch.device, group: dist.ProcessGroup | None = None
) -> Placement | None:
    """The placement of a model on the ranks of `group`, by default all of this run; None if each loads all of it."""
    from finetune.runtime import ranks

    place = STRATEGIES[section.kind].placement
    if place is None or (group.size() if group else ranks.world_size()) == 1:
        return None
    return place(section, device, group)


def engine(given: Given) -> Engine:
    """The engine of this rank, or of a single process."""
    from finetune.model.distributed.engine import OneProcess
    from finetune.runtime import ranks

    if applies(given.section, ranks.world_size()):
        return STRATEGIES[given.section.kind].engine(given)
    return OneProcess(given.model, given.optimizer, given.scaler)


tables.complete(__name__)
