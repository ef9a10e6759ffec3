"""Train a model whose weights, adapter and data are ready, and publish what was trained."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState

from finetune.config import Config
from finetune.data import fingerprint
from finetune.data.batching import RowOrder
from finetune.data.prepare import Prepared
from finetune.memory import inspect
from finetune.memory.monitor import Monitor
from finetune.rundir import RunDirectory, staged
from finetune.training import optimizers
from finetune.training.arguments import arguments
from finetune.training.collator import MicroBatches
from finetune.training.recorder import Listener
from finetune.training.trainer import Trainer, save_weights


@dataclass(frozen=True)
class Outcome:
    """How training ended: the last step and, where there were evaluations, the step of the best one."""

    steps: int
    best_step: int | None


def train(
    config: Config,
    model: Any,
    tokenizer: Any,
    data: Prepared,
    run: RunDirectory,
    monitor: Monitor,
    listener: Listener,
    *,
    device: torch.device,
    resume_from: Path | None = None,
) -> Outcome:
    """Run the optimizer steps and write `adapter/` (or `merged/`, where every weight was trained).

    Raises NumbersError for a loss that is not finite, MachineError when a checkpoint cannot be written.
    """
    trainer = _trainer(config, model, tokenizer, data, run, monitor, listener, device, resuming=bool(resume_from))
    initial = _keep_initial_adapter(config, model, run)
    if not (resume_from and _was_the_last(config, trainer, resume_from)):
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    if config.output.best and (best := trainer.best_checkpoint()):
        trainer.load_weights(best)
        run.event("best_loaded", step=trainer.state.best_global_step)
    _publish(config, trainer.model, tokenizer, run, initial)
    state = trainer.state
    return Outcome(state.global_step, state.best_global_step or None)


def _trainer(
    config: Config,
    model: Any,
    tokenizer: Any,
    data: Prepared,
    run: RunDirectory,
    monitor: Monitor,
    listener: Listener,
    device: torch.device,
    *,
    resuming: bool,
) -> Trainer:
    training = config.training
    name, replaced = optimizers.choose(config.optimizer, device.type)
    if replaced:
        listener.note(replaced)
    return Trainer(
        model=model,
        args=arguments(config, run, evaluates=data.eval is not None, resuming=resuming, device=device),
        train_dataset=data.train,
        eval_dataset=data.eval,
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=optimizers.build(name, config.optimizer, training.learning_rate),
        callbacks=_early_stopping(training.early_stopping),
        order=RowOrder(data.train["length"], training.batch_size, training.seed, training.group_by_length),
        collator=MicroBatches(training, tokenizer.pad_token_id),
        adapter=config.adapter,
        training=training,
        run=run,
        monitor=monitor,
        listener=listener,
        keep=config.output.keep,
        save_best=config.output.best,
        loss_tokens=config.memory.loss_tokens,
        profiler=inspect.profiler(config.memory.profile_steps, run.profile, device),
    )


def _early_stopping(patience: int | None) -> list[Any]:
    """transformers' callback for `training.early_stopping`, or nothing."""
    from transformers import EarlyStoppingCallback

    return [EarlyStoppingCallback(early_stopping_patience=patience)] if patience else []


def _was_the_last(config: Config, trainer: Trainer, checkpoint: Path) -> bool:
    """Whether nothing is left to train after `checkpoint`; its weights and state are then taken as they are.

    transformers would train one step over the end when that lies within an epoch.
    """
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if state.global_step < (config.training.max_steps or state.max_steps):
        return False
    trainer.load_weights(checkpoint)
    trainer.state = state
    return True


def _keep_initial_adapter(config: Config, model: Any, run: RunDirectory) -> Path | None:
    """PiSSA moves part of the base into the adapter. Keep its start, so that what is published fits the plain base."""
    if config.adapter.init != "pissa":
        return None
    folder = run.path / "adapter_initial"
    with staged(folder) as partial:
        save_weights(model, partial)
    return folder


def _publish(config: Config, model: Any, tokenizer: Any, run: RunDirectory, initial: Path | None) -> None:
    """Write the trained weights where other tools look for them; the directory appears when it is whole."""
    target = run.merged if config.adapter.kind == "none" else run.adapter
    with staged(target) as folder:
        if initial:
            # W = residual + B0 A0, so the update on W is BA - B0 A0: an adapter of twice the rank (PiSSA, section 3.3).
            save_weights(model, folder, path_initial_model_for_weight_conversion=str(initial))
        else:
            save_weights(model, folder)
        fingerprint.save(tokenizer, folder)
    if initial:
        shutil.rmtree(initial)
