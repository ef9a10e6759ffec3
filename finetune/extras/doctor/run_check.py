"""Checks whether a run directory is complete and consistent. Read-only: nothing is changed or repaired."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from finetune.choices import CHOICES
from finetune.config import Config, DataSection, ModelSection, load
from finetune.data import fingerprint
from finetune.errors import ArtifactError, ConfigError, FinetuneError, MachineError
from finetune.export.finished_run import FinishedRun
from finetune.extras.doctor.findings import Examination, Finding
from finetune.model import build
from finetune.model.adapters import adapter_files
from finetune.model.source import identity
from finetune.model.source.locate import locate
from finetune.model.source.tokenizer import load_tokenizer
from finetune.runtime import libraries
from finetune.storage import records, weight_files
from finetune.storage.checkpoint import LATEST, manifest_of
from finetune.storage.rundir import RunDirectory, checkpoint_step
from finetune.training.state import MODEL_FILE, problems_of


def examine(path: Path) -> Examination:
    """Check whether a run directory is complete and consistent. Raises ArtifactError if it is not a run directory."""
    libraries.quiet()
    run = RunDirectory(path)
    if not run.config_file.is_file() and not run.events_file.is_file():
        RunDirectory.open(path)  # raises
    return Examination(list(_run_findings(run)), ArtifactError.exit_code)


def _run_findings(run: RunDirectory) -> Iterator[Finding]:
    config, foreign = None, False
    try:
        config = load(run.config_file, choices=CHOICES, trained=True)
    except ConfigError as error:
        yield Finding("config.yaml", "error", str(error), "fix the line, or restore the config of the run")
    else:
        model = config.model
        yield Finding("config.yaml", "ok", f"{model.name}, {config.adapter.kind}")
        if foreign := model.trust_remote_code:
            state = f"Python code shipped with `{model.name}` at revision {model.revision}, which was not run"
            remedy = "read it before you give generate, eval, merge or export --trust-remote-code"
            yield Finding("foreign code", "warning", state, remedy)
            # No foreign code runs here.
            config = load(run.config_file, ["model.trust_remote_code=false"], choices=CHOICES, trained=True)
    yield from _lines(run)
    yield from _records(run)
    yield _lock(run)
    yield from _checkpoints(run)
    if run.adapter.exists():
        yield from _adapter(run, config)
    if run.merged.exists():
        yield from _folder(run.merged, _check_model, f"delete it and run `finetune merge {run.quoted}`")
    if config:
        yield _tokenizer(run, config.model, config.data, foreign)
        yield from _base(FinishedRun(run, config))
    for path in sorted([*run.path.rglob("*.incomplete"), *run.path.rglob("*.replaced")]):
        name = str(path.relative_to(run.path))
        if path.suffix == ".replaced" and not path.with_suffix("").exists():
            state = f"{path.stem} was being replaced when the process ended"
            yield Finding(name, "error", state, f"rename it to {path.stem}")
        else:
            yield Finding(name, "warning", "left by an interrupted write", "delete it")


def _lines(run: RunDirectory) -> Iterator[Finding]:
    """The JSON Lines files: how many lines are intact, and which are skipped."""
    shapes = {run.events_file: records.EVENT, run.metrics_file: records.METRIC, run.data_file: records.AFFECTED}
    for file, shape in shapes.items():
        if not file.exists():
            if file == run.events_file:
                state = "missing, so whether the run has finished is unknown"
                yield Finding(file.name, "error", state, "start it again")
            continue
        try:
            lines = records.read_lines(file, shape)
        except ArtifactError as error:
            yield Finding(file.name, "error", str(error), "restore the file from a backup")
            continue
        if lines.wrong:
            (number, why), *more = lines.wrong.items()
            state = f"line {number} is skipped, because this program did not write it: {why}"
            state += f"; and {len(more)} more" if more else ""
            yield Finding(file.name, "error", state, "remove the damaged lines")
        elif lines.torn:
            state = f"{len(lines.rows)} lines; the next was truncated when the process ended and is skipped"
            yield Finding(file.name, "warning", state)
        else:
            yield Finding(file.name, "ok", f"{len(lines.rows)} lines")


def _records(run: RunDirectory) -> Iterator[Finding]:
    shapes: dict[Path, TypeAdapter[Any]] = {
        run.environment_file: records.ENVIRONMENT,
        run.forecast_file: records.FORECAST,
        run.facts_file: records.DATA,
        run.answers_file: records.ANSWERS,
        run.eval_file: records.EVALUATION,
        run.merged / "merge.json": records.MERGE_PROOF,
    }
    for file, shape in shapes.items():
        try:
            records.find(file, shape)
        except ArtifactError as error:
            yield Finding(file.name, "error", str(error), "delete it; the next start, merge or eval writes it again")


def _lock(run: RunDirectory) -> Finding:
    if run.lock_file.is_file():
        with open(run.lock_file, "rb") as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                process = opened.read(20).decode(errors="replace").strip()
                state = f"process {process} is training here, so its files may look unfinished"
                return Finding("lock", "warning", state, "check again after it has ended")
            except OSError:
                return Finding("lock", "warning", "this file system has no file locks", "start one process at a time")
    return Finding("lock", "ok", "no process is training here")


def _checkpoints(run: RunDirectory) -> Iterator[Finding]:
    problems = {checkpoint: problems_of(checkpoint) for checkpoint in run.complete_checkpoints()}
    sound = [checkpoint for checkpoint, wrong in problems.items() if not wrong]
    remedy = "the next start sets it aside" if sound else "restore it from a backup"
    for checkpoint, wrong in problems.items():
        name = f"checkpoints/{checkpoint.name}"
        yield Finding(name, "error", "; ".join(wrong), remedy) if wrong else Finding(name, "ok", "intact")
    latest = run.checkpoints / LATEST
    if latest.is_file() and run.checkpoints / records.read_bytes(latest).decode(errors="replace").strip() not in sound:
        yield Finding("checkpoints/latest", "warning", "names no complete checkpoint", "the next save rewrites it")
    try:
        events = records.read_lines(run.events_file, records.EVENT)
    except ArtifactError:
        return
    if events.wrong or not run.events_file.exists():
        return
    if run.finished:
        yield Finding("state", "ok", f"finished, {run.steps_done} steps")
    elif sound:
        yield Finding("state", "ok", f"not finished; `finetune train` resumes from step {checkpoint_step(sound[-1])}")
    elif problems or run.saved_steps:
        state = "not finished, and no checkpoint is complete, so `finetune train` refuses to resume it"
        remedy = "restore one from a backup, or start over with --fresh (this run is moved aside)"
        yield Finding("state", "error", state, remedy)
    else:
        yield Finding("state", "ok", "not finished, and no checkpoint yet; `finetune train` starts from the beginning")


def _adapter(run: RunDirectory, config: Config | None) -> Iterator[Finding]:
    """Check an adapter without the base's weights, and if the base is unavailable, without its module names too."""
    section = config.adapter if config and config.adapter.kind == "lora" else None
    base = None
    if config and section:
        try:
            with libraries.offline():
                base = build.weightless(config.model)
        except FinetuneError as error:
            state = f"whether its tensors fit the base is unknown: {error}"
            yield Finding("adapter", "warning", state, "check again where the base is available")

    def check(folder: Path) -> None:
        if section:
            adapter_files.check_files(folder, section)
            if base is not None:
                adapter_files.weightless_adapter(base, folder, section)

    yield from _folder(run.adapter, check, "run `finetune train` again, which publishes it from the last checkpoint")


