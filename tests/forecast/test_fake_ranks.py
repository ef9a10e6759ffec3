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
from jobs import sampled
from messages import refusal
from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from traces import peaks

import finetune
from finetune.config import Config
from finetune.errors import ConfigError
from finetune.forecast import fake_ranks, planning
from finetune.forecast.devices import Device
from finetune.forecast.extrapolate import whole
from finetune.forecast.job_forecast import Forecast
from finetune.forecast.levers import levers
from finetune.forecast.planning import Planner
from finetune.forecast.trace import Trace
from finetune.model import build
from finetune.model.distributed import sharding
from finetune.model.distributed.placement import Placement
from finetune.model.distributed.sharding import Sharding
from finetune.model.recompute import checkpointing
from finetune.training import strategies

Quick = Callable[..., Config]
LAYERS = 6  # the fewest of which one is left out


def job(**changes: Any) -> Config:
    return tiny_models.config(**{"distributed__kind": "fsdp", "training__batch_size": 8, **changes})


def trace(config: Config, world_size: int, **given: Any) -> Trace:
    return tiny_models.trace(config, tiny_models.architecture(layers=LAYERS), world_size=world_size, **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"distributed__stage": "gradients", "quantization__kind": "none"}, marks=pytest.mark.long),
        {"quantization__kind": "none", "adapter__kind": "none", "training__batch_size": 16},
    ],
    ids=["weights of nf4", "gradients", "every weight, accumulated"],
)
def test_extrapolated_layers_take_what_traced_ones_take(changes: dict[str, Any]) -> None:
    shortened, traced = trace(job(**changes), 4), trace(job(**changes), 4, shortening=whole)
    assert peaks(shortened) == peaks(traced)
    assert len(shortened.blocks) == len(traced.blocks)


def sharded(config: Config, architecture: Any, shards: Placement | None) -> Any:
    """The model that is trained."""
    base = build.blueprint(config, architecture, "sdpa").load(torch.device("cpu"), shards)
    return build.trainable(
        base, config.model, config.adapter, config.memory, seed=0, device_type="cpu", placement=shards
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "none"])
def test_a_rank_holds_the_slices_that_the_real_model_has(kind: str) -> None:
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


