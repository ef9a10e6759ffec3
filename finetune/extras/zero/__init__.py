"""DeepSpeed's ZeRO as one more way in which ranks share a model: its entry in the tables of the core.

The engine of a step is in `engine`, that of a traced step in `traced`; both are loaded when a job asks for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune import tables

if TYPE_CHECKING:
    import torch

    from finetune.config import Config, DistributedSection
    from finetune.forecast.traced_engine import TracedEngine
    from finetune.model.distributed.engine import Engine
    from finetune.training.strategies import Given

KIND = "deepspeed"


def register() -> None:
    """Add `distributed.kind: deepspeed` to the strategies, its rules, and its engine to those of a traced step."""
    tables.extend("finetune.config", _add_rules)
    tables.extend("finetune.training.strategies", _add_strategy)
    tables.extend("finetune.forecast.engines", _add_traced_engine)


def _add_rules() -> None:
    from finetune.config.rules import RULES, Rule, but, of_shards, only
    from finetune.config.sections import ONE_PASS, SHARDED

    class OfStage(Rule):
        """A rule for the values of `distributed.stage` under this kind alone."""

        def broken(self, config: Config) -> bool:
            return config.distributed.kind == KIND and super().broken(config)

    SHARDED.add(KIND)
    ONE_PASS.add(KIND)
    RULES.extend([
        *of_shards(KIND),
        Rule(
            "distributed.stage", only("optimizer"), "distributed.kind", only("fsdp"),
            "`fsdp` cuts gradients as well; set `gradients`, or `distributed.kind: deepspeed`",
        ),
        Rule(
            "distributed.offload", only("nvme"), "distributed.kind", only("fsdp"),
            "`fsdp` keeps nothing on a disk; set `cpu`, or `distributed.kind: deepspeed`",
        ),
        Rule(
            "distributed.offload", only("nvme"), "distributed.stage", but("weights"),
            "DeepSpeed keeps shards on a disk only where it cuts weights; set `cpu`, or `distributed.stage: weights`",
        ),
        Rule(
            "distributed.nvme_path", only(None), "distributed.offload", only("nvme"),
            "`offload: nvme` needs it; set a directory on a fast local disk",
        ),
        Rule(
            "distributed.nvme_path", but(None), "distributed.offload", but("nvme"),
            "nothing is kept there; remove it, or set `distributed.offload: nvme`",
        ),
        Rule(
            "adapter.dtype", only("bfloat16"), "distributed.kind", only(KIND),
            "DeepSpeed would train float32 copies of the weights, which no checkpoint has; set `adapter.dtype: "
            "float32`, or `distributed.kind: ddp`",
        ),
        Rule(
            "distributed.context", but(1), "distributed.kind", only(KIND),
            "rows are split beside `ddp` and `fsdp` alone; set `context: 1`, or `distributed.kind: fsdp`",
        ),
        Rule(
            "preference.reference", only("in_step"), "distributed.kind", only(KIND),
            "DeepSpeed computes one pass of a model at a time; set `cached`, or `distributed.kind: fsdp`",
        ),
        Rule(
            "distributed.kind", only(KIND), "training.objective", only("distillation"),
            "the head's rows of a teacher's tokens are read outside of the passes that DeepSpeed gathers weights for; "
            "set `distributed.kind: fsdp`",
        ),
        OfStage(
            "distributed.stage", only("weights"), "model.vision", but("none"),
            "a rank without images would not gather the model of images with the others; set `gradients`, or "
            "`distributed.kind: fsdp`",
        ),
    ])  # fmt: skip


def _add_strategy() -> None:
    from finetune.training.strategies import STRATEGIES, Strategy

    def engine_of(given: Given) -> Engine:
        from finetune.extras.zero.engine import Zero

        return Zero(given.model, given.optimizer, given.section, given.max_grad_norm, given.device)

    def check(section: DistributedSection, device: torch.device) -> None:
        from finetune.extras.zero import engine

        engine.check(section, device)

    STRATEGIES[KIND] = Strategy(
        "optimizer states, and by `stage` gradients and weights, in shards (DeepSpeed's ZeRO 1 to 3; also a single "
        "process, for `offload`); needs the package deepspeed",
        engine_of,
        updates="number",
        alone=True,
        check=check,
        clones_group=True,  # 0.19, `_clone_world_group`
        gathers_experts=lambda section: section.stage != "weights",
    )


def _add_traced_engine() -> None:
    from finetune.forecast.engines import ENGINES

    def traced() -> type[TracedEngine]:
        from finetune.extras.zero.traced import FakeZero

        return FakeZero

    ENGINES[KIND] = traced
