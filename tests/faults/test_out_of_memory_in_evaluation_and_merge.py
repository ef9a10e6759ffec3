"""Out of memory in an evaluation and in a merge ends no training; logits are never accumulated."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from children import PUBLISHING, Fault
from jobs import QUICK, TINY, adapter_weights, metric, same_adapter, write_rows
from messages import refusal
from steps import ready

import finetune
from finetune.choices import load_config
from finetune.errors import OutOfMemoryError
from finetune.runtime import libraries
from finetune.storage.rundir import RunDirectory
from finetune.training import eval_loss
from finetune.training.collator import row_count
from finetune.training.loop import Loop

JOB = ["training.eval_every=2", "output.best=false", "quantization.kind=none"]


@pytest.fixture
def exhausted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """In an evaluation there is memory for so many rows at a time, none at first."""
    rows = [0]

    def sums(model, batch, *settings):
        if len(batch["input_ids"]) > rows[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        return plain(model, batch, *settings)

    plain = eval_loss._sums
    monkeypatch.setattr(eval_loss, "_sums", sums)
    return rows


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, rows_file: Path, shallow_base: Path) -> RunDirectory:
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    job = [*JOB, f"model.name={shallow_base}", f"data.train={rows_file}", "data.eval_share=0.2"]
    return finetune.train(load_config(TINY, [*QUICK, *job, f"output.dir={directory}"])).run


def test_an_evaluation_that_does_not_fit_is_split(quick, exhausted, undisturbed: RunDirectory) -> None:
    exhausted[0] = 1
    run = finetune.train(quick(*JOB)).run
    assert metric(run, "eval_loss") == pytest.approx(metric(undisturbed, "eval_loss"), rel=1e-6)
    splits = [event for event in run.events() if event["event"] == "micro_batch_split"]
    assert [event["evaluation"] for event in splits] == [True], "once, with the worst first, and then remembered"
    assert same_adapter(run, undisturbed)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory, rows_file: Path, shallow_base: Path) -> Loop:
    directory = tmp_path_factory.mktemp("ready") / "run"
    job = [f"model.name={shallow_base}", f"data.train={rows_file}", "data.eval_share=0.5", f"output.dir={directory}"]
    return ready(load_config(TINY, [*QUICK, *job]))


def test_a_part_that_does_not_fit_is_split_reported_and_freed(
    loop: Loop, exhausted, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = loop.steps.collate.micro_batch([loop.steps.rows[row] for row in (0, 1, 2)])
    exhausted[0] = 3
    asked = {"precision": "fp32", "masked": False}
    expected = eval_loss.summed_loss(loop.step.model, [[batch]], **asked)
    exhausted[0] = 1
    splits: list[int] = []
    freed: list[int] = []
    monkeypatch.setattr(libraries, "return_freed_memory", lambda: freed.append(len(splits)))
    found = eval_loss.summed_loss(
        loop.step.model, [[batch]], on_split=lambda part: splits.append(row_count(part)), **asked
    )
    assert splits == [3, 2]
    assert freed == [0, 1]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_an_error_of_another_kind_is_not_tried_again(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args):
        monkeypatch.undo()
        raise RuntimeError("no matter of memory")

    monkeypatch.setattr(eval_loss, "_sums", fail)
    with pytest.raises(RuntimeError, match="no matter of memory"):
        loop.evaluation.sums()


def test_a_real_limit_in_an_evaluation_is_evaluated_through(train_apart, tmp_path: Path) -> None:
    """The host's allocator refuses eight long held-out rows at once; the training rows are short."""
    rows = [" ".join(f"{number} {word}" for word in range(400)) for number in range(8)]
    file = write_rows(tmp_path / "long.jsonl", [{"prompt": "Say", "completion": row} for row in rows])

    def train(name: str, fault: Fault | None = None) -> RunDirectory:
        run, ended = train_apart(
            fault, *JOB, f"data.eval={file}", "data.max_length=512", "data.too_long=truncate", "training.batch_size=8",
            "training.micro_batch=8", "training.max_steps=1", "training.precision=fp32", run=name,
        )  # fmt: skip
        assert ended.code == 0, ended.output
        return run

    roomy = train("roomy")
    little = Fault("finetune.training.eval_loss:EvalLoss.sums", memory_bytes=26 * 2**20, until=PUBLISHING)
    tight = train("tight", little)
    assert [event for event in tight.events() if event["event"] == "micro_batch_split"]
    assert metric(tight, "eval_loss") == pytest.approx(metric(roomy, "eval_loss"), rel=1e-6)
    assert same_adapter(tight, roomy)


def test_an_evaluation_in_which_no_row_fits_is_skipped(quick, exhausted, undisturbed: RunDirectory) -> None:
    run = finetune.train(quick(*JOB)).run
    assert run.finished
    assert metric(run, "eval_loss") == []
    skipped = [event for event in run.events() if event["event"] == "evaluation_skipped"]
    assert [event["step"] for event in skipped] == [0, 0, 2, 4], "tried with the worst first, and at each of three"
    assert all(".jsonl:" in event["place"] for event in skipped)
    assert same_adapter(run, undisturbed)


def test_evaluation_makes_no_full_logits_and_keeps_nothing_of_a_batch(loop: Loop) -> None:
    outputs = []

    def seen(module, args, kwargs, output):
        sizes = [value.numel() for value in output.values() if isinstance(value, torch.Tensor)]
        assert max(sizes) <= kwargs["input_ids"].numel(), "a number for each token, and not one for each of 2,048"
        assert not any(kept() is not None for kept in outputs), "of an earlier batch"
        outputs.append(weakref.ref(output.log_probs))

    hook = loop.step.model.get_base_model().register_forward_hook(seen, with_kwargs=True)
    batches = list(loop.evaluation.batches())
    loop.evaluation.sums([*batches, *batches])
    hook.remove()
    assert len(outputs) >= 4


def test_a_merge_out_of_memory_leaves_the_training_and_is_done_again(train_apart) -> None:
    job = ["output.merge=true", "data.eval=none", "training.eval_every=null", "training.max_steps=1"]
    run, ended = train_apart(Fault("finetune.export.publish:merge_locked", memory_bytes=2**20), *job)
    assert ended.code == 6, ended.output
    assert f"finetune export {run.path} --to merged" in " ".join(ended.output.split())
    assert not run.finished
    assert not run.merged.exists()
    before, lines = adapter_weights(run), run.metrics_file.read_bytes()

    again, ended = train_apart(None, *job)
    assert ended.code == 0, ended.output
    assert again.finished
    assert (run.merged / "merge.json").is_file()
    assert run.metrics_file.read_bytes() == lines
    torch.testing.assert_close(adapter_weights(run), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("finetune.storage.checkpoint.write", "step-00000001"),
        ("finetune.training.checkpoints.snapshot", "step-00000001"),
        ("finetune.model.adapters.peft_format.write", "adapter"),
    ],
    ids=["writing", "copying", "publishing"],
)
def test_a_save_out_of_memory_is_not_blamed_on_the_step(
    quick, monkeypatch: pytest.MonkeyPatch, place: str, name: str
) -> None:
    def fail(*args: object, **named: object) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(place, fail)
    config = quick("training.max_steps=1", "data.eval=none", "training.eval_every=null")
    with refusal(OutOfMemoryError, name) as found:
        finetune.train(config)
    assert "Try, in this order" not in str(found.value)
    assert "out_of_memory" in [event["event"] for event in RunDirectory(config.output.dir).events()]
