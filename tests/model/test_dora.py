"""DoRA on a quantized base equals the paper's equations (arXiv 2402.09353, 5 and 11), computed here from the codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bases import loaded
from jobs import sampled

from finetune.config import AdapterSection, ModelSection, QuantizationSection
from finetune.export.merging.updates import Updates
from finetune.model.adapters import adapter_files
from finetune.model.adapters.adapter import attach
from finetune.model.base import load_architecture
from finetune.model.build import Blueprint

BASE = "builtin:tiny-llama"
KINDS = {
    "nf4": QuantizationSection(kind="nf4", double=False),
    "nf4, double": QuantizationSection(kind="nf4", double=True),
    "fp4": QuantizationSection(kind="fp4", double=True),
    "int8": QuantizationSection(kind="int8"),
}
SECTION = AdapterSection(rank=4, alpha=12, dora=True, targets=["q_proj", "down_proj"])


@pytest.fixture(params=sampled(KINDS, "nf4", "nf4, double", "int8"))
def model(request: pytest.FixtureRequest) -> Any:
    """An adapter whose matrices and magnitudes all matter."""
    model = attach(loaded(KINDS[request.param]), SECTION, BASE, seed=1)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    return model


def weight_of(layer: Any) -> torch.Tensor:
    """The weight (out, in) that a quantized layer stands for, by table and scales."""
    weight = layer.weight
    if weight.dtype == torch.int8:
        return weight.data.float() * (weight.SCB.float() / 127)[:, None]
    state = weight.quant_state
    scales = state.absmax
    if state.nested:
        blocks = torch.arange(len(scales)) // state.state2.blocksize
        scales = state.state2.code[scales.long()] * state.state2.absmax[blocks] + state.offset
    packed = weight.data.flatten()
    codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()
    values = state.code[codes] * scales[torch.arange(len(codes)) // state.blocksize]
    return values.view(layer.out_features, layer.in_features)


def adapted(model: Any) -> list[tuple[str, Any]]:
    found = [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_magnitude_vector")]
    assert len(found) == 8
    return found


def test_forward_and_gradients_are_those_of_the_paper(model: Any) -> None:
    for _, layer in adapted(model):
        weight = weight_of(layer.base_layer)
        down, up = (
            matrix["default"].weight.detach().clone().requires_grad_() for matrix in (layer.lora_A, layer.lora_B)
        )
        magnitude = layer.lora_magnitude_vector["default"].weight.detach().clone().requires_grad_()
        inputs = torch.randn(2, 5, layer.in_features)
        mine, own = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
        direction = weight + 3.0 * up @ down  # alpha / rank
        # Equation 11: the norm is a constant in the backward pass.
        expected = mine @ (magnitude[:, None] * direction / direction.norm(dim=1, keepdim=True).detach()).T
        layer.train()
        found = layer(own)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        towards = torch.randn_like(found)
        wanted = torch.autograd.grad((expected * towards).sum(), (down, up, magnitude, mine))
        trained = (
            layer.lora_A["default"].weight, layer.lora_B["default"].weight,
            layer.lora_magnitude_vector["default"].weight, own,
        )  # fmt: skip
        for one, other in zip(torch.autograd.grad((found * towards).sum(), trained), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_new_adapter_has_the_norms_of_the_dequantized_rows() -> None:
    for quantization in KINDS.values():
        for _, layer in adapted(attach(loaded(quantization), SECTION, BASE, seed=1)):
            torch.testing.assert_close(
                layer.lora_magnitude_vector["default"].weight, weight_of(layer.base_layer).norm(dim=1)
            )


def test_a_merge_onto_the_quantized_base_writes_the_weights_that_were_trained(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(str(tmp_path))
    section, plain = ModelSection(), QuantizationSection(kind="none")
    weightless = Blueprint(section, plain, load_architecture(section), "sdpa", torch.float32).weightless()
    updates = Updates(adapter_files.weightless_adapter(weightless, tmp_path, SECTION), tmp_path, torch.device("cpu"))
    for name, layer in adapted(model):
        weight = weight_of(layer.base_layer)
        direction = weight + 3.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        magnitude = layer.lora_magnitude_vector["default"].weight
        expected = magnitude[:, None] * direction / direction.norm(dim=1, keepdim=True)
        merged = updates.apply(f"{name.removeprefix('base_model.model.')}.weight", weight)
        torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-6)
