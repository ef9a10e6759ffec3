"""Up to which length micro-batches recompute less than the longest: by formulas, and by forecasts of a small model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import forecasts
import pytest
from forecasts import MIB
from jobs import write_rows

from finetune import resolve
from finetune.config import Config
from finetune.data.batching import LargestBatch
from finetune.forecast.job_forecast import Forecast, with_shorter
from finetune.resolve import by_length, planning
from finetune.resolve.fit import SPARE
from finetune.resolve.planner import Planner
from finetune.storage.records import UpTo

LONGEST, GRAIN, FIXED = 2048, 64, 4000
# Of each level: MiB for the longest micro-batch, and its seconds.
LEVELS = {"none": (8000, 10.0), "keep-both": (5000, 11.0), "keep-attention": (2000, 14.0), "all": (1000, 15.0)}
SHORT = [100] * 60 + [900] * 30 + [LONGEST] * 10


class Job:
    """A job of LONGEST tokens at most, whose memory is FIXED and a level's part in proportion to the length, in MiB."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.asked: set[tuple[str, int]] = set()

    def at(self, level: str, tokens: int) -> Forecast:
        self.asked.add((level, tokens))
        found = forecasts.forecast(budget=self.budget * MIB)
        growing = LEVELS[level][0] * min(tokens, LONGEST) * MIB // LONGEST
        return dataclasses.replace(
            found,
            device=dataclasses.replace(found.device, outside_bytes=0),
            batch=LargestBatch(4, min(tokens, LONGEST), True, 1),
            peak_reserved_bytes=FIXED * MIB + growing,
            categories={"base_weights": FIXED * MIB, "activations": growing},
            seconds=LEVELS[level][1],
        )

    def find(self, *levels: str, of: str = "all", lengths: Sequence[int] = SHORT) -> dict[UpTo, Forecast]:
        found = {level: self.at(level, LONGEST) for level in levels}
        self.asked.clear()
        return by_length.find(self.at(of, LONGEST), found, lengths, self.at)


def exact(budget: int, level: str) -> int:
    """The longest multiple of GRAIN that fits at a level."""
    return int(((1 - SPARE) * budget - FIXED) / LEVELS[level][0] * LONGEST) // GRAIN * GRAIN


@pytest.mark.parametrize("budget", [5200, 5700, 6100])
def test_a_level_reaches_as_far_as_it_fits_and_takes_few_forecasts(budget: int) -> None:
    job = Job(budget)
    found = job.find("none", "keep-both", "keep-attention")
    assert found
    assert [each.tokens for each in found] == sorted(each.tokens for each in found)
    for each, forecast in found.items():
        assert each.tokens == exact(budget, each.level)
        assert forecast == job.at(each.level, each.tokens)
    assert len(job.asked) <= 4 * len(found)


def test_a_level_that_saves_little_is_left_out() -> None:
    """It is one that few micro-batches are short enough for, or none that another is not."""
    budget, long = math.ceil((FIXED + 1000) / (1 - SPARE)), [900] * 90 + [LONGEST] * 10
    for levels, lengths, expected in (
        (["none", "keep-both", "keep-attention"], SHORT, ["none", "keep-attention"]),
        (["none"], [LONGEST], []),
        (["none"], [10] + [LONGEST] * 100, []),
        (["none", "keep-attention"], long, ["keep-attention"]),
    ):
        assert [each.level for each in Job(budget).find(*levels, lengths=lengths)] == expected


def test_the_forecast_memory_is_the_maximum_over_lengths() -> None:
    base = Job(9000).at("all", LONGEST)
    phases = {
        "forward": {"allocated_bytes": 5, "reserved_bytes": 7},
        "save": {"allocated_bytes": 1, "reserved_bytes": 1},
    }
    base = dataclasses.replace(base, phases=phases)
    more = {"forward": {"allocated_bytes": 6, "reserved_bytes": 6}}
    less, up_to = dataclasses.replace(base, peak_reserved_bytes=1, phases=more), UpTo(512, "none")
    found = with_shorter(base, {up_to: less})
    assert (found.needed_bytes, found.categories, found.by_length) == (base.needed_bytes, base.categories, (up_to,))
    assert found.phases == {**phases, "forward": {"allocated_bytes": 6, "reserved_bytes": 7}}
    larger = dataclasses.replace(less, peak_reserved_bytes=2 * base.needed_bytes, categories={"loss": 1}, seconds=1.0)
    found = with_shorter(base, {up_to: larger})
    assert (found.needed_bytes, found.categories) == (larger.needed_bytes, {"loss": 1})
    assert (found.seconds, found.batch) == (base.seconds, base.batch), "time and batch are of the longest"
    assert found.as_dict()["by_length"] == [{"tokens": 512, "level": "none"}]
    assert with_shorter(base, {}) == base


