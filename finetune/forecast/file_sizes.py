"""Sizes of checkpoints, in memory and on disk, of exports and of a merge."""

from __future__ import annotations

import itertools

from finetune.config import OutputSection
from finetune.forecast.trace import Trace

_SIXTEEN_BIT = 2
_FLOAT32 = 4


def disk_bytes(output: OutputSection, trace: Trace, *, adapts: bool) -> int:
    """Bytes on disk: the checkpoints kept and the one being written, what is published, and the merged model."""
    trained, checkpoint = _bytes(trace, "adapter"), checkpoint_bytes(trace)
    merged = _SIXTEEN_BIT * trace.base.parameters if output.merge and adapts else 0
    return (output.keep + 1) * checkpoint + trained + merged


def checkpoint_bytes(trace: Trace) -> int:
    """The copy of weights and optimizer states in host memory, from which a checkpoint is written."""
    return _bytes(trace, "adapter") + _bytes(trace, "optimizer_states")


def saves_between(output: OutputSection, steps: int | None) -> bool:
    """Whether training goes on after a save; assumed so if the number of `steps` is unknown."""
    return output.save_every is not None and (steps is None or steps > output.save_every)


def merge_bytes(trace: Trace) -> int:
    """Device memory of `finetune merge`: a weight in float32 with its update (peft 0.21, `Linear.get_delta_weight`: a
    product, and that product scaled), or while the result is proven a layer or the head in 16 bit.
    """
    return max(3 * _FLOAT32 * trace.base.largest_weight, _SIXTEEN_BIT * trace.base.largest_part)


def _bytes(trace: Trace, category: str) -> int:
    """Bytes of all blocks of a category that are made once: weights when they load, states at the first update.

    If ranks hold shards, those of all ranks, as rank 0 gathers them.
    """
    if trace.saved_bytes:
        return trace.saved_bytes[category]
    before = itertools.takewhile(lambda entry: entry[0].phase != "forward", trace.timeline())
    live = sum(sign * block.bytes for _, block, sign in before if block.category == category)
    return round(live / trace.trained_share)