def _folder(folder: Path, check: Callable[[Path], None], remedy: str) -> Iterator[Finding]:
    """One finding for a folder of valid weights, or one for each problem."""
    wrong = []
    try:
        check(folder)
    except FinetuneError as error:  # any kind: the other findings are still reported
        wrong.append(str(error))
    for file in sorted(folder.glob("*" + weight_files.SUFFIX)):
        try:
            weight_files.check(file)
        except ArtifactError as error:
            wrong.append(str(error))
        else:
            wrong += [f"{file}: `{name}` has values that are not finite" for name in weight_files.not_finite(file)]
    for problem in dict.fromkeys(wrong):  # both checks read the headers
        yield Finding(folder.name, "error", problem, remedy)
    if not wrong:
        yield Finding(folder.name, "ok", "intact, weights finite")


def _check_model(folder: Path) -> None:
    """Check a model in Hugging Face format: its config, and every file in its index."""
    index = folder / "model.safetensors.index.json"
    try:
        records.read(folder / "config.json", records.OBJECT)
        parts = records.read(index, records.WEIGHT_INDEX)["weight_map"].values() if index.exists() else [MODEL_FILE]
    except ArtifactError as error:
        raise ArtifactError(f"{folder}: config.json or the index is missing or damaged: {error}") from None
    for name in sorted(set(parts)):
        weight_files.check(folder / name)


def _tokenizer(run: RunDirectory, model: ModelSection, data: DataSection, foreign: bool) -> Finding:
    """Check that the tokenizer is the one of training; `foreign`: it may need Python code, which is not run here."""
    folder = run.adapter if run.adapter.exists() else run.merged
    try:
        with libraries.offline():
            try:
                tokenizer = load_tokenizer(model, run.data(data))
            except ArtifactError as error:
                if not foreign:
                    raise
                raise MachineError(f"cannot be read without that code: {error}") from None
        fingerprint.check(tokenizer, folder)
    except MachineError as error:
        return Finding("tokenizer", "warning", str(error), "check again where the base is available")
    except FinetuneError as error:
        return Finding("tokenizer", "error", str(error), "restore the base where `model.name` points")
    return Finding("tokenizer", "ok", f"as in training, from {model.tokenizer or model.name}")


def _base(finished: FinishedRun) -> Iterator[Finding]:
    """Check that the config's base is the one of training."""
    run, model, is_published = finished.run, finished.config.model, finished.weights.exists()
    if not is_published and model.weights == "random":
        return
    unknown: list[str] = []
    try:
        with libraries.offline():
            if is_published:
                finished.base(unknown.append)
            else:
                _check_base_to_resume(run, model, unknown.append)
    except FinetuneError as error:
        yield Finding("base", "error", str(error), "restore the base where `model.name` points")
    else:
        for note in unknown:
            yield Finding("base", "warning", note)
        if not unknown:
            state = "as in training" if is_published or run.complete_checkpoints() else "complete"
            yield Finding("base", "ok", f"{state}, {model.name}")


def _check_base_to_resume(run: RunDirectory, section: ModelSection, note: Callable[[str], None]) -> None:
    """Raise ArtifactError if the base is missing, or not the one of the newest checkpoint of an unfinished run."""
    folder = Path(locate(section.name))
    if folder.is_dir():
        identity.files_to_load(folder)
    now = identity.of_base(section, note)
    for saved in reversed(run.complete_checkpoints()):
        with contextlib.suppress(ArtifactError, ValueError):  # a damaged one is a finding of its own
            records.check(made_with := manifest_of(saved)["made_with"], records.PROVENANCE)
            then = made_with["base"] if identity.comparable(made_with["base"]) else None
            break
    else:
        return
    fingerprint.compare_base(section, now, then, saved, note)
