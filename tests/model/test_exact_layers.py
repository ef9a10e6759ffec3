"""Layers that compute with rounded weights: gradients, what is kept, and the values that are served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from finetune import kernels
from finetune.config import AdapterSection
from finetune.model.adapters import adapter, exact_layers
from finetune.model.adapters.expert_adapter import ParamWrapper
from finetune.model.structure import block_formats, experts, fixed_point, packed

FORMATS = [how.name for how in fixed_point.POSITIONS.values()]
FEW = ["q4_0", "q8_0", "q4_k", "q6_k", "iq4_xs", "mxfp4", "nvfp4", "int4"]
"""Of one scale and of several, with and without offsets, in 8 and in 16 bits, and of uneven levels."""
SECTION = AdapterSection(rank=8, alpha=24)
IDS = torch.arange(40).view(2, 20)
_SIZES = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


def with_adapter(base: Any) -> Any:
    adapted = adapter.attach(base, SECTION, "tiny", seed=0)
    for path, weight in adapted.named_parameters():
        if "lora_B" in path:
            nn.init.normal_(weight, std=0.01)
    return adapted


def model(name: str) -> Any:
    """A small Llama whose linear layers are stored as positions between the levels of a format, with an adapter."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**_SIZES, num_attention_heads=4, num_key_value_heads=2))
    for path, layer in list(base.named_modules()):
        if type(layer) is nn.Linear and path != "lm_head":
            stored: Any = packed.PackedLinear(layer.in_features, layer.out_features, False, "meta", torch.float32)
            stored.weight = packed.pack(f"exact_{name}", layer.weight.data)
            base.set_submodule(path, stored)
    return with_adapter(base)


def mixture(name: str) -> Any:
    """A small mixture whose experts are stored as positions between the levels of a format, with an adapter."""
    torch.manual_seed(0)
    sizes = {**_SIZES, "moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2}
    base = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=64))
    for _, module, own in list(experts.weights(base)):
        setattr(module, own, packed.pack(f"exact_{name}", getattr(module, own).data))
        experts.unpack_in_forward(module)
    return with_adapter(base)


def decoded(weight: nn.Parameter) -> torch.Tensor:
    """The values of a weight in a block format."""
    how = packed.packing_of(weight)
    assert how is not None
    form = block_formats.BLOCK_FORMATS[how.form]
    codes, fields = form.unpack(weight.data, how.scales)
    return block_formats.values(form, codes, form.grid(fields))


def layers_of(adapted: Any) -> dict[str, Any]:
    return {path: one for path, one in adapted.named_modules() if isinstance(one, exact_layers.ExactLinear)}


