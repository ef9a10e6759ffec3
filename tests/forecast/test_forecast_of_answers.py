"""Facts about the forecast of inference: it is what answers take, and says so before anything is loaded."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import measured_step
import pytest
import tiny_models
import torch
from jobs import lacks
from messages import refusal

from finetune.errors import ConfigError
from finetune.forecast.answer_memory import Inference, Serving
from finetune.resolve import planning

NO_NAN = lacks(reason="8-bit floats of torch 2.11 have NaN for large numbers")


@functools.cache
def forecast(model: str = "llama", *, cache: str = "dynamic", layers: int = 4, **changes: Any) -> Serving:
    settings = {"rows": 3, "context": 96, "device": tiny_models.cpu(), **changes}
    return Inference(tiny_models.config(), tiny_models.architecture(model, layers), cache=cache, **settings).forecast()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cache", "rows"),
    [
        ("llama", "dynamic", 3), ("windows", "static", 1),
        pytest.param("llama", "quantized", 3, marks=NO_NAN),
        pytest.param("mixture", "dynamic", 3, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_the_forecast_is_what_answers_take(model: str, cache: str, rows: int) -> None:
    architecture = tiny_models.architecture(model, 3)
    torch.manual_seed(0)
    measured = measured_step.measure_answers(tiny_models.config(), architecture, rows=rows, context=96, cache=cache)
    found = forecast(model, cache=cache, layers=3, rows=rows)
    assert found.cache_bytes == pytest.approx(measured["cache_bytes"], rel=0.03)
    assert found.phases["prompt"]["allocated_bytes"] == pytest.approx(measured["peak_bytes"], rel=0.02)


@pytest.mark.slow
def test_layers_that_are_left_out_of_the_trace_count() -> None:
    assert forecast(layers=9).cache_bytes == 9 * 2 * (3 * 2 * 96 * 16) * 2


@pytest.mark.slow
def test_an_adapter_on_some_layers_by_pattern_counts_in_those_alone() -> None:
    def adapter_bytes(layers: str) -> int:
        config = tiny_models.config(adapter__targets=[f".*layers[.]{layers}[.]mlp.*"])
        architecture = tiny_models.architecture("llama", 12)
        return Inference(config, architecture, tiny_models.cpu(), rows=1, context=32).forecast().categories["adapter"]

    assert adapter_bytes("[0-5]") == 6 * adapter_bytes("9") > 0


@NO_NAN
@pytest.mark.slow
def test_the_sizes_of_all_possible_caches_are_given(shallow_base: Path) -> None:
    found = planning.answers(tiny_models.config(model__name=str(shallow_base)), "cpu", context=64).caches
    assert found.keys() == {"dynamic", "static", "offloaded", "quantized"}
    assert found["offloaded"] == found["dynamic"] <= found["static"] < found["dynamic"] + 1024
    assert found["quantized"] < 0.51 * found["dynamic"]


@pytest.mark.slow
def test_an_offloaded_cache_lies_in_host_memory_beside_a_card() -> None:
    dynamic, offloaded = (forecast(device=tiny_models.card(), cache=cache) for cache in ("dynamic", "offloaded"))
    assert dynamic.host_bytes == 0
    assert offloaded.host_bytes == offloaded.cache_bytes == dynamic.cache_bytes
    a_layer = dynamic.cache_bytes // 4
    for phase, left in (("prompt", 1), ("decoding", 3)):  # a layer, and when decoding the next and what it becomes
        before, after = (each.phases[phase]["allocated_bytes"] for each in (dynamic, offloaded))
        assert after <= before - (4 - left) * a_layer + 4096


@pytest.mark.slow
def test_an_inference_that_does_not_fit_says_so() -> None:
    card = tiny_models.card()
    dynamic = forecast(device=card, cache="dynamic")
    tight = replace(card, budget_bytes=dynamic.needed_bytes - 1)
    assert dynamic.fits
    assert not forecast(device=tight).fits
    assert sum(dynamic.categories.values()) == dynamic.needed_bytes
    assert dynamic.as_dict()["cache_bytes"] == dynamic.cache_bytes


def test_a_context_beyond_the_positions_and_an_impossible_cache_are_refused() -> None:
    config = tiny_models.config(model__name="builtin:tiny-llama")
    with refusal(ConfigError, "--context:"):
        planning.answers(config, "cpu", context=9_999_999)
    with refusal(ConfigError, "no layer of this model attends to a window"):
        planning.answers(config, "cpu", cache="sliding")
