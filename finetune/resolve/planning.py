"""Plan and fit a job before anything is allocated, on a device that need not be in this machine.

No weights are read. A model that is in the catalog, in a local directory or in the hub's cache needs no network; for
any other the config is fetched.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from finetune.config import Config, MemorySection, dump, explained, loaded
from finetune.errors import ConfigError
from finetune.forecast import answer_memory, devices
from finetune.forecast.answer_memory import Serving
from finetune.forecast.plan import Fitted, Limits, Plan
from finetune.model import precision
from finetune.resolve.job import Job, Stop
from finetune.resolve.machine import NamedMachine
from finetune.resolve.planner import Planner
from finetune.resolve.steps import precision_of_machine, resolve
from finetune.runtime import libraries
from finetune.storage.files import write_text
from finetune.training import learning_rate
from finetune.training.checks import check_optimizer, check_shares


def job_on(asked: Config | Job, gpu: str | None = None, gpus: int = 1, until: Stop = "weights") -> Job:
    """The job resolved for one device or several alike, which need not be in this machine.

    Raises ConfigError for an unknown device, and for a batch that `gpus` cannot share.
    """
    config = asked.config if isinstance(asked, Job) else loaded(asked)
    if gpus < 1:
        raise ConfigError(f"`gpus` must be at least 1, not {gpus}")
    check_shares(config.training, config.distributed, gpus)
    check_optimizer(config.optimizer, config.distributed)
    machine = machine_of(config.memory, gpu, gpus)
    precision.check(config.training.precision, machine.device.type, machine.device.arithmetic)
    return resolve(asked, machine, until=until)


def machine_of(memory: MemorySection, gpu: str | None = None, gpus: int = 1) -> NamedMachine:
    """The machine of a plan: by default this one's device. Raises ConfigError for an unknown one."""
    return NamedMachine(devices.find(gpu or ("auto" if torch.cuda.is_available() else "cpu"), memory), gpus)


def planner_for(asked: Config | Job, gpu: str | None = None, gpus: int = 1) -> Planner:
    """The planner of a job whose weights have a form, the rest still `auto`. Raises as `job_on`."""
    return planner_of(job_on(asked, gpu, gpus))


def planner_of(job: Job) -> Planner:
    """The planner of a job that `job_on` has resolved."""
    assert job.planner, "a job of which no weights are loaded has one"
    return job.planner


@libraries.alone()
def plan(asked: Config | Job, gpu: str | None = None, gpus: int = 1) -> Plan:
    """Forecast the job on `gpu`, with its `auto` settings fitted (see `finetune.plan`)."""
    job = job_on(asked, gpu, gpus, until="memory")
    fitted, planner = job.fitted, planner_of(job)
    forecast = planner.with_reference(fitted.forecast if fitted else planner.forecast())
    forecast = planner.with_routing(forecast)
    return Plan(
        job.config,
        forecast,
        () if forecast.fits else tuple(planner.levers(forecast)),
        fitted,
        why_quantized=job.why.get("quantization.kind"),
        why_precision=job.why.get("training.precision"),
        images=planner.images(),
        evidence=job.notes.get("training.learning_rate"),
    )


def answers(
    asked: Config | Job, gpu: str | None = None, *, rows: int = 1, context: int | None = None, cache: str = "dynamic"
) -> Serving:
    """Forecast what `finetune generate` takes with the job's base and adapter (see `answer_memory.forecast`).

    Its weights have the form that they have in training; raises ConfigError for an unknown model or GPU.
    """
    config = asked.config if isinstance(asked, Job) else asked
    machine = machine_of(config.memory, gpu)
    if config.quantization.kind == "auto":
        job = job_on(asked, gpu)
    else:  # answers need no rows, and no learning rate
        job = precision_of_machine(resolve(asked, machine, until="form"))
    return answer_memory.forecast(job.config, job.architecture, machine.device, rows=rows, context=context, cache=cache)


@libraries.alone()
def fit(config: Config, gpu: str | None = None, gpus: int = 1) -> Fitted:
    """The job fitted to `gpu`, whatever micro-batch and checkpointing it names (see `finetune.fit`)."""
    return _fit(_free(config, gpu, gpus))


def fit_with_limits(asked: Config | Job, gpu: str | None = None, gpus: int = 1) -> tuple[Fitted, Limits]:
    """`fit`, and the limits of the fitted job on that device."""
    job = _free(asked, gpu, gpus)
    fitted = _fit(job)
    return fitted, planner_of(job).variant(fitted.config).limits()


def _free(asked: Config | Job, gpu: str | None, gpus: int) -> Job:
    """A job whose micro-batch and checkpointing are chosen, whatever its config says. Raises as `refuse_guess`."""
    config = asked.config if isinstance(asked, Job) else loaded(asked)
    rows = {} if config.training.micro_batch_tokens else {"training.micro_batch": "auto"}
    learning_rate.refuse_guess(config.training, config.optimizer)
    free = {**rows, "memory.checkpointing": "auto", "memory.offload": "none"}
    return job_on(asked.changed(free), gpu, gpus)


def _fit(job: Job) -> Fitted:
    fitted = planner_of(job).fit()
    first = ("training.learning_rate", "quantization.kind", "training.precision")
    reasons = {key: job.why[key] for key in first if key in job.why}
    return replace(fitted, reasons={**reasons, **fitted.reasons})


def write(fitted: Fitted, path: Path) -> None:
    """Write the fitted config, with a comment beside each value that was chosen. Raises MachineError."""
    write_text(path, "\n".join(explained(dump(fitted.config), fitted.reasons)) + "\n")
