"""Records and reports what a run does when memory runs out, and saves its state before it gives up."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from finetune.config import Config
from finetune.data.prepare import Prepared
from finetune.errors import FinetuneError, MachineError
from finetune.runtime import ranks
from finetune.runtime.out_of_memory import StepOutOfMemoryError, reason
from finetune.storage.rundir import RunDirectory
from finetune.training import oom_retry
from finetune.training.checkpoints import Checkpoints
from finetune.training.collator import Inputs, micro_batching, row_count, tokens_a_row
from finetune.training.progress import Progress
from finetune.training.recorder import Listener


@dataclass
class OutOfMemoryReport:
    """The reports that `oom_retry.Report` describes, as events of the run and notes to the user."""

    config: Config
    run: RunDirectory
    listener: Listener
    progress: Progress
    checkpoints: Checkpoints
    data: Prepared
    device: torch.device

    def split(self, inputs: Inputs, **fields: Any) -> None:
        rows, tokens = row_count(inputs), inputs["input_ids"].shape[1]
        packed = "packed into" if "cu_seq_lens_q" in inputs else "of"
        where = f" on rank {fields['rank']}" if "rank" in fields else ""
        self.run.event("micro_batch_split", step=self.progress.step + 1, rows=rows, tokens=tokens, **fields)
        self.listener.note(
            f"out of memory{where} at {rows} rows {packed} {tokens} tokens: split in two, as are all of this size from "
            "now on"
        )

    def updated_again(self) -> None:
        self.run.event("update_retried", step=self.progress.step + 1)

    def recompute_more(self, inputs: Inputs, **rank: int) -> None:
        rows, tokens = row_count(inputs), tokens_a_row(inputs)
        where = f" on rank {rank['rank']}" if rank else ""
        self.run.event("recomputes_more", step=self.progress.step + 1, rows=rows, tokens=tokens, **rank)
        self.listener.note(
            f"out of memory{where} at {rows} rows of {tokens} tokens, which recomputed less than longer ones: from now "
            "on all recompute as much as the longest"
        )

    def not_repeatable(self, error: BaseException, inputs: Inputs) -> BaseException:
        return self.lower_micro_batch(error, inputs, self.data.train)

    def lower_micro_batch(self, error: BaseException, inputs: Inputs, rows: Any) -> BaseException:
        """Record a smaller micro-batch than `inputs`, of `rows`, for the next start; return the error to end with."""
        rank = {"rank": ranks.rank()} if ranks.world_size() > 1 else {}
        share = self.config.training.batch_size // self.config.distributed.shares(ranks.world_size())
        lowered = oom_retry.smaller(inputs, share, by_tokens=bool(micro_batching(self.config).tokens))
        if not lowered:
            self._name_row(error, rows, inputs, **rank)
            return error
        count, tokens = row_count(inputs), tokens_a_row(inputs)
        try:
            self.run.event(
                "micro_batch_lowered", step=self.progress.step + 1, settings=oom_retry.settings(self.config),
                rank=ranks.rank(), rows=count, tokens=tokens, lowered=lowered,
            )  # fmt: skip
        except MachineError as unrecorded:
            error.add_note(f"The same command cannot go on with smaller micro-batches: {unrecorded}.")
            return error
        where = f" on rank {ranks.rank()}" if rank else ""
        self.listener.note(
            f"out of memory{where} at {count} rows of {tokens} tokens: this step cannot be repeated, so the run has "
            f"{oom_retry.named(lowered)} from its next start on"
        )
        next_start = f"Start the same again: it goes on with {oom_retry.named(lowered)}."
        ending = StepOutOfMemoryError(reason(error), next_start=next_start)
        ending.add_note(next_start)
        return ending

    def _name_row(self, error: BaseException, rows: Any, inputs: Inputs, **rank: int) -> None:
        location = oom_retry.location_of(rows, inputs)
        tokens = inputs["input_ids"].numel()
        with contextlib.suppress(MachineError):  # a disk that is full as well must not hide why the run ends
            self.run.event("row_does_not_fit", step=self.progress.step + 1, place=location, tokens=tokens, **rank)
        where = f", on rank {rank['rank']}" if rank else ""
        error.add_note(f"The row that does not fit, alone in its micro-batch{where}: {location}, {tokens} tokens.")

    def give_up(self, error: BaseException, inputs: Inputs, **rank: int) -> None:
        """Add a note to `error` that names the row, and save the state of the last completed step."""
        step = self.progress.step
        self._name_row(error, self.data.train, inputs, **rank)
        if self.device.type == "cpu":  # saving needs host memory; GPU memory is kept for the allocator's snapshot
            oom_retry.release(error)
        try:
            ranks.main_does(self.checkpoints.wait)
            if step == 0 or ranks.main_does(lambda: self.checkpoints.holds(self.progress)):
                return
            with ranks.agreeing():  # memory may run out again, on the rank that copies the weights
                self.checkpoints.save(self.progress)
            ranks.main_does(self.checkpoints.wait)
        except (FinetuneError, MemoryError, OSError, RuntimeError) as unsaved:
            error.add_note(f"Step {step} could not be saved: {unsaved}.")
        else:
            error.add_note(f"Step {step} was saved.")


@dataclass
class InEvaluation:
    """The reports of an evaluation during training, as `eval_loss.EvaluationReport` describes them."""

    report: OutOfMemoryReport

    def split(self, inputs: Inputs) -> None:
        self.report.split(inputs, evaluation=True)

    def skip(self, inputs: Inputs) -> None:
        report, tokens = self.report, inputs["input_ids"].numel()
        location = oom_retry.location_of(report.data.eval, inputs)
        report.run.event("evaluation_skipped", step=report.progress.step, place=location, tokens=tokens)
        report.listener.note(f"no evaluation: out of memory at {location} alone, {tokens} tokens; training continues")

    def not_repeatable(self, error: BaseException, inputs: Inputs) -> BaseException:
        return self.report.lower_micro_batch(error, inputs, self.report.data.eval)
