"""The output of a run: header, progress and results.

On a terminal, progress is a live view; in a log, an occasional plain line.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, cast

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from finetune.config import Config, DataSection, serving
from finetune.data.prepare import Prepared
from finetune.forecast.job_forecast import Forecast
from finetune.forecast.plan import Fitted
from finetune.model.structure import experts
from finetune.model.structure.mixture import Mixture
from finetune.objectives import OBJECTIVES
from finetune.report import forecast_view, printing, words
from finetune.report.figures import Figures
from finetune.report.live import STOPPING, LiveView
from finetune.report.reports import RENEWALS, Renewal
from finetune.report.result import Result
from finetune.report.view import View
from finetune.report.visible import LINES
from finetune.runtime.memory_monitor import Peak, headline
from finetune.storage.records import Difference
from finetune.storage.rundir import RunDirectory
from finetune.training.collator import micro_batching
from finetune.training.reference_scores import in_step_share

# Progress lines that a whole run prints to a log, besides its evaluations.
_PLAIN_LINES = 10


class Terminal:
    """Prints the progress of a run and renews its reports; implements the training Listener. `quiet` prints nothing.

    Close it, or use it as a context manager, so that a failed run leaves the terminal in order.
    """

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        # A notebook kernel claims to be a terminal, but plain lines read better there.
        terminal = False if "ipykernel" in sys.modules else None
        self._console = console or Console(force_jupyter=False, force_terminal=terminal, quiet=quiet)
        self._live: LiveView | None = None
        self._renewals: list[Renewal] = []
        self._forecast: Forecast | None = None
        self._log_every: int | None = None
        self._trains = False
        self._first_step = self._last_step = 0
        self._started = 0.0
        self._peaks_shown = self._has_said = False

    @property
    def console(self) -> Console:
        """Where it prints."""
        return self._console

    def close(self) -> None:
        """End the live view and running renewals of reports."""
        self._trains = False
        if self._live:
            self._live.stop()
            self._live = None
        for renewal in self._renewals:
            renewal.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, view: View) -> None:
        """Print a view."""
        view.show(self._console)

    # -- before training -------------------------------------------------------------------------------------------

    def compared(self, differences: Sequence[Difference], needed_bytes: int, peaks: dict[str, Peak]) -> None:
        """Print forecast and measurement by phase; on a CPU also those of the whole process."""
        forecast_view.compare(differences, self._console, forecast_view.process(needed_bytes, peaks))
        self._peaks_shown = bool(differences)

    def opened(
        self,
        path: Path,
        config: Config,
        device: Any,
        data: Prepared,
        attention: str,
        forecast: Forecast | None,
        processes: int = 1,
        mixture: Mixture | None = None,
    ) -> None:
        """Print the header: the job, its data, and the device. A failing output does not end the run from here on.

        Also makes the renewals of the run's reports (`reports.RENEWALS`), which `stepped` starts and `close` ends.
        """
        run = self._run = RunDirectory(path)
        if not isinstance(self._console.file, printing.LastingStream):  # in a sweep an earlier run has wrapped it
            lasting = printing.LastingStream(
                self._console.file, lambda reason: self._run.event("output_lost", reason=reason)
            )
            self._console.file = cast(IO[str], lasting)
        self._forecast, self._log_every = forecast, config.tracking.log_every
        if run.config_file.is_file():  # the other ranks' directories have none
            self._renewals = [renewal(run) for renewal in RENEWALS]
        facts = {"run": str(path)} | _job(config, data, processes, mixture) | {"attention": attention}
        facts["device"] = words.device(run.environment(), str(device))
        if unused := words.unused(data.train_counts, data.eval_counts):
            facts["not used"] = f"columns {unused}"
        if forecast:
            facts |= words.shorter(forecast) | {"memory": words.verdict(forecast)}
        objective = OBJECTIVES.get(config.training.objective)
        if objective and objective.reference:
            in_step = in_step_share(config.training, data)
            facts |= words.reference(config.caches_reference, forecast, in_step)
        self._facts(facts)

    def built(self, model: Any, left_out: Mapping[str, int], capacity: str | None = None) -> None:
        """Print the numbers of parameters and of trained ones, the numbers of layers without an adapter by reason
        (`left_out`), and what the adapter can store (`capacity`).
        """
        sizes = [(math.prod(experts.shape(parameter)), parameter.requires_grad) for parameter in model.parameters()]
        total = sum(size for size, _ in sizes)
        trained = sum(size for size, requires_grad in sizes if requires_grad)
        share = f" ({trained / total:.3%})" if total else ""
        facts = {"parameters": f"{words.count(total)}, trained {words.count(trained)}{share}"}
        if capacity:
            facts["capacity"] = capacity
        if left_out:
            reasons = (f"{words.count(layers)} layers {reason}" for reason, layers in left_out.items())
            facts["no adapter"] = f"on {', and on '.join(reasons)}"
        self._facts(facts)

    # -- the training listener -------------------------------------------------------------------------------------

    def started(self, first_step: int, last_step: int) -> None:
        self.close()
        self._first_step, self._last_step, self._started = first_step, last_step, time.perf_counter()
        self._trains = True
        if not self._console.quiet and self._console.is_terminal:
            self._live = LiveView(self._console, first_step, last_step, self._forecast)

    def stepped(self, line: dict[str, Any]) -> None:
        """Print the step if it is due, and start a renewal of the reports in a process of its own if one is due."""
        step = line["step"]
        every = self._log_every or max(1, math.ceil((self._last_step - self._first_step) / _PLAIN_LINES))
        if self._live:
            self._live.stepped(line)
        elif step in (self._first_step + 1, self._last_step) or step % every == 0:
            done = step - self._first_step
            left = (time.perf_counter() - self._started) / max(done, 1) * (self._last_step - step)
            self._say(
                f"step {step}/{self._last_step}  loss {words.loss(line['loss'])}{words.preferred(line)}  "
                f"lr {line['learning_rate']:.2e}  {words.count(line['tokens_per_second'])} tokens/s  "
                f"{words.size(headline(line['memory']))}  {words.duration(left)} left"
            )
        for renewal in self._renewals:
            renewal.renew()

    def evaluated(self, line: dict[str, Any]) -> None:
        peak = words.size(headline(line.get("memory", {})))
        if self._live:
            self._live.evaluated(line)
        self._say(f"step {line['step']}: eval loss {words.loss(line['eval_loss'])}, peak {peak}")

    def stopping(self) -> None:
        """Acknowledge the signal that ends training after this step. A signal handler calls it, so it takes no lock."""
        if self._live:
            self._live.stopping = True
        elif self._trains and not self._console.quiet:
            with contextlib.suppress(OSError):
                os.write(sys.stderr.fileno(), f"{STOPPING}\n".encode())

    def note(self, text: str) -> None:
        self._say(text, "yellow")

    def resolved(self, said: str | Fitted) -> None:
        """Print what a step of the resolution says: a note, or the values that were chosen."""
        if isinstance(said, Fitted):
            self.show(forecast_view.ChosenView(said))
        else:
            self.note(said)

    # -- after training --------------------------------------------------------------------------------------------

    def answers(self, run: RunDirectory) -> None:
        """Print sample questions with their reference and the answers before and after training."""
        self.close()
        for row in run.answers():
            self._say()
            self._say(row["question"].strip(), "bold")
            for kind, text in (("reference", row["reference"]), ("before", row["before"]), ("after", row["after"])):
                if text is not None:
                    printing.put(self._console, Text(kind, style="dim"))
                    answer = printing.plain(self._console, text.strip(), keep=LINES)
                    printing.put(self._console, Padding(answer, (0, 0, 0, 4), expand=False))

    def merged(self, folder: Path, proof: dict[str, Any]) -> None:
        """Print the proof of the merged model, and its folder."""
        self.close()
        self._say_apart(f"merged and {_proven(proof, 'the adapter')}. It is in {folder}")
        if (lost := words.served(proof)) and "to_trained" not in proof:  # `to_trained` is printed as a table
            self._say(lost)
        if likeness := proof.get("to_trained"):
            losses = {name: words.loss(value) for name, value in proof.get("losses", {}).items()}
            self._say(
                f"It was trained on the quantized base and is merged onto the {proof['onto']} one (`--onto`). Beside "
                "the trained model, in KL divergence and loss in nats per token:"
            )
            rows = [
                (f"onto {name}", f"{model['kl']:.4f}", f"{model['agreement']:.1%}", losses.get(name, ""))
                for name, model in likeness.items()
            ]
            rows += [(name, "", "", losses[name]) for name in ("trained", "base") if name in losses]
            printing.table(self._console, ("model", "KL", "same top token", "held-out loss"), rows)

    def exported(self, folder: Path, record: dict[str, Any]) -> None:
        """Print the proof of an export for other programs, and what it does not prove."""
        self.close()
        self._say_apart(f"exported and {_proven(record, 'training')}. It is in {folder}")
        if lost := words.served(record):
            self._say(lost)
        for title, key in (("known difference", "known_differences"), ("not proven here", "not_proven")):
            for one in record.get(key, ()):
                self._say(f"{title}: {one}")

    def serves(self, commands: dict[str, str], prompts: str | None) -> None:
        """Print the command lines that serve an export, by program, and the form of its prompts if it is not a chat."""
        if commands:
            self._say_apart("serve it with")
            self._facts(commands)
        if prompts:
            self._say(prompts)

    def pushed(self, address: str, also_there: list[str]) -> None:
        """Print where an export was uploaded to, and what earlier uploads left there."""
        self._say(f"uploaded to {address}")
        if also_there:
            self._say(f"it also has files of earlier uploads, which the card does not mention: {', '.join(also_there)}")

    def finished(self, run: RunDirectory) -> None:
        """Print the results of the whole run, and their paths."""
        self.close()
        result = Result(run)
        figures, config = result.figures, run.config()
        format = serving.export_of(config.output)
        first_use = "eval" if config.scorer else "chat"  # a model that scores sequences answers nothing
        self._say()
        if figures.peaks and not self._peaks_shown:
            printing.put(self._console, result.table())
        speed = ""
        if figures.tokens_per_second is not None and figures.padding_share is not None:
            speed = f"{words.count(figures.tokens_per_second)} tokens/s, {words.share(figures.padding_share)} padding"
        paths = {"adapter": run.adapter, "merged": run.merged, "report": run.report_file, "plot": run.plot_file}
        facts = {
            "loss": _losses(figures),
            "speed": speed,
            **{name: str(path) for name, path in paths.items() if path.exists()},
            "next": f"finetune {first_use} {run.quoted}" if run.adapter.exists() else "",
            "to serve": f"finetune export {run.quoted} --to {format}" if format else "",
        }
        self._facts({name: fact for name, fact in facts.items() if fact})

    def evaluating(self, model: str) -> None:
        """Print which model is evaluated from now on."""
        self._say(f"evaluating: {model}")

    def _say_apart(self, text: str) -> None:
        """Print a line below an empty one, unless it is the first of the command."""
        if self._has_said:
            printing.say(self._console)
        self._say(text)

    def _say(self, text: str = "", style: str = "") -> None:
        self._has_said = True
        printing.say(self._console, text, style, keep=LINES)

    def _facts(self, facts: dict[str, str]) -> None:
        self._has_said = True
        printing.facts(self._console, facts)


def _proven(proof: dict[str, Any], mover: str) -> str:
    """Describe what a proof compared and how far the logits are apart; `mover` is what moved the base."""
    at_median = "at the median token " if proof.get("median") else ""
    return (
        f"proven: on {words.count(proof['tokens'])} tokens of {proof['rows_of']} its logits differ {at_median}by "
        f"{proof['error']:.3%} from {proof['compared_with']} (rounding explains {proof['bound']:.3%}; {mover} moved "
        f"the base by {proof['effect']:.3%}), and {proof['agreement']:.2%} of the most likely tokens are the same"
    )


def _job(config: Config, data: Prepared, processes: int, mixture: Mixture | None) -> dict[str, str]:
    """The lines of the header on the base, the adapter, the data and the steps."""
    facts = {"base": words.base(config.model, config.quantization, config.training.precision)}
    if mixture:
        facts["experts"] = words.mixture(mixture)
    facts["adapter"] = words.adapter(config.adapter)
    if mixture and config.adapter.kind == "lora" and config.adapter.targets == "all-linear":
        rank = config.adapter.rank_of_experts(mixture.active) if mixture.experts else 0
        facts["adapter"] += f", without routers{f'; rank {rank} for each expert' if rank else ' and experts'}"
    facts["data"] = words.counts(data.train_counts, config.data.max_length)
    if config.data.train == DataSection().train:  # the default of a config without rows
        facts["data"] = f"the built-in rows ({config.data.train}): {facts['data']}"
    if data.eval_counts:
        facts["evaluation set"] = words.counts(data.eval_counts, config.data.max_length)
        if config.output.best and config.training.eval_every and not data.judges:
            stops = ", although training stops early by their loss" if config.training.early_stopping else ""
            facts["evaluation set"] += f"; {words.TOO_FEW_TO_JUDGE}{stops}"
    else:
        facts["evaluation set"] = data.warning or "none"
    if splits := words.splits(data.splits):
        facts["splits"] = splits
    if prompts := words.prompts(config.data.separator, data.train_counts, data.eval_counts):
        facts["prompts"] = prompts
    rows = config.training.batch_size // config.distributed.shares(processes)
    if tokens := micro_batching(config).tokens:
        packed = "packed into" if config.data.packing else "in"
        batch = f"{rows} rows {packed} micro-batches of at most {words.count(tokens)} tokens"
    else:
        parts = rows // config.training.rows
        batch = f"{rows} rows = {parts} micro-batch{'es' if parts > 1 else ''} of {config.training.rows}"
    if processes > 1:
        batch = f"{config.training.batch_size} rows over {config.distributed.named(processes)}; each {batch}"
    return {
        **facts,
        "batch": batch,
        "training": words.training(config.training, config.optimizer.kind),
    }


def _losses(figures: Figures) -> str:
    if not figures.evaluations:
        return f"training loss of the last step {words.loss(figures.final_loss)}" if figures.training else ""
    drop = "" if figures.relative_drop is None else f" ({words.change(-figures.relative_drop)})"
    text = f"eval loss of the base {words.loss(figures.base_eval_loss)}"
    if exported := figures.exported_evaluation:
        text += f" → {words.loss(exported['eval_loss'])}{drop}"
    best = figures.best_evaluation
    return text + (f", best {words.loss(best['eval_loss'])} at step {best['step']}" if best else "")


def note_beside_output(text: str) -> None:
    """Print a note to stderr, for commands whose stdout is an answer or JSON."""
    Terminal(console=Console(stderr=True)).note(text)
