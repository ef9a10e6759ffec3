"""The memory of a base that is held as llama.cpp serves it: 8B beside its adapter on cards of 24 and 16 GB."""

from __future__ import annotations

import pytest
import tiny_models
import torch

from finetune.choices import load_config
from finetune.forecast import operator_costs
from finetune.forms import LEAST_FIRST, packed
from finetune.resolve import planning
from tests.jobs import TINY, sampled

CONFIG = TINY.with_name("llama3_8b_q4_k_m.yaml")
Q4_K, Q6_K = 144 / 256, 210 / 256
"""Bytes of a weight."""


def bytes_of_8b() -> float:
    """Of Llama-3.1 8B in Q4_K_M: `attn_v` and `ffn_down` in 6 bit in 16 of 32 layers, the head too; norms in 16 bit."""
    hidden, inside, keys, vocabulary = 4096, 14336, 1024, 128256
    some, others = (keys + inside) * hidden, (2 * hidden + keys + 2 * inside) * hidden
    tables = vocabulary * hidden * (Q4_K + Q6_K)
    return 32 * others * Q4_K + 16 * some * (Q4_K + Q6_K) + tables + 65 * hidden * 2


@pytest.mark.long
@pytest.mark.parametrize("gpu", sampled(["RTX 4090", "RTX 4080"], "RTX 4080"))
def test_8b_fits_beside_its_adapter_in_the_bytes_that_are_served(gpu: str) -> None:
    least = ["training.micro_batch=1", "memory.checkpointing=all"]
    forecast = planning.plan(load_config(CONFIG, least), gpu).forecast
    assert forecast.fits
    assert forecast.categories["base_weights"] == pytest.approx(bytes_of_8b(), rel=1e-3)
    assert forecast.needed_bytes < 8 * 2**30


@pytest.mark.parametrize("form", ["q4_k", "q8_0", "iq4_xs"])
def test_unpacking_takes_the_memory_of_one_part(form: str) -> None:
    """Of a table of 2^28 weights no more than of 2^24, and at least the values of these in float32."""
    few, many = (torch.empty(rows, 4096, device="meta", dtype=torch.bfloat16) for rows in (4096, 65536))
    held = []
    for weight in (few, many):
        stored = packed.pack(form, weight)
        how = packed.packing_of(stored)
        held += operator_costs._parts_scratch("finetune::unpack_", (weight, stored.data, how.scales, form), "cuda")
    assert held[0] == held[1]
    assert 4 * 2**24 <= held[0] <= 12 * 2**24


@pytest.mark.parametrize("form", ["q4_k", "q6_k", "iq4_xs", "q8_0"])
def test_packing_on_a_cpu_takes_the_memory_that_is_forecast(form: str) -> None:
    """Of a weight that is searched in four parts."""
    weight = torch.randn(1, 512, 1024).bfloat16()
    stored = packed.empty(form, weight)
    with operator_costs._Held((*stored, weight)) as held:
        packed.encode_in_parts(*stored, weight, form)
    forecast = operator_costs._held_by_a_part("finetune::pack_", weight.shape, weight.dtype, form, "cpu")
    assert forecast == pytest.approx(held.most, rel=0.02)


def test_a_table_that_is_embedding_and_head_is_packed_once() -> None:
    trace = tiny_models.trace(tiny_models.config(quantization__kind="q8_0"), tiny_models.architecture(layers=2))
    table = 256 * 64 * torch.bfloat16.itemsize
    loaded = [block for stretch, block, sign in trace.timeline() if stretch.phase == "load" and sign > 0]
    assert [block.bytes for block in loaded if block.layer is None and block.category == "workspace"].count(table) == 1


@pytest.mark.slow
def test_each_kind_that_auto_chooses_from_is_traced_and_holds_less_than_16_bits() -> None:
    held = {}
    for kind in LEAST_FIRST:
        job = tiny_models.config(quantization__kind=kind, adapter__targets=["q_proj"])
        blocks = tiny_models.trace(job, tiny_models.architecture(layers=1)).blocks
        held[kind] = sum(each.bytes for each in blocks if each.category in ("base_weights", "quantization_state"))
    assert held["none"] > max(held["int8"], held["fp8"]) >= min(held["int8"], held["fp8"]) > held["nf4"] > 0
