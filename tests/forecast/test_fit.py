"""The search for the fastest setting that fits, against trying every setting, with a job whose needs are a formula."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import forecasts
import pytest
import yaml
from forecasts import GIB, MIB
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from messages import refusal

from finetune.config import Config, dump, explained
from finetune.errors import OutOfMemoryError
from finetune.forecast.job_forecast import Forecast
from finetune.forecast.plan import Fitted, Limits
from finetune.model.recompute.checkpointing import LEVELS, ladder, pattern
from finetune.resolve import fit as fitting
from finetune.resolve.fit import divisors, fit

LAYERS = 12
DIVISORS = (16, 8, 4, 2, 1)
JOB = Config().changed({"training.micro_batch": "auto", "memory.checkpointing": "auto", "training.batch_size": 16})


@functools.cache
def steps_of(*levels: str) -> list[list[str]]:
    """The levels of all layers with two of `levels`."""
    steps = {str(step): step for pair in itertools.combinations(levels, 2) for step in ladder(pair, LAYERS)}
    return [list(pattern(step, LAYERS)) for step in steps.values()]


@dataclass
class Variant:
    """The forecaster of a config, by a formula."""

    config: Config
    formula: Callable[[Config], Forecast]

    def variant(self, config: Config) -> Variant:
        return Variant(config, self.formula)

    def forecast(self) -> Forecast:
        return self.formula(self.config)

    def forecast_with(self, changes: Mapping[str, Any], *, evaluates: bool) -> Forecast:
        assert not evaluates
        return self.formula(self.config.changed(changes))


@dataclass
class Job:
    """A job of LAYERS layers: memory and time as formulas of the setting; sizes in MiB.

    Recomputing a whole layer's row costs `recompute`, moving its input to the host and back `moving`, a pass over the
    weights `reading`, whatever the micro-batch. `kept`: the shares of a layer's activations and of its recomputation
    that attention and products are.
    """

    budget: int
    type: str = "cuda"
    weights: int = 1000
    activations: int = 50
    layer_input: int = 5
    logits: int = 300
    recompute: float = 1.0
    moving: float = 10.0
    reading: float = 20.0
    kept: tuple[tuple[float, float], tuple[float, float]] = ((0.1, 0.2), (0.5, 0.7))
    asked: list[Config] = field(default_factory=list)

    def of(self, config: Config = JOB) -> Variant:
        return Variant(config, self.forecast)

    def forecast(self, config: Config) -> Forecast:
        self.asked.append(config)
        training, memory = config.training, config.memory
        needed, seconds = self.cost(training.batch_size, training.rows, memory.checkpointing, memory.offload,
                                    memory.loss_tokens)  # fmt: skip
        return forecasts.forecast(
            budget=self.budget * MIB,
            type=self.type,
            device=dataclasses.replace(forecasts.forecast(budget=self.budget * MIB, type=self.type).device,
                                       outside_bytes=0),
            peak_reserved_bytes=needed * MIB,
            seconds=seconds,
            categories={"loss": self.logits * memory.loss_tokens // 4096 * MIB},
        )  # fmt: skip

    def cost(self, batch_size: int, rows: int, checkpointing: Any, offload: str, tile: int) -> tuple[int, float]:
        """MiB and seconds of a setting."""
        return self.cost_of_layers(batch_size, rows, pattern(checkpointing, LAYERS), offload, tile)

    def cost_of_layers(
        self, batch_size: int, rows: int, levels: Sequence[str], offload: str, tile: int
    ) -> tuple[int, float]:
        checkpointed = LAYERS - levels.count("none")
        attention, products = self.kept
        both = (attention[0] + products[0], attention[1] + products[1])
        shares = {"none": (1, 1), "keep-both": both, "keep-products": products, "keep-attention": attention,
                  "all": (0, 0)}  # fmt: skip
        kept, saved = (sum(shares[level][part] for level in levels) for part in (0, 1))
        on_device = 0 if offload == "checkpoints" else self.layer_input
        needed = self.weights + self.logits * tile // 4096
        needed += round(rows * (kept * self.activations + checkpointed * on_device))
        seconds = batch_size * (4 * LAYERS + (LAYERS - saved) * self.recompute)
        seconds += batch_size // rows * (self.reading + 4096 / tile / 10)
        return needed, seconds + (batch_size * checkpointed * self.moving if offload == "checkpoints" else 0)

    def best(self, levels: Sequence[str] = LEVELS) -> float | None:
        """Seconds of the fastest setting that fits of those with two of the levels; with inputs on the host only where
        none fits without.
        """
        steps = steps_of(*levels)
        for offload in ("none", "checkpoints") if self.type == "cuda" else ("none",):
            allowed = [step for step in steps if offload == "none" or set(step) != {"none"}]
            settings = itertools.product([16], DIVISORS, allowed, [offload], (4096, 512))
            found = [
                seconds for needed, seconds in itertools.starmap(self.cost_of_layers, settings) if needed <= self.budget
            ]
            if found:
                return min(found)
        return None

    def fit(self, config: Config = JOB, **fixed: Any) -> Fitted:
        given = {"rows": divisors(config.training.batch_size), "checkpointing": None, "offloads": self.type == "cuda",
                 "spare": 0.0}  # fmt: skip
        given |= {name: [value] if name == "rows" else value for name, value in fixed.items() if value is not None}
        return fit(self.of(config), LAYERS, **given)


BUDGETS = [
    1040, 1060, 1100, 1170, 1200, 1250, 1330, 1400, 1440, 1500, 1600, 1800, 2000, 2500, 3000, 4000, 6000, 9000, 12000,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("reading", [0.5, 20.0, 500.0])
def test_the_search_finds_the_best_of_all_settings_with_few_forecasts(reading: float) -> None:
    for budget in BUDGETS:
        job = Job(budget, reading=reading)
        expected, whole_layers = job.best(), job.best(("none", "all"))
        found = job.fit()
        # Two levels that are not next to each other may come closer to the budget, by less than a layer.
        assert expected <= found.forecast.seconds <= expected + 16 * job.recompute, budget
        assert found.forecast.seconds <= whole_layers, budget
        assert found.forecast.fits, budget
        assert found.forecast == job.forecast(found.config), "the forecast is that of the config"
        assert found.tried == len({config.model_dump_json() for config in job.asked[:-1]}) == len(job.asked) - 1
        assert found.tried <= 40, "of more than a thousand settings"


def test_no_smaller_micro_batch_is_forecast_where_the_largest_recomputes_nothing() -> None:
    found = Job(12000).fit()
    assert (found.value("training.micro_batch"), found.value("memory.checkpointing")) == (16, "none")
    assert found.tried == 1


@pytest.mark.slow
@settings(max_examples=150)
@given(
    budget=st.integers(1000, 12000),
    activations=st.integers(6, 200),
    layer_input=st.integers(0, 5),
    logits=st.integers(0, 2000),
    reading=st.floats(0, 1000),
    type=st.sampled_from(["cuda", "cpu"]),
)
def test_the_search_finds_the_best_whatever_costs_most(
    budget: int, activations: int, layer_input: int, logits: int, reading: float, type: str
) -> None:
    job = Job(budget, type, activations=activations, layer_input=layer_input, logits=logits, reading=reading)
    expected = job.best()
    assume(expected is not None)
    assert expected <= job.fit().forecast.seconds <= expected + 16 * job.recompute


def test_the_global_batch_and_all_that_is_not_chosen_stay() -> None:
    config = JOB.changed({"training.batch_size": 12, "adapter.rank": 7, "data.max_length": 333})
    found = Job(1500).fit(config).config
    kept = found.changed(dict.fromkeys(("training.micro_batch", "memory.checkpointing"), "auto"))
    assert kept.changed({"memory.loss_tokens": 4096, "memory.offload": "none"}) == config
    assert 12 % found.training.rows == 0


@pytest.mark.parametrize(("rows", "checkpointing"), [(4, None), (None, "all"), (2, "every-2"), (None, 3)])
def test_what_is_fixed_is_not_chosen(rows: int | None, checkpointing: Any) -> None:
    job = Job(1900)
    found = job.fit(rows=rows, checkpointing=checkpointing).config
    assert found.training.rows == (rows or found.training.rows)
    assert found.memory.checkpointing == (checkpointing or found.memory.checkpointing)
    assert all(rows in (None, asked.training.rows) for asked in job.asked)
    assert checkpointing is None or {asked.memory.checkpointing for asked in job.asked} <= {checkpointing, "all"}


def test_a_share_of_the_budget_is_not_spent_on_speed_unless_nothing_fits_so() -> None:
    spare = Job(1600).fit(spare=0.02)
    assert spare.forecast.seconds == Job(round(1600 * 0.98)).fit().forecast.seconds > Job(1600).fit().forecast.seconds
    assert "would leave less than 2%" in spare.reasons["memory.checkpointing"]
    least = Job(1040)
    assert least.fit(spare=0.02).config == least.fit().config


def test_with_one_layer_keeping_more_it_would_not_fit() -> None:
    job = Job(4000, reading=10_000)
    found = job.fit()
    less, more = found.config.memory.checkpointing.items()
    assert less[1] + more[1] == LAYERS
    step = {less[0]: less[1] - 1, more[0]: more[1] + 1}
    assert not job.forecast(found.config.changed({"memory.checkpointing": step})).fits
    assert "one layer keeping more" in found.reasons["memory.checkpointing"]


def test_a_level_that_saves_little_for_its_bytes_is_left_out() -> None:
    for sizes, expected in (
        ([(100, 10), (60, 11), (50, 12), (20, 18), (10, 21)], [*LEVELS]),
        ([(100, 10), (60, 11), (50, 12), (20, 22), (10, 21)], ["none", "keep-both", "keep-products", "all"]),
        ([(100, 10), (90, 15), (50, 14), (20, 18), (10, 21)], ["none", "keep-products", "keep-attention", "all"]),
        ([(100, 10), (100, 10), (10, 21), (10, 21), (10, 21)], ["none", "all"]),
        ([(100, 10)] * 5, ["none", "all"]),
    ):
        made = [forecasts.forecast(peak_reserved_bytes=size * MIB, seconds=seconds) for size, seconds in sizes]
        assert fitting.worth_their_bytes(dict(zip(LEVELS, made, strict=True))) == expected


def test_inputs_go_to_the_host_only_where_nothing_else_fits() -> None:
    needed = Job(0, logits=0).forecast(JOB.changed({"training.micro_batch": 1, "memory.checkpointing": "all"}))
    just = needed.needed_bytes // MIB
    assert Job(just, logits=0).fit().config.memory.offload == "none"
    found = Job(just - 1, logits=0).fit()
    assert found.config.memory.offload == "checkpoints"
    assert "memory.offload" in found.reasons
    with pytest.raises(OutOfMemoryError):
        Job(just - 1, "cpu", logits=0).fit()


def test_inputs_stay_on_the_host_where_the_config_says_so() -> None:
    memory = Job(12000).fit(JOB.changed({"memory.offload": "checkpoints"})).config.memory
    assert memory.offload == "checkpoints"
    assert memory.checkpointing != "none"


def test_a_smaller_tile_is_taken_where_it_saves_more_than_it_costs() -> None:
    found = Job(2200, logits=600).fit(rows=1)
    assert found.config.memory.loss_tokens == 4096, "everything fits as it is"
    found = Job(2199, logits=600).fit(rows=1)
    assert found.config.memory.loss_tokens == 512
    assert "memory.loss_tokens" in found.reasons


def test_with_long_rows_only_micro_batches_that_may_fit_are_forecast() -> None:
    """The two smallest tell what each row more takes; the forecast of many long ones takes minutes."""
    job = Job(weights=100, logits=30, budget=100 + 30 + 3 * 12 * 5)  # room for the inputs of three rows
    fitted = fit(
        job.of(JOB.changed({"data.max_length": 131072})), LAYERS, offloads=False, rows=DIVISORS, checkpointing=None,
        spare=0.0,
    )  # fmt: skip
    assert fitted.value("training.micro_batch") == 2
    assert {config.training.rows for config in job.asked} == {1, 2, 4}


def test_when_nothing_fits_the_error_names_the_smallest_setting() -> None:
    least = 1000 + 300 // 8
    with refusal(OutOfMemoryError, f"{least / 1024:.2f} of 1.00 GiB") as raised:
        Job(1024).fit()
    for word in ("micro-batch 1", "checkpointing all", "offload checkpoints", "data.max_length", "adapter.rank"):
        assert word in str(raised.value)


@pytest.mark.parametrize("decides", [True, False])
def test_a_later_merge_is_proposed_where_the_merge_takes_most(decides: bool) -> None:
    def forecast(config: Config) -> Forecast:
        found = Job(1024).forecast(config)
        merge = found.peak_reserved_bytes if decides else MIB
        return dataclasses.replace(found, phases={"merge": {"allocated_bytes": merge, "reserved_bytes": merge}})

    merged = Variant(JOB.changed({"output.merge": True}), forecast)
    with pytest.raises(OutOfMemoryError) as raised:
        fit(merged, LAYERS, offloads=True, rows=DIVISORS, checkpointing=None)
    assert ("output.merge" in str(raised.value)) is decides


def test_the_speed_up_is_over_the_best_that_checkpoints_everything() -> None:
    job = Job(4000)
    found = job.fit()
    whole = [job.forecast(found.config.changed({"training.micro_batch": rows, "memory.checkpointing": "all"}))
             for rows in DIVISORS]  # fmt: skip
    assert found.everything.seconds == min(forecast.seconds for forecast in whole if forecast.fits)
    assert found.speed_up == pytest.approx(found.everything.seconds / found.forecast.seconds)
    assert found.speed_up > 1
    written = found.as_dict()
    keys = {"training.micro_batch", "memory.checkpointing", "memory.offload", "memory.loss_tokens"}
    assert set(written["chosen"]) == keys
    assert written["forecast"]["fits"] is True
    assert written["predicted_speed_up"] > 1


def test_a_comment_stands_beside_each_value_that_was_chosen_and_changes_no_value() -> None:
    found = Job(1500).fit()
    lines = list(explained(dump(found.config), found.reasons))
    assert yaml.safe_load("\n".join(lines)) == yaml.safe_load(dump(found.config))
    commented = {line.split(":")[0].strip(): line.split("# ", 1)[1] for line in lines if "#" in line}
    assert commented == {key.split(".")[1]: reason for key, reason in found.reasons.items()}
    assert {"micro_batch", "checkpointing"} <= set(commented)


# -- limits ------------------------------------------------------------------------------------------------------------


def needing(needed: Callable[[int], float], budget: int) -> Callable[[int], Forecast]:
    base = forecasts.forecast(budget=budget)
    device = dataclasses.replace(base.device, outside_bytes=0)
    return lambda value: dataclasses.replace(base, device=device, peak_reserved_bytes=int(needed(value)))


@settings(max_examples=300)
@given(
    bound=st.integers(0, 100_000),
    start=st.integers(1, 5000),
    fixed=st.integers(0, 10**9),
    each=st.integers(1, 10**7),
    grain=st.sampled_from([1, 64]),
)
def test_the_largest_value_that_fits_is_found_exactly(
    bound: int, start: int, fixed: int, each: int, grain: int
) -> None:
    forecast = needing(lambda value: fixed + each * value, budget=fixed + each * bound)
    assert fitting.largest(forecast, start, grain, 10**9) == bound // grain * grain
    for most in (1, 100, 5000):
        assert fitting.largest(forecast, start, grain, most) == min(bound // grain, max(1, most // grain)) * grain


@pytest.mark.parametrize("bound", [0, 1, 63, 64, 65, 1000, 4096, 20_000])
def test_the_largest_value_is_found_where_memory_grows_quadratically(bound: int) -> None:
    def needed(length: int) -> int:
        return 10**9 + 10**5 * length + 100 * length**2

    for start in (64, 1024, 8192):
        assert fitting.largest(needing(needed, budget=needed(bound)), start, 64, 10**9) == bound // 64 * 64


def test_each_limit_is_found_with_the_other_values_unchanged() -> None:
    asked: list[Config] = []

    def forecast(config: Config) -> Forecast:
        asked.append(config)
        needed = GIB + MIB * (config.training.rows * config.data.max_length + config.adapter.rank)
        return needing(lambda _: needed, budget=5 * GIB)(0)

    def limits(changes: Mapping[str, Any], **most: int) -> Limits:
        return fitting.limits(Variant(JOB.changed({"training.micro_batch": 2, **changes}), forecast), **most)

    most = {"length": 10**6, "rows": 10**6, "rank": 10**6}
    found = limits({"memory.checkpointing": 3}, **most)
    assert found.length == (4096 - 16) // 64 * 64
    assert found.micro_batch == (4096 - 16) // 1024
    assert found.rank == 4096 - 2 * 1024
    assert found.smallest_card is not None
    assert all(config.memory.checkpointing == "all" for config in asked)
    assert len(asked) < 30
    assert limits({"adapter.kind": "none"}, **most).rank == 0
    least = limits({}, length=640, rows=1, rank=16)
    assert (least.length, least.micro_batch, least.rank) == (640, 1, 16)
