"""Trains the members of a sweep on one resident base, stopping those that fall behind; the same call goes on.

A member is trained by `recipe.train` as it would be alone, so its numbers are those of a lone run. It is paused by an
exception after a step, whose checkpoint it goes on from.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from finetune import recipe
from finetune.config import AdapterSection, TrainingSection
from finetune.data import fingerprint, prepare
from finetune.data.batching import MicroBatching
from finetune.data.prepare import Prepared
from finetune.errors import ConfigError, DataError, NumbersError, OutOfMemoryError, first_line
from finetune.extras.sweeps import grid, halving
from finetune.extras.sweeps.grid import Member
from finetune.extras.sweeps.resident import ResidentBase
from finetune.extras.sweeps.table import SettingResult, SettingState, SweepTable
from finetune.extras.sweeps.terminal import SweepTerminal
from finetune.model import build
from finetune.model.adapters import adapter_files
from finetune.model.base import load_architecture
from finetune.model.source.tokenizer import load_tokenizer
from finetune.recipe import provenance, resume
from finetune.report import words
from finetune.report.figures import Figures
from finetune.report.terminal import Terminal
from finetune.resolve import Job, resolve
from finetune.resolve.steps import in_one_precision
from finetune.runtime import libraries, ranks
from finetune.runtime.device import this_device
from finetune.storage import locks
from finetune.storage.files import write_bytes, write_json
from finetune.storage.rundir import SWEEP_SCORES, SWEEP_TABLE, RunDirectory, is_sweep
from finetune.training.callbacks import Callback
from finetune.training.eval_loss import HeldOut
from finetune.training.optimizers import OPTIMIZERS
from finetune.training.progress import Progress, read_progress

_NOT_FINITE = np.array([[np.inf, 1.0]])
"""The score of a member that diverged or failed."""


def sweep(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str], keys: Mapping[str, Sequence[str]], *,
    full: bool = False, fresh: bool = False, terminal: Terminal | None = None,
) -> SweepTable:  # fmt: skip
    """Train every combination of `keys` (see `grid.members`) in `output.dir`, and compare them on the evaluation rows.

    Half of the settings are stopped early, again and again, where they can be told apart; none with `full`. Another
    call with the same arguments goes on where one ended; with `fresh`, an earlier sweep is moved aside. Raises
    ConfigError for a sweep that compares nothing, InUseError while another process trains it, and what `recipe.train`
    raises, but for a member that diverges or does not fit the memory.
    """
    if ranks.world_size() > 1:
        raise ConfigError(
            "a sweep runs in one process, on one GPU; start it without torchrun, or train the members on several GPUs "
            "by `finetune launch --on slurm --sweep`"
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
        with _held(folder):
            pass
        RunDirectory(folder).move_aside()
    with _held(folder), libraries.collecting_as_before():
        table = _Sweep(folder, made, full, terminal).run()
    libraries.return_freed_memory()
    return table


def _held(folder: Path) -> contextlib.AbstractContextManager[None]:
    """The lock of a sweep."""
    (folder / SWEEP_SCORES).mkdir(parents=True, exist_ok=True)
    return locks.locked(folder / SWEEP_SCORES / "lock", str(folder), "or set another `output.dir`")


def _in_one_precision(made: Sequence[Member], terminal: Terminal, *, fresh: bool) -> list[Member]:
    """The members with one `training.precision` (see `resolve.steps.in_one_precision`), and a note on it."""
    asked = [Job(member.config, member.config, earlier=None if fresh else _run_of(member)) for member in made]
    jobs = in_one_precision(asked)
    for note in sorted({note for job in jobs for note in job.notes.values()}):
        terminal.note(note)
    return [replace(member, config=job.config) for member, job in zip(made, jobs, strict=True)]


def _run_of(member: Member) -> RunDirectory:
    return RunDirectory(str(member.config.output.dir))


def _check(members: Sequence[Member]) -> None:
    """Raise ConfigError for an adapter that does not fit the base, and for members that are the same once each `auto`
    is decided, before any is trained.
    """
    checked: list[AdapterSection] = []
    decided: list[dict[str, dict[str, Any]]] = []
    for member in members:
        job = resolve(member.config, until="machine")
        config = job.config
        grid.refuse_open_kind(config.quantization)
        values = grid.compared_values(config)
        values["optimizer"]["kind"] = OPTIMIZERS[config.optimizer.kind].unpaged or config.optimizer.kind
        decided.append(values)
        adapter = resume.to_build(config.adapter, resumed=True)  # a resumed member has already read what it starts from
        if adapter not in checked:
            architecture = job.architecture or load_architecture(config.model)
            attention, _ = build.choose_attention(config, architecture, this_device().type)
            build.blueprint(config, architecture, attention).check(adapter)
            checked.append(adapter)
    grid.refuse_same(members, decided)
    if len({json.dumps([one["quantization"], one["output"]["way"]]) for one in decided}) > 1:
        raise ConfigError(
            "`output.way: auto` holds the base of these members in different forms, and members are trained on one; "
            "set `rounded`"
        )


class _MemberPaused(Exception):
    """Ends a member's training at the share of its run after which members are compared."""


