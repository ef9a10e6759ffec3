"""Plan, fit and the check before training: what a job will take is known before it is spent."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import forecasts
import pytest
import tiny_models
import yaml
from forecasts import GIB, MIB
from jobs import TINY, metric, write_rows
from messages import refusal

import finetune
from finetune.choices import load_config
from finetune.config import Config
from finetune.config.field_types import LEVELS
from finetune.errors import ConfigError, ForecastError, OutOfMemoryError
from finetune.extras.python_docs import rows as python_docs
from finetune.forecast import traced_step
from finetune.forecast.job_forecast import Forecast
from finetune.forecast.plan import Plan
from finetune.resolve import planning
from finetune.resolve.planner import Planner
from finetune.resolve.steps import does_not_fit
from finetune.storage.rundir import RunDirectory

Quick = Callable[..., Config]
# What makes forecasts short.
SMALL = ("adapter.targets=[q_proj]", "quantization.kind=none")


# -- plan --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_routing_changes_is_planned_as_a_range(tmp_path: Path) -> None:
    """For DBRX, which loops over experts; the products of others are grouped, in one kernel on a GPU."""
    fields: dict[str, dict[str, Any]] = {
        "dbrx": {
            "d_model": 256, "n_heads": 4, "n_layers": 1, "max_seq_len": 4096, "vocab_size": 512,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
            "ffn_config": {
                "hidden_size": 256, "ffn_hidden_size": 512, "moe_num_experts": 8, "moe_top_k": 2,
                "ffn_act_fn": {"name": "silu"},
            },
        },
        "mixtral": {
            "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 512,
        },
    }  # fmt: skip
    found = {}
    for name, values in fields.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name, **values}))
        overrides = [
            f"model.name={tmp_path / name}", "data.max_length=4096", "data.train=rows.jsonl", "data.eval=none",
            "training.micro_batch=1", "training.precision=bf16", "memory.checkpointing=all",
        ]  # fmt: skip
        found[name] = planning.plan(load_config(TINY, overrides), "RTX 4090").forecast
    evenly = found["dbrx"].experts.evenly_routed_bytes
    assert 2 * MIB <= found["dbrx"].needed_bytes - evenly <= 32 * MIB
    assert not found["mixtral"].experts.routed
    assert "evenly_routed_bytes" not in found["mixtral"].as_dict()


def test_the_batch_is_the_worst_that_the_data_can_give(quick: Quick) -> None:
    config = quick("training.batch_size=4", "training.micro_batch=4")
    planner = planning.planner_for(config, "cpu")
    lengths, trained = planner.data.train["length"], planner.data.train["trained"]
    [train], held_out = planner.largest_batches()
    assert (train.rows, train.tokens, train.padded) == (4, max(lengths), True)
    assert train.trained_tokens == sum(sorted(trained)[-4:])
    assert train.source == "the data's rows"
    assert held_out is not None
    [shorter], _ = planner.variant(config.changed({"data.max_length": 32})).largest_batches()
    assert (shorter.tokens, shorter.source) == (32, "data.max_length")


@pytest.mark.parametrize(
    "away", ["data.train=someone/rows", "data.train=[builtin:python_docs, someone/rows]", "data.eval=someone/rows"]
)
def test_without_the_data_at_hand_every_row_is_as_long_as_rows_may_be(away: str, quick: Quick) -> None:
    planner = planning.planner_for(quick(away, "data.max_length=96"), "cpu")
    assert planner.data is None
    [train], held_out = planner.largest_batches()
    assert train == held_out
    assert (train.rows, train.tokens, train.trained_tokens, train.padded) == (2, 96, 2 * 95, True)


@pytest.mark.slow
def test_micro_batches_by_tokens_are_forecast_at_the_larger_of_the_two_that_can_be_worst(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Forecast] = []

    def forecast(*arguments: Any) -> Forecast:
        made.append(plain(*arguments))
        return made[-1]

    plain = Planner._traced
    monkeypatch.setattr(Planner, "_traced", forecast)
    config = quick("training.micro_batch_tokens=70", "training.batch_size=8", "data.eval=none", *SMALL)
    planner = planning.planner_for(config, "cpu")
    batches, _ = planner.largest_batches()
    assert max(batch.tokens for batch in batches) == max(planner.data.train["length"])
    found = planner.forecast()
    assert [each.batch for each in made] == batches
    assert len({each.needed_bytes for each in made}) == 2
    assert found.needed_bytes == max(each.needed_bytes for each in made)
    monkeypatch.setattr(Planner, "_traced", lambda *arguments: found)
    fitted = planning.fit(config, "cpu").config
    assert fitted.training.micro_batch_tokens == 70, "what the user wrote stays"


@pytest.mark.slow
def test_a_plan_says_which_rate_auto_is_and_what_speaks_against_the_job(quick: Quick) -> None:
    auto = [
        "training.learning_rate=auto",
        "training.batch_size=64",
        "adapter.targets=[q_proj, v_proj]",
        "memory.checkpointing=all",
    ]
    plan = finetune.plan(quick(*auto), "24GiB")
    found = plan.as_dict()
    assert found["learning_rate"] == 5.9e-3
    assert "2 for a batch of 64, 15 for a width of 192" in found["evidence"]
    assert "attention alone" in found["evidence"]
    assert "0.0059, 0.0002 times 2 for a batch of 64" in str(plan)
    assert finetune.plan(quick("memory.checkpointing=all"), "24GiB").as_dict()["evidence"] is None


@pytest.fixture(scope="module")
def too_small(rows_file: Path, shallow_base: Path) -> Plan:
    overrides = [
        f"model.name={shallow_base}", f"data.train={rows_file}", "data.eval=none", "data.max_length=64",
        "adapter.rank=8", "training.micro_batch=4", "memory.budget=1MiB", "memory.checkpointing=none",
        "memory.loss_tokens=512", "output.dir=unused", SMALL[0],
    ]  # fmt: skip
    return planning.plan(load_config(TINY, overrides), "RTX 4090")


@pytest.mark.slow
def test_a_budget_smaller_than_the_weights_does_not_fit_and_every_lever_that_helps_is_forecast(too_small: Plan) -> None:
    found = json.loads(json.dumps(too_small.as_dict()))
    assert (found["budget_bytes"], found["fits"], too_small.forecast.fits) == (MIB, False, False)
    assert [lever["changes"] for lever in found["levers"]] == [
        {"training.micro_batch": 2},
        {"memory.checkpointing": "all"},
        {"memory.checkpointing": "all", "memory.offload": "checkpoints"},
    ]
    for lever in found["levers"]:
        assert lever["saved_bytes"] == found["needed_bytes"] - lever["needed_bytes"]
        assert lever["fits"] is False
        assert lever["cost"]


@pytest.mark.slow
def test_what_is_said_of_a_job_that_does_not_fit_names_the_batch_and_the_levers(too_small: Plan) -> None:
    text = does_not_fit(too_small.forecast, list(too_small.levers))
    for said in ("does not fit RTX 4090", "from the data's rows", "memory.checkpointing=all", "does not fit yet"):
        assert said in text


# -- fit ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_fitted_config_has_reasons_is_read_and_planned_and_fits(quick: Quick, tmp_path: Path) -> None:
    fitted = planning.fit(quick("data.max_length=64", SMALL[0], "quantization.kind=auto"), "RTX 4090")
    file = tmp_path / "fitted.yaml"
    planning.write(fitted, file)
    assert "kind: none  # the smallest step takes" in file.read_text()
    assert yaml.safe_load(file.read_text())["training"]["batch_size"] == 4
    read = load_config(file)
    assert read == fitted.config
    assert read.fitted
    assert planning.plan(read, "RTX 4090").forecast.fits


def test_only_auto_settings_are_chosen(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fit(planner: Planner, layers: int, **given: Any) -> None:
        asked.update(given, layers=layers)

    monkeypatch.setattr("finetune.resolve.planner.fitting.fit", fit)
    for overrides, rows, checkpointing in (
        (["training.micro_batch=auto", "memory.checkpointing=all"], [4, 2, 1], "all"),
        (["memory.checkpointing=auto", "training.micro_batch=2"], [2], None),
    ):
        planning.planner_for(quick(*overrides), "cpu").fit()
        assert asked == {"rows": rows, "checkpointing": checkpointing, "offloads": False, "layers": 2, "levels": LEVELS}
        asked.clear()


# -- quantization ------------------------------------------------------------------------------------------------------


def test_auto_is_the_least_quantization_that_fits(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    """With forecasts by hand, of the smallest step."""
    needed = {"none": 9, "int8": 7, "fp8": 6, "nf4": 4}

    def forecast(self: Planner, **_: object) -> Forecast:
        config = self.config
        assert (config.training.micro_batch, config.memory.checkpointing) == (1, "all")
        peak = (needed[config.quantization.kind] - 1) * GIB
        return forecasts.forecast(budget=self.device.budget_bytes, peak_reserved_bytes=peak)

    monkeypatch.setattr(Planner, "forecast", forecast)
    auto = ["quantization.kind=auto", "training.micro_batch=auto", "memory.checkpointing=auto"]
    for gib, kind, overrides in (
        (10, "none", []), (8, "int8", []), (6, "fp8", []), (5, "nf4", []), (3, "nf4", []),
        (6, "nf4", ["adapter.dora=true"]),
    ):  # fmt: skip
        job = planning.job_on(quick(*auto, "quantization.double=false", *overrides), f"{gib}GiB")
        assert job.config.quantization.kind == kind, gib
        assert job.config.quantization.double == (kind != "nf4"), "the default, where it is ignored"
        assert "9.00 unquantized" in job.why["quantization.kind"]
    assert "fp8" not in job.why["quantization.kind"], "which DoRA excludes"


@pytest.mark.slow
def test_a_run_keeps_what_auto_decided(quick: Quick, capsys: pytest.CaptureFixture[str]) -> None:
    auto = ("quantization.kind=auto", "data.eval=none", "output.save_every=1", SMALL[0])
    sizes = ("training.micro_batch=auto", "memory.checkpointing=auto")
    saved = finetune.train(quick(*auto, *sizes, "training.max_steps=1")).run.config()
    assert saved.fitted
    assert (saved.quantization.kind, saved.training.batch_size) == ("none", 4)
    assert saved.training.rows in (1, 2, 4)
    assert saved.memory.checkpointing == "none", "there is room"
    assert "quantization.kind: none (the smallest step takes" in " ".join(capsys.readouterr().out.split())
    finetune.train(quick("quantization.kind=nf4", *auto[1:], "training.max_steps=1", run="less"))
    run = finetune.train(quick(*auto, "training.max_steps=2", run="less")).run
    assert run.config().quantization.kind == "nf4"
    assert [line["step"] for line in run.metrics() if "loss" in line] == [1, 2]


# -- before and after training -----------------------------------------------------------------------------------------


def test_a_job_that_does_not_fit_is_refused_before_any_weights_are_loaded(
    quick: Quick, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*arguments: object, **named: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("finetune.model.build.load_base", load)
    monkeypatch.setattr(Planner, "forecast", lambda *_, **named: forecasts.forecast(budget=MIB))
    with refusal(OutOfMemoryError, "memory.check") as raised:
        finetune.train(quick("memory.check=refuse"))
    assert raised.value.exit_code == 6
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_without_a_forecast_warn_says_so_and_trains(
    quick: Quick, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def untraceable(*arguments: object, **named: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(traced_step, "_trace_step", untraceable)
    common = ("training.max_steps=1", "data.eval=none")
    with refusal(ForecastError, "no such kernel"):
        finetune.train(quick(*common, "memory.check=refuse", run="refused"))
    run = finetune.train(quick(*common, "memory.check=warn", run="warned")).run
    assert run.finished
    assert not run.forecast_file.exists()
    assert "training continues without a forecast" in capsys.readouterr().out


@pytest.mark.slow
def test_off_makes_no_forecast_and_warn_says_it_and_trains_the_same(
    quick: Quick, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (
        "adapter.dropout=0.2", "training.max_steps=1", "memory.budget=1MiB", "data.eval=none", *SMALL,
        "training.micro_batch=1", "memory.checkpointing=all", "memory.loss_tokens=512", "adapter.rank=8",
    )  # fmt: skip

    def forecast(*arguments: object, **named: object) -> Forecast:
        raise AssertionError("a forecast was made")

    with monkeypatch.context() as patched:
        patched.setattr(Planner, "forecast", forecast)
        off = finetune.train(quick(*common, "memory.check=off", run="off")).run
    assert off.finished
    assert not off.forecast_file.exists()
    warned = finetune.train(quick(*common, "memory.check=warn", run="warn")).run
    assert "does not fit CPU" in capsys.readouterr().out
    assert warned.finished
    assert json.loads(warned.forecast_file.read_text())["fits"] is False
    assert metric(off, "loss") == metric(warned, "loss"), "a forecast changes nothing of the training"


def test_a_finished_run_has_the_forecast_and_what_was_measured(trained: RunDirectory) -> None:
    found = json.loads(trained.forecast_file.read_text())
    assert found["fits"] is True
    assert found["device"] == "CPU"
    assert set(found["measured"]) >= {"load", "forward", "backward", "optimizer", "evaluation", "save"}
    compared = {difference["phase"]: difference for difference in found["differences"]}
    assert set(compared) == {"forward", "backward", "optimizer", "evaluation", "save"}
    for phase, difference in compared.items():
        assert difference["measured_bytes"] == found["measured"][phase]["allocated_bytes"]
        assert difference["relative"] == pytest.approx(
            difference["forecast_bytes"] / difference["measured_bytes"] - 1, abs=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [[], pytest.param(["adapter.dropout=0.1", "memory.checkpointing=all"], marks=pytest.mark.long)], ids=str
)
def test_the_table_of_the_job_that_a_new_user_tries_is_right_within_two_percent(
    changes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its longest rows, which decide."""
    for split in ("train", "eval"):
        rows = sorted(python_docs.conversations(split), key=lambda row: -len(str(row)))
        write_rows(tmp_path / f"{split}.jsonl", rows[:32])
    short = [
        f"data.train={tmp_path}/train.jsonl", f"data.eval={tmp_path}/eval.jsonl", "training.max_steps=1",
        "training.eval_every=null", "output.merge=false", f"output.dir={tmp_path}/run",
    ]  # fmt: skip
    run = finetune.train(load_config(TINY, [*short, *changes])).run
    found = {each["phase"]: each["relative"] for each in json.loads(run.forecast_file.read_text())["differences"]}
    assert set(found) == {"forward", "backward", "optimizer", "evaluation", "save"}
    assert max(map(abs, found.values())) < 0.02, found
    shown = capsys.readouterr().out
    assert "more than 3% from what was measured" not in shown
    assert "tensors, in a step on the largest batch; with libraries the process was to take " in shown


