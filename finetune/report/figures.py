"""The figures of a run: losses, peaks by phase, speed, and its summary for programs."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.errors import MachineError
from finetune.runtime.memory_monitor import PHASES, Peak, headline
from finetune.storage.records import TrainingLine
from finetune.storage.rundir import RunDirectory

RECENT_STEPS = 20
"""Steps over which the objective's statistics are averaged: those of one step are of few rows."""


@dataclass(frozen=True)
class Figures:
    """The lines of metrics.jsonl by kind, and of events.jsonl. A loss that is not finite is None."""

    training: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @classmethod
    def read(cls, run: RunDirectory) -> Figures:
        """The figures of a run as currently on disk, finished or not."""
        lines = run.metrics()
        return cls(
            training=[line for line in lines if "eval_loss" not in line],
            evaluations=[line for line in lines if "eval_loss" in line],
            events=run.events(),
        )

    # -- losses, in nats per trained token -------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Completed optimizer steps."""
        return self.training[-1]["step"] if self.training else 0

    @property
    def final_loss(self) -> float | None:
        return self.training[-1]["loss"] if self.training else None

    @property
    def base_eval_loss(self) -> float | None:
        """Eval loss before the first step."""
        return next((line["eval_loss"] for line in self.evaluations if line["step"] == 0), None)

    @property
    def best_evaluation(self) -> dict[str, Any] | None:
        """The evaluation with the lowest finite loss; that of step 0 if training did not help."""
        finite = [line for line in self.evaluations if line["eval_loss"] is not None]
        return min(finite, key=lambda line: line["eval_loss"], default=None)

    @property
    def exported_step(self) -> int | None:
        """The step whose weights are published: the last, or the best one if it was loaded; None until then."""
        loaded = [event["step"] for event in self._last_start() if event["event"] == "best_loaded"]
        return (loaded or [self.steps])[-1] if self.trained else None

    @property
    def exported_evaluation(self) -> dict[str, Any] | None:
        """The evaluation of the published weights, or of the latest ones until some are published.

        None if those weights were never evaluated, or are the base's.
        """
        step = self.exported_step if self.trained else self.evaluations[-1]["step"] if self.evaluations else 0
        return next((line for line in reversed(self.evaluations) if line["step"] == step), None) if step else None

    @property
    def relative_drop(self) -> float | None:
        """The relative reduction of the eval loss from the base to the published (or latest) weights."""
        base, evaluation = self.base_eval_loss, self.exported_evaluation
        exported = evaluation["eval_loss"] if evaluation else None
        return 1 - exported / base if base and exported is not None else None

    @property
    def trained(self) -> bool:
        """Whether training has ended since the last start."""
        return any(event["event"] == "trained" for event in self._last_start())

    def _last_start(self) -> list[dict[str, Any]]:
        """The events since the run was last started or resumed."""
        return (self.starts or [[]])[-1]

    @property
    def starts(self) -> list[list[dict[str, Any]]]:
        """The events of each start of the run."""
        starts: list[list[dict[str, Any]]] = []
        for event in self.events:
            if event["event"] in ("started", "resumed") or not starts:
                starts.append([])
            starts[-1].append(event)
        return starts

    # -- what an objective records besides ---------------------------------------------------------------------------

    @property
    def statistics(self) -> list[str]:
        """The names of the objective's own statistics, such as `rewards_margins`."""
        known = {*TrainingLine.__annotations__, "epoch", "skipped"}
        return list(dict.fromkeys(name for line in self.training for name in line if name not in known))

    @property
    def recent_statistics(self) -> dict[str, float | None]:
        """Their means over the last RECENT_STEPS steps, by name."""
        recent = self.training[-RECENT_STEPS:]
        values = {name: [line[name] for line in recent if line.get(name) is not None] for name in self.statistics}
        return {name: statistics.fmean(each) if each else None for name, each in values.items()}

    # -- time ------------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Seconds from start to last event, summed over the starts; a later merge or export does not count."""
        return sum(spent for spent, _ in self._spent())

    @property
    def device_hours(self) -> float:
        """`seconds` as hours, times the processes of each start, which have a device each."""
        return sum(spent * processes for spent, processes in self._spent()) / 3600

    @property
    def processes(self) -> int:
        """Processes (ranks) of the last start."""
        return self._spent()[-1][1] if self.events else 1

    def _spent(self) -> list[tuple[float, int]]:
        """(seconds, processes) of each start."""
        spent = []
        for start in self.starts:
            own = [event["time"] for event in start if event["event"] not in ("merged", "exported")] or [0.0]
            end = next((event["time"] for event in start if event["event"] == "finished"), own[-1])
            spent.append((max(0.0, end - own[0]), start[0].get("world_size", 1)))
        return spent

    # -- memory and speed ------------------------------------------------------------------------------------------

    @property
    def peaks(self) -> dict[str, Peak]:
        """The largest bytes by phase and measure, over all starts of the run, in the order of PHASES."""
        peaks: dict[str, Peak] = {}
        lines = [*self.training, *self.evaluations]
        lines += [event for event in self.events if event["event"] in ("trained", "out_of_memory")]
        lines += [
            {"memory": {"save": event.get("memory", {})}} for event in self.events if event["event"] == "saved"
        ]  # whose `memory` has no phases
        for phase, peak in (measured for line in lines for measured in line.get("memory", {}).items()):
            largest = peaks.setdefault(phase, {})
            for measure, measured_bytes in peak.items():
                largest[measure] = max(largest.get(measure, 0), measured_bytes)
        return {phase: peaks[phase] for phase in PHASES if peaks.get(phase)}

    @property
    def peak_bytes(self) -> int:
        """The largest reserved (CUDA) or resident (CPU) bytes over the phases."""
        return headline(self.peaks)

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the steps, so that the slow first step does not matter."""
        return statistics.median(line["tokens_per_second"] for line in self.training) if self.training else None

    @property
    def padding_share(self) -> float | None:
        """Share of padding among the positions of all batches."""
        lines = [line for line in self.training if line["padding_share"] < 1]
        tokens = sum(line["tokens"] for line in lines)
        positions = sum(line["tokens"] / (1 - line["padding_share"]) for line in lines)
        return 1 - tokens / positions if positions else None


def summary(run: RunDirectory) -> dict[str, Any]:
    """The results of a run as JSON values (see `Result.summary`)."""
    figures = Figures.read(run)
    best, exported = figures.best_evaluation, figures.exported_evaluation
    paths = {"adapter": run.adapter, "merged": run.merged, "report": run.report_file, "plot": run.plot_file}
    return {
        "run": str(run.path),
        "steps": figures.steps,
        "final_train_loss": figures.final_loss,
        **({"statistics": recent} if (recent := figures.recent_statistics) else {}),
        "base_eval_loss": figures.base_eval_loss,
        "final_eval_loss": figures.evaluations[-1]["eval_loss"] if figures.evaluations else None,
        "best_eval_loss": best and best["eval_loss"],
        "best_step": best and best["step"],
        "exported_step": figures.exported_step,
        "exported_eval_loss": exported and exported["eval_loss"],
        "relative_drop": figures.relative_drop,
        "peaks": figures.peaks,
        "peak_bytes": figures.peak_bytes or None,
        "tokens_per_second": figures.tokens_per_second,
        "padding_share": figures.padding_share,
        "seconds": figures.seconds,
        "device_hours": figures.device_hours,
        **{name: str(path) if path.exists() else None for name, path in paths.items()},
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by their path, `memory.backward.resident_bytes`."""
    columns: dict[str, Any] = {}
    for key, value in values.items():
        columns |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return columns


def framed(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A `pandas.DataFrame` of rows that may lack columns. Raises MachineError without pandas."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise MachineError("a frame needs the package pandas: pip install pandas") from None
    return pandas.DataFrame(rows)
