"""A forecast is kept in the user's cache, and made again where anything that it follows from is another."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forecasts
import pytest
import tiny_models
from jobs import TINY

import finetune
from finetune.choices import load_config
from finetune.config import Config
from finetune.data.batching import LargestBatch
from finetune.forecast import cache as kept
from finetune.forecast import devices, forecaster, job_forecast
from finetune.forecast.cache import Kept
from finetune.forecast.job_forecast import Forecast
from finetune.forecast.trace import Trace
from finetune.resolve import planning
from finetune.resolve.planner import Planner
from finetune.storage import private


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; returns the folder of its forecasts."""
    monkeypatch.setattr(private, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "forecasts"


@functools.cache
def trace() -> Trace:
    """The trace that every setting is given."""
    model = tiny_models.architecture(layers=1)
    return tiny_models.trace(tiny_models.config(), model, where=tiny_models.card(), evaluation=tiny_models.BATCH)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings that were traced."""
    settings: list[Any] = []
    monkeypatch.setattr(forecaster, "trace_step", lambda setting, *models: settings.append(setting) or trace())
    return settings


def config(*overrides: str) -> Config:
    return load_config(TINY, ["data.train=builtin:short-answers", "data.eval=none", "training.micro_batch=2",
                              "memory.checkpointing=none", *overrides])  # fmt: skip


def planner(job: Config, **changes: Any) -> Planner:
    made = planning.planner_for(job, "RTX 3090")
    return Planner(job, made.architecture, dataclasses.replace(made.device, **changes), None)


def test_a_second_process_traces_nothing_and_has_the_same_forecast(traced: list[Any]) -> None:
    first, second = (planner(config()).forecast() for _ in range(2))
    assert len(traced) == 1
    assert first == second
    one = planner(config("distributed.kind=ddp", "training.batch_size=4"))
    first, second = (Planner(one.config, one.architecture, one.device, None, 2).forecast() for _ in range(2))
    assert len(traced) == 2
    assert first == second
    assert second.categories["communicators"] > 0


def test_another_job_is_traced(traced: list[Any]) -> None:
    planner(config()).forecast()
    changes = [{"training.micro_batch": 4}, {"adapter.rank": 4}, {"optimizer.kind": "sgd"}]
    for number, change in enumerate(changes):
        planner(config().changed(change)).forecast()
        assert len(traced) == number + 2, change


def test_another_folder_tracker_or_course_is_the_same_job(traced: list[Any], tmp_path: Path) -> None:
    first = planner(config()).forecast()
    for others in (
        [f"output.dir={tmp_path}/other", "tracking.project=other"],
        ["training.learning_rate=1e-5", "training.schedule=constant", "training.warmup=9"],
        ["training.max_steps=9000", "training.seed=7"],
    ):
        assert planner(config(*others)).forecast() == first
    assert len(traced) == 1


def test_whether_training_goes_on_after_a_save_makes_another_job(traced: list[Any]) -> None:
    for steps in (9, 10, 11, 12):
        planner(config("output.save_every=10", f"training.max_steps={steps}")).forecast()
    assert len(traced) == 2


@pytest.mark.slow
def test_a_resume_with_more_steps_traces_nothing(traced: list[Any], quick: Callable[..., Config]) -> None:
    job = ["memory.check=refuse", "memory.checkpointing=auto"]
    finetune.train(quick("training.max_steps=2", *job))
    before = len(traced)
    run = finetune.train(quick("training.max_steps=4", *job)).run
    assert run.steps_done == 4
    assert len(traced) == before > 0


def test_another_version_of_a_library_or_of_the_code_is_traced_again(
    traced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner(config()).forecast()
    for name, value in (("packages", {"torch": "99"}), ("code_hash", "another")):
        kept._software.cache_clear()
        with monkeypatch.context() as patched:
            patched.setattr(kept.environment, name, lambda value=value: value)
            planner(config()).forecast()
    kept._software.cache_clear()
    assert len(traced) == 3


def test_a_file_that_is_damaged_or_that_others_could_have_written_is_made_again(traced: list[Any], cache: Path) -> None:
    expected = planner(config()).forecast()
    (file,) = cache.iterdir()
    for damage in (b"", b"{", b"{}", b"[]", b'{"memory": {}}', b'{"memory": {"budget_bytes": 1}, "flops": 2}'):
        traced.clear()
        file.write_bytes(damage)
        for _ in range(2):
            assert planner(config()).forecast() == expected
            assert len(traced) == 1, damage
    file.chmod(0o666)
    planner(config()).forecast()
    assert len(traced) == 2


def test_a_full_disk_costs_only_time(traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private, "write", full)
    assert planner(config()).forecast() == planner(config()).forecast()
    assert len(traced) == 2


def test_the_oldest_files_make_room(traced: list[Any], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST_FILES", 2)
    for rank in (4, 8, 16):
        planner(config(f"adapter.rank={rank}")).forecast()
        for file in cache.iterdir():
            os.utime(file, (file.stat().st_mtime - 60,) * 2)
    assert len(list(cache.iterdir())) == 2


# -- the memory that is free -------------------------------------------------------------------------------------------


def forecast_of(device: devices.Device, *, peak: int, returns_segments: bool = False) -> Forecast:
    return dataclasses.replace(
        forecasts.forecast(), device=device, peak_reserved_bytes=peak, returns_segments=returns_segments
    )


@pytest.mark.parametrize(
    ("peak", "returns_segments", "room_now", "is_traced"),
    [
        (70, False, 100, False),
        (70, False, 71, False),
        (70, False, 69, True),  # idle segments must be given back now
        (99, True, 100, False),
        (99, True, 101, True),
        (99, True, 99, True),
        (120, False, 90, False),  # did not fit with more
        (120, False, 110, True),
    ],
)
def test_with_other_memory_free_a_forecast_holds_unless_the_allocator_would_act_otherwise(
    peak: int, returns_segments: bool, room_now: int, is_traced: bool
) -> None:
    job = planner(config())
    then = dataclasses.replace(job.device, budget_bytes=100, outside_bytes=0)
    now = dataclasses.replace(then, budget_bytes=room_now)
    batch, made = LargestBatch(1, 8, padded=False, trained_tokens=8), []

    def trace_on(device: devices.Device) -> Forecast:
        made.append(device)
        return forecast_of(device, peak=peak, returns_segments=returns_segments)

    kept = Kept(job.config, job.architecture, then, 1)
    kept.get([batch], lambda: trace_on(then))
    assert dataclasses.replace(kept, device=now).get([batch], lambda: trace_on(now)).device == now
    assert (len(made) == 2) == is_traced


def test_on_a_cpu_the_kept_forecast_takes_the_rates_and_the_memory_of_now(traced: list[Any]) -> None:
    job = config()
    then = planning.planner_for(job, "cpu").device
    half = {name: getattr(then.rates, name) / 2 for name in ("flops", "fp32_flops", "bandwidth_bytes")}
    rates = dataclasses.replace(then.rates, **half)
    now = dataclasses.replace(then, rates=rates, outside_bytes=then.outside_bytes + 2**20, budget_bytes=2**40)
    architecture = planner(job).architecture
    first = Planner(job, architecture, then, None).forecast()
    second = Planner(job, architecture, now, None).forecast()
    assert len(traced) == 1
    planner_of_now = Planner(job, architecture, now, None)
    batch = planner_of_now.largest_batches()[0][0]
    assert second == planner_of_now._traced(batch, None), "as if traced"
    assert second.seconds > first.seconds
    assert job_forecast.on(second, first.device) == first
