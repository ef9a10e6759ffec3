"""The fit: the fastest setting of a job that fits a device, with the same global batch and so with the same result.

The search chooses the micro-batch, what is recomputed, whether the inputs of checkpointed layers are offloaded to the
host, and for how many tokens logits exist at a time. What is recomputed is a step of a ladder, from nothing to
everything: at each step one layer goes to the next level, which frees memory and takes time. Of the levels those are
taken that cost the least seconds for the bytes they free.

Every candidate gets a full forecast; the search only decides which candidates to try. Times are the forecast's
(operations, bytes moved, calls), including recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.config import Config, MemorySection
from finetune.errors import OutOfMemoryError
from finetune.forecast import devices
from finetune.forecast.forecaster import Forecaster
from finetune.forecast.job_forecast import Forecast
from finetune.forecast.plan import Fitted, Limits
from finetune.model.recompute.checkpointing import LEVELS, ladder

_Candidate = tuple[Config, Forecast]

_SMALL_TILE = 512
# The share of the budget that is not spent on speed, for what a forecast may miss: it missed 2.07% at most in the sweep
# (benchmarks/results/forecast_cpu.json), and what does not fit after all costs more than a layer recomputed.
SPARE = 0.02
_LONG = 2**19
"""Tokens of a micro-batch whose forecast takes tens of seconds."""
_BEYOND = 1.25
"""Of the budget: what more than this is expected of is not forecast."""
_ROWS, _RECOMPUTED = "training.micro_batch", "memory.checkpointing"
_OFFLOAD, _TILE = "memory.offload", "memory.loss_tokens"


class NothingFits(OutOfMemoryError):
    """No setting fits; `config` is the one that takes the least memory."""

    def __init__(self, config: Config, message: str) -> None:
        super().__init__(message)
        self.config = config


def least(memory: MemorySection, *, offloads: bool, rows: Sequence[int], checkpointing: Any) -> dict[str, Any]:
    """The setting with the least memory among those that `fit` chooses from, as values of `section.key`."""
    recomputed = "all" if checkpointing is None else checkpointing
    offload = "checkpoints" if offloads and recomputed != "none" else memory.offload
    tile = min(_SMALL_TILE, memory.loss_tokens)
    return {_ROWS: rows[-1], _RECOMPUTED: recomputed, _OFFLOAD: offload, _TILE: tile}


def fit(
    forecaster: Forecaster,
    layers: int,
    *,
    offloads: bool,
    rows: Sequence[int],
    checkpointing: Any,
    levels: Sequence[str] = LEVELS,
    spare: float = SPARE,
) -> Fitted:
    """The fastest setting of a job that fits, for a model with this number of `layers`.

    `offloads`: whether the device has a host to offload to, which is tried if nothing fits without, or if the config
    says so. `rows` are the micro-batches to choose from, the largest first; `checkpointing` is fixed, or None to
    choose it from `levels`. `spare` is the share of the budget to leave, unless nothing fits so. Raises NothingFits,
    saying by how much.
    """
    search = _Search(forecaster, layers, rows, checkpointing, levels)
    ways = ("none", "checkpoints") if offloads else ("none",)
    for offload in ways if forecaster.config.memory.offload == "none" else ways[1:] or ways:
        for share in (spare, 0.0):
            search.spare = share
            if best := search.best(offload):
                return search.fitted(best)
    raise search.nothing_fits()


@dataclass
class _Search:
    forecaster: Forecaster
    layers: int
    rows: Sequence[int]
    checkpointing: Any
    levels: Sequence[str]
    spare: float = 0.0
    known: dict[tuple[Any, ...], _Candidate] = field(default_factory=dict)
    ladder: list[tuple[Any, float]] = field(default_factory=list)
    """What is recomputed at each step, and the bytes that some micro-batch needs with it."""

    @property
    def tile(self) -> int:
        """The tokens for which logits exist at a time, unless fewer are chosen."""
        return self.forecaster.config.memory.loss_tokens

    def best(self, offload: str) -> _Candidate | None:
        """Try micro-batches, the largest first, until a smaller one can be no faster.

        With fewer rows more memory is left to keep activations, but weights are read more often: where nothing is
        recomputed already, a smaller micro-batch is slower, and else it is forecast so first.
        """
        fitting: list[_Candidate] = []
        fastest = "none" if self.checkpointing is None else self.checkpointing
        for rows in self._worth_trying(offload):
            # No setting with these rows is faster than with nothing recomputed.
            if any((one.memory.checkpointing, one.memory.loss_tokens) == (fastest, self.tile) for one, _ in fitting):
                break
            if fitting and _seconds(self._try(rows, fastest, offload, self.tile)) >= min(map(_seconds, fitting)):
                break
            if candidate := self._with_rows(rows, offload):
                fitting.append(candidate)
        return min(fitting, key=_seconds, default=None)

    def _worth_trying(self, offload: str) -> Sequence[int]:
        """The micro-batches, without those that the two smallest rule out where rows are long and forecasts take long.

        Each row more takes as much as the one before.
        """
        if len(self.rows) < 3 or self.rows[0] * self.forecaster.config.data.max_length < _LONG:
            return self.rows
        recomputed = "all" if self.checkpointing is None else self.checkpointing
        second, first = (self._try(rows, recomputed, offload, self.tile)[1] for rows in self.rows[-2:])
        each = (second.needed_bytes - first.needed_bytes) / (self.rows[-2] - self.rows[-1])
        most = _BEYOND * first.budget_bytes
        return [rows for rows in self.rows if first.needed_bytes + each * (rows - self.rows[-1]) <= most]

    # -- one micro-batch -------------------------------------------------------------------------------------------

    def _with_rows(self, rows: int, offload: str) -> _Candidate | None:
        """The fastest that fits with this micro-batch; a smaller tile of logits only where less is recomputed then."""
        tile, small = self.tile, min(_SMALL_TILE, self.tile)
        if self.checkpointing is not None:
            tried = [self._try(rows, self.checkpointing, offload, tokens) for tokens in dict.fromkeys((tile, small))]
            return next((each for each in tried if _room(each[1], self.spare) >= 0), None)
        best = self._least_recomputed(rows, offload, tile)
        loss = (best or self._try(rows, "all", offload, tile))[1].categories["loss"]
        if small == tile or not loss or (best and best[0].memory.checkpointing == "none"):
            return best
        return self._least_recomputed(rows, offload, small, best) or best

    def _least_recomputed(
        self, rows: int, offload: str, tile: int, than: _Candidate | None = None
    ) -> _Candidate | None:
        """With as little recomputed as must be, and less than in `than`."""

        def tried(recomputed: Any) -> _Candidate:
            return self._try(rows, recomputed, offload, tile)

        def fits(recomputed: Any) -> bool:
            # If nothing is recomputed, there are no inputs to offload: not a setting to choose.
            return (offload, recomputed) != ("checkpoints", "none") and _room(tried(recomputed)[1], self.spare) >= 0

        def guess(low: int, high: int) -> int:
            """The first step between two that meets the budget, if all are apart as on the ladder; else `high`."""
            above, below = tried(steps[low])[1], tried(steps[high])[1]
            budget = (1 - self.spare) * below.budget_bytes
            share = (above.needed_bytes - budget) / max(1, above.needed_bytes - below.needed_bytes)
            needed = self.ladder[low][1] + share * (self.ladder[high][1] - self.ladder[low][1])
            return next((step for step in range(low + 1, high) if self.ladder[step][1] <= needed), high)

        if than is None:
            if not self.known and fits("none"):  # one forecast is enough for a small job
                return tried("none")
            if not fits("all"):
                return None
            if fits("none"):
                return tried("none")
        self.ladder = self.ladder or self._ladder(rows, offload)
        steps = [recomputed for recomputed, _ in self.ladder]
        chosen = first_that_fits(
            steps if than is None else steps[: steps.index(than[0].memory.checkpointing)], fits, guess
        )
        return None if chosen is None else tried(chosen)

    def _ladder(self, rows: int, offload: str) -> list[tuple[Any, float]]:
        """From nothing recomputed to everything; made once, as levels compare alike for all micro-batches."""
        at = {level: self._try(rows, level, offload, self.tile)[1] for level in self.levels}
        levels = worth_their_bytes(at)
        needed = [float(at[levels[0]].needed_bytes)]
        for level in levels[1:]:
            each = (at[level].needed_bytes - needed[-1]) / self.layers
            needed += [needed[-1] + each * number for number in range(1, self.layers + 1)]
        return list(zip(ladder(levels, self.layers), needed, strict=True))

    def _try(self, rows: int, recomputed: Any, offload: str, tile: int) -> _Candidate:
        key = (rows, str(recomputed), offload, tile)
        if key not in self.known:
            changes = {_ROWS: rows, _RECOMPUTED: recomputed, _OFFLOAD: offload, _TILE: tile}
            tried = self.forecaster.variant(self.forecaster.config.changed(changes))
            self.known[key] = (tried.config, tried.forecast())
        return self.known[key]

    # -- what is said of it ----------------------------------------------------------------------------------------

    def fitted(self, best: _Candidate) -> Fitted:
        """The best setting, with a reason for each value that was chosen."""
        (config, chosen), asked = best, self.forecaster.config.memory

        def everything() -> Forecast:
            """The fastest that fits with everything recomputed, of all that were tried; else the chosen rows so."""
            whole = [one for one in self.known.values() if one[1].fits and one[0].memory.checkpointing == "all"]
            if whole:
                return min(whole, key=_seconds)[1]
            return self._try(config.training.rows, "all", config.memory.offload, config.memory.loss_tokens)[1]

        rows, recomputed = config.training.rows, config.memory.checkpointing
        accumulation = config.training.batch_size // rows
        room = (chosen.budget_bytes - chosen.needed_bytes) / 2**30
        reasons = {_RECOMPUTED: f"{room:.2f} GiB of the budget are left"}
        if len(self.rows) > 1:
            options = ", ".join(map(str, self.rows))
            each = "one is the global batch" if accumulation == 1 else f"{accumulation} of them make the global batch"
            reasons[_ROWS] = f"the fastest of {options}; {each}"
        if self.checkpointing is None and recomputed != "none":
            limit = f"leave less than {self.spare:.0%}" if self.spare else "not fit"
            reasons[_RECOMPUTED] += f"; one layer keeping more would {limit}"
        if config.memory.offload != asked.offload:
            reasons[_OFFLOAD] = "nothing fits with the layers' inputs on the device"
        if config.memory.loss_tokens != asked.loss_tokens:
            reasons[_TILE] = "fewer logits at a time, so that less must be recomputed"
        levels = tuple(step for step, _ in self.ladder if isinstance(step, str))
        return Fitted(config, chosen, reasons, len(self.known), everything, levels)

    def nothing_fits(self) -> NothingFits:
        config, least = min(self.known.values(), key=lambda tried: tried[1].needed_bytes)
        decides = least.phases.get("merge", {}).get("reserved_bytes") == least.peak_reserved_bytes
        later = "merge later (`output.merge: false`), " if config.output.merge and decides else ""
        return NothingFits(
            config,
            f"nothing fits on {least.device.name}: the smallest setting found needs "
            f"{least.needed_bytes / 2**30:.2f} of {least.budget_bytes / 2**30:.2f} GiB "
            f"(micro-batch {config.training.rows}, checkpointing {config.memory.checkpointing}, "
            f"offload {config.memory.offload}); {later}shorten `data.max_length`, lower "
            "`adapter.rank`, or use a GPU with more memory",
        )


def first_that_fits(steps: Sequence[Any], fits: Callable[[Any], bool], guess: Callable[[int, int], int]) -> Any:
    """The first of `steps` that fits, where all after one that fits do so too; None if the last does not.

    `guess` gives the index to try next between one that does not fit and one that does, or the latter to end there.
    """
    low, high = 0, len(steps) - 1
    if not fits(steps[high]):
        return None
    if fits(steps[low]):
        return steps[low]
    while (middle := guess(low, high)) < high:
        low, high = (low, middle) if fits(steps[middle]) else (middle, high)
    return steps[high]


def worth_their_bytes(at: Mapping[str, Forecast]) -> list[str]:
    """The levels that no mixture of two others beats, from nothing recomputed to everything.

    They are the convex hull of seconds over bytes: along it each byte that is freed costs more than the one before.
    """
    hull: list[str] = []
    for level, forecast in at.items():
        while len(hull) > 1:
            first, last = at[hull[-2]], at[hull[-1]]
            freed, all_freed = (first.needed_bytes - each.needed_bytes for each in (last, forecast))
            if (last.seconds - first.seconds) * all_freed < (forecast.seconds - first.seconds) * freed:
                break
            hull.pop()
        hull.append(level)
    return hull


def limits(forecaster: Forecaster, *, length: int, rows: int, rank: int) -> Limits:
    """The longest rows, the most rows and the highest rank that fit with every layer checkpointed, each by itself.

    `length`, `rows` and `rank` are upper bounds: a small model on a large GPU would fit meaningless values.
    """
    config, least = forecaster.config, {_RECOMPUTED: "all"}
    one = {**least, _ROWS: 1, "training.batch_size": 1}
    smallest = forecaster.forecast_with(one, evaluates=False)
    card = devices.smallest_fitting(smallest.peak_reserved_bytes + smallest.device.communicator_bytes)

    def with_value(changes: Mapping[str, Any], *keys: str) -> Callable[[int], Forecast]:
        return lambda value: forecaster.forecast_with({**changes, **dict.fromkeys(keys, value)}, evaluates=False)

    longest = largest(with_value(one, "data.max_length"), config.data.max_length, 64, length)
    most = largest(with_value(least, _ROWS, "training.batch_size"), config.training.rows, 1, rows)
    trained = config.adapter.kind != "none"
    highest = largest(with_value(least, "adapter.rank"), config.adapter.rank, 1, rank) if trained else 0
    return Limits(longest, most, highest, card.name if card else None)


def largest(
    forecast: Callable[[int], Forecast],
    start: int,
    grain: int,
    most: int,
    *,
    spare: float = 0.0,
    too_large: int | None = None,
) -> int:
    """The largest multiple of `grain` up to `most` whose forecast fits and leaves `spare` of the budget, or 0.

    `too_large` is a larger multiple that is known not to fit. Needed memory grows nearly in proportion, so that a few
    steps along its slope suffice.
    """
    known: dict[int, Forecast] = {}

    def at(value: int) -> Forecast:
        return known.setdefault(value, known.get(value) or forecast(value))

    low, high = 0, too_large
    if too_large:
        at(too_large)
    most = max(grain, most // grain * grain)
    value = min(most, max(grain, start // grain * grain))
    for _ in range(_STEPS):
        if _room(at(value), spare) >= 0:
            low = max(low, value)
        else:
            high = min(high or value, value)
        if low == most or (high is not None and high - low <= grain):
            break
        value = min(most, _next(known, low, high, grain, spare))
    return low


_STEPS = 16
_REACH = 8


def _room(forecast: Forecast, spare: float) -> float:
    """Bytes that are left of the budget; below 0 the job does not fit."""
    return (1 - spare) * forecast.budget_bytes - forecast.needed_bytes


def _next(known: Mapping[int, Forecast], low: int, high: int | None, grain: int, spare: float) -> int:
    # The two that lie next to the limit as far as it is known: above all that fit, or around it, or below all.
    values = sorted(known) if high is None else sorted(value for value in known if value >= low)[:2]
    guess = 2 * values[-1]
    if len(values) > 1:
        first, last = known[values[-2]], known[values[-1]]
        slope = (last.needed_bytes - first.needed_bytes) / (values[-1] - values[-2])
        if slope > 0:
            # A straight line from two small values may miss by far, and large ones take longer to forecast.
            guess = int(values[-1] + _room(last, spare) / slope) // grain * grain
            guess = min(guess, _REACH * values[-1])
    ceiling = guess if high is None else high - grain
    guess = min(max(guess, low + grain), max(ceiling, low + grain))
    return guess if guess not in known else max(grain, (low + (high or 2 * low)) // 2 // grain * grain)


def divisors(number: int) -> list[int]:
    """The divisors of a batch, the largest first."""
    return [value for value in range(number, 0, -1) if number % value == 0]


def _seconds(tried: _Candidate) -> float:
    return tried[1].seconds
