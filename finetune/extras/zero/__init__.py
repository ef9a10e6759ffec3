"""DeepSpeed's ZeRO as one more way in which ranks share a model: its entry in the tables of the core.

The engine of a step is in `engine`, that of a traced step in `traced`; both are loaded when a job asks for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune import tables

if TYPE_CHECKING:
    import torch

    from finetune.config import DistributedSection
    from finetune.forecast.traced_engine import TracedEngine
    from finetune.model.distributed.engine import Engine
    from finetune.training.strategies import Given


def register() -> None:
    """Add `distributed.kind: deepspeed` to the strategies, its rules, and its engine to those of a traced step."""
    tables.extend("finetune.config", _add_rules)
    tables.extend("finetune.training.strategies", _add_strategy)
    tables.extend("finetune.forecast.engines", _add_traced_engine)


def _add_rules() -> None:
    from finetune.config.rules import RULES
    from finetune.config.sections import ONE_PASS, SHARDED
    from finetune.extras.zero import rules

    RULES.extend(rules.RULES)
    SHARDED.add(rules.KIND)
    ONE_PASS.add(rules.KIND)


def _add_strategy() -> None:
    from finetune.extras.zero.rules import KIND
    from finetune.training.strategies import STRATEGIES, Strategy

    STRATEGIES[KIND] = Strategy(
        "optimizer states, and by `stage` gradients and weights, in shards (DeepSpeed's ZeRO 1 to 3; also a single "
        "process, for `offload`); needs the package deepspeed",
        _zero,
        updates="number",
        alone=True,
        check=_check,
        clones_group=True,  # 0.19, `_clone_world_group`
        gathers_experts=lambda section: section.stage != "weights",
    )


def _zero(given: Given) -> Engine:
    from finetune.extras.zero.engine import Zero

    return Zero(given.model, given.optimizer, given.section, given.max_grad_norm, given.device)


def _check(section: DistributedSection, device: torch.device) -> None:
    from finetune.extras.zero import engine

    engine.check(section, device)


def _add_traced_engine() -> None:
    from finetune.extras.zero.rules import KIND
    from finetune.forecast.engines import ENGINES

    ENGINES[KIND] = _traced


def _traced() -> type[TracedEngine]:
    from finetune.extras.zero.traced import FakeZero

    return FakeZero
