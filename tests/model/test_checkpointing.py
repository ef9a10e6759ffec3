"""What a checkpointed layer recomputes: as its level says, and to the same gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any

import every_architecture
import pytest
import tiny_models
import torch
from bases import Operators
from messages import refusal
from torch.utils.checkpoint import CheckpointPolicy
from transformers import AutoModelForImageTextToText

from finetune import kernels
from finetune.config import MemorySection
from finetune.config.field_types import LEVELS
from finetune.errors import ConfigError
from finetune.model import build
from finetune.model.recompute import checkpointing, keeping

LAYERS = 3
# Of one layer: the products of its seven linear layers, and attention.
PRODUCTS = 7


def made(kind: str = "nf4", *, attention_dropout: float = 0.0, dropout: float = 0.0) -> Any:
    architecture = tiny_models.architecture("llama", LAYERS)
    architecture.attention_dropout = attention_dropout
    job = tiny_models.config(
        quantization__kind=kind, training__precision="fp32", adapter__dropout=dropout, memory__checkpointing="keep-both"
    )
    bare = build.blueprint(job, architecture, "sdpa").load(torch.device("cpu"))
    return build.trainable(bare, job.model, job.adapter, job.memory, seed=1, device_type="cpu").train()


def gradients(model: Any, level: str) -> tuple[list[torch.Tensor], Counter[str]]:
    """Those of the adapter, and the operators that were called."""
    checkpointing.choose(model, [level] * LAYERS)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    ids = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    with Operators() as counted:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [one.grad for one in model.parameters() if one.requires_grad], counted.calls


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert sum(one.abs().sum() for one in expected) > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["nf4", "none"])
@pytest.mark.parametrize("fused", [False, True])
def test_what_a_level_keeps_is_computed_once_and_gradients_stay_to_the_bit(kind: str, fused: bool) -> None:
    model = made(kind)
    if fused:
        kernels.attach(model, "on")
    expected, _ = gradients(model, "none")
    calls = {}
    for level in LEVELS:
        found, calls[level] = gradients(model, level)
        assert_equal(found, expected)
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    for level in LEVELS:
        again = calls[level][attention] - LAYERS
        assert again == (LAYERS if level in ("keep-products", "all") else 0), level
    product = "finetune::add_product_" if fused and kind == "none" else "finetune::decode_4bit_" if fused else (
        "bitsandbytes::gemm_4bit" if kind == "nf4" else "aten::mm"
    )  # fmt: skip
    again = {level: calls[level][product] - calls["none"][product] for level in LEVELS}
    # The last product of a layer is not repeated by a fused MLP, nor where its low-rank products come first.
    expected_again = LAYERS * (PRODUCTS - 1 if fused or kind == "none" else PRODUCTS)
    if product == "aten::mm":  # counts low-rank products too, of which the small ones are kept
        assert again["all"] - again["keep-both"] >= expected_again
    else:
        assert again["all"] == again["keep-attention"] == expected_again
        assert again["keep-both"] == again["keep-products"] == 0


@pytest.mark.parametrize("level", ["keep-attention", "keep-both"])
def test_random_numbers_are_the_same_when_a_layer_is_computed_again(level: str) -> None:
    model = made("none", attention_dropout=0.2, dropout=0.3)
    expected, _ = gradients(model, "none")
    assert_equal(gradients(model, level)[0], expected)


def test_attention_with_dropout_is_computed_again() -> None:
    """A recomputation that skipped its random numbers would give others to what follows."""
    attention, kinds = torch.ops.aten._scaled_dot_product_flash_attention.default, (keeping.ATTENTION,)
    for dropout, expected in ((0.0, CheckpointPolicy.MUST_SAVE), (0.1, CheckpointPolicy.PREFER_RECOMPUTE)):
        assert keeping._policy(kinds, None, attention, 0, 0, 0, dropout) is expected
        assert keeping._policy(kinds, None, attention, 0, 0, 0, dropout_p=dropout) is expected


def test_products_that_are_clipped_in_place_are_not_kept() -> None:
    plain, clipped = (every_architecture.config("olmo") for _ in range(2))
    clipped.clip_qkv = 0.02
    assert checkpointing.levels(plain) == LEVELS
    assert checkpointing.levels(clipped) == ("none", "keep-attention", "all")
    model = every_architecture.model(clipped)
    for level in ("keep-products", {"all": 1, "keep-both": 1}):
        with refusal(ConfigError, "`keep-attention`", "`all`"):
            checkpointing.apply(model, MemorySection(checkpointing=level), "cpu")
    checkpointing.apply(model, MemorySection(checkpointing="keep-attention"), "cpu")


def test_products_of_experts_to_which_biases_are_added_in_place_are_not_kept() -> None:
    model = every_architecture.model(every_architecture.config("gpt_oss")).train()
    checkpointing.apply(model, MemorySection(checkpointing="keep-both"), "cpu")
    ids, found, calls = torch.arange(24)[None], {}, {}
    for level in ("none", "keep-both", "all"):
        checkpointing.choose(model, [level] * 2)
        model.zero_grad(set_to_none=True)
        with Operators() as counted:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found[level], calls[level] = [one.grad for one in model.parameters()], counted.calls["aten::addmm"]
    assert_equal(found["keep-both"], found["none"])
    assert calls["none"] == calls["keep-both"] < calls["all"], "those of attention are kept"


def test_levels_are_of_the_text_layers_alone() -> None:
    model = AutoModelForImageTextToText.from_config(every_architecture.config("gemma3"))
    checkpointing.apply(model, MemorySection(checkpointing={"all": 1, "keep-products": 1}), "cpu")
    found = checkpointing.layers(model)
    assert [checkpointing.level_of(layer) for layer in found] == ["all", "keep-products"]
    assert {type(layer).__name__ for layer in found} == {"Gemma3DecoderLayer"}
    assert sum(getattr(module, "gradient_checkpointing", False) for module in model.modules()) == 2


def test_the_level_of_each_layer() -> None:
    assert checkpointing.pattern("every-2", 3) == ["all", "none", "all"]
    assert checkpointing.pattern(2, 3) == checkpointing.pattern({"none": 1, "all": 2}, 3) == ["all", "all", "none"]
    assert checkpointing.pattern({"keep-both": 1, "all": 1}, 4) == ["all", "keep-both", "none", "none"]
    assert checkpointing.pattern({"keep-products": 5, "keep-attention": 1}, 2) == ["keep-attention", "keep-products"]
    assert checkpointing.pattern("keep-both", 2) == ["keep-both"] * 2
    assert checkpointing.pattern(0, 2) == ["none"] * 2
    assert checkpointing.pattern(99, 2) == ["all"] * 2


def test_a_ladder_goes_from_level_to_level_by_one_layer() -> None:
    found = checkpointing.ladder(["none", "keep-both", "all"], 2)
    assert found == ["none", {"keep-both": 1, "none": 1}, "keep-both", {"all": 1, "keep-both": 1}, "all"]


def test_each_level_is_known_to_the_config() -> None:
    assert [level for level in LEVELS if level != "none"] == list(checkpointing.KEPT)