# -- a small model -----------------------------------------------------------------------------------------------------


@pytest.fixture
def uneven(quick: Callable[..., Config], tmp_path: Path) -> Callable[..., Planner]:
    """A planner for rows of 16 to 256 words, with a budget between what the longest need at two levels."""
    rows = write_rows(tmp_path / "uneven.jsonl", [{"text": "word " * (16 + 5 * number)} for number in range(48)])

    def make(*overrides: str, share: float = 0.5) -> Planner:
        job = quick(
            f"data.train={rows}", "data.eval=none", "data.max_length=256", "memory.loss_tokens=64",
            "memory.checkpointing=auto", "adapter.targets=[q_proj]", "quantization.kind=none", *overrides,
        )  # fmt: skip
        planner = planning.planner_for(job, "cpu")
        # What this machine is measured at, and holds, would move the choice.
        rates = dataclasses.replace(planner.device.rates, fp32_flops=1e11, bandwidth_bytes=2e10, call_seconds=1e-5)
        fixed = dataclasses.replace(planner.device, rates=rates, outside_bytes=100 * MIB)
        planner = dataclasses.replace(planner, device=fixed)
        least, most = (
            planner.forecast_with({"memory.checkpointing": level, "training.micro_batch": 2}).needed_bytes
            for level in ("all", "none")
        )
        budget = math.ceil((least + share * (most - least)) / (1 - SPARE))
        device = dataclasses.replace(planner.device, budget_bytes=budget)
        return dataclasses.replace(planner, device=device, _known={}, _largest={})

    return make


@pytest.mark.slow
def test_each_reach_of_a_small_model_fits_and_the_next_length_does_not(
    uneven: Callable[..., Planner], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = uneven()
    fitted = planner.fit()
    config = fitted.config
    assert config.memory.checkpointing != "none"
    found = planner.by_length(fitted).forecast
    assert found.by_length
    assert found.fits
    assert found.batch == fitted.forecast.batch
    for each in found.by_length:
        same = config.changed({"memory.checkpointing": each.level})
        fits = [
            planner.variant(same).forecast(most_tokens=tokens).needed_bytes <= (1 - SPARE) * planner.device.budget_bytes
            for tokens in (each.tokens, each.tokens + 8)  # to 1/32 of the longest
        ]
        assert fits == [True, False], each
    settled, chosen = planner.resolve()
    assert (settled, chosen.forecast) == (config, found)
    monkeypatch.setattr(planning, "_free", lambda *given: resolve.Job(planner.config, planner.config, planner=planner))
    written = planning.fit(planner.config)
    assert (written.config, written.forecast) == (config, fitted.forecast), "its config says it for all lengths"

    def is_alone(of: Planner, **changes: object) -> bool:
        """Whether the longest decides for all."""
        changed = config.changed({key.replace("__", "."): value for key, value in changes.items()})
        other = dataclasses.replace(fitted, config=changed)
        return of.by_length(other) is other

    for changes in (
        {"data__packing": True}, {"training__micro_batch_tokens": 300}, {"memory__offload": "checkpoints"},
        {"kernels__compile": "layers"}, {"distributed__kind": "deepspeed"}, {"distributed__context": 2},
    ):  # fmt: skip
        assert is_alone(planner, **changes), changes
    assert is_alone(dataclasses.replace(planner, gpus=2), distributed__kind="fsdp")
    assert is_alone(dataclasses.replace(planner, data=None)), "every row counts as the longest"


@pytest.mark.slow
def test_where_nothing_is_recomputed_no_forecast_is_added(uneven: Callable[..., Planner]) -> None:
    planner = uneven(share=1.1)
    fitted = planner.fit()
    made = len(planner._known)
    assert planner.by_length(fitted).forecast.by_length == ()
    assert len(planner._known) == made == 1
