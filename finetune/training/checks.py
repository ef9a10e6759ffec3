"""Checks that this machine can run the job, before anything is loaded."""

from __future__ import annotations

import torch

from finetune.config import Config, DistributedSection, OptimizerSection, TrainingSection
from finetune.errors import ConfigError
from finetune.model import precision
from finetune.runtime import ranks
from finetune.training import tracking
from finetune.training.optimizers import OPTIMIZERS
from finetune.training.strategies import STRATEGIES


def check(config: Config, device: torch.device) -> None:
    """Raise MachineError for an unsupported precision or a tracker that is not installed, ConfigError for a batch
    that cannot be divided among the ranks, an optimizer that needs whole weights where a rank holds parts, or random
    weights that are to be served.
    """
    if config.output.serve and config.model.weights == "random":
        raise ConfigError(
            "`output.serve`: random weights are not kept, so nothing can be exported; remove it, or set "
            "`model.weights: pretrained`"
        )
    precision.check(config.training.precision, device.type, precision.of_device(device))
    tracking.check(config.tracking)
    STRATEGIES[config.distributed.kind].check(config.distributed, device)
    check_shares(config.training, config.distributed)
    check_optimizer(config.optimizer, config.distributed)


def check_optimizer(optimizer: OptimizerSection, section: DistributedSection) -> None:
    """Raise ConfigError for an optimizer that cannot update the parts of weights that a rank holds."""
    kind, part = optimizer.kind, STRATEGIES[section.kind].updates
    if OPTIMIZERS[kind].can_update(part):
        return
    if part == "number":
        raise ConfigError(
            f"`optimizer.kind`: {kind} cannot update the shards of `{section.kind}`, which cut across weights; set "
            "`adamw_torch_fused` or `sgd`, or `distributed.kind: fsdp`"
        )
    raise ConfigError(
        f"`optimizer.kind`: {kind} cannot update shards of weights; choose another, or set `distributed.kind: ddp`"
    )


def check_shares(training: TrainingSection, section: DistributedSection, processes: int | None = None) -> None:
    """Raise ConfigError for a batch that cannot be divided among the `processes`, by default all ranks."""
    processes, context = processes or ranks.world_size(), section.context
    if processes % context:
        raise ConfigError(
            f"`distributed.context`: {processes} process{'es' if processes > 1 else ''} cannot form groups of "
            f"{context}; start a multiple of {context} with torchrun (in a plan: --gpus), or set `context: 1`"
        )
    shares = section.shares(processes)
    if training.micro_batch_tokens or training.micro_batch == "auto":
        rows, each = shares, ""
    else:
        rows, each = training.rows * shares, f" with `training.micro_batch` {training.rows}"
    if training.batch_size % rows:
        remedy = f"make the batch a multiple of {rows}"
        share = training.batch_size // shares
        if training.batch_size % shares == 0:  # another micro-batch does not change the result
            fitting = next(part for part in range(training.rows, 0, -1) if share % part == 0)
            remedy = f"set `training.micro_batch` to {fitting}, or {remedy}"
        raise ConfigError(
            f"`training.batch_size` {training.batch_size} cannot be split among {section.named(processes)}{each}; "
            f"{remedy}"
        )
