"""Completes a model for training: kernels, the loss, compiled layers and split rows, each tried on the model itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from finetune import kernels
from finetune.errors import ConfigError, MachineError
from finetune.kernels import compiled
from finetune.model.adapters.adapter import casts_by_autocast
from finetune.model.distributed import context
from finetune.model.precision import autocast
from finetune.objectives import log_probs
from finetune.runtime import libraries, ranks
from finetune.training import probe_table
from finetune.training.job import TrainingJob
from finetune.training.probe_table import Subject


def complete(job: TrainingJob) -> TrainingJob:
    """Complete a job's model; the job with the kernels that it rules out. Raises ConfigError or MachineError."""
    config, model, device, note = job.config, job.model, job.process.device, job.outlets.listener.note
    fused, off_before = config.fused, sorted(job.kernels_off)
    with autocast(config.training.precision, device), libraries.without_cudnn_attention():
        # Fuse what kernels can compute, and take out those that do not compute what this model does.
        triton = device.type != "cuda" or libraries.triton_obstacle() is None
        if off_before and fused == "on":
            names = ", ".join(f"`{name}`" for name in off_before)
            raise ConfigError(
                f"`kernels.fused: on`: {names} ended an earlier process on such a device, or did not hold in an "
                "earlier start of this run; set `auto` or `off`"
            )
        attached = kernels.attach(model, fused, triton=triton, without=off_before)
        fusing = attached.fusing
        unlike = [failure.line for failure in probe_table.run("fused", Subject(config, model, attached))]
        off = fusing - attached.fusing
        if fused == "on" and (unlike or not any(attached.replaced.values())):
            raise ConfigError(f"`kernels.fused: on`: {'; '.join([*attached.lines, *unlike])}; set `auto` or `off`")
        fused_now = ", ".join(f"{len(modules)} {name}" for name, modules in attached.replaced.items() if modules)
        for line in (*([f"kernels: fused {fused_now}"] if fused_now else []), *attached.lines, *unlike):
            note(line)
        probe_table.run("built", Subject(config, model, media=job.data.media))

        if config.kernels.compile == "layers":
            if obstacle := compiled.obstacle() if device.type == "cpu" else libraries.triton_obstacle():
                raise MachineError(f"`kernels.compile: layers`: {obstacle}; install a compiler, or set `none`")
            for line in compiled.attach(model, attached):
                note(line)

        # The model scores labels from here on, by the fused loss if that is what its head computes.
        if unbalanced := log_probs.attach(model):
            note(unbalanced)
        for failure in probe_table.run("scoring", Subject(config, model, off=job.kernels_off)):
            if fused == "on":
                raise ConfigError(f"`kernels.fused: on`: {failure.line}; set `auto` or `off`")
            note(failure.line)
            off.add(failure.off)
    return replace(job, kernels_off=job.kernels_off.union(*ranks.gathered(off)))


@contextlib.contextmanager
def in_training(job: TrainingJob) -> Iterator[None]:
    """A context for all passes of the job: precision of the adapter, tiles of the loss, rows split over ranks."""
    config = job.config
    fused_loss = config.fused != "off" and "loss" not in job.kernels_off
    with (
        libraries.without_cudnn_attention(),
        casts_by_autocast(job.model, config.adapter, config.training.precision),
        log_probs.tiles(config.memory.loss_tokens, fused=fused_loss),
    ):
        group = ranks.group_of(config.distributed.context)
        with autocast(config.training.precision, job.process.device):
            probe_table.run("split", Subject(config, job.model, group=group))
        with context.split(job.model, group):
            yield
