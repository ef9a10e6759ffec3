"""What a forecast knows of images: values that a program reads, and what the largest image takes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import forecasts
import pytest
import seeing
import tiny_models
import torch
from forecasts import MIB
from jobs import sampled
from messages import refusal
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import finetune
from finetune.config import Config
from finetune.data.batching import LargestBatch
from finetune.data.vision import Vision
from finetune.errors import ForecastError
from finetune.forecast import device_paths, image_memory
from finetune.forecast.fake_values import Answers, KnownValues
from finetune.forecast.job_forecast import Forecast
from finetune.forecast.trace_recorder import TraceRecorder
from finetune.resolve import planning


def read(program: Any, *inputs: torch.Tensor) -> Any:
    """What a program makes of fake tensors whose values are known."""
    known = KnownValues()
    recorder = TraceRecorder(tiny_models.cpu().operators, Answers(False, 3, known=known))
    with device_paths.like(tiny_models.cpu(), recorder) as mode:
        fakes = [mode.from_tensor(one) for one in inputs]
        for fake, value in zip(fakes, inputs, strict=True):
            known.know(fake, value)
        with mode, recorder:
            return program(*fakes)


GRID = torch.tensor([[1, 4, 6], [1, 2, 2]])


def test_sizes_follow_from_known_values() -> None:
    def program(grid: torch.Tensor) -> Any:
        patches = grid.prod(-1)
        rows = torch.arange(int(patches.sum()))
        heights = torch.repeat_interleave(grid[:, 1], patches)
        late = rows[rows > 20]
        made = torch.tensor([patches.max(), rows[3]])
        return patches.tolist(), grid.tolist(), heights.shape, late.tolist(), made.tolist()

    assert read(program, GRID) == ([24, 4], GRID.tolist(), (28,), [21, 22, 23, 24, 25, 26, 27], [24, 3])


def test_torchs_device_contexts_are_not_changed_by_a_trace() -> None:
    """With another list of functions transformers leaves the buffers of a base that is loaded later without values."""
    listed = torch.utils._device._device_constructors

    def program() -> None:
        with torch.device("meta"):
            torch.zeros(1)

    listed.cache_clear()  # as in a process that has had no device context
    try:
        read(program)
        with torch.device("meta"):
            assert torch.tensor([]).is_meta
    finally:
        listed.cache_clear()


def test_a_tensor_that_is_changed_in_place_is_known_with_its_views() -> None:
    def program(grid: torch.Tensor) -> Any:
        first = grid[0]
        grid[:, 1] += 10
        return first.tolist()

    assert read(program, GRID.clone()) == [1, 14, 6]


def test_what_unknown_numbers_are_written_to_is_not_known_any_more() -> None:
    known = KnownValues()
    with FakeTensorMode() as mode:
        known.know(grid := mode.from_tensor(GRID), GRID)
        row = grid[0]
        known.follow(torch.ops.aten.select.int, (grid, 0, 0), {}, row)
        assert known.listed(row) == [1, 4, 6]
        known.follow(torch.ops.aten.add_.Tensor, (row, torch.empty(3)), {}, row)
    assert known.of(row) is known.of(grid) is None


def test_pixels_that_are_not_known_are_not_black() -> None:
    def program(tiles: torch.Tensor) -> Any:
        values = tiles.new_empty(3, 8).bernoulli_() * 0.5
        real = (values == 0.0).sum(dim=-1) != 8
        assert isinstance(values, FakeTensor)
        return real.tolist(), values[real].shape

    assert read(program, torch.ones(1)) == ([True] * 3, (3, 8))


# -- a job -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=sampled(["qwen3_vl", "gemma3", "idefics3"], "qwen3_vl"))
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Config]:
    """A family, and a job with its base and rows with none, one and two images; one job has settings to choose."""
    folder = tmp_path_factory.mktemp(request.param)
    seeing.base(folder / "base", request.param)
    rows = []
    for number in range(6):
        names = [seeing.picture(folder, f"{number}_{at}.png", (34 + 13 * at, 20 + 19 * at)) for at in range(number % 3)]
        asked = [*({"type": "image", "path": name} for name in names), {"type": "text", "text": "What is it?"}]
        rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "a circle"}]})
    chosen = request.param == "gemma3"
    sections = {
        "model": {"name": str(folder / "base"), "vision": "frozen"},
        "data": {"train": str(seeing.rows(folder, rows)), "eval": "none", "max_length": 128},
        "training": {
            "batch_size": 6, "micro_batch": "auto" if chosen else 6, "max_steps": 2, "learning_rate": 1e-3,
            "precision": "bf16",
        },
        "memory": {"checkpointing": "auto" if chosen else "all"},
        "adapter": {"targets": ["q_proj"]},
        "output": {"dir": str(folder / "run")},
    }  # fmt: skip
    return request.param, finetune.load_config(sections)


@pytest.mark.slow
def test_a_plan_says_what_an_image_takes_and_the_largest_that_fits(job: tuple[str, Config]) -> None:
    family, config = job
    view = finetune.plan(config, "cpu")
    images = view.as_dict()["images"]
    assert view.config.training.micro_batch in (1, 2, 3, 6)
    assert (images["width"], images["height"]) in ((34, 20), (47, 39))
    assert images["tokens"] > 0
    assert images["bytes"] > 0
    fixed = family == "gemma3"
    assert images["most_pixels"] is None if fixed else images["most_pixels"] >= 64 * 64
    assert json.loads(json.dumps(view.as_dict()))["batch"]["images"]
    assert f"{images['tokens']} tokens" in str(view)


def test_the_largest_image_is_bounded_by_the_budget_and_by_the_length(job: tuple[str, Config]) -> None:
    """With a MiB for each token."""
    family, config = job
    if family != "qwen3_vl":
        pytest.skip("images of one size")
    planner = planning.planner_for(config, "cpu")
    vision = planner.data.media
    assert [vision.bounded(side * side).count(256, 256) for side in (64, 128)] == [64, 256]
    batch = max(planner.largest_batches()[0], key=lambda one: one.area)

    def most_pixels(budget: int, length: int) -> int | None:
        def forecast(one: LargestBatch, seeing: Vision, pixels: int | None) -> Forecast:
            device = dataclasses.replace(tiny_models.cpu(), budget_bytes=budget * MIB, outside_bytes=0)
            return forecasts.forecast(device=device, peak_reserved_bytes=one.tokens * MIB)

        found = image_memory.of(batch, vision, length, forecast)
        assert found.bytes == found.tokens * MIB
        return found.most_pixels

    for budget, length in ((1000, 512), (512, 1000)):
        assert 128**2 < (most_pixels(budget, length) or 0) < 256**2
    for budget, length in ((1000, 200), (200, 1000)):
        assert 64**2 < (most_pixels(budget, length) or 0) < 128**2
    assert most_pixels(10, 1000) == 0


@pytest.mark.long
def test_longer_rows_than_the_data_has_are_forecast_with_its_images(job: tuple[str, Config]) -> None:
    config = job[1].changed({"training.micro_batch": 2, "memory.checkpointing": "all", "data.max_length": 256})
    planner = planning.planner_for(config, "RTX 4090")
    longest, much_longer = (
        planner.forecast_with({"data.max_length": tokens}, evaluates=False) for tokens in (256, 512)
    )
    assert longest.batch.tokens < 256
    assert much_longer.batch.tokens == 512
    assert much_longer.batch.area == longest.batch.area > 0
    assert much_longer.peak_allocated_bytes > longest.peak_allocated_bytes


def test_rows_cut_to_a_length_shorten_the_evaluation_set_and_micro_batches_of_that_length_do_not(
    job: tuple[str, Config],
) -> None:
    rows = Path(str(job[1].data.train))
    held_out = str(shutil.copy(rows, rows.with_name("eval.jsonl")))
    config = job[1].changed({"training.micro_batch": 1, "memory.checkpointing": "all", "data.eval": held_out})
    planner = planning.planner_for(config, "RTX 4090")
    tokens = min(planner.data.train["length"])
    cut = planner.variant(config.changed({"data.max_length": tokens})).largest_batches()[1]
    whole = planner.largest_batches(tokens)[1]
    assert cut.tokens == tokens < whole.tokens


def test_a_forecast_with_images_needs_the_rows(job: tuple[str, Config]) -> None:
    missing = job[1].changed({"data.train": "hf://nobody/nothing-here"})
    with refusal(ForecastError, "needs the rows"):
        finetune.plan(missing, "cpu")
