"""TRL's SFTTrainer, with what a run of ours adds around its loop: measured phases, our row order, our checkpoints.

The loop, the loss (per token, in tiles, without the full logits), accumulation and resume are TRL's, accelerate's
and transformers'. Nothing here changes a number of the step: a test holds its losses against a plain script's.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTConfig, SFTTrainer

from finetune.config import AdapterSection, Config
from finetune.data.batching import RowOrder
from finetune.errors import MachineError, NumbersError
from finetune.memory.monitor import LeakWatch, Monitor, Peak
from finetune.model.adapter import set_trained_dtype
from finetune.rundir import RunDirectory, append_line, checkpoint_step, staged
from finetune.training import optimizers, tracking
from finetune.training.evaluation import summed_loss
from finetune.training.schedules import SCHEDULES

# transformers counts evaluations and saves in steps; "only at the end" is a step that is never reached.
_NEVER = 10**9


class Listener(Protocol):
    """What a progress display is told. Lines are those of metrics.jsonl."""

    def started(self, first_step: int, last_step: int) -> None: ...

    def stepped(self, line: dict[str, Any]) -> None: ...

    def evaluated(self, line: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...


def arguments(config: Config, run: RunDirectory, *, evaluates: bool, resuming: bool, device: torch.device) -> SFTConfig:
    """The SFTConfig that `config` stands for.

    Raises MachineError where the device cannot do the precision, or a tracker is not installed.
    """
    training, optimizer = config.training, config.optimizer
    _check_precision(training.precision, device)
    reports = tracking.check(config.tracking)
    if "tensorboard" in reports:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run.path / "tensorboard"))
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    rows_per_pass = training.micro_batch * processes
    if training.batch_size % rows_per_pass:
        raise MachineError(
            f"`training.batch_size` {training.batch_size} cannot be shared by {processes} processes with "
            f"`training.micro_batch` {training.micro_batch}; make it a multiple of {rows_per_pass}"
        )
    schedule = SCHEDULES[training.schedule]
    return SFTConfig(
        output_dir=str(run.path),
        run_name=run.path.name,
        use_cpu=device.type == "cpu",
        per_device_train_batch_size=training.micro_batch,
        per_device_eval_batch_size=training.micro_batch,
        gradient_accumulation_steps=training.batch_size // rows_per_pass,
        num_train_epochs=training.epochs,
        max_steps=training.max_steps or -1,
        learning_rate=training.learning_rate,
        lr_scheduler_type=schedule.transformers_name,
        lr_scheduler_kwargs=dict(schedule.arguments) or None,
        warmup_steps=training.warmup,
        max_grad_norm=training.max_grad_norm,
        weight_decay=optimizer.weight_decay,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        seed=training.seed,
        # Data and checkpointing are settled before the trainer sees them.
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False,
        dataloader_pin_memory=device.type == "cuda",
        # One line per step, and a NaN that shows.
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=reports or "none",
        eval_strategy="steps" if evaluates else "no",
        eval_steps=training.eval_every or _NEVER,
        eval_on_start=evaluates and not resuming,
        prediction_loss_only=True,
        metric_for_best_model="eval_loss" if evaluates else None,
        greater_is_better=False if evaluates else None,
        save_strategy="steps",
        save_steps=config.output.save_every or _NEVER,
        save_only_model=False,
    )


def _check_precision(precision: str, device: torch.device) -> None:
    if precision == "fp16" and device.type != "cuda":
        raise MachineError("`training.precision: fp16` scales the loss on a CUDA device; set bf16 or fp32 here")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise MachineError(f"{torch.cuda.get_device_name()} has no bfloat16; set `training.precision: fp16`")


class Trainer(SFTTrainer):
    """SFTTrainer that measures the memory of each phase and writes the run directory.

    `order` gives the training rows' order; `run`, `monitor` and `listener` receive what happens.
    """

    def __init__(
        self,
        *,
        order: RowOrder,
        adapter: AdapterSection,
        run: RunDirectory,
        monitor: Monitor,
        listener: Listener,
        keep: int,
        save_best: bool,
        profiler: Any | None = None,
        **arguments: Any,
    ) -> None:
        self.order = order
        self.run = run
        self.monitor = monitor
        self.listener = listener
        self.keep = keep
        self.save_best = save_best
        self.step_counts = StepCounts()
        self.leaks = LeakWatch()
        super().__init__(**arguments)
        set_trained_dtype(self.model, adapter)  # TRL cast the adapter; see there
        self.callback_handler.callbacks = [
            callback for callback in self.callback_handler.callbacks if type(callback).__name__ != "PrinterCallback"
        ]
        self.add_callback(StepRecorder(self, profiler))

    # -- the step, phase by phase ----------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        self.step_counts.add(inputs)
        self.monitor.enter("forward")
        try:
            loss = super().training_step(*args, **kwargs)
        finally:
            peak = self.monitor.leave()
        self._watch_for_leaks(inputs, peak)
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.model.training:
            self.monitor.enter("backward")
        return loss

    def _watch_for_leaks(self, inputs: dict[str, torch.Tensor], peak: Peak) -> None:
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
        with self.monitor.phase("evaluation"):
            metrics = super().evaluate(*args, **kwargs)
        self.step_counts.restart_clock()
        return metrics

    def evaluation_loop(
        self, dataloader: Any, description: str, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        self.callback_handler.eval_dataloader = dataloader
        sums = self.accelerator.reduce(summed_loss(self.model, dataloader))
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

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        best = super()._determine_best_metric(metrics, trial)
        if best and self.save_best:
            self.control.should_save = True
        return best

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        started = time.perf_counter()
        self.monitor.enter("save")
        try:
            with staged(self.run.checkpoint(step)) as folder:
                save_weights(self.model, folder)
                self._save_optimizer_and_scheduler(str(folder))
                self._save_scaler(str(folder))
                self._save_rng_state(str(folder))
                self._export_callback_state()
                self.state.save_to_json(str(folder / "trainer_state.json"))
        except OSError as error:
            raise MachineError(
                f"checkpoint at step {step} could not be written to {self.run.checkpoints}: {error.strerror or error}; "
                "earlier checkpoints are untouched"
            ) from None
        finally:
            peak = self.monitor.leave()
        seconds = round(time.perf_counter() - started, 3)
        self.monitor.take("save")
        self.run.event("saved", step=step, seconds=seconds, memory=peak)
        self._prune()
        self.step_counts.restart_clock()

    def _export_callback_state(self) -> None:
        """Put counters such as early stopping's into the state that is saved (as Trainer._save_checkpoint does)."""
        from transformers.trainer_callback import ExportableState

        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks[type(callback).__name__] = callback.state()

    def _prune(self) -> None:
        """Remove the oldest checkpoints over `keep`, never the best one and never the newest."""
        checkpoints = self.run.complete_checkpoints()
        for path in checkpoints[:-1]:
            if len(self.run.complete_checkpoints()) <= self.keep:
                break
            if checkpoint_step(path) != self.state.best_global_step:
                shutil.rmtree(path)

    def best_checkpoint(self) -> Path | None:
        """The checkpoint of the best evaluation, where it is on disk and not simply the last one."""
        best = self.state.best_global_step
        if not best or best == self.state.global_step:
            return None
        path = self.run.checkpoint(best)
        return path if path.is_dir() else None

    def load_weights(self, checkpoint: Path) -> None:
        """Put a checkpoint's trained weights into the model."""
        self._load_from_checkpoint(str(checkpoint))


