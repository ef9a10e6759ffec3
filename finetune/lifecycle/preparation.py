"""Checks the machine, and prepares the job's tokenizer, architecture and data.

Cheap checks come first, and ranks with different inputs fail before they wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from finetune.config import Config, named
from finetune.data import fingerprint
from finetune.data.prepare import Prepared, check_ids, prepare
from finetune.errors import DataError
from finetune.forecast.planning import check_traceable
from finetune.lifecycle import resume
from finetune.lifecycle.session import Lock
from finetune.model import bounds, build, context
from finetune.model.base import load_architecture
from finetune.model.build import Blueprint
from finetune.model.experts import Mixture
from finetune.model.tokenizer import load_tokenizer
from finetune.runtime import libraries, ranks
from finetune.runtime.environment import describe
from finetune.runtime.stages import stage
from finetune.storage.rundir import RunDirectory
from finetune.training.checks import check


@dataclass(frozen=True)
class Materials:
    """The inputs of a job. `attention` says which implementation was chosen and why; `origin` is everything that
    determines the trained weights, as stored in checkpoints.
    """

    tokenizer: Any
    blueprint: Blueprint
    attention: str
    mixture: Mixture | None
    data: Prepared
    environment: dict[str, Any]
    origin: dict[str, Any]


def gather(
    config: Config, run: RunDirectory, device: torch.device, lock: Lock, note: Callable[[str], None]
) -> Materials:
    """Check the machine, then load and check tokenizer, architecture and data; no weights are read.

    Raises, on all ranks, ConfigError, DataError, ArtifactError or MachineError.
    """
    environment = _check_machine(config, device, note)
    ranks.main_does(lambda: lock.take() if run.exists else None)  # before anything slow
    with ranks.agreeing():
        tokenizer = load_tokenizer(config.model, config.data.chat_template)
    resume.refuse_other_ranks({"tokenizer": fingerprint.of(tokenizer)})
    with ranks.agreeing():
        architecture = load_architecture(config.model)
        bounds.check_tokenizer(tokenizer, architecture, config.model)
        context.check(architecture, config.distributed.context)
        attention, reason = build.choose_attention(config, architecture, device.type)
        blueprint = build.blueprint(config, architecture, attention)
        mixture = blueprint.check(config.adapter)
    ranks.main_does(lambda: check_traceable(config, architecture, device))
    stage(f"reading the rows of {named(config.data.train)}")
    with ranks.agreeing():
        data = prepare(config.data, tokenizer)
        if data.warning and config.training.early_stopping:
            raise DataError(f"`training.early_stopping` needs an evaluation set; {data.warning}")
        check_ids(data, tokenizer, bounds.vocabulary(architecture), config.model.name)
        origin = resume.made_with(config, data, tokenizer, environment, note)
    resume.refuse_other_ranks(origin)
    return Materials(tokenizer, blueprint, f"{attention} ({reason})", mixture, data, environment, origin)


def _check_machine(config: Config, device: torch.device, note: Callable[[str], None]) -> dict[str, Any]:
    """Check the machine; return the contents of environment.json. Raises if it cannot run the job, or ranks differ."""
    if idle := ranks.idle_gpus():
        note(idle)
    if device.type == "cuda" and (obstacle := libraries.triton_obstacle()):
        note(
            f"Triton cannot run its kernels ({obstacle}): torch's own operators are used instead, and the loss takes "
            "more time and memory; `finetune doctor` says what to install"
        )
    with ranks.agreeing():
        check(config, device)
    environment = describe(device)
    resume.refuse_other_ranks({"config": config.model_dump(mode="json"), "packages": environment["packages"]})
    return environment
