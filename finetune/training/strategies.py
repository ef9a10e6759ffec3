"""How ranks share a model. A new strategy is one entry in STRATEGIES; config, help and tests derive from the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.config import DistributedSection

if TYPE_CHECKING:
    import torch

    from finetune.model.sharding import Sharding


@dataclass(frozen=True)
class Strategy:
    """One strategy. `sharded`: ranks hold slices of the weights (`finetune.model.sharding`), not copies of the model.

    `ignores`: keys of the section that do not apply to it, and that a config must not set.
    """

    help: str
    sharded: bool = False
    ignores: tuple[str, ...] = ()


STRATEGIES: dict[str, Strategy] = {
    "auto": Strategy("`ddp`", ignores=("stage", "offload")),
    "ddp": Strategy(
        "a copy of the model on each rank, whose gradients are averaged in the last backward pass of a step",
        ignores=("stage", "offload"),
    ),
    "fsdp": Strategy(
        "slices of all weights, quantized ones included, of gradients and of optimizer states; layers are gathered one "
        "by one (PyTorch's FSDP2)",
        sharded=True,
    ),
}


def is_sharded(section: DistributedSection) -> bool:
    """Whether the ranks of this run hold slices of the model."""
    from finetune.runtime import ranks

    return STRATEGIES[section.kind].sharded and ranks.world_size() > 1


def sharding(section: DistributedSection, device: torch.device) -> Sharding | None:
    """How this run's model is sharded over its ranks, which must be connected; None if each holds all of it."""
    if not is_sharded(section):
        return None
    from finetune.model.sharding import Sharding

    return Sharding.over_ranks(device, keep_whole=section.stage == "gradients", offload=section.offload == "cpu")