def gradients(adapted: Any) -> dict[str, torch.Tensor]:
    adapted.zero_grad()
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    return {name: weight.grad for name, weight in adapted.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("name", FORMATS)
def test_without_an_update_a_weight_has_the_nearest_values(name: str) -> None:
    weight, form = torch.randn(48, 256), fixed_point.POSITIONS[f"exact_{name}"].form
    grid = form.grid(form.search(weight, None))
    expected = block_formats.values(form, block_formats.nearest(form, weight, grid), grid)
    found = packed.values(packed.pack(f"exact_{name}", weight))
    step = grid.scales.abs().repeat_interleave(form.group, dim=-1) * (form.levels[-1] - form.levels[0]) / 200
    moved = found != expected
    # A weight in the middle of two levels, to the precision of its position, may have either.
    assert ((found - weight).abs() <= (expected - weight).abs() + step)[moved].all()
    assert moved.float().mean() < (1e-4 if fixed_point.POSITIONS[f"exact_{name}"].even else 0.05)


@pytest.mark.parametrize("name", FEW)
def test_the_served_weights_are_those_that_the_layers_compute_with_to_the_bit(name: str) -> None:
    adapted = model(name)
    served = dict(exact_layers.as_served(adapted))
    assert len(served) == 7
    changed = 0
    for path, layer in layers_of(adapted).items():
        weight = served[path.removeprefix("base_model.model.") + ".weight"]
        found = layer(torch.eye(layer.in_features)).detach().T
        assert torch.equal(decoded(weight), found)
        changed += int((found != packed.values(layer.base_layer.weight)).sum())
    assert changed > 1000


class _Straight(torch.autograd.Function):
    """Rounds to given values, with the identity as gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


@pytest.mark.parametrize("name", FEW)
def test_gradients_are_those_of_a_whole_weight_with_the_straight_through_estimator(name: str) -> None:
    adapted = model(name)
    found = gradients(adapted)
    for layer in layers_of(adapted).values():

        def forward(x: torch.Tensor, layer: Any = layer) -> torch.Tensor:
            a, b, kappa = exact_layers.update_of(layer)
            rounded = exact_layers.rounded(layer.base_layer.weight, a, b, kappa, torch.float32)
            return x @ _Straight.apply(kappa * b @ a, rounded).T

        layer.forward = forward
    expected = gradients(adapted)
    assert found.keys() == expected.keys()
    for path, gradient in found.items():
        assert (gradient - expected[path]).abs().max() <= 1e-6 * expected[path].abs().max() + 1e-9


@pytest.mark.parametrize("name", ["q4_k", "mxfp4"])
def test_experts_compute_with_rounded_weights_and_have_the_gradients_of_whole_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = mixture(name)
    found, logits = gradients(adapted), adapted(input_ids=IDS).logits
    served = dict(exact_layers.as_served(adapted))
    held = {
        name.rpartition(".")[2]: packed.values(one) for name, one in adapted.named_parameters() if fixed_point.of(one)
    }

    def whole(layer: Any, weight: torch.Tensor, adapter: str) -> torch.Tensor:
        right, left, kappa = layer.current_update()
        assert torch.equal(weight, decoded(served[f"model.layers.0.mlp.experts.{layer.parameter_name}"]))
        assert (weight != held[layer.parameter_name]).sum() > 1000
        return _Straight.apply(kappa * left @ right, weight)

    monkeypatch.setattr(ParamWrapper, "_sum", whole)
    expected = gradients(adapted)
    assert torch.equal(adapted(input_ids=IDS).logits, logits)
    assert found.keys() == expected.keys()
    for path, gradient in found.items():
        assert (gradient - expected[path]).abs().max() <= 1e-5 * expected[path].abs().max() + 1e-9, path
    monkeypatch.undo()
    with adapted.disable_adapter():
        without = adapted(input_ids=IDS).logits
    for path, weight in adapted.named_parameters():
        if "lora_B" in path:
            weight.data.zero_()
    assert torch.equal(without, adapted(input_ids=IDS).logits)


@pytest.mark.parametrize("name", FEW)
def test_kernels_compute_the_same(name: str) -> None:
    adapted = model(name)
    expected = gradients(adapted), adapted(input_ids=IDS).logits
    assert kernels.attach(adapted, "on").fusing == {"norm", "attention", "mlp", "lora"}
    assert torch.allclose(adapted(input_ids=IDS).logits, expected[1], atol=1e-6)
    for path, gradient in gradients(adapted).items():
        assert torch.allclose(gradient, expected[0][path], rtol=1e-4, atol=1e-6)


def test_no_values_of_a_weight_are_kept_for_the_backward_pass() -> None:
    adapted, kept = model("q4_0"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        adapted(input_ids=IDS)
    head = adapted.get_base_model().lm_head.weight
    assert not [one for one in kept if one.numel() >= 128 * 256 and one.data_ptr() != head.data_ptr()]


def test_a_disabled_adapter_leaves_the_rounded_base() -> None:
    adapted = model("q4_0")
    with adapted.disable_adapter():
        found = adapted(input_ids=IDS).logits
    for path, weight in adapted.named_parameters():
        if "lora_B" in path:
            weight.data.zero_()
    assert torch.equal(found, adapted(input_ids=IDS).logits)
