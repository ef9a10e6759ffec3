"""What a rank holds of a sharded model, on a process group that only pretends to have other ranks."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
from bases import loaded
from jobs import lacks
from messages import refusal
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.config import AdapterSection, MemorySection, ModelSection
from finetune.errors import ConfigError, MachineError
from finetune.model import build
from finetune.model.distributed import gradient_norm, sharding
from finetune.model.distributed.sharding import Sharding, Shards
from finetune.objectives import log_probs

RANKS = 4
CPU = torch.device("cpu")


@pytest.fixture(params=[0, 3], ids=lambda rank: f"rank {rank}")
def shards(request: pytest.FixtureRequest) -> Iterator[Sharding]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=RANKS)
    try:
        yield Sharding.over_ranks(CPU, keep_whole=False, offload=False)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["random", "pretrained"])
@pytest.mark.parametrize("kind", ["nf4", "none"])
def test_of_a_layer_only_this_ranks_rows_stay_once_it_is_loaded(shards: Sharding, kind: str, weights: str) -> None:
    whole, cut = (loaded(kind, weights=weights, attention="eager", placement=each) for each in (None, shards))
    inside = {name for name, module in whole.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    assert len(inside) == 4 * 7
    rank = dist.get_rank()
    for name in inside:
        expected = whole.get_submodule(name).weight.data.chunk(RANKS)[rank]
        if weights == "pretrained":
            assert torch.equal(cut.get_submodule(name).weight.data, expected)
        assert cut.get_submodule(name).weight.untyped_storage().nbytes() == expected.nbytes
    assert cut.get_input_embeddings().weight.shape == whole.get_input_embeddings().weight.shape


def test_a_quantized_base_is_refused_with_a_torch_that_cannot_shard_it(
    shards: Sharding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with refusal(MachineError, "`distributed.kind: fsdp`", "2.11.0", "`ddp`"):
        shards.apply(loaded("nf4", weights="random", attention="eager", placement=shards))


@lacks(reason="torch 2.11 shards no quantized base")
def test_every_weight_is_sharded_and_has_its_whole_shape(shards: Sharding) -> None:
    base = loaded("nf4", weights="random", attention="eager", placement=shards)
    model = build.trainable(
        base, ModelSection(), AdapterSection(rank=2), MemorySection(), seed=0, device_type="cpu", placement=shards
    )
    assert isinstance(model, FSDPModule)
    for weight in model.parameters():
        each = -(-len(weight) // RANKS)
        assert len(sharding.held(weight)) <= each
        assert sharding.held(weight).untyped_storage().nbytes() == each * weight.nbytes // len(weight)
    # Rank 2 has two rows, and so two ranks of four.
    rows = [len(sharding.held(weight)) for name, weight in model.named_parameters() if "lora_A" in name]
    assert set(rows) == {1 if dist.get_rank() == 0 else 0}


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_and_head_are_whole_only_where_they_are_used(tied: bool, shards: Sharding) -> None:
    """The head from the last norm on, as the loss reads its weight; with tied weights both all along."""
    architecture = tiny_models.architecture(layers=2)
    architecture.tie_word_embeddings = tied
    config = tiny_models.config(quantization__kind="none", adapter__rank=4)
    unsharded = build.blueprint(config, architecture, "eager").load(CPU, shards)
    model = build.trainable(
        unsharded, config.model, config.adapter, config.memory, seed=0, device_type="cpu", placement=shards
    )
    log_probs.attach(model)
    whole: list[tuple[str, bool, bool]] = []

    def look(place: str) -> Any:
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        return lambda *_: whole.append((place, *(not isinstance(end.weight, DTensor) for end in ends)))

    decoder = model.get_base_model().model
    decoder.layers[0].register_forward_pre_hook(look("first layer"))
    decoder.register_forward_hook(look("loss"))
    ids = torch.zeros(1, 8, dtype=torch.long)
    loss = model(input_ids=ids, labels=ids, fused_lm_head=True).loss
    assert whole == [("first layer", tied, tied), ("loss", tied, True)]
    loss.backward()
    assert all(isinstance(weight, DTensor) for weight in model.parameters())


def test_a_head_that_would_not_be_gathered_is_refused(shards: Sharding) -> None:
    """Its norm stands after the layers, and is not used."""
    base = loaded("none", weights="random", attention="eager", placement=shards)
    base.config.tie_word_embeddings = False
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
    base.model.forward = types.MethodType(lambda self, input_ids, **_: self.embed_tokens(input_ids), base.model)
    shards.apply(base)
    with refusal(ConfigError, "does not use the norm after its layers"):
        base.model(torch.zeros(1, 8, dtype=torch.long))


def test_a_layer_that_peft_would_copy_to_train_it_in_full_is_refused(shards: Sharding) -> None:
    base = loaded("none", weights="random", attention="eager", placement=shards)
    model = build.trainable(
        base, ModelSection(), AdapterSection(extra_modules=["down_proj"]), MemorySection(), seed=0, device_type="cpu"
    )
    with refusal(ConfigError, "`adapter.extra_modules`", "down_proj"):
        shards.apply(model)


@pytest.mark.parametrize(
    ("rows", "numbers", "expected"),
    [(8, 8 * 256, (8, 2)), (5, 5 * 512, (10, 4)), (4096, 4096 * 16, (256, 64)), (1, 100, (1, 1))],
)
def test_the_scales_of_blocks_are_cut_like_their_rows(
    shards: Sharding, rows: int, numbers: int, expected: tuple[int, int]
) -> None:
    by_block = Shards.of(rows, shards.mesh).by_block(numbers, 256)
    assert (by_block.rows, by_block.each) == expected


@pytest.mark.parametrize("shape", [(5000, 256), (1280000,), (2, 640000), (160000, 8), (50, 100, 256)], ids=str)
def test_large_gradients_are_clipped_to_the_norm_also_where_torch_loses_its_digits(shape: tuple[int, ...]) -> None:
    """On a CPU. Should torch no longer lose them, its own function of this name does."""
    weights = [torch.nn.Parameter(torch.empty(size)) for size in (shape, (7, 3), (), (0, 4))]
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    gradients = [torch.clone(weight.grad) for weight in weights]
    exact = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
    assert abs(torch.nn.utils.get_total_norm(gradients) / exact - 1) > 1e-6
    norm = gradient_norm.clip(weights, 1.0)
    assert norm.dtype is torch.float32
    assert abs(norm / exact - 1) < 1e-7
    as_on_gpu = gradient_norm.total(gradients, "cuda")
    assert torch.equal(as_on_gpu, torch.nn.utils.get_total_norm(gradients)), "in a trace"
    for weight, gradient in zip(weights, gradients, strict=True):
        torch.testing.assert_close(weight.grad, (gradient / exact).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(4096,), (8, 4096), (300, 200)], ids=str)
def test_the_norm_of_a_bfloat16_gradient_is_not_rounded_to_bfloat16(shape: tuple[int, ...]) -> None:
    weight = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))
    weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = weight.grad.double().norm()
    assert abs(gradient_norm.clip([weight], math.inf) / exact - 1) < 1e-6


def test_clipping_without_gradients_finds_no_norm() -> None:
    assert gradient_norm.clip([torch.nn.Parameter(torch.empty(3))], 1.0) == 0
