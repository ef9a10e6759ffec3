"""What is written down of each step, and who is told: metrics.jsonl, the progress display, the profiler."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from transformers import TrainerCallback

from finetune.errors import NumbersError
from finetune.runtime import ranks
from finetune.storage.files import append_line
from finetune.storage.rundir import RunDirectory
from finetune.training.collator import Idle, Inputs
from finetune.training.guards import Skips, Spikes

if TYPE_CHECKING:
    from finetune.training.trainer import Trainer


class Listener(Protocol):
    """What a progress display is told. Lines are those of metrics.jsonl."""

    def started(self, first_step: int, last_step: int) -> None: ...

    def stepped(self, line: dict[str, Any]) -> None: ...

    def evaluated(self, line: dict[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...


class StepCounts:
    """Counts of the optimizer step under way; tokens stay on the device until the step is reported."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.clear()

    def clear(self) -> None:
        """Forget the micro-batches so far, of a step that begins again; its time goes on."""
        self.micro_batches = 0
        self._places = 0
        self._tokens: Any = 0

    def add(self, inputs: Inputs) -> None:
        self.micro_batches += 1
        if isinstance(inputs, Idle):
            return
        places = inputs["input_ids"].numel()
        self._places += places
        # Packed rows come without a mask: no place is padding.
        self._tokens = self._tokens + (inputs["attention_mask"].sum() if "attention_mask" in inputs else places)

    def take(self) -> dict[str, Any]:
        """Tokens, tokens per second and padding share of the step that ended, in all processes; starts the next one."""
        now = time.perf_counter()
        counts = ranks.gathered((int(self._tokens), self._places))
        tokens, places = (sum(values) for values in zip(*counts, strict=True))
        seconds = now - self._started
        self.clear()
        self._started = now
        return {
            "tokens": tokens,
            "tokens_per_second": round(tokens / seconds, 1),
            "padding_share": round(1 - tokens / places, 4) if places else 0.0,
        }

    def restart_clock(self) -> None:
        """Leave an evaluation or a save out of the next step's time."""
        self._started = time.perf_counter()


class StepRecorder(TrainerCallback):
    """Writes metrics.jsonl, tells the listener, and stops a run whose numbers stay other than finite."""

    def __init__(self, trainer: Trainer, profiler: Any | None) -> None:
        self.trainer = trainer
        self.profiler = profiler
        self._skips = Skips()
        self._spikes = Spikes()

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
            **({"skipped": True} if self.trainer.skipped else {}),
        }
        append_line(self.trainer.run.metrics_file, line)
        self.trainer.listener.stepped(line)
        self._watch(line)

    def _watch(self, line: dict[str, Any]) -> None:
        """Report a skipped update or a spike of the loss; stop where updates will be skipped for good."""
        trainer, step = self.trainer, line["step"]
        if line["loss"] is None:
            # transformers subtracts the sum of the losses from itself, which leaves a NaN as it is for all later steps.
            trainer._tr_loss.zero_()
        scaler = trainer.accelerator.scaler
        for_good = self._skips.see(trainer.skipped, scaler.get_scale() if scaler and trainer.skipped else None)
        if trainer.skipped:
            name = "loss" if line["loss"] is None else "grad_norm"
            in_a_row, total = self._skips.in_a_row, self._skips.total
            trainer.run.event(
                "update_skipped", step=step, reason=f"{name} is not finite", in_a_row=in_a_row, total=total
            )
            trainer.listener.note(f"step {step}: {name} is not a finite number; the update is skipped, {total} so far")
            if for_good:
                self._stop(name, step)
        if (median := self._spikes.see(line["loss"])) is not None:
            trainer.run.event("loss_spike", step=step, loss=line["loss"], median=median)
            trainer.listener.note(
                f"step {step}: the loss of {line['loss']:.3f} is far above the {median:.3f} before it"
            )

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
        if line["eval_loss"] is None:
            self._stop("eval_loss", state.global_step)

    def _stop(self, name: str, step: int) -> NoReturn:
        self.trainer.run.event("stopped", step=step, reason=f"{name} is not finite")
        raise NumbersError(_not_finite(name, step, self.trainer.run))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.profiler:
            self.profiler.stop()


def _number(value: Any) -> float | None:
    """A finite float, or None, which JSON can say; a NaN is never turned into a number."""
    if value is None:
        return None
    value = float(value)
    return value if math.isfinite(value) else None


def _not_finite(name: str, step: int, run: RunDirectory) -> str:
    saved = run.complete_checkpoints()
    where = f"the last checkpoint is {saved[-1]}" if saved else "no checkpoint was written yet (`output.save_every`)"
    return (
        f"{name} is not a finite number at step {step}; {where}. Lower `training.learning_rate`, lengthen "
        "`training.warmup`, or use bf16 instead of fp16"
    )
