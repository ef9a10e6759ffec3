"""A whole run, from top to bottom: from a config to a trained, exported and verified adapter.

Cheap checks come first: the config is already validated; then come tokenizer, architecture and data, then the forecast,
and only then the weights. Each stage passes one value to the next.
"""

from __future__ import annotations

from finetune.config import Config
from finetune.export import publish
from finetune.model.build import Blueprint, LoadBase
from finetune.recipe import building, inputs, opening, resume, start
from finetune.report import reports
from finetune.report.result import Result
from finetune.report.terminal import Terminal
from finetune.resolve import ThisMachine, resolve
from finetune.runtime import libraries, ranks
from finetune.training import run as training
from finetune.training import sample_answers
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
        # Resolve: every `auto` gets a value, and what cannot be as it was asked for is refused.
        run, note = session.run, terminal.note
        job = resolve(job, ThisMachine(session.device), session.earlier, until="machine")
        if resume.is_finished(job):
            return Result(run)
        prepared, read = inputs.gather(resolve(job, until="kernels"), session)
        job = resolve(prepared, until="memory")

        # Open a new run directory, or an earlier one and its last checkpoint.
        opened = opening.open_run(job, read, session)
        with start.computing(job, opened.run, session) as (monitor, trackers):
            # Build the base, which is asked a few questions, and the adapter on it.
            built, asked = building.load_and_adapt(
                job, read, opened, session, monitor, trackers, callbacks, load_base
            )  # fmt: skip
            built, job = building.complete(built, job, prepared, session)

            # Train: the optimizer steps, evaluations and checkpoints, and at the end the adapter on disk.
            ended = training.train(built)
            sample_answers.after(built.model, built.tokenizer, job.config, opened.run, asked)
            trackers.answers(opened.run)
            del built

        # Publish, and report.
        if ranks.is_main():
            steps = {"step": ended.steps, "best_step": ended.best_step}
            opening.record_end(job, session, monitor.run, **steps)
            if job.config.output.merge and job.config.adapter.kind == "lora":
                publish.merge_locked(run, job.config, terminal, note)
            reports.write(run, end=True)
            run.event("finished", **steps)
            terminal.finished(run)
    return Result(run)
