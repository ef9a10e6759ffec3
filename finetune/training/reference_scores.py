"""The reference of preference objectives: log-probabilities of the rows under the model that training starts from.

They are computed once, before the first step, in batches of rows of similar length, and become values of the rows. They
are kept in the run directory part by part, so that a pass that was killed goes on, and in this user's cache for other
runs on the same rows and the same starting model.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from finetune.config import AdapterSection, TrainingSection
from finetune.data.batching import (
    LargestBatch,
    MicroBatching,
    Sizes,
    longest_first,
    micro_batches,
    whole_batch,
    worst_batches,
)
from finetune.data.encoded import columns
from finetune.data.prepare import Prepared
from finetune.errors import ArtifactError, NumbersError
from finetune.model.base import base_dtype
from finetune.model.source.catalog import attention_of
from finetune.objectives import Loss, by_sequence, scored
from finetune.objectives.preference import reference_column
from finetune.objectives.starting_model import adapter_off
from finetune.runtime import ranks
from finetune.runtime.randomness import RandomState
from finetune.storage import private
from finetune.storage.files import write_bytes
from finetune.training import oom_retry
from finetune.training.batches import PreparedRows
from finetune.training.collator import Inputs, StepCollator, passes, row_count
from finetune.training.eval_loss import DoesNotFit, EvalLoss, EvaluationReport, summed_loss
from finetune.training.step import Step

if TYPE_CHECKING:
    from finetune.training.job import TrainingJob
    from finetune.training.loop import Loop

ReferenceScores: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
"""Summed log-probabilities (rows, segments), of the training rows and then of the evaluation set; NaN: to be scored."""

_SplitReport: TypeAlias = EvaluationReport | oom_retry.Report
_Split: TypeAlias = tuple[Any, _SplitReport]
"""A data set, and where it is reported that memory ran out for some of its rows."""

_FOLDER = "references"
_KEPT_EVERY_SECONDS = 10  # at most this much work is lost in a kill
_SHOWN_EVERY_SECONDS = 60
_WINDOW_ROWS = 4096  # sorted by length, rows are divided into batches one window at a time
_HASH = hashlib.sha256().digest_size
_MOST_BYTES = 2**32


def batching(way: MicroBatching, sizes: Sizes, step_rows: int) -> MicroBatching:
    """How rows are batched to be scored, if steps of `step_rows` a process are divided by `way`; `sizes` are those of
    the training rows.

    As many positions at a time as the largest micro-batch of a step has, which take less memory without a backward
    pass.
    """
    tokens = max(batch.positions for batch in worst_batches(sizes, way, step_rows, "the data's rows"))
    return replace(way, rows=1, tokens=tokens, layout=replace(way.layout, values=()))


def batching_of(steps: PreparedRows) -> MicroBatching:
    """`batching` of the rows of a source of steps."""
    way = steps.collate.way
    return batching(way, Sizes.of(steps.rows, way), max(1, steps.batch_size // steps.collate.rank_groups))


def batches(lengths: Sequence[int], way: MicroBatching) -> Iterator[list[int]]:
    """The indices of the rows of each batch, the longest first."""
    order = longest_first(lengths)
    for at in range(0, len(order), _WINDOW_ROWS):
        window = order[at : at + _WINDOW_ROWS]
        for batch in micro_batches([lengths[row] for row in window], way):
            yield [window[row] for row in batch]


def largest_batch(way: MicroBatching, data: Prepared, step_rows: int) -> LargestBatch:
    """The largest batch that is scored, which is the first one; see `batching`."""
    sizes = Sizes.of(data.train, way)
    way = batching(way, sizes, step_rows)
    return whole_batch(sizes.some(next(batches(sizes.lengths, way))), way, "the data's rows")


def positions(way: MicroBatching, data: Prepared, step_rows: int) -> int:
    """Positions, padding included, in which all rows are scored, see `batching`; of a segment that goes through the
    model apart, not counted again.
    """
    way, total = batching(way, Sizes.of(data.train, way), step_rows), 0
    for rows in (data.train, data.eval):
        lengths = Sizes.of(rows, way).lengths if rows else ()
        for batch in batches(lengths, way):
            own = [lengths[row] for row in batch]
            total += sum(own) if way.packed else max(own) * len(own) * way.layout.together
    return total


def scoring(into: list[torch.Tensor]) -> Loss:
    """A loss that appends the summed log-probabilities (sequences,), float32, of each batch `into` a list."""

    def score(model: Any, batch: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        sums = by_sequence(scored(model, batch).log_probs, batch)
        into.append(sums)
        return sums.sum(), sums.new_tensor(len(sums))

    return score


def starting(model: Any, adapter: AdapterSection) -> contextlib.AbstractContextManager[None]:
    """A context in which `model`, not yet trained, is the starting model, and does not depend on an adapter's seed."""
    return adapter_off(model) if adapter.starts_at_zero else contextlib.nullcontext()


