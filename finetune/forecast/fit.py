"""The fit: the fastest setting of a job that fits a device, with the same global batch and so with the same result.

The search chooses the micro-batch, how many layers are checkpointed, whether their inputs are offloaded to the host,
and for how many tokens logits exist at a time. Every candidate gets a full forecast; the search only decides which
candidates to try. Times are the forecast's (operations, bytes moved, calls), including recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from finetune.config import Config
from finetune.errors import OutOfMemoryError
from finetune.forecast import devices
from finetune.forecast.replay import Forecast
from finetune.model.checkpointing import pattern

Forecaster = Callable[[Config], Forecast]
_Tried = tuple[Config, Forecast]

_SMALL_TILE = 512
_ROWS, _LAYERS, _OFFLOAD, _TILE = (
    "training.micro_batch",
    "memory.checkpointing",
    "memory.offload",
    "memory.loss_tokens",
)


class NothingFits(OutOfMemoryError):
    """No setting fits; `config` is the one that takes least."""

    def __init__(self, config: Config, message: str) -> None:
        super().__init__(message)
        self.config = config


@dataclass(frozen=True)
class Fitted:
    """What was chosen: the config, its forecast, why each value, and the best that checkpoints every layer.

    `tried` is the number of settings that were forecast.
    """

    config: Config
    forecast: Forecast
    reasons: Mapping[str, str]
    everything: Forecast
    tried: int

    @property
    def speed_up(self) -> float:
        """Predicted speed over the fastest setting that fits with every layer checkpointed."""
        return self.everything.seconds / self.forecast.seconds

    def value(self, key: str) -> Any:
        """What was chosen for `section.key`."""
        section, _, name = key.partition(".")
        return getattr(getattr(self.config, section), name)

    def as_dict(self) -> dict[str, Any]:
        """What was chosen, as JSON values."""
        return {
            "chosen": {key: self.value(key) for key in (_ROWS, _LAYERS, _OFFLOAD, _TILE)},
            "reasons": dict(self.reasons),
            "forecast": self.forecast.as_dict(),
            "checkpoint_everything": self.everything.as_dict(),
            "predicted_speed_up": round(self.speed_up, 4),
            "tried": self.tried,
        }


@dataclass(frozen=True)
class Limits:
    """How far the job could be taken: the largest values that fit with every layer checkpointed, each by itself.

    0 where not even the least fits. `smallest_card` is that of the table that still holds one row with every layer
    checkpointed, or None.
    """

    length: int
    micro_batch: int
    rank: int
    smallest_card: str | None

    def as_dict(self) -> dict[str, Any]:
        """The limits as JSON values."""
        return asdict(self)


def fit(
    config: Config,
    layers: int,
    forecast: Forecaster,
    *,
    offloads: bool,
    rows: Sequence[int],
    checkpointing: str | int | None,
) -> Fitted:
    """The fastest setting that fits a model of so many `layers`.

    `offloads`: whether the device has a host to offload to; that is done only where nothing fits without. `rows` are
    the micro-batches to choose from, the largest first; `checkpointing` is fixed, or None to choose it. Raises
    NothingFits, saying by how much.
    """
    search = _Search(config, layers, forecast, rows, checkpointing)
    for offload in ("none", "checkpoints") if offloads else ("none",):
        if found := search.best(offload):
            return search.fitted(*found)
    raise search.nothing_fits()


@dataclass
class _Search:
    config: Config
    layers: int
    forecast: Forecaster
    rows: Sequence[int]
    checkpointing: str | int | None
    known: dict[tuple[Any, ...], _Tried] = field(default_factory=dict)

    def best(self, offload: str) -> _Tried | None:
        """Try micro-batches, the largest first, until a smaller one can be no faster.

        With fewer rows more memory is left to keep activations, but weights are read more often: not even without
        any recomputation is a smaller micro-batch faster than that.
        """
        found: list[_Tried] = []
        for rows in self.rows:
            if found and self._bound(rows, offload) >= min(map(_seconds, found)):
                break
            if candidate := self._with_rows(rows, offload):
                found.append(candidate)
        return min(found, key=_seconds, default=None)

    # -- one micro-batch -------------------------------------------------------------------------------------------

    def _bound(self, rows: int, offload: str) -> float:
        """Seconds below which no setting with so many rows can be."""
        layers = self._least(offload) if self.checkpointing is None else self.checkpointing
        return self._try(rows, layers, offload, self.config.memory.loss_tokens)[1].seconds

    def _with_rows(self, rows: int, offload: str) -> _Tried | None:
        """The fastest that fits with this micro-batch; a smaller tile of logits only where it saves a layer."""
        tile, small = self.config.memory.loss_tokens, min(_SMALL_TILE, self.config.memory.loss_tokens)
        if self.checkpointing is not None:
            tried = [self._try(rows, self.checkpointing, offload, tokens) for tokens in dict.fromkeys((tile, small))]
            return next((each for each in tried if each[1].fits), None)
        found = self._least_layers(rows, offload, tile, self.layers)
        layers = self.layers + 1 if found is None else self._checkpointed(found[0])
        if small == tile or layers == self._least(offload):
            return found
        return self._least_layers(rows, offload, small, layers - 1) or found

    def _least_layers(self, rows: int, offload: str, tile: int, most: int) -> _Tried | None:
        """With as few layers checkpointed as must be, and at most so many: each more takes no more memory."""
        if not (full := self._try(rows, most, offload, tile))[1].fits:
            return None
        low, high, fitting = self._least(offload), most, full
        if low == high or (free := self._try(rows, low, offload, tile))[1].fits:
            return full if low == high else free
        # `low` does not fit and `high` does.
        while high - low > 1:
            middle = self._guess(rows, offload, tile, low, high)
            tried = self._try(rows, middle, offload, tile)
            if tried[1].fits:
                high, fitting = middle, tried
            else:
                low = middle
        return fitting

    def _guess(self, rows: int, offload: str, tile: int, low: int, high: int) -> int:
        """Where a straight line between two known numbers of layers meets the budget, and at least one inside."""
        above, below = (self._try(rows, number, offload, tile)[1].needed_bytes for number in (low, high))
        budget = self._try(rows, high, offload, tile)[1].budget_bytes
        share = (above - budget) / max(1, above - below)
        return min(high - 1, max(low + 1, low + math.ceil(share * (high - low))))

    def _least(self, offload: str) -> int:
        """The fewest layers that can be checkpointed: offloading needs one."""
        return 1 if offload == "checkpoints" else 0

    def _try(self, rows: int, layers: str | int, offload: str, tile: int) -> _Tried:
        named = {0: "none", self.layers: "all"}.get(layers, layers) if isinstance(layers, int) else layers
        key = (rows, named, offload, tile)
        if key not in self.known:
            config = self.config.changed({_ROWS: rows, _LAYERS: named, _OFFLOAD: offload, _TILE: tile})
            self.known[key] = (config, self.forecast(config))
        return self.known[key]

    # -- what is said of it ----------------------------------------------------------------------------------------

    def fitted(self, config: Config, chosen: Forecast) -> Fitted:
        return Fitted(config, chosen, self._reasons(config, chosen), self._everything(config), len(self.known))

    def _checkpointed(self, config: Config) -> int:
        return sum(pattern(config.memory.checkpointing, self.layers))

    def _everything(self, config: Config) -> Forecast:
        """The fastest that fits with every layer checkpointed, of all that were tried; else the chosen rows so."""
        whole = [
            tried for tried in self.known.values() if tried[1].fits and self._checkpointed(tried[0]) == self.layers
        ]
        if whole:
            return min(whole, key=_seconds)[1]
        return self._try(config.training.rows, self.layers, config.memory.offload, config.memory.loss_tokens)[1]

    def _reasons(self, config: Config, chosen: Forecast) -> dict[str, str]:
        layers, rows = self._checkpointed(config), config.training.rows
        accumulation = config.training.batch_size // rows
        room = (chosen.budget_bytes - chosen.needed_bytes) / 2**30
        reasons = {
            _LAYERS: f"{layers} of {self.layers} layers recomputed; {room:.2f} GiB of the budget are left",
        }
        if not config.training.micro_batch_tokens:
            options = ", ".join(map(str, self.rows))
            reasons[_ROWS] = f"the fastest of {options}; {accumulation} of them make the global batch"
        if 0 < layers < self.layers:
            reasons[_LAYERS] += ", and one layer less would not fit"
        if config.memory.offload != self.config.memory.offload:
            reasons[_OFFLOAD] = "nothing fits with the layers' inputs on the device"
        if config.memory.loss_tokens != self.config.memory.loss_tokens:
            reasons[_TILE] = "fewer logits at a time, so that fewer layers must be recomputed"
        return reasons

    def nothing_fits(self) -> NothingFits:
        config, least = min(self.known.values(), key=lambda tried: tried[1].needed_bytes)
        return NothingFits(
            config,
            f"nothing fits on {least.device.name}: the smallest setting found needs "
            f"{least.needed_bytes / 2**30:.2f} of {least.budget_bytes / 2**30:.2f} GiB "
            f"(micro-batch {config.training.rows}, checkpointing {config.memory.checkpointing}, "
            f"offload {config.memory.offload}); shorten `data.max_length`, lower "
            "`adapter.rank`, or use a GPU with more memory",
        )


def limits(config: Config, forecast: Forecaster) -> Limits:
    """The longest rows, the most rows and the highest rank that fit with every layer checkpointed, each by itself."""
    least = config.changed({_LAYERS: "all"})
    one = least.changed({_ROWS: 1, "training.batch_size": 1})
    card = devices.smallest_fitting(forecast(one).peak_reserved_bytes)
    return Limits(
        smallest_card=card.name if card else None,
        length=_largest(lambda value: forecast(one.changed({"data.max_length": value})), config.data.max_length, 64),
        micro_batch=_largest(
            lambda value: forecast(least.changed({_ROWS: value, "training.batch_size": value})), config.training.rows, 1
        ),
        rank=0
        if config.adapter.kind == "none"
        else _largest(lambda value: forecast(least.changed({"adapter.rank": value})), config.adapter.rank, 1),
    )


def _largest(forecast: Callable[[int], Forecast], start: int, grain: int) -> int:
    """The largest multiple of `grain` whose forecast fits, found by following the slope; 0 where none does.

    Needed memory grows nearly in proportion, so that a few steps suffice.
    """
    known: dict[int, Forecast] = {}

    def at(value: int) -> Forecast:
        return known.setdefault(value, known.get(value) or forecast(value))

    low, high = 0, None
    value = max(grain, start // grain * grain)
    for _ in range(_STEPS):
        if at(value).fits:
            low = max(low, value)
        else:
            high = min(high or value, value)
        if high is not None and high - low <= grain:
            break
        value = _next(known, low, high, grain)
    return low


_STEPS = 16
_REACH = 8


def _next(known: Mapping[int, Forecast], low: int, high: int | None, grain: int) -> int:
    # The two that lie next to the limit as far as it is known: above all that fit, or around it, or below all.
    values = sorted(known) if high is None else sorted(value for value in known if value >= low)[:2]
    guess = 2 * values[-1]
    if len(values) > 1:
        first, last = known[values[-2]], known[values[-1]]
        slope = (last.needed_bytes - first.needed_bytes) / (values[-1] - values[-2])
        if slope > 0:
            # A straight line from two small values may miss by far, and large ones take longer to forecast.
            guess = int(values[-1] + (last.budget_bytes - last.needed_bytes) / slope) // grain * grain
            guess = min(guess, _REACH * values[-1])
    ceiling = guess if high is None else high - grain
    guess = min(max(guess, low + grain), max(ceiling, low + grain))
    return guess if guess not in known else max(grain, (low + (high or 2 * low)) // 2 // grain * grain)


def divisors(number: int) -> list[int]:
    """The divisors of a batch, the largest first."""
    return [value for value in range(number, 0, -1) if number % value == 0]


def _seconds(tried: _Tried) -> float:
    return tried[1].seconds


def explained(dumped: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """The lines of a config file, with a comment beside each value that was chosen."""
    section = ""
    for line in dumped.splitlines():
        key = line.strip().partition(":")[0]
        section = key if line and not line.startswith(" ") else section
        reason = reasons.get(f"{section}.{key}")
        yield f"{line}  # {reason}" if reason and line.startswith(" ") else line
