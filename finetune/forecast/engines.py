"""The engine of a traced step, by the way in which ranks share the model.

Each is loaded when a trace asks for it, so that the table can be read and extended without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from finetune import tables
from finetune.config import DistributedSection
from finetune.training import strategies

if TYPE_CHECKING:
    from finetune.forecast.traced_engine import TracedEngine


def _sharded() -> type[TracedEngine]:
    from finetune.forecast.traced_engine import TracedShards

    return TracedShards


ENGINES: dict[str, Callable[[], type[TracedEngine]]] = {
    "fsdp": _sharded,
}
"""By `distributed.kind`, a function that loads the engine; a strategy without an entry is traced by TracedEngine.

An engine adds to a trace what its strategy allocates, sends and copies: see the methods of TracedEngine, and `mark`,
`omit` and `transfers` of the TraceRecorder that it is given.
"""


def of(section: DistributedSection, world_size: int) -> type[TracedEngine]:
    """The engine in which a step of `world_size` ranks is traced."""
    from finetune.forecast.traced_engine import TracedEngine

    load = ENGINES.get(section.kind) if strategies.applies(section, world_size) else None
    return load() if load else TracedEngine


tables.complete(__name__)
