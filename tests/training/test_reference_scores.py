"""The reference of a preference objective: what the starting model says of each answer, scored once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import in_fp32, metric, same_adapter, sampled, write_rows
from steps import out_of_memory, ready

import finetune
from finetune.config import Config
from finetune.data.prepare import prepare
from finetune.model.source.tokenizer import load_tokenizer
from finetune.resolve.job import Job
from finetune.resolve.steps import reference
from finetune.storage import private
from finetune.storage.rundir import RunDirectory
from finetune.training import reference_scores

SEGMENTS = ("chosen", "rejected")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(private, "cache_folder", lambda: tmp_path / "cache")


@pytest.fixture
def job(tmp_path: Path, quick):
    """A function from overrides to a job on pairs of different lengths."""
    pairs = [
        {"prompt": f"To {n}. ", "chosen": "yes " * (1 + n % 5), "rejected": "no " * (2 + n % 3)} for n in range(24)
    ]
    return in_fp32(quick, write_rows(tmp_path / "pairs.jsonl", pairs), "training.objective=dpo")


CACHED = "preference.reference=cached"
STARTS = {
    "default": [CACHED],
    "dora": [CACHED, "adapter.dora=true"],
    "modules trained in full": [CACHED, "adapter.extra_modules=[lm_head, norm]"],
    "new tokens": ["data.new_tokens=[yes]"],
    "pissa": ["adapter.init=pissa"],
    "loftq": ["adapter.init=loftq", "quantization.kind=nf4"],
    "trained": ["adapter.start_from={earlier}/adapter"],
    "full": ["adapter.kind=none", "training.learning_rate=1e-4"],
}


def passes(run: RunDirectory) -> int:
    """Rows that the starts of a run have scored."""
    return sum(event["rows"] for event in run.events() if event["event"] == "reference_scored")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("start", sampled(STARTS, "trained", "pissa", "full"))
def test_the_first_loss_is_that_of_the_model_beside_itself_whatever_it_starts_from(job, tmp_path: Path, start) -> None:
    if start == "trained":
        finetune.train(job("training.max_steps=2", run="earlier"))
    overrides = [each.format(earlier=tmp_path / "earlier") for each in STARTS[start]]
    finetune.train(job("training.max_steps=1", *overrides))
    run = RunDirectory(tmp_path / "run")
    assert passes(run) == 24
    assert metric(run, "loss", "eval_loss")[:2] == pytest.approx([math.log(2)] * 2, abs=1e-5)


@pytest.mark.slow
def test_cached_and_in_step_train_alike_and_another_seed_finds_the_scores(job, tmp_path: Path) -> None:
    for kind in ("cached", "in_step"):
        finetune.train(job(f"preference.reference={kind}", "training.max_steps=2", run=kind))
    cached, in_step = (RunDirectory(tmp_path / name) for name in ("cached", "in_step"))
    names = ("loss", "eval_loss", "rewards_margins")
    assert metric(cached, *names) == pytest.approx(metric(in_step, *names), abs=1e-5)
    assert (passes(cached), passes(in_step)) == (24, 0)
    assert metric(cached, "loss")[0] == pytest.approx(math.log(2), abs=1e-5)
    finetune.train(job(CACHED, "training.seed=7", "adapter.rank=4", "training.max_steps=1", run="again"))
    again = RunDirectory(tmp_path / "again")
    assert passes(again) == 0
    assert [event["rows"] for event in again.events() if event["event"] == "reference_found"] == [24]


@pytest.mark.slow
def test_a_pass_that_was_killed_goes_on_to_the_same_bits(job, tmp_path: Path, monkeypatch) -> None:
    class Killed(BaseException):
        pass

    left: list[None] = []

    def one(*arguments: Any) -> Any:
        if not left:
            raise Killed
        left.pop()
        return plain(*arguments)

    plain = reference_scores._one
    monkeypatch.setattr(reference_scores, "_KEPT_EVERY_SECONDS", 0)
    monkeypatch.setattr(reference_scores, "_one", one)
    keys = [CACHED, "training.max_steps=2"]
    for batches in (2, 0):
        left[:] = [None] * batches
        with pytest.raises(Killed):
            finetune.train(job(*keys, run="halted"))
    left[:] = [None] * 100
    finetune.train(job(*keys, run="halted"))
    monkeypatch.setattr(private, "cache_folder", lambda: tmp_path / "empty")
    finetune.train(job(*keys, run="whole"))
    halted, whole = (RunDirectory(tmp_path / name) for name in ("halted", "whole"))
    assert 0 < passes(halted) < passes(whole) == 24
    assert halted.reference_file.read_bytes() == whole.reference_file.read_bytes()
    assert metric(halted, "loss") == metric(whole, "loss")
    assert same_adapter(halted, whole)


def begun(config: Config) -> tuple[Any, Any]:
    """A job and its loop after the pass, as they stand before the first step."""
    with pytest.MonkeyPatch.context() as patch:
        seen: list[Any] = []
        add = reference_scores.add
        patch.setattr(reference_scores, "add", lambda *both: (seen.extend(both), add(*both)))
        ready(config)
    return seen[0], seen[1]


def scored(job: Any, loop: Any) -> np.ndarray[Any, Any]:
    """The scores of all rows, scored anew."""
    scores = np.full((24, 2), np.nan, np.float32)
    with reference_scores.starting(loop.step.model, job.config.adapter):
        splits = [(loop.steps.rows, loop.retry.report), (loop.evaluation.rows, loop.evaluation.report)]
        way = reference_scores.batching_of(loop.steps)
        for rows, values, _ in reference_scores._passes(job, loop.step, splits, way, scores):
            scores[rows] = values
    return scores


@pytest.mark.slow
def test_batches_that_do_not_fit_and_ranks_change_nothing(job, monkeypatch) -> None:
    begun_job, loop = begun(job(CACHED, "model.name=builtin:tiny-llama", "training.micro_batch=4"))
    whole = scored(begun_job, loop)
    for rows, own in ((loop.steps.rows, whole[: len(loop.steps.rows)]), (loop.evaluation.rows, whole[-5:])):
        assert np.column_stack([rows[f"reference_{name}"] for name in SEGMENTS]) == pytest.approx(own)
    with out_of_memory(loop, "forward", 70) as refused:
        assert scored(begun_job, loop) == pytest.approx(whole, abs=1e-5)
    assert refused
    parts = []
    monkeypatch.setattr(reference_scores.ranks, "world_size", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(reference_scores.ranks, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(reference_scores.ranks, "gathered", lambda value: [value])
        parts.append(scored(begun_job, loop))
    assert all(np.isnan(part).any() for part in parts)
    np.testing.assert_array_equal(np.nanmax(parts, axis=0), whole)


def test_a_damaged_file_is_computed_again(job, tmp_path: Path) -> None:
    begun_job, _ = begun(job(CACHED))
    [file] = (tmp_path / "cache" / "references").iterdir()
    own = begun_job.outlets.run.reference_file
    content = file.read_bytes()
    assert len(content) == 64 + 24 * 8, "8 bytes a pair"
    own.unlink()
    for damaged in (content[:-4], content[:-1] + b"x", b"", content[:40]):
        file.write_bytes(damaged)
        assert np.isnan(reference_scores._Files(begun_job, (24, 2)).read()).all()
    file.write_bytes(content)
    assert np.isfinite(reference_scores._Files(begun_job, (24, 2)).read()).all()
    assert own.read_bytes() == content, "a run keeps its own, which a resume finds without a cache"


def test_auto_scores_once_what_steps_would_score_as_often(job) -> None:
    config = job("training.max_steps=null", "training.epochs=1")
    data = prepare(config.data, load_tokenizer(config.model, config.data))
    for overrides, chosen in (
        ([], "cached"),
        (["training.epochs=0.5"], "in_step"),
        (["training.epochs=0.5", "adapter.init=pissa"], "cached"),
        (["training.max_steps=3", "training.eval_every=1"], "cached"),
        (["training.max_steps=3", "training.objective=supervised"], "auto"),
    ):
        config = job("training.max_steps=null", "training.epochs=1", *overrides)
        assert reference(Job(config, config, data=data)).config.preference.reference == chosen
