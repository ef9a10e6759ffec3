"""Fake weights take what real ones do, to the byte, and hold nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from finetune.config import ModelSection, QuantizationSection
from finetune.forecast import fake_model
from finetune.model.base import load_base
from finetune.model.skeleton import weightless_base

KINDS = [("nf4", True), ("nf4", False), ("fp4", True), ("int8", True), ("none", True)]


def faked(section: QuantizationSection, name: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Any:
    model = weightless_base(tiny_models.architecture(name, 1), section, attention="sdpa", dtype=dtype)
    fake_model.fill(model, section, FakeTensorMode(allow_non_fake_inputs=True))
    return model


def real(section: QuantizationSection, name: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Any:
    return load_base(
        ModelSection(weights="random"), section, tiny_models.architecture(name, 1), attention="sdpa", dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip


def tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights, buffers and what says how to read them, under their names."""
    for name, parameter in model.named_parameters():
        yield name, parameter
        for number, tensor in enumerate(fake_model.quantization_state(parameter)):
            yield f"{name}.{number}", tensor
    yield from model.named_buffers()


def size(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().nbytes(), tensor.dtype


def sizes(model: Any) -> Iterator[tuple[str, Any]]:
    """The bytes and type of each of `tensors`, and the type that a 4-bit weight is dequantized to."""
    yield from ((name, size(tensor)) for name, tensor in tensors(model))
    for name, weight in model.named_parameters():
        if state := getattr(weight, "quant_state", None):
            yield f"{name}, dequantized", state.dtype


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["llama", "mixture"])
def test_weights_and_quantization_states_have_the_bytes_and_types_of_real_ones(name: str, dtype: torch.dtype) -> None:
    for kind, double in KINDS[:1] if dtype is torch.float16 else KINDS:
        section = QuantizationSection(kind=kind, double=double)
        found, expected = faked(section, name, dtype), real(section, name, dtype)
        assert dict(sizes(found)) == dict(sizes(expected)), (kind, double)
        # 4 bits are dequantized to the type of the model.
        types = {one.quant_state.dtype for one in found.parameters() if getattr(one, "quant_state", None)}
        assert types == ({dtype} if "4" in kind else set()), kind


@pytest.mark.parametrize("kind", ["nf4", "int8", "none"])
def test_dora_reads_a_fake_weight_as_it_reads_a_real_one(kind: Any) -> None:
    from peft.tuners.lora import dora

    section = QuantizationSection(kind=kind)
    expected = dora.dequantize_module_weight(real(section).model.layers[0].mlp.up_proj)
    with fake_model.for_dora():
        found = dora.dequantize_module_weight(faked(section).model.layers[0].mlp.up_proj)
    assert isinstance(found, FakeTensor)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_a_weight_with_a_partial_last_block_has_the_real_bytes() -> None:
    import bitsandbytes as bnb

    for rows, columns in ((3, 5), (64, 1), (65, 129)):
        for double in (True, False):
            with torch.device("meta"):
                layer = torch.nn.Sequential(bnb.nn.Linear4bit(columns, rows, compress_statistics=double))
            fake_model.fill(layer, QuantizationSection(double=double), FakeTensorMode())
            true = bnb.nn.Linear4bit(columns, rows, compress_statistics=double, quant_type="nf4").to("cpu").weight
            mine: Any = layer[0].weight
            assert size(mine) == size(true)
            assert [size(tensor) for tensor in fake_model.quantization_state(mine)] == [
                size(tensor) for tensor in fake_model.quantization_state(true)
            ]


def test_all_tensors_are_fake_and_tied_weights_stay_tied() -> None:
    model = faked(QuantizationSection())
    assert all(isinstance(tensor, FakeTensor) for _, tensor in tensors(model))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {tensor.device.type for _, tensor in tensors(model)} == {"cpu"}


def test_only_quantized_weights_count_as_such() -> None:
    for kind in ("nf4", "int8"):
        model = faked(QuantizationSection(kind=kind))
        assert fake_model.is_quantized(model.model.layers[0].mlp.up_proj.weight)
        assert not fake_model.is_quantized(model.lm_head.weight)
        assert not fake_model.is_quantized(model.model.norm.weight)
    assert not any(fake_model.is_quantized(weight) for weight in faked(QuantizationSection(kind="none")).parameters())