def save_weights(model: Any, folder: Path, **arguments: Any) -> None:
    """Write the adapter (or the whole model without one) as safetensors."""
    if hasattr(model, "peft_config"):
        # "auto" would ask the hub whether the vocabulary grew; extra_modules says what else is trained.
        model.save_pretrained(str(folder), save_embedding_layers=False, **arguments)
    else:
        model.save_pretrained(str(folder))


class StepCounts:
    """Counts of the optimizer step under way; tokens stay on the device until the step is reported."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self._places = 0
        self._tokens: Any = 0
        self._started = time.perf_counter()

    def add(self, inputs: dict[str, torch.Tensor]) -> None:
        mask = inputs["attention_mask"]
        self.micro_batches += 1
        self._places += mask.numel()
        self._tokens = self._tokens + mask.sum()

    def take(self) -> dict[str, Any]:
        """Tokens, tokens per second and padding share of the step that ended; starts the next one."""
        now = time.perf_counter()
        tokens, seconds, places = int(self._tokens), now - self._started, self._places
        self.__init__()  # type: ignore[misc]
        return {
            "tokens": tokens,
            "tokens_per_second": round(tokens / seconds, 1),
            "padding_share": round(1 - tokens / places, 4) if places else 0.0,
        }

    def restart_clock(self) -> None:
        """Leave an evaluation or a save out of the next step's time."""
        self._started = time.perf_counter()


class StepRecorder(TrainerCallback):
    """Writes metrics.jsonl, tells the listener, and stops a run whose loss is no longer a number."""

    def __init__(self, trainer: Trainer, profiler: Any | None) -> None:
        self.trainer = trainer
        self.profiler = profiler

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.listener.started(state.global_step, state.max_steps)
        self.trainer.step_counts.restart_clock()
        if self.profiler:
            self.profiler.start()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.order.set_epoch(math.floor(state.epoch or 0))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.monitor.enter("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.monitor.leave()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.profiler:
            self.profiler.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        line = {
            "step": state.global_step,
            "loss": _number(logs["loss"]),
            "learning_rate": logs["learning_rate"],
            "grad_norm": _number(logs.get("grad_norm")),
            "epoch": round(state.epoch, 4),
            **self.trainer.step_counts.take(),
            "memory": self.trainer.monitor.take_step(),
        }
        append_line(self.trainer.run.metrics_file, line)
        self.trainer.listener.stepped(line)
        if line["loss"] is None:
            self.trainer.run.event("stopped", step=state.global_step, reason="loss is not finite")
            raise NumbersError(_not_finite(state.global_step, self.trainer.run))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **kwargs: Any) -> None:
        # Called inside `evaluate`, whose phase is still open.
        line = {
            "step": state.global_step,
            "eval_loss": _number(metrics["eval_loss"]),
            "memory": {"evaluation": self.trainer.monitor.leave()},
        }
        self.trainer.monitor.take("evaluation")
        append_line(self.trainer.run.metrics_file, line)
        self.trainer.listener.evaluated(line)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.profiler:
            self.profiler.stop()


def _number(value: Any) -> float | None:
    """A finite float, or None, which JSON can say; a NaN is never turned into a number."""
    if value is None:
        return None
    value = float(value)
    return value if math.isfinite(value) else None


def _not_finite(step: int, run: RunDirectory) -> str:
    saved = run.complete_checkpoints()
    where = f"the last checkpoint is {saved[-1]}" if saved else "no checkpoint was written yet (`output.save_every`)"
    return (
        f"the loss is not a finite number at step {step}; {where}. Lower `training.learning_rate`, lengthen "
        "`training.warmup`, or use bf16 instead of fp16"
    )


def early_stopping(patience: int | None) -> list[TrainerCallback]:
    """transformers' callback for `training.early_stopping`, or nothing."""
    from transformers import EarlyStoppingCallback

    return [EarlyStoppingCallback(early_stopping_patience=patience)] if patience else []


__all__ = ["Listener", "Trainer", "arguments", "early_stopping", "optimizers", "save_weights"]
