"""The trace of a step: what it allocates, frees and computes, in stretches of one phase and one layer each."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from finetune.model.structure.mixture import Mixture

CATEGORIES = {
    "base_weights": "base weights",
    "quantization_state": "quantization state",
    "adapter": "adapter",
    "optimizer_states": "optimizer states",
    "gradients": "gradients",
    "layer_inputs": "layer inputs",
    "activations": "activations",
    "loss": "loss and logits",
    "workspace": "workspace",
}
"""The categories of memory: the key in JSON and the words for a person."""


@dataclass(slots=True, eq=False)
class TracedBlock:
    """One allocation: its size, what it is for, the layer that owns it, and whether it is managed memory.

    Managed memory (paged optimizer states) lies outside the caching allocator and may live on the host.
    """

    bytes: int
    category: str
    layer: int | None
    managed: bool = False


@dataclass
class Work:
    """The work of a stretch: floating-point operations, bytes that bandwidth-bound operators move, kernel launches.

    Operators without a count of operations are bandwidth-bound, and so are products with a low-rank matrix, whose
    operations, `hidden_flops` of `flops`, take no time beside their traffic. `copied_bytes` go between the host and the
    device, `sent_bytes` from this rank to others, and `swapped_bytes` from a disk, to which as many go back.
    """

    flops: int = 0
    moved_bytes: int = 0
    calls: int = 0
    copied_bytes: int = 0
    sent_bytes: int = 0
    hidden_flops: int = 0
    swapped_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*map(operator.add, vars(self).values(), vars(other).values()))

    def __mul__(self, times: float) -> Work:
        return Work(*(int(value * times) for value in vars(self).values()))


@dataclass
class Stretch:
    """A stretch of the recording in one phase and one layer (None: outside the layers).

    An event is the number of a block plus one when it is allocated, and the negative of that when it is freed.
    """

    phase: str
    layer: int | None
    events: list[int] = field(default_factory=list)
    work: Work = field(default_factory=Work)

    def moved(self, by: int) -> Stretch:
        """The same stretch with all its block numbers raised `by` as many."""
        events = [event + by if event > 0 else event - by for event in self.events]
        return Stretch(self.phase, self.layer, events, replace(self.work))


@dataclass(frozen=True)
class WholeBase:
    """Numbers of parameters of a base with all its layers: of all, and of the largest parts.

    `largest_weight` is that of the largest weight that may get an adapter, `largest_part` that of the largest layer, or
    of the head. `mixture` says how the base's experts are stored, where it has some.
    """

    parameters: int = 0
    largest_weight: int = 0
    largest_part: int = 0
    mixture: Mixture | None = None


@dataclass
class Trace:
    """A recorded step: its blocks, and what happens to them in order.

    Memory that is `routed` depends on what a router decides. `trained_share` is the share of the trained weights that
    this rank holds. `saved_bytes` are those of the trained weights and their states in a checkpoint, by category, where
    the trace does not show them.
    """

    blocks: list[TracedBlock]
    stretches: list[Stretch]
    base: WholeBase = WholeBase()
    routed: bool = False
    trained_share: float = 1.0
    saved_bytes: Mapping[str, int] | None = None

    def timeline(self) -> Iterator[tuple[Stretch, TracedBlock, int]]:
        """(stretch, block, +1 or -1) for each allocation and free, in order."""
        for stretch in self.stretches:
            for event in stretch.events:
                yield stretch, self.blocks[abs(event) - 1], 1 if event > 0 else -1

    def work(self, phases: Iterable[str]) -> Work:
        """The work of all `phases`."""
        wanted = set(phases)
        return sum((stretch.work for stretch in self.stretches if stretch.phase in wanted), Work())
