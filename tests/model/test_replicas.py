"""The engine of copies, on a process group of one rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist

from finetune.model.distributed.replicas import Replicas


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_the_weights_of_a_closed_engine_do_not_keep_its_optimizer(alone: None) -> None:
    """They live on to be published, without the optimizer's states."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    engine = Replicas(model, optimizer, None, repeatable=True)
    engine.backward(engine.forward(torch.ones(1, 4)).sum())
    engine.update()
    left = weakref.ref(optimizer)
    engine.close()
    del engine, optimizer
    gc.collect()
    assert left() is None
