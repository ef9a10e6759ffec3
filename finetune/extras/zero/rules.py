"""What a config must not combine with DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config import Config
from finetune.config.rules import Rule, but, of_shards, only

KIND = "deepspeed"


@dataclass(frozen=True)
class OfStage(Rule):
    """A rule for the values of `distributed.stage` under this kind alone."""

    def broken(self, config: Config) -> bool:
        return config.distributed.kind == KIND and super().broken(config)


RULES = [
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
        "DeepSpeed would train float32 copies of the weights, which no checkpoint has; set `adapter.dtype: float32`, "
        "or `distributed.kind: ddp`",
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
        "the head's rows of a teacher's tokens are read outside of the passes that DeepSpeed gathers weights for; set "
        "`distributed.kind: fsdp`",
    ),
    OfStage(
        "distributed.stage", only("weights"), "model.vision", but("none"),
        "a rank without images would not gather the model of images with the others; set `gradients`, or "
        "`distributed.kind: fsdp`",
    ),
]  # fmt: skip
