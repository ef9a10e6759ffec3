"""Trains the members of a sweep on one resident base, stopping those that fall behind; the same call goes on.

A member is trained by `recipe.train` as it would be alone, so its numbers are those of a lone run. It is paused by an
exception after a step, whose checkpoint it goes on from. Several processes may make the same call, one for each GPU:
each takes members that no other has, and all come to the same decisions from the same scores.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from finetune import recipe
from finetune.config import AdapterSection, Config, TrainingSection
from finetune.config.field_types import shown
from finetune.data import fingerprint, prepare
from finetune.data.prepare import Prepared
from finetune.errors import ConfigError, DataError, InUseError, NumbersError, OutOfMemoryError, first_line
from finetune.lifecycle import provenance, resume
from finetune.model import bounds, build, precision
from finetune.model.adapters import adapter_files
from finetune.model.base import load_architecture
from finetune.model.source import vision
from finetune.model.source.tokenizer import load_tokenizer
from finetune.report import words
from finetune.report.sweep_terminal import SweepTerminal
from finetune.report.terminal import Terminal
from finetune.results.figures import Figures
from finetune.results.sweep_table import SCORES, TABLE, SettingResult, SettingState, SweepTable, is_sweep
from finetune.runtime import libraries, ranks
from finetune.runtime.device import this_device
from finetune.storage import locks
from finetune.storage.files import write_bytes, write_json
from finetune.storage.rundir import RunDirectory
from finetune.sweeps import grid, halving
from finetune.sweeps.grid import Member
from finetune.training import evidence
from finetune.training.callbacks import Callback
from finetune.training.eval_loss import held_out_loss
from finetune.training.optimizers import OPTIMIZERS
from finetune.training.progress import Progress, read_progress
from finetune.training.residents import Residents

_OTHERWISE = "or set another `output.dir`"
_NOT_ENDED = "the sweep has not ended; the same command goes on"
_POLL_SECONDS = 0.5
_NOT_FINITE = np.array([[np.inf, 1.0]])
"""The score of a member that diverged or failed."""


def sweep(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str], keys: Mapping[str, Sequence[str]], *,
    full: bool = False, fresh: bool = False, budget_seconds: float | None = None, terminal: Terminal | None = None,
) -> SweepTable:  # fmt: skip
    """Train every combination of `keys` (see `grid.members`) in `output.dir`, and compare them on the evaluation rows.

    Half of the settings are stopped early, again and again, where they can be told apart; none with `full`. After
    `budget_seconds` no further training starts. Another call with the same arguments goes on where one ended, or works
    beside it; with `fresh`, an earlier sweep is moved aside. Raises ConfigError for a sweep that compares nothing, or
    whose budget ends before all settings were compared once, and what `recipe.train` raises, but for a member that
    diverges or does not fit the memory.
    """
    if ranks.world_size() > 1:
        raise ConfigError(
            "a member of a sweep runs in one process; without torchrun, start the same command once for each GPU: "
            "`CUDA_VISIBLE_DEVICES=0 finetune sweep ...`, `CUDA_VISIBLE_DEVICES=1 finetune sweep ...`; they share the "
            "members"
        )
    libraries.quiet()
    terminal = terminal or Terminal()
    made = _in_one_precision(grid.members(source, overrides, keys), terminal, fresh=fresh)
    folder = _run_of(made[0]).path.parent
    if RunDirectory(folder).exists:
        raise ConfigError(
            f"`output.dir`: {folder} is a run; give the sweep a directory of its own: output.dir={folder}_sweep"
        )
    _check(made)
    if fresh and is_sweep(folder):
        _move_aside(folder)
    with libraries.collecting_as_before():
        table = _Sweep(folder, made, full, budget_seconds, terminal).run()
    libraries.return_freed_memory()
    _write(folder, table)
    return table


def _in_one_precision(made: Sequence[Member], terminal: Terminal, *, fresh: bool) -> list[Member]:
    """The members with one value for `training.precision: auto`, so that they can be compared: that of the runs that
    were started, on whatever machine, or else this device's.
    """
    of_device = [precision.of_device(this_device())]
    runs = [_run_of(member) for member in made if member.config.training.precision == "auto"]
    started = next((run.config().training.precision for run in runs if not fresh and run.has_results), None)
    members, notes = list[Member](), set[str]()
    for member in made:
        config, why = precision.resolved(member.config, of_device)
        if why:
            config = config.changed({"training.precision": started}) if started else config
            notes.add(f"training.precision: {config.training.precision} ({'as started' if started else why})")
        members.append(replace(member, config=config))
    for note in sorted(notes):
        terminal.note(note)
    return members


def _notes(members: Sequence[Member]) -> dict[str, list[str]]:
    """What training will note on the members' configs, with the settings that each note holds for."""
    notes: dict[str, list[str]] = {}
    for member in members:
        allowed, limited = bounds.as_known_base_allows(member.config)
        for note in filter(None, (limited, evidence.resolved_if_known(allowed)[1])):
            settings = notes.setdefault(note, [])
            if member.setting not in settings:
                settings.append(member.setting)
    return notes


