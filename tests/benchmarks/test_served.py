"""What the benchmark of served models makes and keeps: its large base, and the cells of its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grown_base
import harness
import pytest
import served
import torch
from transformers import AutoModelForCausalLM

from finetune.model.source.locate import BUILTIN_BASE, locate


@torch.no_grad()
def test_the_large_base_computes_what_it_was_grown_from(monkeypatch: pytest.MonkeyPatch) -> None:
    small = AutoModelForCausalLM.from_pretrained(locate(BUILTIN_BASE), dtype=torch.float32)
    monkeypatch.setattr(grown_base, "LAYERS", small.config.num_hidden_layers)  # with more, each adds its share at once
    large = grown_base.grown(small)
    ids = torch.arange(5, 29)[None]
    expected, found = (model(ids).logits for model in (small, large))
    assert torch.allclose(found, expected, atol=1e-3 * float(expected.abs().max()))
    copies = large.model.layers[0].mlp.up_proj.weight[:, :: small.config.hidden_size]
    assert (copies.diff(dim=1).abs().mean(0) > 0.005).all(), "copies of a weight differ"


def test_cells_of_several_calls_stand_beside_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "environment", lambda threads: {})
    file, way = tmp_path / "served.json", "plain rounding"
    for seed, kept in enumerate((0.97, 0.98, 0.99)):
        for kind in ("q4_0", "q4_k_m")[: 2 if seed else 1]:
            served.save(file, "built-in", seed, {"base": 4.0, way: {kind: {"kept": kept}}})
    found = harness.saved(file, "bases")["built-in"]
    assert found["kept"] == {way: {"q4_0": [0.98, 0.9552, 1.0048]}}, "two seeds have no interval"
    assert found["seeds"]["1"] == {"base": 4.0, way: {"q4_0": {"kept": 0.98}, "q4_k_m": {"kept": 0.98}}}


def test_what_the_result_has_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "environment", lambda threads: {})
    monkeypatch.setattr(served, "trained", lambda folder, settings, seed: seed)
    asked: list[Any] = []

    def measured(job: Any, cells: served.Cells) -> Any:
        asked.append((job, cells))
        return ({way: {kind: {"kept": 1.0}}} for way, kind in cells)

    monkeypatch.setattr(served, "measured", measured)
    adapter, exact = ("adapter", "q4_0"), ("exact", "q4_0")
    for cells in ([adapter], [adapter, exact], [adapter, exact]):
        served.measure(tmp_path / "served.json", "built-in", tmp_path, 7, cells)
    assert asked == [(7, [adapter]), (7, [exact])]
