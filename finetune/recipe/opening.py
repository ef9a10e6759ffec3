"""Creates or reopens the run directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from finetune.data import inspection
from finetune.data.encoded import MEDIA
from finetune.data.prepare import Prepared
from finetune.forms import packed
from finetune.model import served
from finetune.model.source import identity
from finetune.recipe import provenance, resume
from finetune.recipe.inputs import JobInputs
from finetune.recipe.resume import Start
from finetune.recipe.start import Session
from finetune.resolve import Job
from finetune.runtime import ranks
from finetune.runtime.memory_monitor import Peak
from finetune.storage.checkpoint import set_aside
from finetune.storage.files import write_json, write_lines
from finetune.storage.rundir import RunDirectory, checkpoint_step

_NAMED_IMAGES = 20


@dataclass(frozen=True)
class Opened:
    """The directory that this rank writes, and where training starts."""

    run: RunDirectory
    start: Start


def open_run(job: Job, inputs: JobInputs, session: Session) -> Opened:
    """Open a new run directory, or an earlier one at its last checkpoint, and print the header of this start.

    A fresh start moves an earlier run aside. Each rank has a directory of its own, below rank 0's.
    """
    config, run, lock, note = job.config, session.run, session.lock, job.say

    def by_main() -> Start:
        if session.fresh and run.events_file.exists():
            lock.release()
            note(f"the earlier run was moved to {run.move_aside()}")
        run.claim()
        lock.take()
        start = resume.find(run)
        provenance.changes_since(run, start.checkpoint, _provenance(job, inputs))  # refuses what may not change
        world_size, learns = ranks.world_size(), inputs.data.kind
        # A reopened run says so before its new config is saved: a finished run with a config that asks for more steps
        # would otherwise be taken for finished with all of them.
        if start.checkpoint:
            for damaged, problems in start.damaged.items():
                aside = set_aside(damaged)
                run.event("checkpoint_damaged", step=checkpoint_step(damaged), moved_to=aside.name, problems=problems)
                note(f"{damaged.name} cannot be used ({'; '.join(problems)}) and was renamed to {aside.name}")
            name, why = start.checkpoint.name, "newest complete" if start.damaged else "last"
            run.event("resumed", step=start.step, checkpoint=name, learns=learns, world_size=world_size)
            note(f"resuming from {start.checkpoint}, the {why} checkpoint")
        write_plan(job, run)
        run.remove_leftovers()
        write_json(run.environment_file, {"seed": config.training.seed, **inputs.environment})
        write_lines(run.data_file, inputs.data.affected())
        write_json(run.facts_file, inspection.facts(inputs.data, inputs.tokenizer))
        run.forget_metrics_after(start.step)
        if not start.checkpoint:
            run.answers_file.unlink(missing_ok=True)
            start_from = {"start_from": inputs.started_from} if inputs.started_from else {}
            run.event("started", seed=config.training.seed, learns=learns, world_size=world_size, **start_from)
        return start

    start = ranks.main_does(by_main)
    own = run
    if not ranks.is_main():
        own = run.of_rank(ranks.rank())
        own.claim()
        own.forget_metrics_after(start.step)
    session.terminal.opened(
        own.path, config, session.device, inputs.data, inputs.attention, job.forecast, ranks.world_size(),
        inputs.mixture,
    )  # fmt: skip
    return Opened(own, start)


def write_plan(job: Job, run: RunDirectory) -> None:
    """Save the fitted config and its forecast, if any."""
    run.create(job.config)
    if job.forecast:
        write_json(run.forecast_file, job.forecast.beside({}))


def record_end(job: Job, session: Session, peaks: dict[str, Peak], **facts: Any) -> None:
    """Record the end of training, with `facts` and peak memory by phase, and compare the forecast with the peaks."""
    run, terminal = session.run, session.terminal
    terminal.answers(run)
    run.event("trained", **facts, memory=peaks)
    if job.forecast:
        write_json(run.forecast_file, job.forecast.beside(peaks))
        terminal.compared(job.forecast.differences(peaks), job.forecast.needed_bytes, peaks)


def confirm_base(job: Job, opened: Opened, inputs: JobInputs, model: Any) -> dict[str, Any]:
    """The provenance with the base, whose files are only certain to be local once it is loaded as `model`.

    Logs what has changed since the checkpoint, and the bytes of packed weights, which an export has to find again.
    Raises ConfigError for a base whose files, now that they are here, cannot be served as the config says.
    """
    config = job.config
    with ranks.agreeing():
        served.consequences(config, inputs.blueprint.architecture)
    base = identity.confirmed(config.model, inputs.provenance["base"], job.say)
    whole = {**_provenance(job, inputs), "base": base}
    provenance.refuse_other_ranks(whole)

    def by_main() -> None:
        if changes := provenance.changes_since(opened.run, opened.start.checkpoint, whole):
            _log_changes(job, opened.run, changes, inputs.data)
        sha256, before = packed.digest(model), opened.run.packed_base
        if sha256 is not None and sha256 != before:
            opened.run.event("base_packed", kind=config.quantization.kind, sha256=sha256)
            if before:
                job.say(
                    f"{config.model.name} has other bytes in {config.quantization.kind} than when the run was started, "
                    "as another device or version may round them; the adapter goes on with these"
                )

    ranks.main_does(by_main)
    return whole


def _provenance(job: Job, inputs: JobInputs) -> dict[str, Any]:
    return {**inputs.provenance, "config": job.config.model_dump(mode="json")}


def _log_changes(job: Job, run: RunDirectory, changes: dict[str, Any], data: Prepared) -> None:
    """Record harmless changes since the checkpoint, with replaced images by path; one given as bytes by its row."""
    if replaced := changes.pop("images", None):
        names: dict[str, None] = {}  # each once, in the order of the rows, by which images are numbered
        for split, numbers in replaced.items():
            rows: Any = data.train if split == "train" else data.eval
            named = rows.select_columns(["place", MEDIA])
            shown = ((row["place"], image["path"]) for row in named for image in row[MEDIA])
            wanted = {*numbers}
            names |= {path or f"an image of {place}": None for at, (place, path) in enumerate(shown) if at in wanted}
        changes["images"], more = [*names][:_NAMED_IMAGES], len(names) - _NAMED_IMAGES
        listed = ", ".join(changes["images"]) + (f" and {more} more" if more > 0 else "")
        job.say(f"these images were replaced since the checkpoint, and the run goes on with the new ones: {listed}")
    run.event("changed", **changes)
    if "base" in changes:
        job.say(
            "the checkpoint was saved by an earlier version, which identified a base by samples, so whether "
            f"{job.config.model.name} is still the same is unknown"
        )
