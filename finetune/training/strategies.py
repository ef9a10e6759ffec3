"""How ranks share a model. A new strategy is one entry in STRATEGIES; config, help and tests derive from the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.config import Config, DistributedSection, contradictions

if TYPE_CHECKING:
    import torch
    from torch import distributed as dist

    from finetune.model.distributed.sharding import Sharding


@dataclass(frozen=True)
class Strategy:
    """One strategy. `sharded`: ranks hold slices of the weights (`distributed.sharding`), not copies of the model.

    `deepspeed`: DeepSpeed's engine shares the model (`distributed.zero`).
    `ignores`: keys of the section that do not apply to it, and that a config must not set.
    """

    help: str
    sharded: bool = False
    deepspeed: bool = False
    ignores: tuple[str, ...] = ()


_OF_SHARDS = ("stage", "offload", "nvme_path")

STRATEGIES: dict[str, Strategy] = {
    "auto": Strategy(
        "the first of these that the forecast says fits: `ddp`, `fsdp` with `stage: gradients`, with `stage: weights`; "
        "`ddp` without a forecast",
        ignores=_OF_SHARDS,
    ),
    "ddp": Strategy(
        "a copy of the model on each rank, whose gradients are averaged in the last backward pass of a step",
        ignores=_OF_SHARDS,
    ),
    "fsdp": Strategy(
        "slices of all weights, quantized ones included, of gradients and of optimizer states; layers are gathered one "
        "by one (PyTorch's FSDP2)",
        sharded=True,
    ),
    "deepspeed": Strategy(
        "optimizer states, and by `stage` gradients and weights, in slices (DeepSpeed's ZeRO 1 to 3; also a single "
        "process, for `offload`); needs the package deepspeed",
        deepspeed=True,
    ),
}


def least_first(config: Config) -> list[dict[str, str]]:
    """The ways in which several ranks can share this job's model, as changes of its config: from copies to slices."""
    from finetune.training.optimizers import OPTIMIZERS

    ways = [{"distributed.kind": "ddp"}]
    slices = [{"distributed.kind": "fsdp", "distributed.stage": stage} for stage in ("gradients", "weights")]
    if OPTIMIZERS[config.optimizer.kind].sharded and not contradictions(config.changed(slices[0])):
        ways += slices
    return ways


def is_sharded(section: DistributedSection, world_size: int | None = None) -> bool:
    """Whether so many ranks, by default those of this run, hold slices of the model."""
    from finetune.runtime import ranks

    return STRATEGIES[section.kind].sharded and (world_size or ranks.world_size()) > 1


def cannot_run_alone(section: DistributedSection) -> bool:
    """Whether a rank of this run cannot compute with the model by itself."""
    return STRATEGIES[section.kind].deepspeed or is_sharded(section)


def sharding(
    section: DistributedSection, device: torch.device, group: dist.ProcessGroup | None = None
) -> Sharding | None:
    """How a model is sharded over the ranks of `group`, by default those of this run, which must be connected.

    None if each holds all of it.
    """
    if not is_sharded(section, group.size() if group else None):
        return None
    from finetune.model.distributed.sharding import Sharding

    return Sharding.over_ranks(device, group, keep_whole=section.stage == "gradients", offload=section.offload == "cpu")