def test_checkpoints_take_the_disk_that_was_forecast(trained: RunDirectory) -> None:
    """The rest, files of some KiB each, weighs no more than this in the smallest job there is."""
    checkpoint = sum(file.stat().st_size for file in trained.complete_checkpoints()[0].iterdir())
    adapter = (trained.adapter / "adapter_model.safetensors").stat().st_size
    found = json.loads(trained.forecast_file.read_text())["disk_bytes"]
    assert found == pytest.approx((trained.config().output.keep + 1) * checkpoint + adapter, rel=0.05)


def test_targets_that_the_model_lacks_are_reported_before_the_data_is_read(quick: Quick, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("no row\n")
    for start in (finetune.plan, finetune.train):
        for wrong in (
            "adapter.targets=[q_prj]",
            "adapter.extra_modules=[nrm]",
            "adapter.ranks={q_prj: 4}",
            "adapter.rank=1000",
        ):
            with refusal(ConfigError, wrong.partition("=")[0]):
                start(quick(wrong, f"data.train={tmp_path / 'rows.jsonl'}"))


def test_a_process_is_measured_again_once_its_rows_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[None] = []
    found = tiny_models.cpu()
    monkeypatch.setattr("finetune.resolve.steps._at_hand", lambda *_: prepared.append(None))
    monkeypatch.setattr(planning.devices, "find", lambda *_: replace(found, outside_bytes=len(prepared)))
    assert planning.planner_for(load_config(TINY), "cpu").device.outside_bytes == 1