def in_step_share(training: TrainingSection, data: Prepared | None) -> float:
    """The rows that steps and evaluations would score, over the number of rows; without data, no evaluation counts."""
    if data is None:
        return 0.0 if training.max_steps else training.epochs
    trained, held_out = data.train_counts.rows, data.eval_counts.rows if data.eval_counts else 0
    steps = training.max_steps or math.ceil(training.epochs * math.ceil(trained / training.batch_size))
    evaluations = 2 + (steps - 1) // (training.eval_every or steps)
    rows = steps * min(training.batch_size, trained) + evaluations * held_out
    return rows / (trained + held_out)


def add(job: TrainingJob, loop: Loop) -> None:
    """Give the prepared rows of the loop their log-probabilities under the model, from which training starts.

    Does nothing if the objective needs no reference, or each step computes it. Raises NumbersError for a
    log-probability that is not finite, ArtifactError if the starting model is gone, Terminated or KeyboardInterrupt
    after a signal, and torch's out-of-memory error for a single row that does not fit.
    """
    steps, evaluation = loop.steps, loop.evaluation
    # Another source of steps gives its rows what they need by itself.
    if not (loop.step.objective.reference and job.config.caches_reference and isinstance(steps, PreparedRows)):
        return
    splits: list[_Split] = [(steps.rows, loop.retry.report)]
    if isinstance(evaluation, EvalLoss):
        splits.append((evaluation.rows, evaluation.report))
    segments = steps.collate.way.layout.segments
    files = _Files(job, (sum(len(rows) for rows, _ in splits), len(segments)))
    scores = ranks.main_does(files.read)
    if np.isnan(scores).any():
        _score(job, loop.step, splits, batching_of(steps), scores, files)

    with_scores, first = [], 0
    for rows, _ in splits:
        own, first = scores[first : first + len(rows)], first + len(rows)
        finite = np.isfinite(own).all(axis=1)
        if not finite.all():
            row = rows[int(finite.argmin())]["place"]
            raise NumbersError(f"{row}: its log-probability under the starting model is not finite; check the base")
        for name, values in zip(segments, own.T, strict=True):
            rows = rows.add_column(reference_column(name), values)
        with_scores.append(rows)
    loop.steps = replace(steps, rows=with_scores[0])
    if isinstance(evaluation, EvalLoss):
        evaluation.rows = with_scores[1]


def _score(
    job: TrainingJob, step: Step, splits: Sequence[_Split], way: MicroBatching, scores: ReferenceScores, files: _Files
) -> None:
    """Fill in the rows of `scores` that are NaN, and keep what is done. The random state is preserved."""
    run, note = job.outlets.run, job.outlets.listener.note
    if job.resume_from and job.config.adapter.start_from:
        raise ArtifactError(
            f"{run.reference_file}: the reference that this run trains against is missing or damaged, and its "
            "adapter is no longer the one it started from; restore the file, or use --fresh to start over"
        )
    before, started = RandomState(), time.perf_counter()
    missing = _unscored(scores)
    note(f"scoring {missing:,} rows with the starting model, once before the first step")
    kept = shown = started
    with starting(step.model, job.config.adapter):
        for rows, values, signal in _passes(job, step, splits, way, scores):
            scores[rows] = values
            now = time.perf_counter()
            if now - kept > _KEPT_EVERY_SECONDS or signal:
                files.keep(scores)
                kept = now
            if signal:
                job.process.signals.take_stop(signal)
                job.process.signals.raise_if_received("the rows scored so far are kept")
            if now - shown > _SHOWN_EVERY_SECONDS:
                left = _unscored(scores)
                minutes = (now - started) / (missing - left) * left / 60
                note(f"{missing - left:,} of {missing:,} rows are scored, {minutes:.0f} minutes left")
                shown = now
    before.restore()
    files.finish(scores)
    seconds, peak = round(time.perf_counter() - started, 3), job.process.monitor.take("reference")
    run.event("reference_scored", rows=missing, seconds=seconds, memory={"reference": peak})


def _passes(
    job: TrainingJob, step: Step, splits: Sequence[_Split], way: MicroBatching, scores: ReferenceScores
) -> Iterator[tuple[list[int], ReferenceScores, str | None]]:
    """Rows that have a NaN, their scores, and the signal that a rank has received, if any; a batch for each rank.

    All ranks get the scores of all.
    """
    collate, limit, first = StepCollator(way, job.tokenizer.pad_token_id), oom_retry.Limit(), 0
    for rows, report in splits:
        inputs, lengths = rows.select_columns(columns(rows)), Sizes.of(rows, way).lengths
        left = [batch for batch in batches(lengths, way) if np.isnan(scores[first:][batch]).any()]
        for at in range(0, len(left), ranks.world_size()):
            # A rank without a batch repeats the last one, as ranks that share a model pass through it together.
            mine = left[min(at + ranks.rank(), len(left) - 1)]
            own = _one(step, collate.micro_batch([inputs[row] for row in mine]), limit, report)
            taken, values, signals = zip(*ranks.gathered((mine, own, job.process.signals.name)), strict=True)
            yield (
                [first + row for batch in taken for row in batch],
                np.concatenate(values),
                next(filter(None, signals), None),
            )
        first += len(rows)


