"""Train a model whose weights, adapter and data are ready, and publish what was trained."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import EarlyStoppingCallback, TrainerState

from finetune.config import Config
from finetune.data import fingerprint
from finetune.data.batching import MicroBatching, RowOrder
from finetune.data.prepare import Prepared
from finetune.errors import FinetuneError, MachineError
from finetune.measure import snapshots
from finetune.measure.monitor import Monitor
from finetune.model import causality, packing
from finetune.model.adapter import casts_by_autocast
from finetune.model.base import autocast
from finetune.runtime import libraries, ranks
from finetune.runtime.signals import Signals
from finetune.storage.files import not_written, staged
from finetune.storage.rundir import RunDirectory
from finetune.training import optimizers
from finetune.training.arguments import arguments
from finetune.training.checkpoints import Saver, read_trainer_state
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
    signals: Signals,
    made_with: dict[str, Any],
    resume_from: Path | None = None,
) -> Outcome:
    """Run the optimizer steps and write `adapter/` (or `merged/`, where every weight was trained).

    `made_with` is what checkpoints remember of their origin; `resume_from` is a whole one. Raises NumbersError for a
    loss that is not finite, MachineError when a checkpoint cannot be written, ArtifactError when one does not fit, and
    Terminated or KeyboardInterrupt after the save that a signal asked for.
    """
    with autocast(config.training.precision, device), libraries.without_cudnn_attention():
        if config.data.packing:
            packing.prove(model)
        causality.prove(model)
    saver = Saver(run, config.output.keep, made_with, verified=[resume_from] if resume_from else [])
    trainer = _trainer(
        config, model, tokenizer, data, run, monitor, listener, device, saver, signals, resuming=bool(resume_from)
    )
    initial = _keep_initial_adapter(config, model, run) if ranks.first() else None
    last = _last_state(config, trainer, resume_from) if resume_from else None
    casting = casts_by_autocast(model, config.adapter, config.training.precision)
    with signals.waiting(), libraries.without_cudnn_attention(), casting:
        if resume_from and last:
            trainer.take_as_trained(resume_from, last)
        else:
            _run_steps(trainer, resume_from)
    ranks.part()  # the first one does the rest alone
    signals.end(f"step {trainer.state.global_step} is saved in {run.checkpoints}")
    state = trainer.state
    outcome = Outcome(state.global_step, state.best_global_step or None)
    if not ranks.first():
        return outcome
    if config.output.best and (best := trainer.best_checkpoint()):
        trainer.load_weights(best)
        run.event("best_loaded", step=trainer.state.best_global_step)
    _publish(config, trainer.model, tokenizer, made_with["base"], run, initial)
    return outcome


def _run_steps(trainer: Trainer, resume_from: Path | None) -> None:
    """Train to the end, or to the end of the step in which a signal came; the last save is awaited either way."""
    try:
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        # A launcher that sees one process end after a signal leaves the others half a minute.
        ranks.first_does(trainer.saver.wait)
    except KeyboardInterrupt:  # the second one, which does not wait for anything
        raise
    except BaseException:
        with contextlib.suppress(FinetuneError):  # the first error is the one to tell
            trainer.saver.wait()
        raise


def _trainer(
    config: Config,
    model: Any,
    tokenizer: Any,
    data: Prepared,
    run: RunDirectory,
    monitor: Monitor,
    listener: Listener,
    device: torch.device,
    saver: Saver,
    signals: Signals,
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
        order=RowOrder(data.train["length"][:], training.batch_size, training.seed, training.group_by_length),
        collator=MicroBatches(
            MicroBatching.of(training, config.data), tokenizer.pad_token_id, ranks.number(), ranks.count()
        ),
        adapter=config.adapter,
        training=training,
        run=run,
        monitor=monitor,
        listener=listener,
        saver=saver,
        signals=signals,
        save_best=config.output.best,
        loss_tokens=config.memory.loss_tokens,
        masked=causality.needs_mask(model.config, training.precision, causality.capability_of(device)),
        profiler=snapshots.profiler(config.memory.profile_steps, run.profile, device),
    )


def _early_stopping(patience: int | None) -> list[Any]:
    """transformers' callback for `training.early_stopping`, or nothing."""
    return [EarlyStoppingCallback(early_stopping_patience=patience)] if patience else []


def _last_state(config: Config, trainer: Trainer, checkpoint: Path) -> TrainerState | None:
    """The state of `checkpoint`, if no step is left after it.

    transformers would train one step over the end when that lies within an epoch, and an evaluation's interval over
    where early stopping ended.
    """
    state = read_trainer_state(checkpoint)
    patience = config.training.early_stopping
    stopped_early = patience and _evaluations_without_gain(state) >= patience
    return state if stopped_early or state.global_step >= trainer.total_steps() else None


def _evaluations_without_gain(state: TrainerState) -> int:
    counted = state.stateful_callbacks.get(EarlyStoppingCallback.__name__, {})
    return counted.get("attributes", {}).get("early_stopping_patience_counter", 0)


def _keep_initial_adapter(config: Config, model: Any, run: RunDirectory) -> Path | None:
    """PiSSA moves part of the base into the adapter. Keep its start, so that what is published fits the plain base."""
    if config.adapter.init != "pissa":
        return None
    folder = run.path / "adapter_initial"
    with staged(folder) as partial:
        save_weights(model, partial)
    return folder


def _publish(
    config: Config, model: Any, tokenizer: Any, base: str | None, run: RunDirectory, initial: Path | None
) -> None:
    """Write the trained weights where other tools look for them; the directory appears when it is whole."""
    target = run.merged if config.adapter.kind == "none" else run.adapter
    try:
        with staged(target) as folder:
            if initial:
                # W = residual + B0 A0, so the update on W is BA - B0 A0: an adapter of twice the rank (PiSSA, 3.3).
                save_weights(model, folder, path_initial_model_for_weight_conversion=str(initial))
            else:
                save_weights(model, folder)
            fingerprint.save(tokenizer, base, folder)
    except (OSError, SafetensorError) as error:  # safetensors 0.8 makes its own of a full disk
        raise MachineError(not_written(target, error)) from None
    if initial:
        shutil.rmtree(initial)
