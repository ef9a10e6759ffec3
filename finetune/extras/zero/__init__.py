"""DeepSpeed's ZeRO as one more way in which ranks share a model: its entry in the tables of the core.

The engine of a step is in `engine`, that of a traced step in `traced`; both are loaded when a job asks for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.config import DistributedSection
from finetune.forecast.engines import ENGINES
from finetune.training.strategies import STRATEGIES, Given, Strategy

if TYPE_CHECKING:
    import torch

    from finetune.forecast.traced_engine import TracedEngine
    from finetune.model.distributed.engine import Engine

KIND = "deepspeed"


def register() -> None:
    """Add `distributed.kind: deepspeed` to the strategies, and its engine to those of a traced step."""
    STRATEGIES[KIND] = Strategy(
        "optimizer states, and by `stage` gradients and weights, in shards (DeepSpeed's ZeRO 1 to 3; also a single "
        "process, for `offload`); needs the package deepspeed",
        _zero,
        updates="number",
        alone=True,
        check=_check,
    )
    ENGINES[KIND] = _traced


def _zero(given: Given) -> Engine:
    from finetune.extras.zero.engine import Zero

    return Zero(given.model, given.optimizer, given.section, given.max_grad_norm, given.device)


def _check(section: DistributedSection, device: torch.device) -> None:
    from finetune.extras.zero import engine

    engine.check(section, device)


def _traced() -> type[TracedEngine]:
    from finetune.extras.zero.traced import FakeZero

    return FakeZero