def _one(step: Step, micro_batch: Inputs, limit: oom_retry.Limit, report: _SplitReport) -> ReferenceScores:
    """The scores (rows, segments) of a micro-batch, which is split if it does not fit."""
    monitor, scores = step.monitor, list[torch.Tensor]()
    # Tensors are counted in the first batch, which is the largest.
    counted = contextlib.nullcontext() if "reference" in monitor.peaks else monitor.counting_tensors()
    with counted, monitor.phase("reference"):
        for inputs in passes(micro_batch):
            sums: list[torch.Tensor] = []
            try:
                summed_loss(
                    step.model, [[inputs]], limit, report.split, precision=step.precision, masked=step.masked,
                    repeatable=step.engine.repeatable, loss=scoring(sums),
                )  # fmt: skip
            except DoesNotFit as row:
                raise report.not_repeatable(torch.OutOfMemoryError(str(row)), row.inputs) from None
            scores.append(torch.cat(sums).view(row_count(inputs), -1))
        return torch.cat(scores, 1).cpu().numpy()


def _unscored(scores: ReferenceScores) -> int:
    return int(np.isnan(scores).any(axis=1).sum())


@dataclass(frozen=True)
class _Files:
    """The scores, of this `shape`, in the run directory and, for other runs, in this user's cache; for rank 0 alone.

    A file is the key of what the scores follow from, a hash of key and scores, and the scores: float32, row by row.
    """

    job: TrainingJob
    shape: tuple[int, int]

    def read(self) -> ReferenceScores:
        """Read the known scores; the rest is NaN. A resumed run keeps its own, whatever the key."""
        job, known = self.job, np.full(self.shape, np.nan, np.float32)
        for file in (job.outlets.run.reference_file, self._cached):
            content = None if file is None else private.read(file, _MOST_BYTES)
            if content is None:
                continue
            key, digest, values = content[:_HASH], content[_HASH : 2 * _HASH], content[2 * _HASH :]
            if digest != _digest(key, values):
                job.outlets.listener.note(f"{file} is damaged: what it has of the reference is computed again")
            elif len(values) == known.nbytes and (key == self._key or (job.resume_from and file != self._cached)):
                scores = np.frombuffer(values, known.dtype).reshape(self.shape).copy()
                known = min(known, scores, key=_unscored)
                if not _unscored(known):
                    break
        if not _unscored(known):
            job.outlets.run.event("reference_found", rows=len(known), file=str(file))
            self.keep(known)
        return known

    def keep(self, scores: ReferenceScores) -> None:
        """Write what is scored into the run directory. Raises MachineError."""
        if ranks.is_main():
            write_bytes(self.job.outlets.run.reference_file, self._content(scores))

    def finish(self, scores: ReferenceScores) -> None:
        """Write the scores of all rows into the run directory and, if they are finite, into the cache if possible."""
        self.keep(scores)
        if ranks.is_main() and self._cached and np.isfinite(scores).all():
            with contextlib.suppress(OSError):
                private.write(self._cached, self._content(scores))

    def _content(self, scores: ReferenceScores) -> bytes:
        values = scores.tobytes()
        return self._key + _digest(self._key, values) + values

    @functools.cached_property
    def _cached(self) -> Path | None:
        """The file in the cache; None for a base that is known by name only."""
        if self.job.provenance["base"] is None or self.job.config.model.trust_remote_code:
            return None
        return private.cache_folder() / _FOLDER / self._key.hex()

    @functools.cached_property
    def _key(self) -> bytes:
        """A hash of all that the scores follow from: not of an adapter that starts at zero, nor of its seed."""
        config, model, made = self.job.config, self.job.model, self.job.provenance
        start: list[Any] = []
        if not config.adapter.starts_at_zero:
            events = [event for event in self.job.outlets.run.events() if event["event"] == "started"]
            # The adapter that the run started from, as its first event has it.
            adapter = events[-1]["start_from"]["sha256"] if config.adapter.start_from else None
            start = [config.adapter.model_dump(exclude={"start_from"}), adapter]
            start += [config.training.seed] if config.adapter.init != "default" else []
        dtype = base_dtype(config.adapter, config.training.precision)
        parts = [
            made["data"], made["base"], made["packages"], start, config.quantization.model_dump(), str(dtype),
            attention_of(model.config.get_text_config()), config.training.precision, config.fused,
            config.kernels.compile, sorted(self.job.kernels_off), self.job.process.device.type,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def _digest(key: bytes, values: bytes) -> bytes:
    return hashlib.sha256(key + values).digest()