def _share(training: TrainingSection, step: int, epoch: float) -> float:
    """The share of a run that is done."""
    return step / training.max_steps if training.max_steps else epoch / training.epochs


@dataclass
class _Sweep:
    folder: Path
    members: Sequence[Member]
    full: bool
    terminal: Terminal
    resident: ResidentBase = field(default_factory=ResidentBase)
    scores: dict[float, dict[str, np.ndarray]] = field(default_factory=dict)
    """By share and setting, those of this call."""
    losses: dict[str, dict[float, float]] = field(default_factory=dict)
    """By member, those after each share."""
    why: dict[str, tuple[SettingState, str]] = field(default_factory=dict)

    def run(self) -> SweepTable:
        """Train in rounds, each to a larger share; after each, some settings are stopped."""
        self.output.began()
        going = [*self._by_setting]
        for share in [*self._shares, 1.0]:
            if share < 1 and len(going) <= 2:
                continue
            scores = self.scores[share] = {}
            for setting in going:
                rows = [self._scored(member, share) for member in self._by_setting[setting]]
                known = [one for one in rows if one is not None]
                if len(known) == len(rows):  # a setting that was trained further takes no part
                    scores[setting] = np.stack(np.broadcast_arrays(*known))
            kept = halving.finite(scores)
            diverged = scores.keys() - kept.keys() - self.why.keys()
            self.why |= dict.fromkeys(diverged, ("diverged", "its loss is not finite"))
            if share < 1:
                for setting, why in halving.stopped(kept).items():
                    self.why[setting] = "stopped", why
                    self.terminal.note(f"{setting}: stopped after {share:.3g} of a run, {why}")
            going = [setting for setting in going if setting not in self.why]
        table = self._table()
        write_json(self.folder / SWEEP_TABLE, table.as_dict())
        return table

    @cached_property
    def _by_setting(self) -> dict[str, list[Member]]:
        settings: dict[str, list[Member]] = {}
        for member in self.members:
            settings.setdefault(member.setting, []).append(member)
        return settings

    @cached_property
    def _shares(self) -> list[float]:
        """The shares of a run after which half of the settings are stopped."""
        return [] if self.full else halving.shares(len(self._by_setting))

    @cached_property
    def output(self) -> SweepTerminal:
        """What the members print on."""
        return SweepTerminal(self.terminal, len(self._by_setting), len(self.members), self._shares)

    def _scored(self, member: Member, share: float) -> np.ndarray | None:
        """(sum, trained tokens) of each evaluation row by a member, trained up to `share` unless its score is there;
        None for one that was trained further.
        """
        file, rows = self._score_file(member, share), None
        if file.exists():
            try:
                rows = np.load(file)
            except (OSError, ValueError, EOFError):
                self.terminal.note(f"{file}: damaged; {member.name} is scored again")
        if rows is None:
            unfinished = f"the sweep has not ended; the same command goes on with {member.setting}"
            write_json(self.folder / SWEEP_TABLE, self._table(unfinished).as_dict())
            try:
                rows = self._trained(member, share)
            except OutOfMemoryError as error:
                self.why[member.setting] = "failed", first_line(error)
                self.terminal.note(f"{member.setting}: {first_line(error)}")
                return _NOT_FINITE
            if rows is None:
                said = f"not compared at {words.share(share)} of its run, which has gone further"
                self.terminal.note(f"{member.name}: {said}")
                return None
            content = io.BytesIO()
            np.save(content, rows)
            write_bytes(file, content.getvalue())
        self.losses.setdefault(member.name, {})[share] = halving.loss(rows)
        after = "" if share == 1 else f" after {words.share(share)} of its run"
        self.terminal.note(f"{member.name}: eval loss {halving.loss(rows):.4f}{after}")
        return rows

    def _score_file(self, member: Member, share: float) -> Path:
        return self.folder / SWEEP_SCORES / f"{member.name}-{share:.4f}-{self._made_of[member.name]}.npy"

    @cached_property
    def _made_of(self) -> dict[str, str]:
        """By member, a hash of what its scores and their order depend on, except the versions of libraries."""
        made, batch_size = {}, self.members[0].config.training.batch_size
        for member in self.members:
            config = resolve(member.config, until="base").config  # the base follows from what is served
            parts = [config.model_dump_json(exclude={"output", "tracking"}), batch_size, self._rows]
            made[member.name] = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        return made

    @cached_property
    def _tokenizer(self) -> Any:
        job = self.members[0].config
        return load_tokenizer(job.model, job.data)

    @cached_property
    def _data(self) -> Prepared:
        job = resolve(self.members[0].config, until="base")
        media = prepare.media_of(job.config.model, job.config.data, self._tokenizer, job.architecture)
        data = prepare.prepare(job.config.data, self._tokenizer, media)
        if not data.eval:
            raise DataError(f"a sweep compares members on evaluation rows; {data.warning}")
        return data

    @cached_property
    def _rows(self) -> dict[str, str]:
        """The hashes of the training and evaluation rows."""
        return {"train": fingerprint.of_rows(self._data.train), "eval": fingerprint.of_rows(self._data.eval)}

    def _trained(self, member: Member, share: float) -> np.ndarray | None:
        """Train a member up to `share` of its run, and return its (sum, trained tokens) of each evaluation row; None
        if no checkpoint is left of that share.
        """
        run, training = _run_of(member), member.config.training
        saved = resume.find(run).checkpoint if run.exists else None
        if saved:  # raise as training does for other settings or rows, also where nothing is left to train
            config = resolve(member.config, earlier=run, until="machine").config
            provenance.changes_since(run, saved, {"config": config.model_dump(mode="json"), "data": self._rows})
        progress = read_progress(saved) if saved else Progress()
        before = progress.step - 1, progress.epoch * (1 - 1 / max(1, progress.step))
        if share < 1 and _share(training, *before) >= share:
            return None

        def on_step(metrics: dict[str, Any]) -> None:
            if share <= _share(training, metrics["step"], metrics["epoch"]) < 1:
                raise _MemberPaused

        try:
            if share == 1 or _share(training, progress.step, progress.epoch) < share:
                libraries.return_freed_memory()  # freed by members that have ended
                terminal, pausing = self.output.of(member.name, share), cast(Callback, SimpleNamespace(on_step=on_step))
                recipe.train(member.config, terminal=terminal, callbacks=(pausing,), load_base=self.resident.load)
        except _MemberPaused:
            pass
        except NumbersError:
            return _NOT_FINITE
        weights = run.adapter if share == 1 else resume.find(run).checkpoint
        assert weights, "a paused run has a checkpoint"
        return self._losses(run, weights)

    def _losses(self, run: RunDirectory, weights: Path) -> np.ndarray:
        """(sum, trained tokens) of each evaluation row by a run's `weights`, in the same order for all members."""
        config, device = run.config(), this_device()
        architecture = load_architecture(config.model)
        attention, _ = build.choose_attention(config, architecture, device.type)
        base = self.resident.load(build.blueprint(config, architecture, attention), device)
        model = adapter_files.load_adapter(base, weights, config.adapter)
        # The order of the rows must not depend on the member, nor on what fits it.
        first = self.members[0].config.training
        tokens = first.micro_batch_tokens or (config.data.max_length if config.data.packing else None)
        way = MicroBatching(1 if tokens else config.training.rows, tokens, config.data.packing)
        _, by_row = HeldOut(model, self._tokenizer, config).loss(self._data.eval, way, first.batch_size)
        return by_row.numpy()

    def _table(self, unfinished: str = "") -> SweepTable:
        """The settings as they stand, the best first: by how far they were compared, then by their losses.

        Differences, whose intervals take long, are left out of an `unfinished` one.
        """
        scores = self.scores
        order: list[str] = []
        for share in sorted(scores, reverse=True):
            order += [name for name in halving.ranked(scores[share]) if name not in order]
        order += [setting for setting in self._by_setting if setting not in order]
        results = [self._result(setting, ended=not unfinished) for setting in order]
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

    def _result(self, setting: str, *, ended: bool) -> SettingResult:
        members = self._by_setting[setting]
        share = max((share for share, scores in self.scores.items() if setting in scores), default=0.0)
        scores = halving.finite(self.scores.get(share, {}))
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
