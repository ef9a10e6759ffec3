"""The cost of a step by part, and TRL's side of the comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
import step_cost
import tiny_models

import finetune
from finetune.config import Config
from finetune.forecast import traced_step
from finetune.resolve import planning


@pytest.fixture(scope="module")
def job() -> Config:
    """Llama on rows that fill a micro-batch, under the autocast of a card."""
    given = ["training.precision=bf16", "data.eval=none", "data.max_length=256",
             "training.batch_size=8", "kernels.fused=off"]  # fmt: skip
    return finetune.load_config(tiny_models.ROOT / "configs" / "tiny_cpu.yaml", [*given, "memory.checkpointing=all"])


@pytest.mark.long
def test_the_parts_of_a_layer_add_up_to_its_passes(job: Config) -> None:
    found = step_cost.layer(job)
    for figure in ("gigabytes", "calls", "teraflop"):
        for each in step_cost.PASSES:
            assert sum(part[each][figure] for part in found["parts"].values()) == pytest.approx(
                found["passes"][each][figure], abs=0.01
            )
    assert "other" not in found["parts"]
    assert [found["passes"][each]["calls"] for each in step_cost.PASSES] == [108, 104, 143]
    norms = found["parts"]["norms"]
    assert [norms[each]["calls"] for each in step_cost.PASSES] == [16, 16, 30], "eight operators each, and 15 back"


@pytest.mark.long
def test_trl_gives_a_mask_that_costs_uneven_rows_their_flash_kernel_and_leaves_nothing_behind(
    job: Config, shallow_base: Path
) -> None:
    job = job.changed({"model.name": str(shallow_base)})
    before = traced_step.objectives.of, traced_step.needs_mask, traced_step.log_probs.attach
    flops = {}
    for padded in (False, True):
        with step_cost.rows_of(padded=padded), step_cost.as_trl():
            flops["trl", padded] = planning.planner_for(job, "RTX 4090").forecast().work.flops
        with step_cost.rows_of(padded=padded):
            flops["ours", padded] = planning.planner_for(job, "RTX 4090").forecast().work.flops
    assert (traced_step.objectives.of, traced_step.needs_mask, traced_step.log_probs.attach) == before
    assert flops["ours", False] == flops["ours", True] == flops["trl", False] < flops["trl", True]


@pytest.mark.long
def test_a_step_on_served_codes_has_the_arithmetic_of_one_on_nf4(job: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cost, "SERVED", step_cost.SERVED[:1])
    job = job.changed(step_cost.PATHS["fused"])
    with step_cost.rows_of(padded=False):
        one = step_cost._step(job, planning.planner_for(job, "RTX 4090").forecast())
    [found] = step_cost.served(job, "RTX 4090", one).values()
    assert found["flops"] == one["flops"]
    assert found["micro_batch"] == one["micro_batch"]
    assert found["times"] == round(found["seconds"] / one["seconds"], 4)