@pytest.mark.slow
def test_a_rank_sends_all_but_its_slice_of_what_is_gathered_and_of_the_gradients() -> None:
    """Each unit once in the forward pass, layers once more in the backward pass."""
    config, architecture = job(quantization__kind="none"), tiny_models.architecture(layers=2)
    found = tiny_models.trace(config, architecture, world_size=4)
    with fake_ranks.placing(config.distributed, 4) as shards:
        model = sharded(config, architecture, shards)
    weights = sum(weight.nbytes for weight in model.parameters())
    layers = sum(weight.nbytes for layer in checkpointing.layers(model) for weight in layer.parameters())
    trained = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    sent = [found.work((phase,)).sent_bytes for phase in ("forward", "backward")]
    assert sent == [3 * weights // 4, 3 * (layers + trained) // 4]


@pytest.mark.slow
def test_more_ranks_hold_less_and_offloaded_shards_take_no_device_memory() -> None:
    card = tiny_models.card()

    def made(world_size: int, **changes: Any) -> Forecast:
        return Planner(job(**changes), tiny_models.architecture(layers=2), card, None, world_size).forecast()

    two, four, host = made(2), made(4), made(2, distributed__offload="cpu")
    for phase in ("load", "forward", "backward", "optimizer"):
        assert four.phases[phase]["allocated_bytes"] < two.phases[phase]["allocated_bytes"]
    assert "optimizer" not in host.phases, "the host updates"
    for phase in ("load", "forward", "backward"):
        assert host.phases[phase]["allocated_bytes"] < two.phases[phase]["allocated_bytes"]
    assert host.host_bytes > two.host_bytes
    assert four.as_dict()["gpus"] == 4
    assert four.as_dict()["sharding"] == {
        "kind": "fsdp",
        "stage": "weights",
        "offload": "none",
        "nvme_path": None,
        "context": 1,
    }
    # The files are written once, and hold what all ranks train.
    assert four.disk_bytes == pytest.approx(two.disk_bytes, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sampled(["ddp", "fsdp"], "ddp"))
def test_ranks_that_split_rows_hold_their_share_of_what_layers_keep(kind: str) -> None:
    """With as many rows on each rank as without, of which it computes a slice; eight ranks are four groups."""

    def kept(context: int, rows: int) -> dict[str, int]:
        config = job(
            kernels__fused="off", distributed__kind=kind, distributed__context=context, training__batch_size=rows
        )
        planner = Planner(config, tiny_models.architecture(layers=2), tiny_models.card(), None, 8)
        return planner.forecast().categories

    whole, split = kept(1, 32), kept(2, 16)
    assert split["layer_inputs"] * 2 == whole["layer_inputs"] > 0
    assert split["activations"] < 0.6 * whole["activations"]
    assert split["base_weights"] == whole["base_weights"]


@pytest.mark.slow
def test_ranks_that_split_rows_count_what_they_exchange() -> None:
    """In the backward pass as much as in the forward pass, and two of two ranks half of what they have."""
    architecture = tiny_models.architecture(layers=2)
    found = tiny_models.trace(job(distributed__kind="ddp", distributed__context=2), architecture, world_size=2)
    forward, backward = (found.work((phase,)).sent_bytes for phase in ("forward", "backward"))
    assert backward >= forward > 0


def test_a_number_of_gpus_that_forms_no_groups_is_refused(quick: Quick) -> None:
    for gpus, said in ((1, "1 process cannot form groups of 2"), (3, "3 processes cannot form groups of 2")):
        with pytest.raises(ConfigError, match=said):
            planning.planner_for(quick("distributed.context=2"), "cpu", gpus)


@pytest.mark.slow
def test_a_model_sharded_after_a_forecast_uses_the_connected_ranks() -> None:
    config, architecture = job(), tiny_models.architecture(layers=2)
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


# -- how ranks share a model -------------------------------------------------------------------------------------------

NEEDED = {"ddp": 13, "gradients": 9, "weights": 5}


def needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecasts by hand: GiB by sharding."""

    def forecast(self: Planner, config: Config | None = None, *, evaluates: bool = True) -> Forecast:
        section = (config or self.job).distributed
        size = NEEDED["ddp" if section.kind == "ddp" else section.stage] * forecasts.GIB
        return forecasts.forecast(
            budget=self.device.budget_bytes, peak_reserved_bytes=size - forecasts.GIB, gpus=self.gpus
        )

    monkeypatch.setattr(Planner, "forecast", forecast)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(14, ("ddp", "weights")), (10, ("fsdp", "gradients")), (6, ("fsdp", "weights")), (4, ("fsdp", "weights"))],
)
@pytest.mark.parametrize("fitted", [True, False])
def test_auto_is_the_least_sharding_that_fits(
    budget: int, expected: tuple[str, str], fitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(monkeypatch)
    config = job(distributed__kind="auto", **({} if fitted else {"memory__checkpointing": "auto"}))
    card = dataclasses.replace(tiny_models.card(), budget_bytes=budget * forecasts.GIB)
    planner = Planner(config, tiny_models.architecture(), card, None, 2)
    chosen, found = planner.resolve()
    assert (chosen.distributed.kind, chosen.distributed.stage) == expected
    assert (found is not None) == (not fitted and budget > 4)
    if found:
        assert found.as_dict()["chosen"]["distributed.kind"] == expected[0]
        assert "distributed.kind" in found.reasons


def test_a_job_that_cannot_be_sharded_is_copied() -> None:
    for changes in ({"quantization__kind": "int8"}, {"optimizer__kind": "adafactor"}, {"adapter__dora": True}):
        assert strategies.least_first(job(distributed__kind="auto", **changes)) == [{"distributed.kind": "ddp"}]
        assert not any("distributed" in str(lever) for lever in levers(job(distributed__kind="ddp", **changes), 2))


def test_a_model_that_cannot_be_sharded_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    needs(monkeypatch)
    plain = Planner.forecast

    def forecast(self: Planner, config: Config | None = None, *, evaluates: bool = True) -> Forecast:
        if (config or self.job).distributed.kind == "fsdp":
            raise ConfigError("cannot shard experts in 4 bit")
        return plain(self, config)

    monkeypatch.setattr(Planner, "forecast", forecast)
    card = dataclasses.replace(tiny_models.card(), budget_bytes=forecasts.GIB)
    planner = Planner(job(distributed__kind="auto"), tiny_models.architecture(), card, None, 2)
    chosen, _ = planner.resolve()
    assert chosen.distributed.kind == "ddp"
    assert not any("distributed" in str(lever) for lever, _ in planner.levers(chosen, planner.forecast(chosen)))


def test_each_next_step_of_sharding_is_a_lever() -> None:
    def offered(**changes: Any) -> list[str]:
        return [str(lever) for lever in levers(job(**changes), 2) if "distributed" in str(lever)]

    assert offered(distributed__kind="ddp") == ["distributed.kind=fsdp distributed.stage=weights"]
    assert offered(distributed__stage="gradients") == ["distributed.stage=weights"]
    assert offered() == ["distributed.offload=cpu"]
    assert offered(distributed__offload="cpu") == []


def test_a_batch_that_ranks_cannot_share_is_refused_before_anything_is_forecast(quick: Quick) -> None:
    with refusal(ConfigError, "`training.batch_size`"):
        planning.planner_for(quick("training.batch_size=4"), "cpu", 3)
    with refusal(ConfigError, "`training.micro_batch`"):
        planning.planner_for(quick("training.batch_size=4"), "cpu", 4)


@functools.cache
def zero(stage: str, ranks: int, card: str | None = None, layers: int = 2, **changes: Any) -> Forecast:
    config = job(
        distributed__kind="deepspeed", distributed__stage=stage, optimizer__kind="adamw_torch_fused", **changes
    )
    device = tiny_models.card(card) if card else tiny_models.cpu()
    return Planner(config, tiny_models.architecture(layers=layers), device, None, ranks).forecast()


@pytest.mark.slow
def test_nccl_has_a_term_for_several_gpus_and_for_nothing_else() -> None:
    """544 MiB for two GPUs, 688 for more (NVIDIA/nccl#964), once for each group that a rank is in."""
    mib = 2**20
    card, nvlink = tiny_models.card(), dataclasses.replace(tiny_models.card(), nvlink_bytes=1e11)

    def made(ranks: int, device: Device, **changes: Any) -> Forecast:
        config = job(**{"distributed__kind": "ddp", **changes})
        return Planner(config, tiny_models.architecture(layers=1), device, None, ranks).forecast()

    one = made(1, card)
    assert "communicators" not in one.categories
    assert "communicators" not in made(2, tiny_models.cpu()).categories
    two, eight = made(2, card), made(8, card)
    assert two.categories["communicators"] == 544 * mib
    assert eight.categories["communicators"] == 688 * mib
    assert two.categories["context"] == one.categories["context"]
    assert two.needed_bytes == two.peak_reserved_bytes + card.outside_bytes + 544 * mib
    assert sum(two.categories.values()) == two.needed_bytes
    split = {"distributed__context": 2}
    assert made(8, card, **split).categories["communicators"] == (688 + 544) * mib
    assert made(8, nvlink, **split).categories["communicators"] == (688 + 544) * mib + int(3.28e9) // 7
    assert zero("optimizer", 2, CARD).categories["communicators"] == 2 * 544 * mib


CARD = "RTX 4090"
FULL = {"quantization__kind": "none", "adapter__kind": "none"}


@pytest.mark.slow
def test_each_stage_of_zero_shards_what_it_says() -> None:
    """Beside the weights, which are float32, a copy of them and two states."""
    trained = zero("optimizer", 1, **FULL).categories["adapter"]
    for stage, share in (("optimizer", 1), ("gradients", 1), ("weights", 4)):
        found = zero(stage, 4, **FULL).categories
        assert found["optimizer_states"] == pytest.approx(3 * trained / 4, rel=0.01)
        assert found["adapter"] == pytest.approx(trained / share, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param("gradients", marks=pytest.mark.long), "weights"])
def test_layers_under_zero_are_extrapolated_to_what_traced_ones_take(stage: str) -> None:
    config = job(distributed__kind="deepspeed", distributed__stage=stage, optimizer__kind="adamw_torch_fused")
    assert peaks(trace(config, 4)) == peaks(trace(config, 4, shortening=whole))


@pytest.mark.slow
def test_zero_sends_reduced_gradients_and_gathered_weights() -> None:
    """In one micro-batch; at stage 3 weights are gathered for the forward and the backward pass, or more."""
    trained = zero("optimizer", 1, **FULL).categories["adapter"]
    for stage in ("optimizer", "gradients"):
        assert zero(stage, 4, **FULL).sent_bytes == pytest.approx(3 * trained * 3 / 4, rel=0.01)
    assert zero("weights", 4, **FULL).sent_bytes > 3 * trained / 4


@pytest.mark.slow
def test_zero_offloads_to_the_host_and_to_a_disk() -> None:
    plain = zero("weights", 2, CARD, LAYERS, **FULL)
    host = zero("weights", 2, CARD, LAYERS, **FULL, distributed__offload="cpu")
    assert host.needed_bytes < plain.needed_bytes
    assert host.host_bytes > plain.host_bytes
    assert host.copied_bytes > plain.copied_bytes == 0


@pytest.mark.slow
def test_the_time_of_a_disk_is_its_bytes_over_its_bandwidth() -> None:
    """Weights, two states and gradients, in float32, each read and written once a step; norms are too small for it."""
    architecture = tiny_models.architecture(layers=LAYERS)
    changes = {**FULL, "distributed__nvme_path": "/tmp", "optimizer__kind": "adamw_torch_fused"}
    config = job(distributed__kind="deepspeed", distributed__offload="nvme", **changes)
    disk = Planner(config, architecture, tiny_models.card(CARD), None, 1).forecast()
    memory = zero("weights", 1, CARD, LAYERS, **FULL, distributed__offload="cpu")
    trained = zero("optimizer", 1, layers=LAYERS, **FULL).categories["adapter"]
    assert 0.99 * 4 * trained < disk.swapped_bytes < 4 * trained
    assert disk.seconds - memory.seconds == pytest.approx(disk.swapped_bytes * (1 / 7e9 + 1 / 5e9), rel=0.01)
    assert disk.as_dict()["sharding"]["offload"] == "nvme"


@pytest.mark.slow
def test_more_ranks_than_this_machine_will_ever_have() -> None:
    many, four = zero("weights", 1024, **FULL, training__batch_size=2048), zero("weights", 4, **FULL)
    assert many.phases["backward"]["allocated_bytes"] < four.phases["backward"]["allocated_bytes"]


def test_an_optimizer_that_deepspeed_cannot_use_is_refused_before_anything_is_forecast(quick: Quick) -> None:
    with refusal(ConfigError, "DeepSpeed"):
        finetune.plan(quick("optimizer.kind=adamw_8bit", "distributed.kind=deepspeed"), "24GiB", 2)


@pytest.mark.slow
def test_a_plan_for_several_gpus_says_so(quick: Quick) -> None:
    plan = finetune.plan(quick("training.batch_size=4", "training.micro_batch=1", "distributed.kind=ddp"), "24GiB", 2)
    found = json.loads(json.dumps(plan.as_dict()))
    assert (found["gpus"], found["sharding"]["kind"]) == (2, "ddp")
    assert "each of 2 x" in repr(plan)