def _run_of(member: Member) -> RunDirectory:
    return RunDirectory(str(member.config.output.dir))


def _check(members: Sequence[Member]) -> None:
    """Raise ConfigError for an adapter that does not fit the base, and for members that are the same once each `auto`
    is decided, before any is trained.
    """
    checked: list[AdapterSection] = []
    decided: list[Config] = []
    for member in members:
        config, _ = evidence.resolved_if_known(bounds.as_known_base_allows(member.config)[0])
        grid.refuse_open_kind(config.quantization)
        unpaged = OPTIMIZERS[config.optimizer.kind].unpaged or config.optimizer.kind
        decided.append(config.changed({"optimizer.kind": unpaged}))
        adapter = resume.to_build(config.adapter, resumed=True)  # a resumed member has already read what it starts from
        if adapter not in checked:
            architecture = load_architecture(config.model)
            attention, _ = build.choose_attention(config, architecture, this_device().type)
            build.blueprint(config, architecture, attention).check(adapter)
            checked.append(adapter)
    grid.refuse_same(members, decided)
    if len({(one.quantization.model_dump_json(), one.output.way) for one in decided}) > 1:
        raise ConfigError(
            "`output.way: auto` holds the base of these members in different forms, and members are trained on one; "
            "set `rounded`"
        )


def _write(folder: Path, table: SweepTable) -> None:
    """Write the table, one process after the other: those that share the members end in the same moment."""
    (folder / SCORES).mkdir(parents=True, exist_ok=True)
    with locks.locked(folder / SCORES / "table.lock", f"{folder / TABLE}", _OTHERWISE, wait=True):
        write_json(folder / TABLE, table.as_dict())


def _move_aside(folder: Path) -> None:
    """Rename an earlier sweep. Raises InUseError while another process trains one of its members."""
    for lock in (folder / SCORES).glob("*.lock"):
        with locks.locked(lock, str(folder), _OTHERWISE):
            pass
    RunDirectory(folder).move_aside()


class _BudgetSpent(Exception):
    """No further training starts."""


class _TrainedFurther(Exception):
    """No checkpoint is left of the share of a member's run after which it would be compared."""


class _MemberPaused(Exception):
    """Ends a member's training at the share of its run after which members are compared."""


def _share(training: TrainingSection, step: int, epoch: float) -> float:
    """The share of a run that is done."""
    return step / training.max_steps if training.max_steps else epoch / training.epochs


def _pause(training: TrainingSection, share: float) -> Callback:
    """A callback that pauses at the first step after which `share` of a run is done."""

    def on_step(metrics: dict[str, Any]) -> None:
        if share <= _share(training, metrics["step"], metrics["epoch"]) < 1:
            raise _MemberPaused

    return cast(Callback, SimpleNamespace(on_step=on_step))


