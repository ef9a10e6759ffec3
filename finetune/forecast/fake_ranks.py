"""Ranks that share a forecast's model or its rows: process groups in which this is the only process.

Its collectives (torch's backend `fake`) exchange nothing; on fake tensors they allocate what the real ones do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend; torch 2.13 has no other

from finetune.config import DistributedSection
from finetune.model.distributed.placement import Placement
from finetune.training import strategies


@contextlib.contextmanager
def placing(section: DistributedSection, world_size: int) -> Iterator[Placement | None]:
    """The placement of rank 0 of `world_size`, in fake tensors on the CPU; None if it holds all of the model."""
    if not strategies.loads_parts(section, world_size):
        yield None
        return
    with _first(world_size) as group:
        yield strategies.placement(section, torch.device("cpu"), group)


@contextlib.contextmanager
def splitting(section: DistributedSection, world_size: int) -> Iterator[dist.ProcessGroup | None]:
    """The group of rank 0 of `world_size` for splitting rows; None if it computes whole ones."""
    if section.context == 1 or world_size == 1:
        yield None
        return
    with _first(section.context) as group:
        yield group


@contextlib.contextmanager
def _first(size: int) -> Iterator[dist.ProcessGroup]:
    """A group of the first `size` ranks: of those that are connected, or of ranks that do not exist."""
    if dist.is_initialized():
        # In a run of several ranks only this one makes the group; a hashed name does not change the count of groups.
        group = made = dist.new_group(list(range(size)), backend="fake", use_local_synchronization=True)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        group, made = dist.group.WORLD, None
    try:
        yield group
    finally:
        dist.destroy_process_group(made)
