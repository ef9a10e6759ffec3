"""A whole run, from top to bottom: from a config to a trained, exported and verified adapter.

Cheap checks come first: the config is already validated; then come tokenizer, architecture and data, then the forecast,
and only then the weights. Each stage passes one value to the next.
"""

from __future__ import annotations

from finetune.config import Config
from finetune.export import publish
from finetune.export.finished_run import FinishedRun
from finetune.model.build import Blueprint, LoadBase
from finetune.recipe import building, inputs, opening, resume, start
from finetune.report import reports
from finetune.report.result import Result
from finetune.report.terminal import Terminal
from finetune.resolve import ThisMachine, resolve
from finetune.runtime import libraries, ranks
from finetune.training import run as training
from finetune.training.callbacks import Callback


@start.releasing()
@libraries.alone()
def train(
    config: Config, *, fresh: bool = False, terminal: Terminal | None = None, callbacks: tuple[Callback, ...] = (),
    load_base: LoadBase = Blueprint.load,
) -> Result:  # fmt: skip
    """Train as `config` says and return the results; a run that was interrupted goes on from its last checkpoint.

    Every rank runs this; rank 0 alone prints, exports and reports. `fresh` moves an earlier run in the same directory
    aside instead. `load_base` may return a base that the process already holds. Raises a FinetuneError for each problem
    that a user can solve.
    """
    terminal = (terminal or Terminal()) if ranks.is_main() else Terminal(quiet=True)
    with start.started(config, terminal, fresh=fresh) as (session, job):
        # Resolve what needs no rows: precision, learning rate, and the kernels that are off.
        run, note = session.run, terminal.note
        job = resolve(job, ThisMachine(session.device), session.earlier, until="machine")
        if resume.is_finished(job):  # which refuses a run that was started with another config
            return Result(run)
        job = resolve(job, until="kernels")

        # Prepare the rows (data/prepare.py), and resolve what they decide: how the weights are held, then the memory.
        job_with_rows, job_inputs = inputs.gather(job, session)
        job = resolve(job_with_rows, until="memory")

        # Open a new run directory, or an earlier one and its last checkpoint.
        opened = opening.open_run(job, job_inputs, session)
        with start.computing(job, opened.run, session) as (monitor, trackers):
            # Build the base, which answers a few questions before training, the adapter on it, and the kernels.
            training_job, answers = building.load_and_adapt(
                job, job_inputs, opened, session, monitor, trackers, callbacks, load_base
            )  # fmt: skip
            training_job, job = building.complete(training_job, job, job_with_rows, session)

            # Train: the optimizer steps, evaluations and checkpoints, and at the end the adapter on disk.
            outcome = training.train(training_job)
            answers.after(training_job.model)
            trackers.answers(opened.run)
            del training_job

        # Publish, and report.
        if ranks.is_main():
            steps = {"step": outcome.steps, "best_step": outcome.best_step}
            opening.record_end(job, session, monitor.peaks, **steps)
            if job.config.output.merge and job.config.adapter.kind == "lora":
                publish.merge_locked(FinishedRun(run, job.config), terminal, note)
            reports.write(run, end=True)
            run.event("finished", **steps)
            terminal.finished(run)
    return Result(run)
