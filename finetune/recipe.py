"""The program as a story: a config becomes a trained, exported and proven adapter.

Cheap failures come first: the config was checked before; then tokenizer and architecture, data, and only then the
weights. Each stage hands one value to the next and none reaches back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune import libraries
from finetune.config import Config
from finetune.data import prepare as data_prepare
from finetune.environment import describe
from finetune.errors import DataError
from finetune.export import merge as export_merge
from finetune.memory import exhausted, inspect
from finetune.memory.monitor import Monitor, meter_for
from finetune.model import adapter, attention, checkpointing
from finetune.model.base import DTYPES, load_architecture, load_base
from finetune.model.generation import answer
from finetune.model.tokenizer import load_tokenizer
from finetune.report import page, plots
from finetune.report.result import Result
from finetune.report.terminal import Terminal
from finetune.rundir import RunDirectory, checkpoint_step, write_json
from finetune.training import run as training
from finetune.training.evaluation import held_out_loss

# Held-out questions answered before and after training: enough to see a difference, few enough to read.
_QUESTIONS = 3
_ANSWER_TOKENS = 96


def train(config: Config, *, fresh: bool = False, terminal: Terminal | None = None) -> Result:
    """Train as `config` says and return what came out; a run that was interrupted goes on where it stopped.

    `fresh` moves an earlier run in the same directory aside instead. Raises a FinetuneError for whatever a person
    can mend.
    """
    libraries.quiet()
    terminal = terminal or Terminal()
    run = RunDirectory(config.output.dir or "runs/unnamed")
    if fresh and run.path.exists():
        terminal.note(f"the earlier run is now {run.move_aside()}")
    if run.finished:
        terminal.note(
            f"{run.path} is finished. Go on with more steps: a larger training.max_steps and another output.dir; "
            "start anew: --fresh (the old run is moved aside)"
        )
        return Result(run)
    with terminal:
        return _Training(config, run, terminal).go()


@dataclass
class _Training:
    """One start of a run: the stages of `go`, in order."""

    config: Config
    run: RunDirectory
    terminal: Terminal

    def go(self) -> Result:
        config, run, terminal = self.config, self.run, self.terminal
        device = this_device()
        tokenizer = load_tokenizer(config.model)
        architecture = load_architecture(config.model)
        implementation, reason = attention.choose(config.model.attention, architecture, device.type)
        data = data_prepare.prepare(config.data, tokenizer)

        resume_from = self._open(describe(device))
        terminal.opened(run.path, config, device, data, f"{implementation} ({reason})")
        monitor = Monitor(meter_for(device.type))
        inspect.cap(config.memory.limit, device)
        with exhausted.told(config, run, monitor, device):
            with monitor.phase("load"):
                base = _base(config, architecture, implementation, device)
            monitor.take_step()  # loading is reported once, not with the first step
            self._ask_base(base, tokenizer)
            model = adapter.attach(base, config.adapter, config.model.name, config.training.seed)
            checkpointing.apply(base, config.memory)
            terminal.built(model)

            outcome = training.train(
                config, model, tokenizer, data, run, monitor, terminal, device=device, resume_from=resume_from
            )
            self._ask_again(model, tokenizer)
        terminal.answers(run)
        run.event("finished", step=outcome.steps, best_step=outcome.best_step, memory=monitor.run)
        if config.output.merge and config.adapter.kind == "lora":
            del base, model
            merge(run, terminal=terminal)
        report(run)
        terminal.finished(run)
        return Result(run)

    def _open(self, environment: dict[str, Any]) -> Path | None:
        """Make or reopen the run directory; the checkpoint to resume from, if there is one."""
        checkpoints = self.run.complete_checkpoints()
        self.run.create(self.config)
        write_json(self.run.environment_file, {"seed": self.config.training.seed, **environment})
        if not checkpoints:
            self.run.forget_metrics_after(-1)
            self.run.answers_file.unlink(missing_ok=True)
            self.run.event("started", seed=self.config.training.seed)
            return None
        newest = checkpoints[-1]
        self.run.forget_metrics_after(checkpoint_step(newest))
        self.run.event("resumed", step=checkpoint_step(newest), checkpoint=newest.name)
        self.terminal.note(f"resuming from {newest}")
        return newest

    def _ask_base(self, base: Any, tokenizer: Any) -> None:
        """The base's answers to the first held-out questions, once a run; random weights have nothing to say."""
        if self.config.model.weights == "random" or self.run.answers_file.exists():
            return
        asked = data_prepare.questions(self.config.data, _QUESTIONS)
        rows = [
            {
                "question": messages[-1]["content"],
                "reference": reference,
                "before": answer(base, tokenizer, messages, _ANSWER_TOKENS),
                "after": None,
            }
            for messages, reference in asked
        ]
        write_json(self.run.answers_file, rows)

    def _ask_again(self, model: Any, tokenizer: Any) -> None:
        """The trained model's answers beside the base's."""
        if not self.run.answers_file.exists():
            return
        rows = json.loads(self.run.answers_file.read_text(encoding="utf-8"))
        for row, (messages, _) in zip(rows, data_prepare.questions(self.config.data, len(rows)), strict=True):
            row["after"] = answer(model, tokenizer, messages, _ANSWER_TOKENS)
        write_json(self.run.answers_file, rows)


def report(run: RunDirectory) -> Path:
    """Draw the plot and write the self-contained report of a run; returns the report's path."""
    plots.training(run)
    page.write(run)
    return run.report_file


def merge(run: RunDirectory, *, terminal: Terminal | None = None) -> dict[str, Any]:
    """Merge the adapter into the unquantized base and publish `merged/` once its logits are proven equal.

    Returns the comparison. Raises ArtifactError when the merged model differs by more than the stated bound.
    """
    libraries.quiet()
    terminal = terminal or Terminal()
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
    if config.data.eval == "none":
        raise DataError(f"{run.path} was trained with `data.eval: none`; there are no held-out rows to evaluate on")
    losses = {}
    for which in ("base", "adapter"):
        model, tokenizer = _model_of(run, which)
        data = data_prepare.prepare(config.data, tokenizer)
        losses[which] = held_out_loss(model, tokenizer, data.eval, config.training)
    return losses


def _model_of(run: RunDirectory, which: str) -> tuple[Any, Any]:
    """The run's base, base with adapter (as it was trained), or merged model, and the tokenizer."""
    libraries.quiet()
    config = run.config()
    device = this_device()
    if which == "merged" or (which == "adapter" and config.adapter.kind == "none"):
        return export_merge.load_merged(run, device), load_tokenizer(config.model)
    architecture = load_architecture(config.model)
    implementation, _ = attention.choose(config.model.attention, architecture, device.type)
    base = _base(config, architecture, implementation, device)
    tokenizer = load_tokenizer(config.model)
    if which == "base":
        return base, tokenizer
    return adapter.load_adapter(base, run.adapter), tokenizer


def _base(config: Config, architecture: Any, implementation: str, device: torch.device) -> Any:
    dtype = DTYPES[config.training.precision]
    return load_base(
        config.model, config.quantization, architecture, attention=implementation, dtype=dtype, device=device
    )


def this_device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
