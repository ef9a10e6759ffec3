"""What benchmarks/evidence.py makes of the losses it measured, and that what it compares is comparable."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import evidence
import pytest


def bowl(*lowest: float) -> evidence.Losses:
    """Losses at 1e-3, 2e-3 and so on, which for each seed are least at `lowest`, as parabolas of the logarithm."""
    rates = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
    return {f"{rate:g}": [math.log2(rate / best) ** 2 for best in lowest] for rate in rates}


def test_the_best_rate_of_each_seed_is_the_lowest_point_of_its_parabola() -> None:
    found = evidence.best_rates(bowl(2.5e-3, 3e-3))
    assert found is not None
    assert [2**rate for rate in found] == pytest.approx([2.5e-3, 3e-3])


@pytest.mark.parametrize("lowest", [1e-4, 1e-3, 1.6e-2, 1.0])
def test_a_ladder_that_ends_at_its_best_rate_has_none(lowest: float) -> None:
    assert evidence.best_rates(bowl(lowest, lowest)) is None


def test_the_interval_is_students() -> None:
    """By hand: the standard deviation of 1 to 4 is 1.291, and t is 3.182 with three degrees of freedom."""
    assert evidence.interval([1, 2, 3, 4]) == {"mean": 2.5, "low": pytest.approx(0.446), "high": pytest.approx(4.554)}


def test_the_exponent_is_that_of_the_rates() -> None:
    rates = {"batch 4": (1.5e-3, 1.6e-3, 1.4e-3, 1.5e-3), "batch 16": (3e-3, 3.2e-3, 2.8e-3, 3e-3),
             "batch 64": (6e-3, 6.4e-3, 5.6e-3, 6e-3)}  # fmt: skip
    parts = {"batch": {"losses": {batch: bowl(*lowest) for batch, lowest in rates.items()}}}
    found: dict[str, Any] = evidence.findings(parts)["batch"]
    assert found["exponent of the batch"] == {"mean": 0.5, "low": 0.5, "high": 0.5}
    assert "over reference" not in found["batch 4"]
    assert found["batch 16"]["rate"]["mean"] == pytest.approx(3e-3, rel=0.01)


def test_settings_are_compared_within_each_seed() -> None:
    noisy = {"losses": {"mlp": {"1": [2.0, 3.0, 4.0, 5.0]}, "attention": {"1": [2.5, 3.5, 4.5, 5.5]}}}
    found = evidence.findings({"targets": noisy})["targets"]
    assert found["attention"]["over reference"] == {"mean": 0.5, "low": 0.5, "high": 0.5}
    assert found["attention"]["loss"]["high"] > 5


def test_attention_and_mlp_have_adapters_of_the_same_size(tiny_base: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    sizes = {}
    for name, setting in evidence.PARTS["targets"].settings.items():
        targets = setting.changes.get("adapter.targets", [*evidence.ATTENTION, *evidence.MLP])
        base = AutoModelForCausalLM.from_pretrained(tiny_base)
        model = get_peft_model(base, LoraConfig(r=setting.changes["adapter.rank"], target_modules=targets))
        sizes[name], _ = model.get_nb_trainable_parameters()
    assert sizes["attention"] == sizes["mlp"]
    assert 0.95 < sizes["all-linear"] / sizes["mlp"] < 1
