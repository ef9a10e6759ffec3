"""The program as a story: a config becomes a trained, exported and proven adapter.

Cheap failures come first: the config was checked before; then tokenizer and architecture, data, and only then the
weights. Each stage hands one value to the next and none reaches back.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune import libraries, planning, resuming
from finetune.checkpoint import set_aside
from finetune.config import Config
from finetune.data import fingerprint
from finetune.data import prepare as data_prepare
from finetune.environment import describe
from finetune.errors import ArtifactError, ForecastError, MachineError, OutOfMemoryError, Terminated
from finetune.export import merge as export_merge
from finetune.memory import comparison, exhausted, inspect
from finetune.memory import device as devices
from finetune.memory.fit import NothingFits
from finetune.memory.forecast import Forecast
from finetune.memory.monitor import Monitor, meter_for
from finetune.model import adapter, attention, checkpointing, identity
from finetune.model.base import autocast, base_dtype, load_architecture, load_base
from finetune.model.generation import answer
from finetune.model.tokenizer import load_tokenizer
from finetune.report import page, plots
from finetune.report.result import Result
from finetune.report.terminal import Terminal
from finetune.rundir import DISK_ERRORS, RunDirectory, checkpoint_step, not_written, write_json, write_lines
from finetune.signals import Signals
from finetune.training import processes
from finetune.training import run as training
from finetune.training.arguments import check
from finetune.training.evaluation import held_out_loss

# Held-out questions answered before and after training: enough to see a difference, few enough to read.
_QUESTIONS = 3
_ANSWER_TOKENS = 96


def train(config: Config, *, fresh: bool = False, terminal: Terminal | None = None) -> Result:
    """Train as `config` says and return what came out; a run that was interrupted goes on where it stopped.

    Of several processes the first one prints and writes the run directory.

    `fresh` moves an earlier run in the same directory aside instead. Raises a FinetuneError for whatever a person
    can mend.
    """
    libraries.quiet()
    terminal = (terminal or Terminal()) if processes.first() else Terminal(quiet=True)
    run = RunDirectory(config.output.dir or "runs/unnamed")
    run.check_layout()
    if run.has_results and not fresh:
        resuming.refuse_changes(config, run)
        if run.finished and not _wants_more_steps(config, run):
            terminal.note(
                f"{run.path} is finished. Go on: set training.max_steps above its {run.steps_done} steps, or more "
                "training.epochs; "
                "start anew: --fresh (the old run is moved aside)"
            )
            return Result(run)
    with terminal, Signals() as signals, contextlib.ExitStack() as held:
        try:
            _Training(config, run, terminal, fresh, signals, held).go()
            return Result(run)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            raise MachineError(not_written(Path(error.filename or run.path), error)) from None


def _wants_more_steps(config: Config, run: RunDirectory) -> bool:
    now, then = config.training, run.config().training
    if now.max_steps:
        return now.max_steps > run.steps_done
    return then.max_steps is not None or now.epochs > then.epochs


@dataclass
class _Training:
    """One start of a run: the stages of `go`, in order. `held` is given back at the end: the run directory's lock."""

    config: Config
    run: RunDirectory
    terminal: Terminal
    fresh: bool
    signals: Signals
    held: contextlib.ExitStack
    locked: bool = False

    def go(self) -> None:
        run, terminal = self.run, self.terminal
        config, device = self.config, this_device()
        check(config, device)
        processes.meet(device)
        processes.first_does(lambda: self._lock() if run.exists else None)  # before anything that takes time
        tokenizer = load_tokenizer(config.model, config.data.chat_template)
        architecture = load_architecture(config.model)
        implementation, reason = _attention(config, architecture, device)
        data = data_prepare.prepare(config.data, tokenizer)
        config, forecast = processes.first_does(lambda: self._plan(architecture, device, data))

        environment = describe(device)
        made_with = resuming.made_with(config, data, tokenizer, environment)
        start = processes.first_does(lambda: self._open(config, forecast, environment, made_with, data))
        if not processes.first():
            run = self.run = run.of_process(processes.number())
            run.claim()
            run.forget_metrics_after(start.step)
        told = f"{implementation} ({reason})"
        terminal.opened(run.path, config, device, data, told, forecast, processes.count())
        monitor = Monitor(meter_for(device.type))
        inspect.cap(config.memory.limit, device)
        with exhausted.told(config, run, monitor, device):
            if config.training.deterministic and device.type == "cuda":
                self.held.enter_context(libraries.deterministic())
            with monitor.phase("load"):
                base = _base(config, architecture, implementation, device)
            made_with["base"] = identity.of_base(config.model)  # now it is on this machine
            self._log_changes(start, made_with)
            monitor.take_step()  # loading is reported once, not with the first step
            asked = self._ask_base(base, tokenizer) if processes.first() else []
            model = adapter.attach(base, config.adapter, config.model.name, config.training.seed, config.model.revision)
            checkpointing.apply(base, config.memory, device.type)
            terminal.built(model)

            outcome = training.train(
                config, model, tokenizer, data, run, monitor, terminal, device=device, signals=self.signals,
                made_with=made_with, resume_from=start.checkpoint,
            )  # fmt: skip
            processes.part()
            if not processes.first():
                return
            self._ask_again(model, tokenizer, asked)
        terminal.answers(run)
        run.event("trained", step=outcome.steps, best_step=outcome.best_step, memory=monitor.run)
        if forecast:
            write_json(run.forecast_file, comparison.as_dict(forecast, monitor.run))
            terminal.compared(comparison.compare(forecast, monitor.run))
        if config.output.merge and config.adapter.kind == "lora":
            del base, model
            libraries.return_freed_memory()
            _merge(run, terminal)
        report(run)
        run.event("finished", step=outcome.steps, best_step=outcome.best_step)
        terminal.finished(run)

    def _plan(self, architecture: Any, device: torch.device, data: Any) -> tuple[Config, Forecast | None]:
        """The config with what was `auto` fitted to the device, and the forecast of its step.

        Raises OutOfMemoryError, with the levers, for a job that does not fit.
        """
        config = self.config
        planner = planning.Planner(config, architecture, devices.here(device, config.memory), data)
        if not config.fitted:
            try:
                fitted = planner.fit()
            except NothingFits as least:
                config = least.config
            else:
                self.terminal.chose(fitted)
                config = fitted.config
            check(config, device)  # now that the micro-batch is a number
        if config.memory.check == "off":
            return config, None
        try:
            forecast = planner.forecast(config)
        except ForecastError as error:
            self.terminal.note(f"{error}; going on without one")
            return config, None
        if not forecast.fits:
            told = planning.does_not_fit(forecast, planner.levers(config, forecast))
            if config.memory.check == "refuse":
                raise OutOfMemoryError(f"{told}\nTo try all the same: memory.check=warn")
            self.terminal.note(told)
        return config, forecast

    def _lock(self) -> None:
        """Keep other processes out of the run directory. Raises MachineError where one is in it."""
        if not self.locked:
            self.held.enter_context(self.run.locked())
            self.held.push(self._note_signal)
            self.locked = True

    def _unlock(self) -> None:
        self.held.close()
        self.locked = False

    def _note_signal(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (Terminated, KeyboardInterrupt)):
            name = "interrupted" if isinstance(error, KeyboardInterrupt) else "terminated"
            self.run.event(name, step=max(self.run.saved_steps, default=0))

    def _open(
        self,
        config: Config,
        forecast: Forecast | None,
        environment: dict[str, Any],
        made_with: dict[str, Any],
        data: data_prepare.Prepared,
    ) -> resuming.Start:
        """Make or reopen the run directory; where training starts."""
        run = self.run
        if self.fresh and run.events_file.exists():
            self._unlock()
            self.terminal.note(f"the earlier run is now {run.move_aside()}")
        run.claim()
        self._lock()
        start = resuming.find(run)
        resuming.compare(run, start, made_with)
        run.create(config)
        run.remove_leftovers()
        if forecast:
            write_json(run.forecast_file, comparison.as_dict(forecast, {}))
        write_json(run.environment_file, {"seed": self.config.training.seed, **environment})
        write_lines(run.data_file, data.affected())
        run.forget_metrics_after(start.step)
        if not start.checkpoint:
            run.answers_file.unlink(missing_ok=True)
            run.event("started", seed=self.config.training.seed)
            return start
        for damaged, problems in start.damaged.items():
            aside = set_aside(damaged)
            run.event("checkpoint_damaged", step=checkpoint_step(damaged), moved_to=aside.name, problems=problems)
            self.terminal.note(f"{damaged.name} cannot be used ({'; '.join(problems)}); it is now {aside.name}")
        run.event("resumed", step=start.step, checkpoint=start.checkpoint.name)
        why = "the newest whole checkpoint" if start.damaged else "the last checkpoint"
        self.terminal.note(f"resuming from {start.checkpoint}, {why}")
        return start

    def _log_changes(self, start: resuming.Start, made_with: dict[str, Any]) -> None:
        """Write down what changed since the checkpoint was made; raises ConfigError for another base."""
        if changes := resuming.compare(self.run, start, made_with):
            self.run.event("changed", **changes)

    def _ask_base(self, base: Any, tokenizer: Any) -> list[dict[str, Any]]:
        """The base's answers to the first held-out questions, once a run; random weights have nothing to say."""
        if self.config.model.weights == "random":
            return []
        asked = data_prepare.questions(self.config.data, _QUESTIONS)
        if kept := self._answered_before(asked):
            return kept
        with autocast(self.config.training.precision, base.device):
            rows = [
                {
                    "messages": messages,
                    "question": messages[-1]["content"],
                    "reference": reference,
                    "before": answer(base, tokenizer, messages, _ANSWER_TOKENS),
                    "after": None,
                }
                for messages, reference in asked
            ]
        write_json(self.run.answers_file, rows)
        return rows

    def _answered_before(self, asked: list[tuple[Any, str]]) -> list[dict[str, Any]]:
        """The base's answers of an earlier start; none where they are not to what is asked, whatever the file says."""
        try:
            rows: list[dict[str, Any]] = [{**row} for row in self.run.answers()]
        except ArtifactError as error:
            self.terminal.note(f"{error}; the base is asked again")
            return []
        same = [(row.get("messages"), row["reference"]) for row in rows] == [(*each,) for each in asked]
        return rows if same else []

    def _ask_again(self, model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> None:
        """The trained model's answers beside the base's."""
        if not rows:
            return
        with autocast(self.config.training.precision, model.device):
            for row in rows:
                row["after"] = answer(model, tokenizer, row["messages"], _ANSWER_TOKENS)
        write_json(self.run.answers_file, rows)


def report(run: RunDirectory) -> Path:
    """Draw the plot and write the self-contained report of a run; returns the report's path."""
    plots.training(run)
    page.write(run)
    return run.report_file


def merge(run: RunDirectory, *, terminal: Terminal | None = None) -> dict[str, Any]:
    """Merge the adapter into the unquantized base and publish `merged/` once its logits are proven equal.

    Returns the comparison. Raises ArtifactError when the merged model differs by more than the stated bound,
    MachineError where a process trains in the run directory.
    """
    libraries.quiet()
    run.config()  # of a foreign run perhaps: refused before anything is written there
    with run.locked(), Signals():
        return _merge(run, terminal or Terminal())


def _merge(run: RunDirectory, terminal: Terminal) -> dict[str, Any]:
    with exhausted.told_of_merge(run):
        proof = export_merge.merge(run, this_device())
    run.event("merged", **proof)
    terminal.merged(run, proof)
    return proof


def generate(run: RunDirectory, prompt: str, *, which: str = "adapter", max_new_tokens: int = 256) -> str:
    """Answer `prompt` with the run's `base`, `adapter` or `merged` model."""
    model, tokenizer = _model_of(run, which)
    return answer(model, tokenizer, [{"role": "user", "content": prompt}], max_new_tokens)


def evaluate(run: RunDirectory) -> dict[str, float]:
    """Held-out loss in nats per trained token of the base and of what was trained, as during training."""
    config = run.config()
    model, tokenizer = _model_of(run, "adapter")
    rows, _ = data_prepare.prepare_held_out(config.data, tokenizer)

    def loss(model: Any) -> float:
        return held_out_loss(model, tokenizer, rows, config)

    trained = loss(model)
    if config.adapter.kind == "lora":
        with model.disable_adapter():
            return {"base": loss(model), "adapter": trained}
    del model
    libraries.return_freed_memory()
    return {"base": loss(_model_of(run, "base")[0]), "adapter": trained}


def _model_of(run: RunDirectory, which: str) -> tuple[Any, Any]:
    """The run's base, base with adapter (as it was trained), or merged model, and the tokenizer.

    Raises ArtifactError where that is no longer the tokenizer that the weights were trained with.
    """
    libraries.quiet()
    config = run.config()
    device = this_device()
    tokenizer = load_tokenizer(config.model, run.chat_template)
    if which == "merged" or (which == "adapter" and config.adapter.kind == "none"):
        fingerprint.check(tokenizer, run.merged)
        return export_merge.load_merged(run, device), tokenizer
    if which == "adapter":
        adapter.check_files(run.adapter)
        fingerprint.check(tokenizer, run.adapter)
    architecture = load_architecture(config.model)
    implementation, _ = _attention(config, architecture, device)
    base = _base(config, architecture, implementation, device)
    if which == "base":
        return base, tokenizer
    return adapter.load_adapter(base, run.adapter), tokenizer


def _attention(config: Config, architecture: Any, device: torch.device) -> tuple[str, str]:
    packed = config.data.packing
    return attention.choose(config.model.attention, architecture, device.type, config.training.precision, packed=packed)


def _base(config: Config, architecture: Any, implementation: str, device: torch.device) -> Any:
    dtype = base_dtype(config.adapter, config.training)
    return load_base(
        config.model, config.quantization, architecture, attention=implementation, dtype=dtype, device=device
    )


def this_device() -> torch.device:
    """The GPU where there is one, else the CPU; each process has its own."""
    processes.choose_gpu()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
