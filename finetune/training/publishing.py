"""Publishes the trained weights: those of the best evaluation or of the last step, proven to be what PEFT loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from finetune.data import fingerprint
from finetune.data.prepare import ROWS_TO_JUDGE
from finetune.errors import ArtifactError, MachineError, OutOfMemoryError
from finetune.model import build
from finetune.model.adapters import adapter_files, peft_format, plain_peft
from finetune.model.distributed.engine import WeightAccess
from finetune.model.source import chat_template
from finetune.runtime.out_of_memory import is_out_of_memory, reason, while_writing
from finetune.storage.files import not_written, staged
from finetune.storage.rundir import checkpoint_step
from finetune.training.job import TrainingJob
from finetune.training.progress import Progress
from finetune.training.state import problems_of, restore_weights, save_weights


def load_best(job: TrainingJob, weights: WeightAccess, best: Path | None) -> None:
    """Restore the weights of the checkpoint `best`, if there is one. All ranks must call it if they hold parts."""
    if best:
        restore_weights(weights, best)
        job.outlets.run.event("best_loaded", step=checkpoint_step(best))


def best_checkpoint(job: TrainingJob, progress: Progress) -> Path | None:
    """The checkpoint of the best evaluation, if it is to be published; None if it is the last step or not on disk."""
    best, run, note = progress.best_step, job.outlets.run, job.outlets.listener.note
    if not job.config.output.best or not best or best == progress.step:
        return None
    if not job.data.judges:
        note(
            f"publishing the last step, not step {best} with its lower eval loss: that of fewer than {ROWS_TO_JUDGE} "
            "different rows says too little of the adapter"
        )
        return None
    path = run.checkpoint(best)
    if not path.is_dir():
        return None
    if problems := problems_of(path):
        run.event("best_damaged", step=best, problems=problems)
        note(f"the best checkpoint {path} cannot be used ({'; '.join(problems)}); exporting the last step")
        return None
    return path


def keep_initial_adapter(job: TrainingJob) -> None:
    """PiSSA moves part of the base into the adapter. Keep the initial adapter, to publish one for the plain base."""
    if folder := _initial_adapter(job):
        with staged(folder) as partial:
            save_weights(job.model, partial)


def _initial_adapter(job: TrainingJob) -> Path | None:
    return job.outlets.run.path / "adapter_initial" if job.config.adapter.init == "pissa" else None


def publish(job: TrainingJob, whole: dict[str, torch.Tensor] | None) -> None:
    """Write the trained weights (`whole`: see `state.whole_weights`) as an atomically published directory."""
    target, initial = job.outlets.run.adapter, _initial_adapter(job)
    if job.config.adapter.kind == "none":
        target = job.outlets.run.merged
        job.model.config.use_cache = True  # off for training, but needed for generation
    try:
        with while_writing(target), staged(target) as folder:
            if target == job.outlets.run.adapter:
                _write_adapter(job, initial, whole, folder)
            else:
                save_weights(job.model, folder, whole)
                if job.model.can_generate():
                    chat_template.write_generation_config(job.model.generation_config, job.tokenizer, folder)
            fingerprint.save_tokenizer(job.tokenizer, job.provenance["base"], folder)
    except (OSError, SafetensorError) as error:  # safetensors 0.8 raises its own error for a full disk
        raise MachineError(not_written(target, error)) from None
    if initial:
        shutil.rmtree(initial)


def _write_adapter(job: TrainingJob, initial: Path | None, whole: dict[str, torch.Tensor] | None, folder: Path) -> None:
    """Write the adapter of the plain base, and prove that it is the trained one to PEFT."""
    model, section = job.model, job.config.adapter
    tensors, settings = adapter_files.weights(model, whole), plain_peft.settings(model)
    if initial:
        first = load_file(initial / adapter_files.WEIGHTS)
        tensors, settings = peft_format.for_plain_base(tensors, first, settings, section)
    peft_format.write(tensors, settings, folder)
    base = build.weightless(job.config.model, job.architecture)
    try:
        peft_format.prove(base, folder, tensors, adapter_files.scales(model))
    except ArtifactError as error:
        if error.__cause__ and is_out_of_memory(error.__cause__):
            raise OutOfMemoryError(
                f"out of memory while adapter/ was loaded to prove it: {reason(error.__cause__)}. Nothing was "
                "published; with more memory, the same command goes on from the run's last checkpoint"
            ) from None
        raise
