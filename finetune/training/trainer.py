"""TRL's SFTTrainer, with what a run of ours adds around its loop: measured phases, our row order, our checkpoints.

The loop, the loss (per token, in tiles, without the full logits), accumulation and resume are TRL's, accelerate's
and transformers'. Nothing here changes a number of the step: a test holds its losses against a plain script's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from bitsandbytes.optim import GlobalOptimManager
from bitsandbytes.optim.optimizer import Optimizer8bit
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTConfig, SFTTrainer
from trl.kernels import chunked_logprob

from finetune.config import AdapterSection, TrainingSection
from finetune.data.batching import RowOrder
from finetune.errors import FinetuneError, Terminated
from finetune.measure.monitor import LeakWatch, Monitor, Peak
from finetune.measure.out_of_memory import is_out_of_memory
from finetune.model import experts
from finetune.model.adapter import set_trained_dtype
from finetune.runtime import ranks
from finetune.runtime.randomness import RandomState
from finetune.runtime.signals import Signals
from finetune.storage.checkpoint import problems_of
from finetune.storage.rundir import RunDirectory
from finetune.training import largest_batch, oom_retry, schedules
from finetune.training.checkpoints import (
    Saver,
    read_trainer_state,
    restore,
    restore_random,
    restore_weights,
    snapshot,
)
from finetune.training.collator import Inputs, MicroBatches, for_model, row_count
from finetune.training.evaluation import DoesNotFit, summed_loss
from finetune.training.recorder import Listener, StepCounts, StepRecorder


class _CutShort(Exception):
    """A signal ended an evaluation before its loss was known."""


class _NothingLeft(Exception):
    """An evaluation before a resumed run's first step has ended it."""


