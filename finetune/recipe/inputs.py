"""Checks the machine, and prepares the job's tokenizer, architecture and data.

Cheap checks come first, and ranks with different inputs fail before they wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from finetune.config import AdapterSection, DataSection, ModelSection, named
from finetune.data import fingerprint
from finetune.data.media import Media
from finetune.data.prepare import Prepared, check_ids, media_of, prepare
from finetune.errors import ConfigError, DataError
from finetune.export import publish
from finetune.forecast import measured
from finetune.model import bounds, build
from finetune.model.adapters import starting
from finetune.model.adapters.adapter import adapted_experts
from finetune.model.attention import backends
from finetune.model.base import load_architecture
from finetune.model.build import Blueprint
from finetune.model.distributed import context
from finetune.model.source.tokenizer import load_tokenizer
from finetune.model.structure.mixture import Mixture
from finetune.objectives import contract
from finetune.recipe import provenance, resume
from finetune.recipe.start import Session
from finetune.resolve import Job, resolve
from finetune.resolve.planner import check_traceable
from finetune.runtime import driver, libraries, ranks
from finetune.runtime.environment import describe
from finetune.runtime.stages import stage
from finetune.training import trial
from finetune.training.checks import check
from finetune.training.strategies import STRATEGIES


@dataclass(frozen=True)
class JobInputs:
    """The inputs of a job. `attention` says which implementation was chosen and why; `started_from` is the name and
    hash of the adapter that training starts from.
    """

    tokenizer: Any
    blueprint: Blueprint
    attention: str
    mixture: Mixture | None
    data: Prepared
    environment: dict[str, Any]
    provenance: dict[str, Any]
    started_from: dict[str, Any] | None


def gather(job: Job, session: Session) -> tuple[Job, JobInputs]:
    """Check the machine, then load and check tokenizer, architecture and data; no weights are read.

    The job returned has its data, and a kind of quantization in place of `auto`. A problem of one rank is raised on
    all.
    """
    config, run, device, note = job.config, session.run, session.device, job.say
    environment = _check_machine(job, device)
    ranks.main_does(lambda: session.lock.take() if run.exists else None)  # before anything slow
    with ranks.agreeing():
        # First, as it refuses bases that cannot be trained.
        architecture = job.architecture or load_architecture(config.model)
        tokenizer = load_tokenizer(config.model, config.data)
    provenance.refuse_other_ranks({"tokenizer": fingerprint.of(tokenizer)})
    with ranks.agreeing():
        bounds.check_tokenizer(tokenizer, architecture, config.model)
        context.check(architecture, config.distributed.context)
        attention, reason = build.choose_attention(config, architecture, device.type)
        if slow := backends.without_fla(architecture, device.type):
            note(slow)
        blueprint = build.blueprint(config, architecture, attention)
        adapter = resume.to_build(config.adapter, resumed=session.resumes)
        mixture = trial.check_model(config, architecture, attention, adapter)
        gathered = STRATEGIES[config.distributed.kind].gathers_experts(config.distributed)
        if mixture and not gathered and adapted_experts(build.weightless(config.model, architecture), adapter):
            raise ConfigError(
                "`distributed.stage: weights` does not gather adapters on experts; set `stage: gradients`, or "
                "`adapter.expert_rank: 0`, which leaves out experts"
            )
    ranks.main_does(lambda: check_traceable(config, architecture, device))
    with ranks.agreeing():
        build.check_files(config.model, architecture)
    stage(f"reading {named(config.data.train)}")
    with ranks.agreeing():
        data = _prepared(config.data, session, media_of(config.model, config.data, tokenizer, architecture), tokenizer)
        if data.warning and config.training.early_stopping:
            raise DataError(f"`training.early_stopping` needs an evaluation set; {data.warning}")
        contract.check_rows(config.training.objective, data.layout, config.distributed.context)
        check_ids(data, tokenizer, bounds.vocabulary(architecture), config.model.name)
        publish.check_served(run, config, tokenizer, data.kind)
    job = resolve(replace(job, architecture=architecture, data=data), until="weights")
    if "quantization.kind" in job.why:
        with ranks.agreeing():
            blueprint = build.blueprint(job.config, architecture, attention)
            mixture = blueprint.check(adapter)
    with ranks.agreeing():
        recorded = provenance.of(job, data, tokenizer, environment)
        started_from = _started_from(config.model, adapter, tokenizer, recorded["base"], note)
    provenance.refuse_other_ranks({**recorded, "started_from": started_from and started_from["sha256"]})
    return job, JobInputs(
        tokenizer, blueprint, f"{attention} ({reason})", mixture, data, environment, recorded, started_from
    )


def _prepared(section: DataSection, session: Session, media: Media, tokenizer: Any) -> Prepared:
    try:
        return prepare(section, tokenizer, media)
    except DataError as error:
        if media and session.resumes:  # without a row that is said to be removed it would be refused
            run = session.run
            raise DataError(
                f"{error}\n{run.path} is saved up to step {max(run.saved_steps)} and goes on with the same rows alone: "
                "put each image back, or another of its size in its place; without a row, use --fresh to start over"
            ) from None
        raise


def _started_from(
    model: ModelSection, adapter: AdapterSection, tokenizer: Any, base: str | None, note: Callable[[str], None]
) -> dict[str, Any] | None:
    """The name and hash of the adapter to start from, after checking that it was trained on this base and tokenizer.

    `base` is the identity of the job's. Calls `note` if the adapter does not say what it was trained on.
    """
    if adapter.start_from is None:
        return None
    folder = starting.folder_of(adapter.start_from)
    fingerprint.check(tokenizer, folder)
    saved = fingerprint.saved_in(folder)
    then = saved.get("base") if saved else None
    if then and base and then != base:
        raise ConfigError(
            f"`adapter.start_from`: {adapter.start_from} was trained on another base than {model.name} as it is here; "
            "set `model.name`, `model.revision` and `model.rope_scaling` to its own"
        )
    if not then and (named := starting.trained_on(adapter)) != model.name:
        note(f"{adapter.start_from} names {named or 'no model'} as its base; that it is {model.name} cannot be checked")
    return {"name": adapter.start_from, "sha256": starting.sha256(adapter)}


def _check_machine(job: Job, device: torch.device) -> dict[str, Any]:
    """Check the machine; return the contents of environment.json. Raises if it cannot run the job, or ranks differ."""
    config, note = job.config, job.say
    if idle := ranks.idle_gpus():
        note(idle)
    if device.type == "cpu" and not driver.is_hidden() and (unused := driver.unused_gpu()):
        reason, remedy = unused
        note(
            f"training on the CPU, though there is a GPU: {reason}; {remedy}, or set CUDA_VISIBLE_DEVICES= for the CPU"
        )
    if device.type == "cuda" and (obstacle := libraries.triton_obstacle()):
        note(
            f"Triton cannot run its kernels ({obstacle}): torch's own operators are used instead, and the loss takes "
            "more time and memory; `finetune doctor` says what to install"
        )
    with ranks.agreeing():
        check(config, device)
        beside = {*config.adapter.extra_modules} - {"embed_tokens", "lm_head"}
        if ranks.world_size() > 1 and (config.model.vision == "adapter" or (config.model.vision != "none" and beside)):
            raise ConfigError(
                "`model.vision`: a process whose rows have no images has no gradient for the model of images, which "
                "others would wait for; start one process, or set `frozen` and no `adapter.extra_modules`"
            )
    measured.rates(device, note)
    environment = describe(device)
    provenance.refuse_other_ranks({"config": config.model_dump(mode="json"), "packages": environment["packages"]})
    return environment
