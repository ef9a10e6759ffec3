"""A whole run, from top to bottom: from a config to a trained, exported and verified adapter.

Cheap checks come first: the config is already validated; then come tokenizer, architecture and data, then the forecast,
and only then the weights. Each stage passes one value to the next.
"""

from __future__ import annotations

from finetune.config import Config
from finetune.export import publish
from finetune.forecast import measured
from finetune.lifecycle import opening, outcome, preparation, replan, resume, session
from finetune.measure.monitor import Monitor, meter_for
from finetune.model import build
from finetune.model.adapters import adapter
from finetune.model.resident import ResidentBase
from finetune.report import page
from finetune.report.result import Result
from finetune.report.terminal import Terminal
from finetune.resolve import ThisMachine, resolve
from finetune.runtime import libraries, ranks
from finetune.storage.rundir import RunDirectory
from finetune.training import learning_rate, sample_answers, strategies
from finetune.training import run as training
from finetune.training.callbacks import Callback
from finetune.training.checks import check_shares
from finetune.training.tracking import Trackers


@session.releasing()
@libraries.alone()
def train(
    config: Config, *, fresh: bool = False, terminal: Terminal | None = None, callbacks: tuple[Callback, ...] = (),
    resident: ResidentBase | None = None,
) -> Result:  # fmt: skip
    """Train as `config` says and return the results; a run that was interrupted goes on from its last checkpoint.

    Every rank runs this; rank 0 alone prints, exports and reports. `fresh` moves an earlier run in the same directory
    aside instead. `resident` keeps the base of a single process in memory for its next run. Raises a FinetuneError for
    each problem that a user can solve.
    """
    terminal = (terminal or Terminal()) if ranks.is_main() else Terminal(quiet=True)
    with ranks.refusing():
        job = resolve(config, until="base", say=terminal.resolved)
        check_shares(job.config.training, job.config.distributed)
    run = RunDirectory(config.output.dir or "runs/unnamed")
    with session.opened(job.config.model, run, terminal) as (device, signals, lock):
        # Resolve: every `auto` gets a value, and what was asked for and cannot be is refused.
        here, earlier = ThisMachine(device), None if fresh else run
        job = resolve(job, here, earlier, until="machine")
        if resume.is_finished(job.config, run, terminal.note, fresh=fresh):
            return Result(run)
        job = resolve(job, until="kernels")
        prepared, inputs = preparation.gather(job, run, device, lock, terminal, fresh=fresh)
        job = resolve(prepared, until="memory")
        config, forecast = job.config, job.forecast

        # Open: a new run directory, or an earlier one and its last checkpoint. Ranks have one each, below rank 0's.
        own, start = opening.open_run(config, run, inputs, forecast, lock, terminal.note, fresh=fresh)
        terminal.opened(
            own.path, config, device, inputs.data, inputs.attention, forecast,
            ranks.world_size(), inputs.mixture,
        )  # fmt: skip

        monitor = Monitor(meter_for(device.type), resident.weights() if resident else ())
        tracked = Trackers(config.tracking, own, config, terminal.note)
        with tracked, session.computing(config, own, monitor, device):
            # Build: the base, which is asked a few questions, and the adapter on it.
            placement = strategies.placement(config.distributed, device)
            with monitor.phase("load"):
                load = inputs.blueprint.load
                base = resident.load(inputs.blueprint, device) if resident else load(device, placement)
            provenance = opening.confirm_base(config, own, inputs, start, base, terminal.note)
            monitor.take_step()  # loading is reported once, not with the first step
            known = resident.computed if resident else None
            answered = sample_answers.before(base, inputs.tokenizer, config, own, terminal.note, known)
            model = build.trainable(
                base, config.model, resume.to_build(config.adapter, resumed=bool(start.checkpoint)), config.memory,
                seed=config.training.seed, device_type=device.type, placement=placement,
            )  # fmt: skip
            capacity = learning_rate.capacity(config, model, inputs.data.train_counts)
            terminal.built(model, adapter.left_out(base, config.adapter), capacity)

            # Train: the optimizer steps, evaluations and checkpoints, and at the end the adapter on disk.
            trained = training.TrainingJob(
                config, inputs.blueprint.architecture, model, inputs.tokenizer, inputs.data, own, monitor,
                terminal, tracked, device=device, signals=signals, provenance=provenance, resume_from=start.checkpoint,
                by_length=forecast.by_length if forecast else (), callbacks=callbacks,
                kernels_off=job.kernels_off, resident=resident,
            )  # fmt: skip
            trained = training.complete(trained)
            measured.context(device, terminal.note)  # now that the kernels of a step are loaded
            trained, job = replan.without_ruled_out(trained, job, prepared, terminal)
            config, forecast = job.config, job.forecast
            ended = training.train(trained)
            sample_answers.after(model, inputs.tokenizer, config, own, answered)
            tracked.answers(own)
            del base, model, trained

        # Publish, and report.
        if ranks.is_main():
            steps = {"step": ended.steps, "best_step": ended.best_step}
            outcome.record(run, forecast, monitor.run, terminal, **steps)
            if config.output.merge and config.adapter.kind == "lora":
                libraries.return_freed_memory()
                publish.merge_locked(run, config, terminal, terminal.note)
            page.write(run, plot=True)
            run.event("finished", **steps)
            terminal.finished(run)
    return Result(run)
