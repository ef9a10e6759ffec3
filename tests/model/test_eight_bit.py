"""8-bit weights: quantized wherever they are made, and the same arithmetic on every device and in every pass."""

from __future__ import annotations

import weakref
from typing import Any

import bitsandbytes as bnb
import pytest
import tiny_models
import torch
from bases import Operators, loaded
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config import AdapterSection, QuantizationSection
from finetune.model import skeleton
from finetune.model.adapters.adapter import attach
from finetune.model.structure import eight_bit

INT8 = QuantizationSection(kind="int8")
META = torch.device("meta")
IDS = torch.arange(48)[None]


def layer(inputs: int = 96, outputs: int = 64, *, bias: bool = True, device: str = "cpu") -> Any:
    """An 8-bit layer, and the 16-bit weight that it was made from as its attribute `exact`."""
    torch.manual_seed(0)
    made = bnb.nn.Linear8bitLt(inputs, outputs, bias, has_fp16_weights=False).to(torch.bfloat16).requires_grad_(False)
    exact = made.weight.data.to(device)
    made.weight, made.exact = eight_bit.quantized(exact), exact
    if bias:
        made.bias = torch.nn.Parameter(made.bias.to(device), requires_grad=False)
    eight_bit.weight_only(made)
    return made


def dequantized(weight: Any) -> torch.Tensor:
    return weight.data * weight.SCB[:, None] / 127


# -- quantized wherever they are made ----------------------------------------------------------------------------------


def test_random_weights_are_quantized_where_they_are_made_and_not_on_their_way_from_a_cpu() -> None:
    """bitsandbytes quantizes on the way from a CPU to a device. The meta device is none: it stands for a card."""
    model = skeleton.weightless_base(tiny_models.architecture(), INT8, attention="sdpa", dtype=torch.bfloat16)
    for module in list(model.modules()):
        skeleton._materialise(model, module, torch.bfloat16, META)
    layers = [module for module in model.modules() if isinstance(module, bnb.nn.Linear8bitLt)]
    assert len(layers) == 9 * 7
    for module in layers:
        assert module.weight.dtype == torch.int8
        assert module.weight.CB.dtype == torch.int8
        assert module.weight.SCB.shape == (module.out_features,)


def test_one_layer_at_a_time_is_in_16_bit() -> None:
    """As its random weights are quantized, and none after."""
    alive: list[Any] = []
    most = 0
    quantize = eight_bit.quantize

    def watched(weight: torch.Tensor) -> Any:
        nonlocal most
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(weight.untyped_storage()))
        most = max(most, sum(not one.expired() for one in alive))
        return quantize(weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eight_bit, "quantize", watched)
        model = skeleton.random_base(
            tiny_models.architecture(), INT8, attention="sdpa", dtype=torch.bfloat16, device=torch.device("cpu")
        )
    assert len(alive) == 9 * 7
    assert most == 1
    assert all(one.expired() for one in alive)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.int8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_stored_as_bitsandbytes_stores_those_of_a_file(dtype: torch.dtype) -> None:
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, expected = eight_bit.quantized(weight), bnb.nn.Int8Params(weight, requires_grad=False).to("cpu")
    assert torch.equal(found.data, expected.data)
    assert torch.equal(found.SCB, expected.SCB)
    assert found.CB.untyped_storage().data_ptr() == found.untyped_storage().data_ptr(), "held once"


# -- one arithmetic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_every_8_bit_layer_of_a_base_is_weight_only(weights: str) -> None:
    model = loaded("int8", weights=weights, dtype=torch.bfloat16)
    found = [type(module) for module in model.modules() if isinstance(module, bnb.nn.Linear8bitLt)]
    assert len(found) == 4 * 7
    assert set(found) == {eight_bit.WeightOnly}


def test_training_evaluation_and_inference_compute_the_same() -> None:
    model = attach(loaded("int8", dtype=torch.bfloat16), AdapterSection(rank=4), "", seed=1)
    losses = []
    for training in (True, False):
        model.train(training)
        losses.append(model(input_ids=IDS, labels=IDS).loss.detach())
    with torch.inference_mode():
        losses.append(model(input_ids=IDS, labels=IDS).loss)
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_but_the_weight_is_quantized_on_any_device(
    device: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither pass calls bitsandbytes: they are torch's own operators on the dequantized weight."""
    if device == "meta":  # has no autocast to be asked for
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)
    module = layer(device=device).train(training)
    x = torch.randn(2, 5, 96, device=device, dtype=torch.bfloat16, requires_grad=training)
    with Operators() as operators:
        out = module(x)
        if training:
            out.sum().backward()
    assert any("mm" in name for name in operators.calls)
    assert not any("bitsandbytes" in name for name in operators.calls)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_and_gradient_are_those_of_the_dequantized_weight(dtype: torch.dtype, bias: bool) -> None:
    module = layer(bias=bias)
    x = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    gradient = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = module(x)
    found.backward(gradient)
    weight = dequantized(module.weight).to(dtype)
    expected = torch.nn.functional.linear(x, weight, module.bias.to(dtype) if bias else None)
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    torch.testing.assert_close(found, expected, **tolerance)
    torch.testing.assert_close(x.grad, gradient @ weight, **tolerance)
    assert found.dtype == x.grad.dtype == dtype
    # Rounding to 8 bit under one scale a row: a uniform error of a 254th of the largest at most, here of +-3.5.
    assert (dequantized(module.weight) - module.exact).norm() < 0.01 * module.exact.float().norm()


def test_under_autocast_the_product_is_in_its_type_and_the_gradient_in_the_inputs() -> None:
    """As a linear layer's: layer norms give float32 under CUDA's autocast."""
    module = layer()
    x = torch.randn(2, 5, 96, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert x.grad.dtype == torch.float32
    assert torch.equal(out, module(x.bfloat16()))


def test_neither_the_input_nor_the_dequantized_weight_is_kept_for_the_backward_pass() -> None:
    module, freed = layer(), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and func is not torch.ops.aten.view.default:
                weakref.finalize(out.untyped_storage(), freed.append, out.shape)
            return out

    leaf = torch.randn(5, 96, dtype=torch.bfloat16, requires_grad=True)
    with Watch():
        out = module(leaf * 1)
    assert torch.Size((5, 96)) in freed
    assert torch.Size((64, 96)) in freed
    assert torch.Size((5, 64)) not in freed
    out.sum().backward()
    assert leaf.grad is not None