@dataclass
class _Sweep:
    folder: Path
    members: Sequence[Member]
    full: bool
    budget_seconds: float | None
    terminal: Terminal
    residents: Residents = field(default_factory=Residents)
    started: float = field(init=False)
    scores: dict[float, dict[str, np.ndarray]] = field(default_factory=dict)
    losses: dict[str, dict[float, float]] = field(default_factory=dict)
    """By member, those after each share."""
    why: dict[str, tuple[SettingState, str]] = field(default_factory=dict)
    trained_seconds: list[float] = field(default_factory=list)
    """Of each training up to a comparison in this call."""
    trained_further: set[str] = field(default_factory=set)
    """Members without a score at the share of the round."""

    def run(self) -> SweepTable:
        """Train in rounds, each to a larger share; after each, some settings are stopped."""
        self.started = time.monotonic()
        self.output.began(_notes(self.members))
        going = self._settings
        for share in [*self._shares, 1.0]:
            if share < 1 and len(going) <= 2:
                continue
            try:
                self._compare(going, share)
            except _BudgetSpent as spent:
                table = self._table(f"the budget was spent; the same command goes on with {spent}", self._kept())
                if len(self.scores) > 1:
                    return table
                if self.trained_seconds:
                    _write(self.folder, table)
                raise ConfigError(self._too_small(share)) from None
            going = self._going_on(going, share)
        return self._table("", self.scores)

    @cached_property
    def _settings(self) -> list[str]:
        return list(dict.fromkeys(member.setting for member in self.members))

    @cached_property
    def _shares(self) -> list[float]:
        """The shares of a run after which half of the settings are stopped."""
        return [] if self.full else halving.shares(len(self._settings))

    @cached_property
    def output(self) -> SweepTerminal:
        """What the members print on."""
        return SweepTerminal(self.terminal, self._settings, len(self.members), self._shares)

    def _too_small(self, share: float) -> str:
        """What is wrong with a budget that was spent before all settings were compared once, at `share` of a run."""
        if not self.trained_seconds:
            return "the budget was spent before a member was trained; give more, such as 30m or 2h"
        left = sum(
            self._read(self._score_file(member, share)) is None
            for member in self.members
            if member.name not in self.trained_further and member.setting not in self.why
        )
        seconds = sum(self.trained_seconds) / len(self.trained_seconds)
        upto = "over whole runs" if share == 1 else f"after {share:.3g} of their runs"
        return (
            f"the budget was spent before all settings were compared once, {upto}: "
            f"{left} of {len(self.members)} members are left, of about {math.ceil(seconds)}s each; the same command "
            f"with --budget {_as_budget(left * seconds)} or more goes on"
        )

    def _compare(self, going: Sequence[str], share: float) -> None:
        """Have all members of the settings `going` trained up to `share`, here or by other processes.

        A setting that was trained further without having been compared there takes no part.
        """
        scores = self.scores[share] = {}
        rows: dict[str, np.ndarray | None] = {}
        members = {setting: [each for each in self.members if each.setting == setting] for setting in going}
        while any(each.name not in rows for own in members.values() for each in own):
            known = len(rows)
            for member in (each for own in members.values() for each in own if each.name not in rows):
                with contextlib.suppress(InUseError):
                    rows[member.name] = self._scored(member, share)
                own = members[member.setting]
                found = [score for each in own if (score := rows.get(each.name)) is not None]
                if len(found) == len(own):
                    scores[member.setting] = np.stack(np.broadcast_arrays(*found))
            if len(rows) == known:  # the rest is with other processes
                for member in (each for own in members.values() for each in own if each.name not in rows):
                    upto = "" if share == 1 else f" to {words.share(share)} of its run"
                    self.output.once(f"{member.name}: trained{upto} by another process; waiting")
                time.sleep(_POLL_SECONDS)

    def _going_on(self, going: Sequence[str], share: float) -> list[str]:
        scores = self.scores[share]
        kept = halving.finite(scores)
        diverged = scores.keys() - kept.keys() - self.why.keys()
        self.why |= dict.fromkeys(diverged, ("diverged", "its loss is not finite"))
        if share < 1:
            for setting, why in halving.stopped(kept).items():
                self.why[setting] = "stopped", why
                for member in (each for each in self.members if each.setting == setting):
                    self.residents.paused.pop(_run_of(member).path, None)
                self.terminal.note(f"{setting}: stopped after {share:.3g} of a run, {why}")
        return [setting for setting in going if setting not in self.why]

    def _scored(self, member: Member, share: float) -> np.ndarray | None:
        """(sum, trained tokens) of each evaluation row by a member, trained up to `share` unless its score is there;
        None for one that was trained further.

        Raises InUseError while another process trains it, and else _BudgetSpent.
        """
        file = self._score_file(member, share)
        rows = self._read(file)
        if rows is None:
            with self._held(member):
                try:
                    rows = self._read(file)
                    if rows is None:  # another process may have written it meanwhile
                        if os.path.lexists(file):
                            self.terminal.note(f"{file}: damaged; {member.name} is scored again")
                        not_ended = f"{_NOT_ENDED} with {member.setting}"
                        _write(self.folder, self._table(not_ended, self._kept(), ended=False))
                        started = time.monotonic()
                        rows = self._trained(member, share)
                        self._keep(file, rows)
                        self.trained_seconds.append(time.monotonic() - started)
                except _TrainedFurther:
                    self.trained_further.add(member.name)
                    self.terminal.note(
                        f"{member.name}: not compared at {words.share(share)} of its run, which has gone further"
                    )
                    return None
                except OutOfMemoryError as error:
                    self.why[member.setting] = "failed", first_line(error)
                    self.terminal.note(f"{member.setting}: {first_line(error)}")
                    return _NOT_FINITE
        self.losses.setdefault(member.name, {})[share] = halving.loss(rows)
        after = "" if share == 1 else f" after {words.share(share)} of its run"
        self.terminal.note(f"{member.name}: eval loss {halving.loss(rows):.4f}{after}")
        return rows

    def _held(self, member: Member) -> contextlib.AbstractContextManager[None]:
        """A member's lock, to train it. Raises InUseError and _BudgetSpent as `_scored`."""
        file = self.folder / SCORES / f"{member.name}.lock"
        lock = locks.locked(file, f"{self.folder}: {member.name}", _OTHERWISE)
        if self.budget_seconds is not None and time.monotonic() - self.started > self.budget_seconds:
            if file.exists():
                with lock:  # raises for one that is trained elsewhere
                    pass
            raise _BudgetSpent(member.setting)
        file.parent.mkdir(parents=True, exist_ok=True)
        return lock

    def _kept(self) -> dict[float, dict[str, np.ndarray]]:
        """The scores that were written, also in other calls and by other processes, by share and setting."""
        kept: dict[float, dict[str, np.ndarray]] = {}
        for share in (*self._shares, 1.0):
            for setting in self._settings:
                own = [member for member in self.members if member.setting == setting]
                rows = [one for member in own if (one := self._read(self._score_file(member, share))) is not None]
                if len(rows) == len(own):
                    kept.setdefault(share, {})[setting] = np.stack(np.broadcast_arrays(*rows))
                    for member, one in zip(own, rows, strict=True):
                        self.losses.setdefault(member.name, {})[share] = halving.loss(one)
        return kept

    def _score_file(self, member: Member, share: float) -> Path:
        return self.folder / SCORES / f"{member.name}-{share:.4f}-{self._made_of[member.name]}.npy"

    @cached_property
    def _made_of(self) -> dict[str, str]:
        """By member, a hash of what its scores and their order depend on, except the versions of libraries."""
        made, batch_size = {}, self.members[0].config.training.batch_size
        for member in self.members:
            config, _ = bounds.as_known_base_allows(member.config)  # the base follows from what is served
            parts = [config.model_dump_json(exclude={"output", "tracking"}), batch_size, self._rows]
            made[member.name] = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        return made

    @cached_property
    def _tokenizer(self) -> Any:
        job = self.members[0].config
        return load_tokenizer(job.model, job.data)

    @cached_property
    def _data(self) -> Prepared:
        allowed, _ = bounds.as_known_base_allows(self.members[0].config)
        seen = vision.of(allowed, load_architecture(allowed.model), self._tokenizer)
        data = prepare.prepare(allowed.data, self._tokenizer, seen)
        if not data.eval:
            raise DataError(f"a sweep compares members on evaluation rows; {data.warning}")
        return data

    @cached_property
    def _rows(self) -> dict[str, str]:
        """The hashes of the training and evaluation rows."""
        return {"train": fingerprint.of_rows(self._data.train), "eval": fingerprint.of_rows(self._data.eval)}

    def _read(self, file: Path) -> np.ndarray | None:
        """The scores that were kept in a file; None if it is missing or damaged."""
        with contextlib.suppress(OSError, ValueError, EOFError, TypeError, OverflowError):
            if file.is_file():  # mapped, because a damaged header may ask for any memory
                rows = np.lib.format.open_memmap(file, mode="r")
                if rows.dtype == float and rows.ndim == 2 and rows.shape[1] == 2:
                    content, end = file.read_bytes(), rows.offset + rows.nbytes
                    if content[end:] in (b"", hashlib.sha256(content[:end]).digest()):  # earlier versions wrote none
                        return np.array(rows)
        return None

    def _keep(self, file: Path, rows: np.ndarray) -> None:
        content = io.BytesIO()
        np.save(content, rows)
        write_bytes(file, content.getvalue() + hashlib.sha256(content.getvalue()).digest())

    def _trained(self, member: Member, share: float) -> np.ndarray:
        """Train a member up to `share` of its run, and return its (sum, trained tokens) of each evaluation row.

        Raises _TrainedFurther.
        """
        run, training = _run_of(member), member.config.training
        saved = resume.find(run).checkpoint if run.exists else None
        if saved:
            self._refuse_other_job(member.config, run, saved)
        progress = read_progress(saved) if saved else Progress()
        before = progress.step - 1, progress.epoch * (1 - 1 / max(1, progress.step))
        if share < 1 and _share(training, *before) >= share:
            raise _TrainedFurther
        try:
            if share == 1 or _share(training, progress.step, progress.epoch) < share:
                libraries.return_freed_memory()  # freed by members that have ended
                terminal, callbacks = self.output.of(member.name, share), (_pause(training, share),)
                recipe.train(member.config, terminal=terminal, callbacks=callbacks, residents=self.residents)
        except _MemberPaused:
            pass
        except NumbersError:
            return _NOT_FINITE
        weights = run.adapter if share == 1 else resume.find(run).checkpoint
        assert weights, "a paused run has a checkpoint"
        return self._losses(run.config(), weights)

    def _refuse_other_job(self, config: Config, run: RunDirectory, saved: Path) -> None:
        """Raise as training does for a checkpoint of other settings or rows, also where nothing is left to train."""
        allowed, _ = bounds.as_known_base_allows(config)
        config, _ = evidence.resolved_if_known(resume.as_started(allowed, run, fresh=False))
        provenance.changes_since(run, saved, {"config": config.model_dump(mode="json"), "data": self._rows})

    def _losses(self, config: Config, weights: Path) -> np.ndarray:
        """(sum, trained tokens) of each evaluation row, in the same order for all members."""
        architecture, device = load_architecture(config.model), this_device()
        attention, _ = build.choose_attention(config, architecture, device.type)
        base = self.residents.load(build.blueprint(config, architecture, attention), device)
        model = adapter_files.load_adapter(base, weights, config.adapter)
        _, by_row = held_out_loss(model, self._tokenizer, self._data.eval, self._in_order(config))
        return by_row.numpy()

    def _in_order(self, config: Config) -> Config:
        """`config`, with evaluation rows in an order that does not depend on the member, nor on what fits it."""
        first = self.members[0].config.training
        same = {"training.batch_size": first.batch_size, "training.micro_batch_tokens": first.micro_batch_tokens}
        return config.changed({**same, "training.micro_batch": 1} if config.data.packing else same)

    def _table(
        self, unfinished: str, scores: Mapping[float, Mapping[str, np.ndarray]], *, ended: bool = True
    ) -> SweepTable:  # fmt: skip
        """The settings as they stand by `scores`, the best first: by how far they were compared, then by their losses.

        Differences, whose intervals take long, are left out unless the call has `ended`.
        """
        order: list[str] = []
        for share in sorted(scores, reverse=True):
            order += [name for name in halving.ranked(scores[share]) if name not in order]
        order += [member.setting for member in self.members if member.setting not in order]
        results = [self._result(setting, scores, ended=ended) for setting in dict.fromkeys(order)]
        tied = [] if unfinished else halving.tied(scores.get(1.0, {}))
        undecided = unfinished
        if len(tied) > 1:
            best = scores[1.0][tied[0]]
            drawn = "these rows" if len(best) == 1 else "these rows and seeds"
            if not halving.are_enough(best):
                drawn = f"fewer than {halving.LEAST_ROWS} evaluation rows"
            undecided = f"{', '.join(tied)} cannot be told apart on {drawn}"
        elif not (tied or unfinished):
            undecided = "every setting diverged; sweep lower learning rates"
            if any(state == "failed" for state, _ in self.why.values()):
                undecided = "no setting was trained to its end; see why below each"
        compared = (score for each in scores.values() for score in halving.finite(each).values())
        rows = max((score.shape[1] for score in compared), default=0) or len(self._data.eval or ())
        return SweepTable(self.folder, results, rows, tied[0] if len(tied) == 1 else None, undecided)

    def _result(
        self, setting: str, by_share: Mapping[float, Mapping[str, np.ndarray]], *, ended: bool
    ) -> SettingResult:  # fmt: skip
        members = [member for member in self.members if member.setting == setting]
        share = max((share for share, scores in by_share.items() if setting in scores), default=0.0)
        scores = halving.finite(by_share.get(share, {}))
        difference = None
        if ended and setting in scores and (best := halving.ranked(scores)[0]) != setting:
            difference = halving.differences({best: scores[best], setting: scores[setting]}, best)[setting]
        state, why = self.why.get(setting, ("finished" if share == 1 else "waiting", ""))
        runs = [*map(_run_of, members)]
        return SettingResult(
            setting=setting,
            values={key: value for key, value in members[0].values.items() if key != grid.SEED},
            runs=[str(run.path) for run in runs],
            state=state,
            share=share,
            loss=halving.loss(scores[setting]) if setting in scores else None,
            difference=difference,
            why=why,
            seconds=sum(Figures.read(run).seconds or 0.0 for run in runs if run.exists),
            compared=[
                {"run": str(run.path), "share": at, "loss": loss if math.isfinite(loss) else None}
                for member, run in zip(members, runs, strict=True)
                for at, loss in self.losses.get(member.name, {}).items()
            ],
        )


_UNITS = {"h": 3600, "m": 60, "s": 1}


def seconds_of(budget: str | float) -> float:
    """The seconds of a budget such as `90s`, `30m` or `2h`, or of seconds. Raises ConfigError for anything else."""
    number, unit = (budget[:-1], budget[-1:]) if isinstance(budget, str) else (budget, "s")
    try:
        if unit not in _UNITS or not 0 < float(number) < 1e6:
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(f"budget {shown(budget)}: write a time above 0 such as 90s, 30m or 2h") from None
    return _UNITS[unit] * float(number)


def _as_budget(seconds: float) -> str:
    """`seconds` rounded up, as `seconds_of` reads it."""
    unit = next(unit for unit, size in _UNITS.items() if seconds >= 2 * size or size == 1)
    return f"{math.ceil(seconds / _UNITS[unit])}{unit}"
