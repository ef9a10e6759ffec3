"""A job, from what was asked to what holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from finetune.config import Config
from finetune.data.prepare import Prepared
from finetune.resolve.machine import Machine, ThisMachine
from finetune.storage.rundir import RunDirectory

if TYPE_CHECKING:  # a look at the data imports no forecast
    from finetune.forecast.job_forecast import Forecast
    from finetune.forecast.plan import Fitted
    from finetune.resolve.planner import Planner

Stop = Literal["form", "base", "machine", "kernels", "weights", "memory"]
"""What a resolution settles last: the form of the base that is served, what else the base allows, precision and rate,
which kernels are off, how the weights are held, or how much memory a step takes."""


@dataclass(frozen=True)
class Job:
    """A job as far as it is resolved.

    `asked` is what the person wrote, `config` what holds. `earlier` is the directory of a run that may have had an
    earlier start, None with `--fresh` and in a plan. `architecture` is transformers' config of the base, None where
    that cannot be loaded. `data` are the prepared rows, None before they are read, and where a plan does without.
    `kernels_off` are the fused kernels, or `loss`, to do without. `why` has by key the reason of a value that was
    `auto`, and `notes` what was said of keys, by `say`.
    """

    asked: Config
    config: Config
    machine: Machine = field(default_factory=ThisMachine)
    earlier: RunDirectory | None = None
    reached: Stop | None = None
    architecture: Any = None
    data: Prepared | None = None
    kernels_off: frozenset[str] = frozenset()
    planner: Planner | None = None
    fitted: Fitted | None = None
    forecast: Forecast | None = None
    why: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str | Fitted], None] = lambda said: None

    def changed(self, changes: Mapping[str, Any], why: Mapping[str, str] | None = None) -> Job:
        """This job with other values of some `section.key` in its config, and the reasons of those that were `auto`."""
        return replace(self, config=self.config.changed(changes), why={**self.why, **(why or {})})

    def noting(self, key: str, note: str | None) -> Job:
        """This job with a note on a key, which is said at once; unchanged without one."""
        if note is None:
            return self
        self.say(note)
        return replace(self, notes={**self.notes, key: note})


Step = Callable[[Job], Job]
"""Derives a part of a job's config from the rest."""
