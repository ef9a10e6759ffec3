"""Choose what short micro-batches recompute: less than the longest, within the same memory.

The fit chooses for the longest micro-batch. Memory grows nearly in proportion to a micro-batch's length, so for each
level that recomputes less there is a length up to which all layers can have it. Those lengths are found by forecasts,
for the levels that save most time on the lengths that an epoch has.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from finetune.forecast.job_forecast import Forecast
from finetune.resolve.fit import SPARE, largest
from finetune.storage.records import UpTo

At = Callable[[str, int], Forecast]
"""From a level of all layers and a length to the forecast of the largest micro-batch of rows up to that length."""

# The share of an epoch's predicted time that a level must save by itself to be worth its forecasts.
_LEAST_SAVED = 0.01
# Lengths are found to this part of the longest, or a little less: 64 of 2,048 tokens.
_PARTS = 32
# The categories of memory at a forecast's peak that grow with the micro-batch.
_GROWING = ("layer_inputs", "activations", "loss", "workspace", "allocator_slack")


def find(longest: Forecast, levels: Mapping[str, Forecast], lengths: Iterable[int], at: At) -> dict[UpTo, Forecast]:
    """The level for micro-batches up to each length, the shortest first, with the forecast of the largest of them.

    `longest` is the forecast of the longest micro-batch as it was fitted, `levels` that with all layers at levels that
    recompute less. `lengths` are those of an epoch's micro-batches.
    """
    tokens = Counter(lengths)
    seconds = {level: each.seconds / longest.seconds for level, each in levels.items()}
    grain = 2 ** max(0, (longest.batch.tokens // _PARTS).bit_length() - 1)
    too_large = -(-longest.batch.tokens // grain) * grain
    guessed = {level: _guess(longest, each) for level, each in levels.items()}
    reach = {
        level: largest(
            functools.partial(at, level), guessed[level], grain, too_large - grain, spare=SPARE, too_large=too_large
        )
        for level in _worth(guessed, seconds, tokens)
    }
    chosen = sorted(_worth(reach, seconds, tokens), key=reach.__getitem__)
    return {UpTo(reach[level], level): at(level, reach[level]) for level in chosen}


def _guess(longest: Forecast, less_recomputed: Forecast) -> int:
    """The length at which all layers can have a level, if what grows with it does so in proportion."""
    fixed = longest.needed_bytes - sum(longest.categories.get(name, 0) for name in _GROWING)
    room = (1 - SPARE) * longest.budget_bytes - fixed
    return max(0, int(longest.batch.tokens * room / max(1, less_recomputed.needed_bytes - fixed)))


def _worth(reach: Mapping[str, int], seconds: Mapping[str, float], tokens: Mapping[int, int]) -> tuple[str, ...]:
    """The levels, up to these lengths, that together save most of an epoch's time; each must save enough by itself.

    `seconds` is the time at a level as a share of the longest micro-batch's; `tokens` counts micro-batches by length.
    """
    whole = sum(length * number for length, number in tokens.items())

    def cost(chosen: tuple[str, ...]) -> float:
        spent = sum(
            length * number * min([1.0, *(seconds[level] for level in chosen if length <= reach[level])])
            for length, number in tokens.items()
        )
        return spent / whole + _LEAST_SAVED * len(chosen)

    subsets = (itertools.combinations(reach, number) for number in range(len(reach) + 1))
    return min(itertools.chain.from_iterable(subsets), key=cost)
