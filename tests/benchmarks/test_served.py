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
from finetune.storage.rundir import RunDirectory
from tests.jobs import QUICK


@pytest.mark.long
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


@pytest.mark.long
def test_what_was_trained_on_nf4_is_compared_with_that_and_not_with_the_merged_model(
    tmp_path: Path, shallow_base: Path, rows_file: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings: list[tuple[object, ...]] = []

    def train(*arguments: object, threads: int) -> None:
        trainings.append(arguments)
        code, out, err = call(*arguments)
        assert code == 0, out + err

    monkeypatch.setattr(served.harness, "finetune", train)  # in this process
    settings = [
        f"model.name={shallow_base}",
        f"data.train={rows_file}",
        "data.eval_share=0.2",
        *QUICK,
        "training.max_steps=2",
    ]
    job = served.trained(tmp_path, [*settings, "output.merge=true"], seed=3)
    ways = ("plain rounding", "NF4, plain rounding", "NF4, rounded with the rows")
    cells: dict[str, Any] = {}
    for found in served.measured(job, [(way, "q8_0") for way in ways]):
        cells |= {way: found[way]["q8_0"] for way in ways if way in found}
    assert [sum(f"quantization.kind={kind}" in one for one in trainings) for kind in ("none", "nf4")] == [1, 1]
    assert RunDirectory(tmp_path / "run3-nf4").is_merged
    # 8 bit change little: this is what merging into the base in 16 bit changes.
    assert min(cells[way]["kl"] for way in ways[1:]) > 10 * cells[ways[0]]["kl"] > 0


def test_what_the_result_has_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "environment", lambda threads: {})
    monkeypatch.setattr(served, "trained", lambda folder, settings, seed: seed)
    asked: list[Any] = []

    def measured(job: Any, cells: served.Cells) -> Any:
        asked.append((job, cells))
        return ({way: {kind: {"kept": 1.0}}} for way, kind in cells)

    monkeypatch.setattr(served, "measured", measured)
    adapter, plain = ("adapter", "q4_0"), ("plain rounding", "q4_0")
    for cells in ([adapter], [adapter, plain], [adapter, plain]):
        served.measure(tmp_path / "served.json", "built-in", tmp_path, 7, cells)
    assert asked == [(7, [adapter]), (7, [plain])]
