"""What one of several ranks takes, forecast without the others."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import forecasts
import pytest
import tiny_models
import torch
from forecasts import GIB, MIB
from jobs import sampled
from messages import refusal
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from traces import peaks

import finetune
from finetune.config import Config
from finetune.errors import ConfigError
from finetune.forecast import fake_ranks
from finetune.forecast.device import Device
from finetune.forecast.extrapolate import whole
from finetune.forecast.job_forecast import Forecast
from finetune.forecast.levers import levers
from finetune.forecast.replay import Ranks
from finetune.model import build
from finetune.model.distributed import sharding
from finetune.model.distributed.placement import Placement
from finetune.model.distributed.sharding import Sharding
from finetune.model.recompute import checkpointing
from finetune.resolve import planning
from finetune.resolve.planner import Planner
from finetune.training import strategies

Quick = Callable[..., Config]
PLAIN = {"quantization__kind": "none"}
FULL = {**PLAIN, "adapter__kind": "none"}
ZERO = {"distributed__kind": "deepspeed", "optimizer__kind": "adamw_torch_fused"}
CARD = "RTX 4090"


def job(**changes: Any) -> Config:
    return tiny_models.config(**{"distributed__kind": "fsdp", "training__batch_size": 8, **changes})


@functools.cache
def made(ranks: int, card: str | None = None, words: int = 256, **changes: Any) -> Forecast:
    """The forecast of a rank with a model of one layer on a card, or on a CPU."""
    device, model = tiny_models.card(card) if card else tiny_models.cpu(), tiny_models.architecture(layers=1)
    model.vocab_size = words
    return Planner(job(**changes), model, device, None, ranks).forecast()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.long, id="weights of nf4"),
        pytest.param({**PLAIN, "distributed__stage": "gradients"}, marks=pytest.mark.long, id="gradients"),
        pytest.param({**FULL, "training__batch_size": 16}, marks=pytest.mark.long, id="every weight, accumulated"),
        pytest.param({**ZERO, "distributed__stage": "gradients"}, marks=pytest.mark.long, id="gradients under ZeRO"),
        pytest.param({**ZERO, **PLAIN, "adapter__targets": ["q_proj"]}, id="weights under ZeRO"),
    ],
)
def test_extrapolated_layers_take_what_traced_ones_take(changes: dict[str, Any]) -> None:
    model = tiny_models.architecture(layers=6)  # the fewest of which one is left out
    shortened, traced = (
        tiny_models.trace(job(**changes), model, world_size=4, **given) for given in ({}, {"shortening": whole})
    )
    assert peaks(shortened) == peaks(traced)
    assert len(shortened.blocks) == len(traced.blocks)


def sharded(config: Config, architecture: Any, shards: Placement | None) -> Any:
    """The model that is trained."""
    base = build.blueprint(config, architecture, "sdpa").load(torch.device("cpu"), shards)
    return build.trainable(
        base, config.model, config.adapter, config.memory, seed=0, device_type="cpu", placement=shards
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled(["nf4", "none"], "nf4"))
def test_a_rank_holds_the_slices_of_the_real_model_and_sends_the_rest(kind: str) -> None:
    """Each unit is gathered once in the forward pass, layers once more in the backward pass."""
    config, architecture = job(quantization__kind=kind), tiny_models.architecture(layers=2)
    found = tiny_models.trace(config, architecture, world_size=4)
    with fake_ranks.placing(config.distributed, 4) as shards:
        model = sharded(config, architecture, shards)
        storages = {
            storage._cdata: storage.nbytes()
            for weight in model.parameters()
            if (storage := sharding.held(weight).untyped_storage())
        }
    forward = next(number for number, stretch in enumerate(found.stretches) if stretch.phase == "forward")
    kept = {"adapter": 0, "base_weights": 0}
    for _, block, sign in dataclasses.replace(found, stretches=found.stretches[:forward]).timeline():
        if block.category in kept:
            kept[block.category] += sign * block.bytes
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert kept["adapter"] + kept["base_weights"] - buffers == sum(storages.values())

    weights = sum(weight.nbytes for weight in model.parameters())
    layers = sum(weight.nbytes for layer in checkpointing.layers(model) for weight in layer.parameters())
    trained = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    sent = [found.work((phase,)).sent_bytes for phase in ("forward", "backward")]
    assert sent == [3 * weights // 4, 3 * (layers + trained) // 4]


@pytest.mark.slow
def test_more_ranks_hold_less_and_offloaded_shards_take_no_device_memory() -> None:
    two, four, host = made(2, CARD, **PLAIN), made(4, CARD, **PLAIN), made(2, CARD, **PLAIN, distributed__offload="cpu")
    for phase in ("load", "forward", "backward", "optimizer"):
        assert four.phases[phase]["allocated_bytes"] < two.phases[phase]["allocated_bytes"]
    assert "optimizer" not in host.phases, "the host updates"
    for phase in ("load", "forward", "backward"):
        assert host.phases[phase]["allocated_bytes"] < two.phases[phase]["allocated_bytes"]
    assert host.host_bytes > two.host_bytes
    assert four.as_dict()["gpus"] == 4
    sharing = {"kind": "fsdp", "stage": "weights", "offload": "none", "nvme_path": None, "context": 1}
    assert four.as_dict()["sharding"] == sharing
    # The files are written once, and hold what all ranks train.
    assert four.disk_bytes == pytest.approx(two.disk_bytes, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled(["ddp", "fsdp"], "ddp"))
def test_ranks_that_split_rows_hold_their_share_of_what_layers_keep(kind: str) -> None:
    """With as many rows on each rank as without, of which it computes a slice; eight ranks are four groups."""
    changes = {"kernels__fused": "off", "distributed__kind": kind}
    whole_rows = made(8, CARD, **changes, training__batch_size=32).categories
    split = made(8, CARD, **changes, training__batch_size=16, distributed__context=2).categories
    assert split["layer_inputs"] * 2 == whole_rows["layer_inputs"] > 0
    assert split["activations"] < 0.6 * whole_rows["activations"]
    assert split["base_weights"] == whole_rows["base_weights"]


@pytest.mark.slow
def test_ranks_that_split_rows_count_what_they_exchange() -> None:
    """In the backward pass as much as in the forward pass, and two of two ranks half of what they have."""
    config = job(distributed__kind="ddp", distributed__context=2)
    found = tiny_models.trace(config, tiny_models.architecture(layers=1), world_size=2)
    forward, backward = (found.work((phase,)).sent_bytes for phase in ("forward", "backward"))
    assert backward >= forward > 0


@pytest.mark.slow
def test_a_model_sharded_after_a_forecast_uses_the_connected_ranks() -> None:
    config, architecture = job(**PLAIN), tiny_models.architecture(layers=1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        for _ in range(2):
            tiny_models.trace(config, architecture, world_size=4)
        shards = Sharding.over_ranks(torch.device("cpu"), keep_whole=False, offload=False)
        model = sharded(config, architecture, shards)
        # That of the forecast, which DTensor's caches still know, has no group any more.
        assert {weight.device_mesh.get_group().size() for weight in model.parameters()} == {4}
    finally:
        dist.destroy_process_group()


def test_what_ranks_cannot_share_is_refused_before_anything_is_forecast(quick: Quick) -> None:
    for overrides, gpus, said in (
        (["distributed.context=2"], 1, "1 process cannot form groups of 2"),
        (["distributed.context=2"], 3, "3 processes cannot form groups of 2"),
        (["training.batch_size=4"], 3, "`training.batch_size`"),
        (["training.batch_size=4"], 4, "`training.micro_batch`"),
        (["optimizer.kind=adamw_8bit", "distributed.kind=deepspeed"], 2, "shards of `deepspeed`"),
    ):
        with refusal(ConfigError, said):
            planning.planner_for(quick(*overrides), "cpu", gpus)


# -- how ranks share a model -------------------------------------------------------------------------------------------


def planner_of_copies(budget: int, patch: pytest.MonkeyPatch, *, divisible: bool = True, **changes: Any) -> Planner:
    """A planner for two cards of `budget` GiB, whose forecasts are by hand: 13, 9 or 5 GiB by the sharding."""

    def forecast(self: Planner, **_: object) -> Forecast:
        section = self.config.distributed
        if section.kind == "fsdp" and not divisible:
            raise ConfigError("cannot shard experts in 4 bit")
        size = 13 if section.kind == "ddp" else {"gradients": 9, "weights": 5}[section.stage]
        peak = (size - 1) * GIB
        return forecasts.forecast(budget=self.device.budget_bytes, peak_reserved_bytes=peak, ranks=Ranks(self.gpus))

    patch.setattr(Planner, "forecast", forecast)
    card = dataclasses.replace(tiny_models.card(), budget_bytes=budget * GIB)
    return Planner(job(distributed__kind="auto", **changes), tiny_models.architecture(), card, None, 2)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(14, ("ddp", "weights")), (10, ("fsdp", "gradients")), (6, ("fsdp", "weights")), (4, ("fsdp", "weights"))],
)
@pytest.mark.parametrize("fitted", [True, False])
def test_auto_is_the_least_sharding_that_fits(
    budget: int, expected: tuple[str, str], fitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {} if fitted else {"memory__checkpointing": "auto"}
    chosen, found = planner_of_copies(budget, monkeypatch, **changes).resolve()
    assert (chosen.distributed.kind, chosen.distributed.stage) == expected
    assert (found is not None) == (not fitted and budget > 4)
    if found:
        assert found.as_dict()["chosen"]["distributed.kind"] == expected[0]
        assert "distributed.kind" in found.reasons


def test_a_job_or_model_that_cannot_be_sharded_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in ({"quantization__kind": "int8"}, {"optimizer__kind": "adafactor"}, {"adapter__dora": True}):
        assert strategies.least_first(job(distributed__kind="auto", **changes)) == [{"distributed.kind": "ddp"}]
        assert not any("distributed" in str(lever) for lever in levers(job(distributed__kind="ddp", **changes), 2))
    planner = planner_of_copies(1, monkeypatch, divisible=False)
    chosen, _ = planner.resolve()
    assert chosen.distributed.kind == "ddp"
    copied = planner.variant(chosen)
    assert not any("distributed" in str(lever) for lever, _ in copied.levers(copied.forecast()))


def test_each_next_step_of_sharding_is_a_lever() -> None:
    for changes, expected in (
        ({"distributed__kind": "ddp"}, ["distributed.kind=fsdp distributed.stage=weights"]),
        ({"distributed__stage": "gradients"}, ["distributed.stage=weights"]),
        ({}, ["distributed.offload=cpu"]),
        ({"distributed__offload": "cpu"}, []),
    ):
        assert [str(lever) for lever in levers(job(**changes), 2) if "distributed" in str(lever)] == expected


# -- communicators -----------------------------------------------------------------------------------------------------


def test_nccl_has_a_term_for_several_gpus_and_for_nothing_else() -> None:
    """544 MiB for two GPUs, 688 for more (NVIDIA/nccl#964), once for each group that a rank is in."""
    card = tiny_models.card()
    nvlink = dataclasses.replace(card, rates=dataclasses.replace(card.rates, nvlink_bytes=1e11))
    split = {"distributed__context": 2}
    for ranks, device, changes, expected in (
        (1, card, {}, 0),
        (2, tiny_models.cpu(), {}, 0),
        (2, card, {}, 544 * MIB),
        (8, card, {}, 688 * MIB),
        (8, card, split, (688 + 544) * MIB),
        (8, nvlink, split, (688 + 544) * MIB + int(3.28e9) // 7),
        (2, card, {**ZERO, "distributed__stage": "optimizer"}, 2 * 544 * MIB),
    ):
        config = job(**{"distributed__kind": "ddp", **changes})
        found: Device = Planner(config, None, device, None, ranks)._device()
        assert found.communicator_bytes == expected, (ranks, changes)
        assert found.outside_bytes - device.outside_bytes == expected


@pytest.mark.slow
def test_a_plan_for_several_gpus_says_so_and_has_the_communicators(quick: Quick) -> None:
    plan = finetune.plan(quick("training.batch_size=4", "training.micro_batch=1", "distributed.kind=ddp"), CARD, 2)
    found = json.loads(json.dumps(plan.as_dict()))
    assert (found["gpus"], found["sharding"]["kind"]) == (2, "ddp")
    assert "each of 2 x" in repr(plan)
    categories, outside = found["categories"], tiny_models.card(CARD).outside_bytes
    assert (categories["communicators"], categories["context"]) == (544 * MIB, outside)
    assert sum(categories.values()) == found["needed_bytes"] == found["peak_reserved_bytes"] + outside + 544 * MIB


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def zero(stage: str, ranks: int, card: str | None = None, **changes: Any) -> Forecast:
    return made(ranks, card, **ZERO, **FULL, distributed__stage=stage, **changes)


@pytest.mark.slow
def test_each_stage_of_zero_shards_and_sends_what_it_says() -> None:
    """Beside the weights, which are float32, a copy of them and two states.

    Of one micro-batch, reduced gradients and gathered weights are sent; at stage 3 weights are gathered for the forward
    and the backward pass, or more.
    """
    trained = zero("optimizer", 1).categories["adapter"]
    for stage, share in (("optimizer", 1), ("gradients", 1), ("weights", 4)):
        found = zero(stage, 4)
        assert found.categories["optimizer_states"] == pytest.approx(3 * trained / 4, rel=0.01)
        assert found.categories["adapter"] == pytest.approx(trained / share, rel=0.01)
        if stage == "weights":
            assert found.work.sent_bytes > 3 * trained / 4
        else:
            assert found.work.sent_bytes == pytest.approx(3 * trained * 3 / 4, rel=0.01)


@pytest.mark.slow
def test_zero_offloads_to_the_host_and_to_a_disk() -> None:
    plain, host = (zero("weights", 2, CARD, words=8192, distributed__offload=where) for where in ("none", "cpu"))
    assert host.needed_bytes < plain.needed_bytes
    assert host.host_bytes > plain.host_bytes
    assert host.work.copied_bytes > plain.work.copied_bytes == 0


@pytest.mark.slow
def test_the_time_of_a_disk_is_its_bytes_over_its_bandwidth() -> None:
    """Weights, two states and gradients, in float32, each read and written once a step; norms are too small for it."""
    disk = zero("weights", 1, CARD, words=8192, distributed__offload="nvme", distributed__nvme_path="/tmp")
    memory = zero("weights", 1, CARD, words=8192, distributed__offload="cpu")
    trained = zero("optimizer", 1, words=8192).categories["adapter"]
    assert 0.99 * 4 * trained < disk.work.swapped_bytes < 4 * trained
    assert disk.seconds - memory.seconds == pytest.approx(disk.work.swapped_bytes * (1 / 7e9 + 1 / 5e9), rel=0.01)
    assert disk.as_dict()["sharding"]["offload"] == "nvme"


@pytest.mark.slow
def test_more_ranks_than_this_machine_will_ever_have() -> None:
    many, four = zero("weights", 1024, training__batch_size=2048), zero("weights", 4)
    assert many.phases["backward"]["allocated_bytes"] < four.phases["backward"]["allocated_bytes"]
