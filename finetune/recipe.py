"""The program as a story: a config becomes a trained, exported and proven adapter.

Cheap failures come first: the config was checked before; then tokenizer and architecture, data, and only then the
weights. Each stage hands one value to the next and none reaches back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.config import Config
from finetune.data import chat, examples, fingerprint
from finetune.data import prepare as data_prepare
from finetune.errors import (
    ArtifactError,
    DataError,
    ForecastError,
    MachineError,
    NumbersError,
    OutOfMemoryError,
    Terminated,
)
from finetune.export import merge as export_merge
from finetune.forecast import comparison, devices, planning
from finetune.forecast.fit import NothingFits
from finetune.forecast.replay import Forecast
from finetune.inference.generation import TooLong, answer
from finetune.lifecycle import out_of_memory, resume
from finetune.measure.monitor import Monitor, meter_for
from finetune.model import adapter, attention, bounds, checkpointing, identity
from finetune.model.base import autocast, base_dtype, load_architecture, load_base, outline, refuse_not_finite
from finetune.model.experts import Mixture
from finetune.model.tokenizer import load_tokenizer
from finetune.report import page, plan_look, plots
from finetune.report.result import Result
from finetune.report.terminal import Terminal, note_beside_output
from finetune.runtime import libraries, ranks, segments
from finetune.runtime.environment import describe
from finetune.runtime.signals import Signals
from finetune.settings import config_of
from finetune.storage.checkpoint import set_aside
from finetune.storage.files import DISK_ERRORS, not_written, write_json, write_lines
from finetune.storage.rundir import RunDirectory, checkpoint_step
from finetune.training import run as training
from finetune.training.checks import check, check_shares
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
    terminal = (terminal or Terminal()) if ranks.first() else Terminal(quiet=True)
    config, note = bounds.settled(config)
    if note:
        terminal.note(note)
    run = RunDirectory(config.output.dir or "runs/unnamed")
    check_shares(config)
    with terminal, Signals() as signals, ranks.together(this_device()), contextlib.ExitStack() as held:
        try:
            if not ranks.first_does(lambda: _nothing_to_do(config, run, fresh, terminal)):
                with _blaming_base(config):
                    _Training(config, run, terminal, fresh, signals, held).go()
            return Result(run)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            raise MachineError(not_written(Path(error.filename or run.path), error)) from None


def _nothing_to_do(config: Config, run: RunDirectory, fresh: bool, terminal: Terminal) -> bool:
    """Whether the run is finished, as the config has it. Raises ConfigError where the run is of another config."""
    run.check_layout()
    if fresh or not run.has_results:
        return False
    resume.refuse_changes(config, run)
    if not run.finished or _wants_more_steps(config, run):
        return False
    terminal.note(
        f"{run.path} is finished. Go on: set training.max_steps above its {run.steps_done} steps, or more "
        "training.epochs; "
        "start anew: --fresh (the old run is moved aside)"
    )
    return True


@contextlib.contextmanager
def _blaming_base(config: Config) -> Iterator[None]:
    """Where numbers are not finite, say so of the base's weights first: no learning rate mends those."""
    try:
        yield
    except NumbersError:
        refuse_not_finite(config.model)
        raise


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
        if idle := ranks.idle_gpus():
            terminal.note(idle)
        if device.type == "cuda" and (obstacle := libraries.triton_obstacle()):
            terminal.note(
                f"Triton cannot run its kernels ({obstacle}): going on with torch's own operators, which take more "
                "time and memory for the loss; `finetune doctor` says what to install"
            )
        check(config, device)
        environment = describe(device)
        given = {"config": config.model_dump(mode="json"), "packages": environment["packages"]}
        resume.refuse_other_ranks(given)
        ranks.first_does(lambda: self._lock() if run.exists else None)  # before anything that takes time
        tokenizer = load_tokenizer(config.model, config.data.chat_template)
        resume.refuse_other_ranks({"tokenizer": fingerprint.of(tokenizer)})
        architecture = load_architecture(config.model)
        bounds.check_tokenizer(tokenizer, architecture, config.model)
        implementation, reason = _attention(config, architecture, device)
        mixture = _outline(config, architecture, implementation)
        ranks.first_does(lambda: planning.try_out(config, architecture, device))
        data = data_prepare.prepare(config.data, tokenizer)
        if data.warning and config.training.early_stopping:
            raise DataError(f"`training.early_stopping` needs held-out rows; {data.warning}")
        data_prepare.check_ids(data, tokenizer, bounds.vocabulary(architecture), config.model.name)
        made_with = resume.made_with(config, data, tokenizer, environment, terminal.note)
        resume.refuse_other_ranks(made_with)
        config, forecast = ranks.first_does(lambda: self._plan(architecture, device, data))
        config = resume.own_places(config, self.config)
        made_with["config"] = config.model_dump(mode="json")
        start = ranks.first_does(lambda: self._open(config, forecast, environment, made_with, data))
        if not ranks.first():
            run = self.run = run.of_process(ranks.number())
            run.claim()
            self.held.enter_context(run.held())
            run.forget_metrics_after(start.step)
        told = f"{implementation} ({reason})"
        terminal.opened(run.path, config, device, data, told, forecast, ranks.count(), mixture)
        monitor = Monitor(meter_for(device.type))
        devices.cap(config.memory.limit, device)
        with out_of_memory.told(config, run, monitor, device):
            if self.config.training.deterministic and device.type == "cuda":
                self.held.enter_context(libraries.deterministic())
            with monitor.phase("load"):
                base = _base(config, architecture, implementation, device)
            made_with["base"] = identity.of_base(config.model, terminal.note)  # now it is on this machine
            resume.refuse_other_ranks(made_with)
            ranks.first_does(lambda: self._log_changes(start, made_with))
            monitor.take_step()  # loading is reported once, not with the first step
            asked = self._ask_base(base, tokenizer) if ranks.first() else []
            model = adapter.attach(base, config.adapter, config.model.name, config.training.seed, config.model.revision)
            checkpointing.apply(base, config.memory, device.type)
            terminal.built(model, adapter.left_out(base, config.adapter))

            outcome = training.train(
                config, model, tokenizer, data, run, monitor, terminal, device=device, signals=self.signals,
                made_with=made_with, resume_from=start.checkpoint,
            )  # fmt: skip
            if not ranks.first():
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
            _merge(run, config, terminal, terminal.note)
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
            if config.memory.check == "refuse":
                raise
            self.terminal.note(f"there is no forecast, and training goes on without one: {error}")
            return config, None
        if not forecast.fits:
            told = plan_look.does_not_fit(forecast, planner.levers(config, forecast))
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
    ) -> resume.Start:
        """Make or reopen the run directory; where training starts."""
        run = self.run
        if self.fresh and run.events_file.exists():
            self._unlock()
            self.terminal.note(f"the earlier run is now {run.move_aside()}")
        run.claim()
        self._lock()
        start = resume.find(run)
        resume.compare(run, start, made_with)
        run.create(config)
        run.remove_leftovers()
        if forecast:
            write_json(run.forecast_file, comparison.as_dict(forecast, {}))
        write_json(run.environment_file, {"seed": self.config.training.seed, **environment})
        write_lines(run.data_file, data.affected())
        run.forget_metrics_after(start.step)
        if not start.checkpoint:
            run.answers_file.unlink(missing_ok=True)
            run.event("started", seed=self.config.training.seed, learns=data.kind)
            return start
        for damaged, problems in start.damaged.items():
            aside = set_aside(damaged)
            run.event("checkpoint_damaged", step=checkpoint_step(damaged), moved_to=aside.name, problems=problems)
            self.terminal.note(f"{damaged.name} cannot be used ({'; '.join(problems)}); it is now {aside.name}")
        run.event("resumed", step=start.step, checkpoint=start.checkpoint.name, learns=data.kind)
        why = "the newest whole checkpoint" if start.damaged else "the last checkpoint"
        self.terminal.note(f"resuming from {start.checkpoint}, {why}")
        return start

    def _log_changes(self, start: resume.Start, made_with: dict[str, Any]) -> None:
        """Write down what changed since the checkpoint was made; raises ConfigError for another base."""
        if changes := resume.compare(self.run, start, made_with):
            self.run.event("changed", **changes)
            if "base" in changes:
                self.terminal.note(
                    "the checkpoint is of an earlier version, which knew a base by samples: whether "
                    f"{self.config.model.name} is still the same is not known"
                )

    def _ask_base(self, base: Any, tokenizer: Any) -> list[dict[str, Any]]:
        """The base's answers to the first held-out questions, once a run; random weights have nothing to say."""
        if self.config.model.weights == "random":
            return []
        asked = data_prepare.questions(self.config.data, _QUESTIONS)
        if kept := self._answered_before(asked):
            return kept
        with autocast(self.config.training.precision, base.device):
            rows = []
            for prompt, reference in asked:
                with contextlib.suppress(TooLong):  # rows are cut for training, and questions are not
                    rows.append(
                        {
                            "prompt": prompt,
                            "question": examples.shown(prompt),
                            "reference": reference,
                            "before": answer(base, tokenizer, self._prompt_ids(prompt, tokenizer), _ANSWER_TOKENS),
                            "after": None,
                        }
                    )
        write_json(self.run.answers_file, rows)
        return rows

    def _answered_before(self, asked: list[tuple[Any, str]]) -> list[dict[str, Any]]:
        """The base's answers of an earlier start; none where they are not to what is asked, whatever the file says."""
        try:
            rows: list[dict[str, Any]] = [{**row} for row in self.run.answers()]
        except ArtifactError as error:
            self.terminal.note(f"{error}; the base is asked again")
            return []
        # Questions too long for the model's positions were left out.
        same = rows and all((row.get("prompt"), row["reference"]) in asked for row in rows)
        return rows if same else []

    def _ask_again(self, model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> None:
        """The trained model's answers beside the base's."""
        if not rows:
            return
        with autocast(self.config.training.precision, model.device):
            for row in rows:
                row["after"] = answer(model, tokenizer, self._prompt_ids(row["prompt"], tokenizer), _ANSWER_TOKENS)
        write_json(self.run.answers_file, rows)

    def _prompt_ids(self, prompt: list[examples.Message] | str, tokenizer: Any) -> list[int]:
        example = examples.Completion(prompt, "") if isinstance(prompt, str) else examples.Chat(prompt)
        return _prompt_ids(example, tokenizer, self.config)


def report(run: RunDirectory) -> Path:
    """Draw the plot and write the self-contained report of a run; returns the report's path."""
    plots.training(run)
    page.write(run)
    return run.report_file


def merge(run: RunDirectory, *, trust_remote_code: bool = False, terminal: Terminal | None = None) -> dict[str, Any]:
    """Merge the adapter into the unquantized base and publish `merged/` once its logits are proven equal.

    `trust_remote_code` allows the Python code that the run's base ships with. Returns the comparison. Raises
    ArtifactError when the merged model differs by more than the stated bound, or where such code is needed and not
    allowed; MachineError where a process trains in the run directory.
    """
    libraries.quiet()
    # A foreign run is refused before anything is written there.
    config = config_of(run, trust_remote_code=trust_remote_code)
    with run.locked(), Signals():
        return _merge(run, config, terminal or Terminal(), note_beside_output)


def _merge(run: RunDirectory, config: Config, terminal: Terminal, note: Callable[[str], None]) -> dict[str, Any]:
    with out_of_memory.told_of_merge(run):
        proof = export_merge.merge(run, config, this_device(), note)
    run.event("merged", **proof)
    terminal.merged(run, proof)
    return proof


def generate(
    run: RunDirectory,
    prompt: str,
    *,
    which: str = "adapter",
    max_new_tokens: int = 256,
    trust_remote_code: bool = False,
) -> str:
    """Answer `prompt`, in the shape of the rows that were learnt, with the run's `base`, `adapter` or `merged` model.

    A run on conversations answers it as a user's message; one on completions, or on plain text, goes on with it.
    `trust_remote_code` allows the Python code that the run's base ships with. Raises ArtifactError where such code is
    needed and not allowed.
    """
    config = config_of(run, trust_remote_code=trust_remote_code)
    model, tokenizer = _model_of(run, config, which)
    kinds = [kind for event in run.events() if (kind := str(event.get("learns"))) in examples.ASKED]
    if not kinds:
        note_beside_output(f"{run.path} does not say what its rows were: the prompt is asked as a conversation")
    asked = examples.ASKED[kinds[-1] if kinds else "chat"]
    with _blaming_base(config):
        return answer(model, tokenizer, _prompt_ids(asked(prompt), tokenizer, config), max_new_tokens)


def _prompt_ids(example: examples.Example, tokenizer: Any, config: Config) -> list[int]:
    try:
        ids = chat.prompt_ids(example, tokenizer, config.data.control_tokens)
    except examples.RowError as error:
        raise ArtifactError(f"the prompt cannot be written for the model: {error}") from None
    return ids or [tokenizer.eos_token_id]  # an empty prompt of a tokenizer that begins texts with no token


def evaluate(run: RunDirectory, *, trust_remote_code: bool = False) -> dict[str, float]:
    """Held-out loss in nats per trained token of the base and of what was trained, as during training.

    `trust_remote_code` as for `generate`.
    """
    config = config_of(run, trust_remote_code=trust_remote_code)
    model, tokenizer = _model_of(run, config, "adapter")
    rows, _ = data_prepare.prepare_held_out(config.data, tokenizer)

    def loss(model: Any) -> float:
        with _blaming_base(config):
            nats = held_out_loss(model, tokenizer, rows, config)
            if not math.isfinite(nats):
                raise NumbersError(
                    f"the held-out loss is {nats}: `finetune doctor {run.path}` tells weights that are not finite"
                )
        return nats

    trained = loss(model)
    if config.adapter.kind == "lora":
        with model.disable_adapter():
            return {"base": loss(model), "adapter": trained}
    del model
    libraries.return_freed_memory()
    return {"base": loss(_model_of(run, config, "base")[0]), "adapter": trained}


def _model_of(run: RunDirectory, config: Config, which: str) -> tuple[Any, Any]:
    """The run's base, base with adapter (as it was trained), or merged model, and the tokenizer.

    Raises ArtifactError where the tokenizer, or the base, is no longer the one that the weights were trained with.
    """
    libraries.quiet()
    device = this_device()
    tokenizer = load_tokenizer(config.model, run.chat_template)
    if which == "merged" or (which == "adapter" and config.adapter.kind == "none"):
        fingerprint.check(tokenizer, run.merged)
        return export_merge.load_merged(run, config.model, device), tokenizer
    if which == "adapter":
        adapter.check_files(run.adapter, config.adapter)
        fingerprint.check(tokenizer, run.adapter)
    architecture = load_architecture(config.model)
    bounds.check_tokenizer(tokenizer, architecture, config.model)
    implementation, _ = _attention(config, architecture, device)
    base = _base(config, architecture, implementation, device)
    trained = run.adapter if config.adapter.kind == "lora" else run.merged
    if trained.exists():
        fingerprint.check_base(
            config.model, identity.of_base(config.model, note_beside_output), trained, note_beside_output
        )
    if which == "base":
        return base, tokenizer
    return adapter.load_adapter(base, run.adapter, config.adapter), tokenizer


def _attention(config: Config, architecture: Any, device: torch.device) -> tuple[str, str]:
    packed = config.data.packing
    return attention.choose(config.model.attention, architecture, device.type, config.training.precision, packed=packed)


def _outline(config: Config, architecture: Any, implementation: str) -> Mixture | None:
    """What is known of the base's experts. Raises ConfigError for an adapter that the base cannot have."""
    dtype = base_dtype(config.adapter, config.training)
    base, mixture = outline(config.model, config.quantization, architecture, attention=implementation, dtype=dtype)
    if config.adapter.kind == "lora":
        adapter.lora_config(base, config.adapter)
    return mixture


def _base(config: Config, architecture: Any, implementation: str, device: torch.device) -> Any:
    dtype = base_dtype(config.adapter, config.training)
    return load_base(
        config.model, config.quantization, architecture, attention=implementation, dtype=dtype, device=device
    )


def this_device() -> torch.device:
    """The GPU where there is one, else the CPU; each process has its own."""
    ranks.choose_gpu()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpu = torch.cuda.current_device()
    segments.settle(gpu)
    if libraries.triton_obstacle():
        libraries.without_triton()
    return torch.device("cuda", gpu)