class Trainer(SFTTrainer):
    """SFTTrainer that measures the memory of each phase and writes the run directory.

    `order` gives the training rows' order and `collator` the micro-batches of a step; `run`, `monitor` and `listener`
    receive what happens; `saver` writes the checkpoints, and `signals` may ask for one, or for the end. With `masked`
    the model is given the padding mask.
    """

    def __init__(
        self,
        *,
        order: RowOrder,
        collator: MicroBatches,
        adapter: AdapterSection,
        training: TrainingSection,
        run: RunDirectory,
        monitor: Monitor,
        listener: Listener,
        saver: Saver,
        signals: Signals,
        save_best: bool,
        loss_tokens: int,
        masked: bool,
        profiler: Any | None = None,
        **arguments: Any,
    ) -> None:
        self.order = order
        self.section = training
        self.run = run
        self.monitor = monitor
        self.listener = listener
        self.saver = saver
        self.signals = signals
        self.save_best = save_best
        self.masked = masked
        self.step_counts = StepCounts()
        self.leaks = LeakWatch()
        self.limits = {"train": oom_retry.Limit(), "eval": oom_retry.Limit()}
        self.skipped = False
        self._grad_norm: torch.Tensor | float = 0.0
        chunked_logprob.TOKEN_CHUNK_SIZE = loss_tokens  # read at each call; trl 1.16 has no argument for it
        _set_balancing_loss(arguments["model"], arguments["args"])
        super().__init__(data_collator=collator, **arguments)
        set_trained_dtype(self.model, adapter)  # TRL cast the adapter; see there
        self.callback_handler.callbacks = [
            callback for callback in self.callback_handler.callbacks if type(callback).__name__ != "PrinterCallback"
        ]
        self.add_callback(StepRecorder(self, profiler))
        self.stop_and_save = StopAndSave(self)
        self.add_callback(self.stop_and_save)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Nothing: the weights were made where they belong."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """transformers' optimizer, with bitsandbytes' exceptions for it settled at once.

        bitsandbytes 0.50 notes which weights get 32-bit states (embeddings) by place and for the whole process: a
        later model's weight in the same place would get them too, and the earlier model's embeddings never be freed.
        """
        exceptions = GlobalOptimManager.get_instance()
        exceptions.initialize()
        optimizer = super().create_optimizer(model)
        if isinstance(optimizer, Optimizer8bit):
            optimizer.check_overrides()
            exceptions.module_weight_config_triple.clear()
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> torch.optim.lr_scheduler.LRScheduler:
        """Ours in place of transformers', whose first step has a rate of 0."""
        self.lr_scheduler = schedules.scheduler(self.section, optimizer or self.optimizer, num_training_steps)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    # -- the step, phase by phase ----------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: list[Inputs], num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of each micro-batch of one optimizer step; the step's loss.

        transformers sees a step as one batch, so that the number of micro-batches is free. Out of memory, the one that
        did not fit is split and the step begun again; raised again, with the row on it, where it was a single row.
        """
        start = oom_retry.StepStart(self)
        while True:
            parts = self.limits["train"].parts(inputs)
            self.current_gradient_accumulation_steps = len(parts)
            losses: list[torch.Tensor] = []
            try:
                *before, last = parts
                with self.accelerator.no_sync(model):
                    for part in before:
                        losses.append(self._micro_step(model, part, num_items_in_batch))
                losses.append(self._micro_step(model, last, num_items_in_batch))
                break
            except (MemoryError, RuntimeError) as error:
                # Several processes wait for each other in the last backward pass; none can do its step again alone.
                if not is_out_of_memory(error) or self.accelerator.num_processes > 1:
                    raise
                too_large = parts[len(losses)]
                if not self.limits["train"].lower(too_large):
                    self._give_up(error, too_large, start)
                    raise
            # Here the error is gone, and with it what the frames of the failed pass held.
            start.restore()
            oom_retry.release()
            self.tell_split(too_large)
        return torch.stack(losses).sum()

    def tell_split(self, inputs: Inputs, **fields: Any) -> None:
        """Write down that a micro-batch did not fit and was split."""
        rows, tokens = row_count(inputs), inputs["input_ids"].shape[1]
        packed = "packed into" if "cu_seq_lens_q" in inputs else "of"
        self.run.event("micro_batch_split", step=self.state.global_step + 1, rows=rows, tokens=tokens, **fields)
        self.listener.note(
            f"out of memory at {rows} rows {packed} {tokens} tokens: split in two, as all of that size from now on"
        )

    def _give_up(self, error: BaseException, inputs: Inputs, start: oom_retry.StepStart) -> None:
        """Say on `error` which row is too large, and save what the steps before have trained."""
        place, step = oom_retry.place_of(self.train_dataset, inputs), self.state.global_step
        tokens = inputs["input_ids"].numel()
        self.run.event("row_does_not_fit", step=step + 1, place=place, tokens=tokens)
        error.add_note(f"The row that does not fit, alone in its micro-batch: {place}, {tokens} tokens.")
        start.restore()
        if self.args.device.type == "cpu":  # elsewhere it stays, for the allocator's snapshot; saving needs the host's
            oom_retry.release(error)
        try:
            self.saver.wait()
            if step == 0 or self.run.checkpoint(step) in self.run.complete_checkpoints():
                return
            self._save_checkpoint(self.model, None)
            self.saver.wait()
        except (FinetuneError, MemoryError, RuntimeError) as unsaved:
            error.add_note(f"Step {step} could not be saved: {unsaved}.")
        else:
            error.add_note(f"Step {step} was saved.")

    def _micro_step(self, model: Any, inputs: Inputs, trained_tokens: Any) -> torch.Tensor:
        self.step_counts.add(inputs)
        self.monitor.enter("forward")
        try:
            loss = super().training_step(model, inputs, trained_tokens)
        finally:
            peak = self.monitor.leave()
        self._watch_for_leaks(inputs, peak)
        return loss

    # -- the update ------------------------------------------------------------------------------------------------

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        update = self.optimizer.step

        @functools.wraps(update)
        def watched(*args: Any, **kwargs: Any) -> None:
            self._update(update)

        self.optimizer.step = watched
        largest_batch.rehearse(self)
        return prepared

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        self._grad_norm = super()._get_grad_norm(model, grad_norm)
        return self._grad_norm

    def _update(self, update: Callable[[], None]) -> None:
        """The optimizer's step. Without finite gradients there is none: weights, states and schedule stay as they are.

        So it is with and without loss scaling; the scale goes down then. transformers asks accelerate's optimizer
        whether the schedule goes on, and accelerate 1.15 takes the step of a fused optimizer for done, which the
        scaler leaves to find out by itself that it must not do anything.
        """
        self.skipped = self.optimizer._is_overflow = not math.isfinite(float(self._grad_norm))
        if not self.skipped:
            self._in_memory(update)
        elif self.accelerator.scaler is not None:
            self.accelerator.scaler.update()

    def _in_memory(self, update: Callable[[], None]) -> None:
        """The update; once more with freed memory where it ran out before anything was changed."""
        start = oom_retry.UpdateStart(self.optimizer.optimizer)
        try:
            update()
            return
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if not start.undo():
                error.add_note(
                    "The optimizer had changed some weights and not others, so that this step cannot be done again; "
                    "the checkpoints before it are untouched."
                )
                raise
        oom_retry.release()
        self.run.event("update_retried", step=self.state.global_step + 1)
        update()

    def _get_num_items_in_batch(self, batch_samples: list[list[Inputs]], device: torch.device) -> Any:
        return super()._get_num_items_in_batch(list(itertools.chain.from_iterable(batch_samples)), device)

    def floating_point_ops(self, inputs: list[Inputs]) -> int:
        """Not counted: transformers' estimate knows neither adapters nor quantized weights."""
        return 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        def called(**inputs: Any) -> Any:
            return model(**for_model(inputs, masked=self.masked))

        # TRL counts tokens by the mask, and wants it for that.
        loss = super().compute_loss(called, inputs, *args, **kwargs)
        if self.model.training:
            self.monitor.enter("backward")
        return loss

    def _watch_for_leaks(self, inputs: Inputs, peak: Peak) -> None:
        # Gradients and optimizer states come into being during the first step, so its peaks grow by right; so do
        # those of a step's later micro-batches, which are therefore told apart by their place.
        if self.state.global_step < 1:
            return
        shape = (*inputs["input_ids"].shape, self.step_counts.micro_batches)
        if grown := self.leaks.see(tuple(shape), peak):
            rows, length = shape[:2]
            text = f"peak memory at {rows} rows of {length} tokens keeps growing: {grown / 2**20:.0f} MiB so far"
            self.run.event("leak", step=self.state.global_step, rows=rows, length=length, grown_bytes=grown)
            self.listener.note(text)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        try:
            with self.monitor.phase("evaluation"):
                return super().evaluate(*args, **kwargs)
        except DoesNotFit as row:
            if self.accelerator.num_processes > 1:  # the others wait for this one's sums
                raise
            self.control.should_evaluate = False
            self.tell_no_evaluation(row)
            return {}
        finally:
            self.step_counts.restart_clock()

    def held_out_sums(self, steps: Iterable[list[Inputs]]) -> torch.Tensor:
        """See `summed_loss`; what does not fit is split, and written down."""
        return summed_loss(
            self.model, steps, self.limits["eval"], lambda part: self.tell_split(part, evaluation=True),
            masked=self.masked,
        )  # fmt: skip

    def tell_no_evaluation(self, row: DoesNotFit) -> None:
        """Write down which held-out row is too large to evaluate any."""
        place, tokens = oom_retry.place_of(self.eval_dataset, row.inputs), row.inputs["input_ids"].numel()
        self.run.event("evaluation_skipped", step=self.state.global_step, place=place, tokens=tokens)
        self.listener.note(f"no evaluation: out of memory at {place} alone, {tokens} tokens; training goes on")

    def evaluation_loop(
        self, dataloader: Any, description: str, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        self.callback_handler.eval_dataloader = dataloader
        with self._until_a_signal():
            sums = self.accelerator.reduce(self.held_out_sums(dataloader))
        loss, tokens = sums.tolist()
        return EvalLoopOutput(
            predictions=None,
            label_ids=None,
            metrics={f"{metric_key_prefix}_loss": loss / tokens},
            num_samples=len(dataloader.dataset),
        )

    # -- the order of rows -----------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> RowOrder:
        return self.order

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' loader, of whole steps in every process: the collator takes each one's share of the rows."""
        loader = super()._get_dataloader(*args, **kwargs)
        if isinstance(loader.batch_sampler, BatchSamplerShard):  # as transformers itself has it for some samplers
            loader.batch_sampler.num_processes, loader.batch_sampler.process_index = 1, 0
        return loader

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float] | None:
        """transformers' evaluation, which moves no random number of the training's.

        None where a signal came before its loss was known: then a resume makes up for it. A signal that comes later
        ends the run after this step, with the evaluation written down and counted.
        """
        before = RandomState()
        if self._several and self.stop_and_save.stops:
            self._owe_evaluation()
            return None
        try:
            found: dict[str, float] = super()._evaluate(*args, **kwargs)
        except _CutShort:
            self._owe_evaluation()
            return None
        finally:
            before.restore()
        if self.signals.name and not self._several:  # several learn of it together, at the end of the next step
            self._save_and_stop()
        return found

    @property
    def _several(self) -> bool:
        return self.args.world_size > 1

    @contextlib.contextmanager
    def _until_a_signal(self) -> Iterator[None]:
        """Within the block a signal ends an evaluation at once; of several processes none can leave the others."""
        try:
            with self.signals.waiting(self._several):
                if not self._several:
                    self.signals.end()
                yield
        except (Terminated, KeyboardInterrupt):
            if self._several or not self.state.global_step or self.signals.name is None:
                raise
            raise _CutShort from None

    def _owe_evaluation(self) -> None:
        self.stop_and_save.owes_evaluation = True
        self.control.should_evaluate = False  # nor again where this step ends an epoch
        self._save_and_stop()

    def _save_and_stop(self) -> None:
        self.control.should_save = self.control.should_training_stop = True

    def _determine_best_metric(self, metrics: dict[str, float] | None, trial: Any) -> bool:
        if not metrics:  # the evaluation was skipped, or cut short
            return False
        best = super()._determine_best_metric(metrics, trial)
        if best and self.save_best:
            self.control.should_save = True
        return best

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Copy the state to the host; it is written, verified and published while training goes on."""
        self.saver.wait()
        started = time.perf_counter()
        self.monitor.enter("save")
        try:
            random_states = ranks.gathered(RandomState().as_json())
            self._export_callback_state()
            contents = snapshot(self, self.saver.made_with, random_states) if self.args.should_save else None
        finally:
            peak = self.monitor.leave()
        self.monitor.take("save")
        if contents:
            self.saver.start(contents, self.state.best_global_step, time.perf_counter() - started, peak)
        self.step_counts.restart_clock()

    def _export_callback_state(self) -> None:
        """Put counters such as early stopping's into the state that is saved (as Trainer._save_checkpoint does)."""
        for callback in self._stateful_callbacks():
            self.state.stateful_callbacks[type(callback).__name__] = callback.state()

    def _load_callback_state(self) -> None:
        """Counters go on where they stood; what the config says of them may have changed, and holds."""
        for callback in self._stateful_callbacks():
            stored = self.state.stateful_callbacks.get(type(callback).__name__, {})
            for name, value in callback.state()["attributes"].items():
                if (then := stored.get("attributes", {}).get(name)) is not None:
                    setattr(callback, name, type(value)(then))

    def _stateful_callbacks(self) -> list[Any]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, ExportableState)]

    def best_checkpoint(self) -> Path | None:
        """The checkpoint of the best evaluation, where it is on disk and not simply the last one."""
        best = self.state.best_global_step
        if not best or best == self.state.global_step:
            return None
        path = self.run.checkpoint(best)
        if not path.is_dir():
            return None
        if problems := problems_of(path):
            self.run.event("best_damaged", step=best, problems=problems)
            self.listener.note(
                f"{path}, the best, cannot be used ({'; '.join(problems)}); the last is exported instead"
            )
            return None
        return path

    def total_steps(self) -> int:
        """Optimizer steps of the whole job, as its config says now."""
        *_, steps = self.set_initial_training_values(self.args, self.get_train_dataloader())
        return int(steps)

    def take_as_trained(self, folder: Path, state: TrainerState) -> None:
        """Take over a checkpoint after which no step is left, with the evaluation that it may lack."""
        self.load_weights(folder)
        self.state = state
        self._load_callback_state()
        self.make_up_for_evaluation()

    def load_weights(self, folder: Path) -> None:
        """Put a checkpoint's trained weights into the model."""
        restore_weights(self.model, folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        restore_weights(self.model, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not checkpoint:
            return
        restore(self, Path(checkpoint))
        then, now = read_trainer_state(Path(checkpoint)).max_steps, self.total_steps()
        done = self.lr_scheduler.last_epoch
        if done and then != now:
            before, after = schedules.rate(self.section, done, then), schedules.rate(self.section, done + 1, now)
            self.run.event("schedule_changed", step=done, steps=[then, now], learning_rate=[before, after])
            self.listener.note(
                f"the schedule now ends at step {now}, not {then}: the learning rate goes from {before:.2e} at step "
                f"{done} to {after:.2e} at the next, and on as `training.schedule: {self.section.schedule}` says"
            )

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing: it came with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint:
            restore_random(Path(checkpoint), self.args.process_index)
        self.make_up_for_evaluation()
        if self.control.should_training_stop:
            raise _NothingLeft

    def make_up_for_evaluation(self) -> None:
        """Evaluate as a signal kept the run from doing before this start, if one did."""
        if self.stop_and_save.owes_evaluation:
            self.stop_and_save.owes_evaluation = False
            self.run.forget_evaluation_at(self.state.global_step)  # of a start that was killed after it made up for it
            self._determine_best_metric(self._evaluate(None, None), None)

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """transformers'; but how often a resumed run saves and evaluates is as its config says now, not as then."""
        found: tuple[int, int] = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)
        return found

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """transformers' epoch; none of it where the evaluation that a resume makes up for ends the run."""
        with contextlib.suppress(_NothingLeft):
            super()._run_epoch(*args, **kwargs)


class StopAndSave(TrainerCallback, ExportableState):
    """Before an update: the save under way is over, or raises. After it: a save or an end that a signal asked for."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.owes_evaluation = False
        self.stops = False

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"owes_evaluation": self.owes_evaluation}}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A save has the time of a forward and backward pass; were it longer, a kill could cost more than one interval.
        self.trainer.saver.wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        signals = self.trainer.signals
        # Every process must leave the loop at the same step, whichever was told to.
        came = ranks.gathered((signals.take_save(), signals.name))
        signals.take_stop(next((name for _, name in came if name), None))
        self.stops = signals.name is not None
        control.should_save |= self.stops or any(asked for asked, _ in came)
        control.should_training_stop |= self.stops


def save_weights(model: Any, folder: Path, **arguments: Any) -> None:
    """Write the adapter (or the whole model without one) as safetensors."""
    if hasattr(model, "peft_config"):
        # "auto" would ask the hub whether the vocabulary grew; extra_modules says what else is trained.
        model.save_pretrained(str(folder), save_embedding_layers=False, **arguments)
    else:
        model.save_pretrained(str(folder))


def _set_balancing_loss(model: Any, args: SFTConfig) -> None:
    """Let TRL (1.16) know whether there are experts to balance, and how many.

    It takes a model for a mixture where its config has `output_router_logits`, which some dense ones have as well
    (Granite 4, Doge), and reads the number from `num_experts` alone.
    """
    config = model.config.get_text_config()
    if not experts.is_mixture(model) and not getattr(config, "is_moe", False):  # `is_moe`: Doge's, without a module
        args.router_aux_loss_coef = 0.0
        return
    if not hasattr(config, "output_router_logits") or hasattr(config, "num_experts"):
        return
    for name in ("num_local_experts", "n_routed_experts", "moe_num_experts"):
        if hasattr(config, name):
            type(config).attribute_map = {**type(config).attribute_map, "num_experts": name}
