"""What a person sees while a run goes on: a header, the progress, and what came of it.

On a terminal the progress is one live line; in a log it is a plain line now and then.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from finetune.config import Config
from finetune.data.batching import MicroBatching
from finetune.data.inspection import Inspection
from finetune.data.prepare import Counts, Prepared
from finetune.errors import MachineError
from finetune.forecast.comparison import Difference
from finetune.forecast.fit import Fitted, Limits
from finetune.forecast.levers import Lever
from finetune.forecast.replay import Forecast
from finetune.measure.monitor import headline
from finetune.model.experts import Mixture
from finetune.report import data_view, doctor_view, forecast_view, printing, words
from finetune.report.figures import Figures
from finetune.report.result import Result
from finetune.report.visible import LINES, visible
from finetune.storage.rundir import RunDirectory

# Lines that a whole run prints where there is no terminal, besides its evaluations.
_PLAIN_LINES = 10


class Terminal:
    """Tells a person how a run goes; a training Listener. `quiet` prints nothing.

    Close it, or use it as a context manager, so that a run that fails leaves the terminal as it was.
    """

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        # A notebook's kernel claims to be a terminal; plain lines, one after the other, read best there.
        in_notebook = "ipykernel" in sys.modules
        self._console = console or Console(force_jupyter=False, force_terminal=False if in_notebook else None)
        self._quiet = quiet
        self._live: Progress | None = None
        self._task = TaskID(0)
        self._first_step = self._last_step = 0
        self._started = 0.0

    def close(self) -> None:
        """End the live line, if there is one."""
        if self._live:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- before training -------------------------------------------------------------------------------------------

    def inspected(self, found: Inspection) -> None:
        """The data by itself."""
        data_view.show(found, self._console)

    def planned(self, forecast: Forecast, levers: Sequence[tuple[Lever, Forecast]]) -> None:
        """A forecast by itself and, where it does not fit, what would help."""
        forecast_view.show(forecast, self._console)
        forecast_view.levers(
            [(str(lever), after.needed_bytes, after.fits, lever.cost) for lever, after in levers], self._console
        )

    def examined(self, findings: Iterable[tuple[str, str, str, str]]) -> None:
        """(about, status, what, remedy) of each thing that `finetune doctor` looked at."""
        doctor_view.show(findings, self._console)

    def chose(self, fitted: Fitted) -> None:
        """What was chosen for `auto`, and why."""
        for key, reason in fitted.reasons.items():
            self._say(f"{key}: {fitted.value(key)} ({reason})")

    def fitted(self, fitted: Fitted, limits: Limits, target: Path) -> None:
        """The fitted job, what it gains, and how far it could be taken."""
        self.planned(fitted.forecast, ())
        self._say("")
        self.chose(fitted)
        self._say(
            f"predicted {fitted.speed_up:.2f} times as fast as the best that checkpoints every layer; {fitted.tried} "
            "settings were forecast"
        )
        self._say("")
        self._facts(
            {
                "longest rows": f"{words.count(limits.length)} tokens, one at a time",
                "largest micro-batch": f"{words.count(limits.micro_batch)} rows",
                "highest rank": words.count(limits.rank) if limits.rank else "no adapter",
                "smallest card": limits.smallest_card or "none in the table holds one row",
                "config": str(target),
            }
        )

    def compared(self, differences: Sequence[Difference]) -> None:
        """Forecast beside measured, by phase."""
        if not self._quiet:
            forecast_view.compare(
                [(found.label, found.forecast_bytes, found.measured_bytes) for found in differences], self._console
            )

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
        """The header: what is about to be done, on what, with what."""
        leaves_out = mixture and config.adapter.kind == "lora" and config.adapter.targets == "all-linear"
        facts = {
            "run": str(path),
            "base": words.base(config),
            **({"experts": words.mixture(mixture)} if mixture else {}),
            "adapter": words.adapter(config) + (", without routers and experts" if leaves_out else ""),
            "data": _counts(data.train_counts, config.data.max_length),
            "held out": _counts(data.eval_counts, config.data.max_length)
            if data.eval_counts
            else data.warning or "none",
            "batch": _batch(config, config.training.batch_size // processes, processes),
            "attention": attention,
            "device": _device(RunDirectory(path), str(device)),
        }
        if unused := words.unused(data.train_counts, data.eval_counts):
            facts["not used"] = f"columns {unused}"
        if forecast:
            facts["memory"] = words.verdict(forecast)
        self._facts(facts)

    def built(self, model: Any, left_out: int = 0) -> None:
        """How many parameters there are and how many of them are trained; `left_out` layers have no adapter."""
        sizes = [(_numel(parameter), parameter.requires_grad) for parameter in model.parameters()]
        total = sum(size for size, _ in sizes)
        trained = sum(size for size, requires_grad in sizes if requires_grad)
        share = f" ({trained / total:.3%})" if total else ""
        facts = {"parameters": f"{words.count(total)}, trained {words.count(trained)}{share}"}
        if left_out:
            facts["no adapter"] = f"on {words.count(left_out)} layers whose weights the model's code reads itself"
        self._facts(facts)

    # -- the training listener -------------------------------------------------------------------------------------

    def started(self, first_step: int, last_step: int) -> None:
        self.close()
        self._first_step, self._last_step, self._started = first_step, last_step, time.perf_counter()
        if self._quiet or not self._console.is_terminal:
            return
        self._live = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self._console,
            expand=True,
        )
        self._task = self._live.add_task("", completed=first_step, total=last_step, figures="")
        self._live.start()

    def stepped(self, line: dict[str, Any]) -> None:
        step = line["step"]
        figures = self._progress_figures(line)
        if self._live:
            self._live.update(self._task, completed=step, figures=figures)
        elif step in (self._first_step + 1, self._last_step) or step % self._plain_every() == 0:
            self._say(f"step {step}/{self._last_step}  {figures}")

    def evaluated(self, line: dict[str, Any]) -> None:
        peak = headline(line.get("memory", {}))
        self._say(f"step {line['step']}: held-out loss {words.loss(line['eval_loss'])}, peak {words.size(peak)}")

    def note(self, text: str) -> None:
        self._say(text, style="yellow")

    def _plain_every(self) -> int:
        return max(1, math.ceil((self._last_step - self._first_step) / _PLAIN_LINES))

    def _progress_figures(self, line: dict[str, Any]) -> str:
        done = line["step"] - self._first_step
        left = (time.perf_counter() - self._started) / max(done, 1) * (self._last_step - line["step"])
        return "  ".join(
            [
                f"loss {words.loss(line['loss'])}",
                f"lr {line['learning_rate']:.2e}",
                f"{words.count(line['tokens_per_second'])} tokens/s",
                words.size(headline(line["memory"])),
                f"{words.duration(left)} left",
            ]
        )

    # -- after training --------------------------------------------------------------------------------------------

    def answers(self, run: RunDirectory) -> None:
        """Held-out questions with the reference and the answers before and after training."""
        self.close()
        for row in run.answers():
            self._say("")
            self._say(row["question"].strip(), style="bold")
            for kind, text in (("reference", row["reference"]), ("before", row["before"]), ("after", row["after"])):
                if text is not None:
                    self._print(Text(kind, style="dim"))
                    self._print(Padding(self._text(text.strip()), (0, 0, 0, 4), expand=False))

    def merged(self, run: RunDirectory, proof: dict[str, Any]) -> None:
        """What was proven about the merged model, and where it is."""
        self.close()
        self._say(
            f"\nmerged and proven: on {words.count(proof['tokens'])} held-out tokens its logits differ "
            f"{'at the median token ' if proof.get('median') else ''}by "
            f"{proof['error']:.3%} from base plus adapter (rounding explains {proof['bound']:.3%}; the adapter moved "
            f"the base by {proof['effect']:.3%}), and {proof['agreement']:.2%} of the most likely tokens are the same. "
            f"It is in {run.merged}"
        )

    def finished(self, run: RunDirectory) -> None:
        """The results of the whole run, and where they are."""
        self.close()
        result = Result(run)
        figures = result.figures
        self._say("")
        if figures.peaks:
            self._print(result.table())
        paths = {"adapter": run.adapter, "merged": run.merged, "report": run.report_file, "plot": run.plot_file}
        facts = {
            "loss": _losses(figures),
            "speed": _speed(figures),
            **{name: str(path) for name, path in paths.items() if path.exists()},
        }
        self._facts({name: fact for name, fact in facts.items() if fact})

    def losses(self, losses: dict[str, float]) -> None:
        """Held-out loss and perplexity of each model."""
        table = Table("model")
        table.add_column("loss (nats/token)", justify="right")
        table.add_column("perplexity", justify="right")
        for name, nats in losses.items():
            table.add_row(name, words.loss(nats), words.perplexity(nats))
        self._print(table)

    # -- printing --------------------------------------------------------------------------------------------------

    def _say(self, text: str, style: str = "") -> None:
        self._print(self._text(text, style), soft_wrap=not self._console.is_terminal)

    def _facts(self, facts: dict[str, str]) -> None:
        """Names and facts in two columns. Lines of a log stay whole, however long."""
        width = max(map(len, facts), default=0)
        if not self._console.is_terminal:
            for name, fact in facts.items():
                self._say(f"{name:{width}}  {fact}")
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", min_width=10)
        table.add_column(overflow="fold")
        for name, fact in facts.items():
            table.add_row(name, self._text(fact))
        self._print(table)

    def _text(self, text: str, style: str = "") -> Text:
        """`text` as it is: no markup is read in it, no control character kept, and the console can encode it."""
        return Text(printing.encodable(self._console, visible(text, LINES)), style=style)

    def _print(self, printed: Any, *, soft_wrap: bool = False) -> None:
        if self._quiet:
            return
        try:
            self._console.print(printed, soft_wrap=soft_wrap, highlight=False)
        except OSError as error:
            raise MachineError(f"the output could not be written: {error.strerror}") from None


# -- a data set, a batch, a device in a few words ----------------------------------------------------------------------


def _counts(counts: Counts, max_length: int) -> str:
    trained = words.share(counts.trained_tokens / counts.tokens) if counts.tokens else "nothing"
    told = [
        f"{words.count(counts.rows)} rows",
        f"{words.count(counts.tokens)} tokens",
        f"{trained} trained",
        f"longest {words.count(counts.longest)}",
    ]
    if counts.truncated:
        told.append(f"{words.count(counts.truncated)} cut to {words.count(max_length)}")
    if counts.answers_truncated:
        told.append(f"{words.count(counts.answers_truncated)} of them in the answer")
    if counts.split:
        told.append(f"{words.count(counts.split)} split")
    if counts.duplicates:
        told.append(f"{words.count(counts.duplicates)} duplicate{'s' if counts.duplicates > 1 else ''}")
    if counts.control_tokens:
        told.append(f"{words.count(counts.control_tokens)} with control tokens as text")
    if counts.dropped:
        told.append(f"{words.count(counts.dropped)} dropped: {words.dropped(counts)}")
    if counts.affected:
        told.append("listed in data.jsonl")
    return ", ".join(told)


def _batch(config: Config, rows: int, processes: int) -> str:
    """How the rows of a step are shared out; `rows` is the share of each process."""
    if processes > 1:
        return f"{config.training.batch_size} rows over {processes} processes; each {_batch(config, rows, 1)}"
    if tokens := MicroBatching.of(config.training, config.data).tokens:
        packed = "packed into" if config.data.packing else "in"
        return f"{rows} rows {packed} micro-batches of at most {words.count(tokens)} tokens"
    micro = config.training.rows
    parts = rows // micro
    return f"{rows} rows = {parts} micro-batch{'es' if parts > 1 else ''} of {micro}"


def _device(run: RunDirectory, device: str) -> str:
    """The device as environment.json describes it, or its bare name."""
    environment = run.environment()
    if environment is None:
        return device
    described = environment["device"]
    if "name" in described and "total_bytes" in described:
        return f"{described['name']} ({device}), {words.size(described['total_bytes'])}"
    return f"{device}, {environment.get('cpu_cores')} cores, {environment.get('threads')} threads"


def _numel(parameter: Any) -> int:
    """Weights in a parameter. bitsandbytes packs two 4-bit weights into a byte and keeps the true shape beside them."""
    state = getattr(parameter, "quant_state", None)
    return math.prod(state.shape) if state is not None else parameter.numel()


def _losses(figures: Figures) -> str:
    if not figures.evaluations:
        return f"training loss of the last step {words.loss(figures.final_loss)}" if figures.training else ""
    drop = "" if figures.relative_drop is None else f" ({words.change(-figures.relative_drop)})"
    told = f"held-out loss base {words.loss(figures.base_eval_loss)}"
    if exported := figures.exported_evaluation:
        told += f" → {words.loss(exported['eval_loss'])}{drop}"
    best = figures.best_evaluation
    return told + (f", best {words.loss(best['eval_loss'])} at step {best['step']}" if best else "")


def _speed(figures: Figures) -> str:
    if figures.tokens_per_second is None or figures.padding_share is None:
        return ""
    return f"{words.count(figures.tokens_per_second)} tokens/s, {words.share(figures.padding_share)} padding"


def note_beside_output(text: str) -> None:
    """A note on stderr, for commands whose stdout is an answer or JSON."""
    Terminal(console=Console(stderr=True)).note(text)
