"""Optimizers on shards of weights, and their states, on a process group that only pretends to have other ranks."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from messages import refusal
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.config import Config, DistributedSection, OptimizerSection
from finetune.errors import ConfigError, MachineError
from finetune.model.distributed import optimizer_states, sharding
from finetune.model.distributed.sharding import Sharded, Sharding
from finetune.runtime import ranks
from finetune.training import optimizers, state
from finetune.training.checks import check
from finetune.training.optimizers import OPTIMIZERS, STATES

RANKS = 2
SHARDED = [name for name, optimizer in OPTIMIZERS.items() if optimizer.can_update("row") and not optimizer.unpaged]


class Layer(GradientCheckpointingLayer):
    """Weights with states in 8 bit, with too few numbers for that, and with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small, self.thin = nn.Linear(64, 96), nn.Linear(64, 48), nn.Linear(8192, 1, bias=False)


class Model(nn.Sequential):
    """A decoder of one layer."""

    def get_input_embeddings(self) -> None:
        pass

    get_output_embeddings = get_input_embeddings


@pytest.fixture(params=range(RANKS), ids=lambda rank: f"rank {rank}")
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=RANKS)
    try:
        yield request.param
    finally:
        dist.destroy_process_group()


def model(shards: Sharding | None = None) -> nn.Module:
    torch.manual_seed(0)
    made = Model(Layer())
    if shards:
        shards.apply(made)
    return made


def step(optimizer: Any, weights: list[nn.Parameter], count: int) -> None:
    """Set the gradients of the whole weights, of which a rank has its shard, and update."""
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=generator)
            if isinstance(weight, DTensor):
                gradient = DTensor.from_local(
                    sharding.mine(gradient, weight), weight.device_mesh, weight.placements,
                    run_check=False, shape=weight.shape, stride=weight.stride(),
                )  # fmt: skip
            weight.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("name", SHARDED)
def test_a_slice_is_updated_as_in_the_whole_weight_bit_for_bit(rank: int, name: str) -> None:
    whole, sharded = model(), model(Sharding.over_ranks(torch.device("cpu"), keep_whole=False, offload=False))
    section = OptimizerSection(kind=name)
    one, other = (optimizers.make(name, section, 0.01, each) for each in (whole, sharded))
    step(one, list(whole.parameters()), 3)
    step(other, list(sharded.parameters()), 3)
    for expected, weight in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(sharding.held(weight), sharding.mine(expected, weight))
    # A checkpoint of whole states is cut to what this rank has.
    described, tensors = optimizer_states.read(one)
    again = optimizers.make(name, section, 0.01, sharded)
    state.restore_optimizer(Sharded(sharded, again, STATES, RANKS), described, tensors)
    for before, after in zip(_parameters(other), _parameters(again), strict=True):
        if before.numel() == 0:
            continue  # a shard without numbers is not updated, whatever its optimizer keeps for it
        assert other.state[before].keys() == again.state[after].keys()
        for key, value in other.state[before].items():
            assert torch.equal(torch.as_tensor(again.state[after][key]), torch.as_tensor(value))


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("rank", [1], indirect=True)
def test_a_rank_without_rows_sends_slices_of_the_shape_that_the_others_expect(
    rank: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `thin` this rank has no row, and before a warm-up no state."""
    one, other = model(), model(Sharding.over_ranks(torch.device("cpu"), keep_whole=False, offload=False))
    section = OptimizerSection(kind=name)
    alone, optimizer = (optimizers.make(name, section, 0.01, each) for each in (one, other))
    step(alone, list(one.parameters()), 1)
    step(optimizer, list(other.parameters()), 1)
    described, tensors = optimizer_states.read(alone)
    first = {key: (tensor.dtype, tensor.shape[1:]) for key, tensor in tensors.items()}
    sent: list[torch.Size] = []
    monkeypatch.setattr(ranks, "main_does", lambda work: (described, first))
    monkeypatch.setattr(sharding.Shards, "whole", lambda shards, mine: sent.append(mine.shape[1:]) or mine)
    Sharded(other, optimizer, STATES, RANKS).optimizer_state()
    cut = [key for key in tensors if "step" not in key and "qmap" not in key]
    assert sent == [tensors[key].shape[1:] for key in cut]


def _parameters(optimizer: Any) -> list[nn.Parameter]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def test_an_optimizer_that_needs_whole_weights_is_refused(subtests: pytest.Subtests) -> None:
    for kind, name in itertools.product(("fsdp", "deepspeed"), OPTIMIZERS):
        with subtests.test(kind=kind, name=name):
            job = Config(distributed=DistributedSection(kind=kind)).changed({"optimizer.kind": name})
            optimizer = OPTIMIZERS[name]
            if optimizer.can_update("row" if kind == "fsdp" else "number"):
                check(job, torch.device("cpu"))
            else:
                with refusal(ConfigError, name):
                    check(job, torch.device("cpu"))


def test_deepspeed_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    job = Config(distributed=DistributedSection(kind="deepspeed"))
    with refusal(MachineError, "pip install deepspeed"):
        check(job, torch.device("cpu"))
