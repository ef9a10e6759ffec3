"""A run whose short micro-batches recompute less than its longest: nothing of what is trained depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import QUICK, TINY, same_adapter
from messages import reported
from steps import before_each_step, gradients, ready

import finetune
from finetune.choices import load_config
from finetune.config import Config
from finetune.model.recompute import checkpointing
from finetune.recipe import building
from finetune.storage.records import UpTo
from finetune.storage.rundir import RunDirectory
from finetune.training import oom_retry
from finetune.training.collator import Inputs, tokens_a_row
from finetune.training.job import TrainingJob
from finetune.training.loop import Loop
from finetune.training.step import Step
from finetune.training.warm_up import warm_up

Quick = Callable[..., Config]
# Of the rows' 18 to 32 tokens.
SHORT, MIDDLE = 24, 27
TABLE = (UpTo(SHORT, "none"), UpTo(MIDDLE, "keep-attention"))
JOB = (
    "memory.checkpointing=all", "data.eval=none", "training.eval_every=null", "adapter.dropout=0.1",
    "quantization.kind=none",
)  # fmt: skip


@pytest.fixture(scope="module")
def alike(shallow_base: Path, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run whose micro-batches all recompute alike."""
    place = tmp_path_factory.mktemp("alike") / "run"
    job = [f"model.name={shallow_base}", f"data.train={rows_file}", f"output.dir={place}"]
    return finetune.train(load_config(TINY, [*QUICK, *job, *JOB])).run


def shorten(patch: pytest.MonkeyPatch, table: Sequence[UpTo]) -> None:
    """Train with this table, whatever was forecast."""
    patch.setattr(building, "TrainingJob", lambda *args, **named: TrainingJob(*args, **{**named, "by_length": table}))


def computed(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each micro-batch from now on its tokens, and how many layers it computes once more."""
    found: list[tuple[int, int]] = []

    def count(module: Any, args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # within a backward pass
            found[-1] = (found[-1][0], found[-1][1] + 1)

    def micro_step(self: Step, inputs: Inputs, *rest: Any) -> torch.Tensor:
        found.append((tokens_a_row(inputs), 0))
        # A hook on the layer itself would stay outside of its checkpoint.
        hooks = [layer.mlp.register_forward_pre_hook(count) for layer in checkpointing.layers(self.model)]
        try:
            return plain(self, inputs, *rest)
        finally:
            for hook in hooks:
                hook.remove()

    plain = Step.micro_step
    patch.setattr(Step, "micro_step", micro_step)
    return found


def assert_same(found: RunDirectory, expected: RunDirectory) -> None:
    """The trained weights, and loss and gradient norm of each step."""
    of_found, of_expected = (
        [(line["step"], line["loss"], line["grad_norm"]) for line in run.metrics()] for run in (found, expected)
    )
    assert of_found == of_expected
    assert same_adapter(found, expected)


@pytest.mark.slow
def test_short_micro_batches_recompute_less_and_the_training_is_the_same_to_the_bit(quick, alike, monkeypatch) -> None:
    seen = computed(monkeypatch)
    shorten(monkeypatch, TABLE)
    assert_same(finetune.train(quick(*JOB)).run, alike)
    layers, trained = 2, seen[-8:]  # in four steps
    assert {tokens <= SHORT for tokens, _ in trained} == {True, False}
    assert all(again == (0 if tokens <= SHORT else layers) for tokens, again in trained)


def test_the_largest_of_each_length_is_tried_before_the_first_step(quick, monkeypatch) -> None:
    seen = computed(monkeypatch)
    shorten(monkeypatch, TABLE)
    loop = ready(quick(*JOB))
    warm_up(loop.step, loop.steps, loop.retry, loop.evaluation)
    lengths = loop.steps.rows["length"][:]
    most = [max(length for length in lengths if length <= bound) for bound in (max(lengths), SHORT, MIDDLE)]
    assert [tokens for tokens, _ in seen] == [tokens for tokens in most for _ in range(2)]
    assert [again for _, again in seen] == [2, 2, 0, 0, 2, 2]
    assert loop.step.levels is not None
    assert loop.step.levels.shorter == TABLE


def refuse_to_keep(layer: Any, args: Any) -> None:
    """Memory runs out in each layer that is not checkpointed."""
    if layer.training and not layer.gradient_checkpointing:
        raise torch.OutOfMemoryError("CUDA out of memory. (injected)")


@pytest.mark.slow
def test_out_of_memory_lets_all_recompute_as_the_longest_do_before_any_is_split(
    quick: Quick, alike: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(loop: Loop) -> None:
        if loop.progress.step == 1:
            for layer in checkpointing.layers(loop.step.model):
                layer.register_forward_pre_hook(refuse_to_keep)

    shorten(monkeypatch, TABLE)
    before_each_step(monkeypatch, act)
    found = finetune.train(quick(*JOB)).run
    assert_same(found, alike)
    names = [event["event"] for event in found.events()]
    assert names.count("recomputes_more") == 1
    assert "micro_batch_split" not in names
    [event] = [event for event in found.events() if event["event"] == "recomputes_more"]
    assert event["tokens"] <= SHORT
    reported(capsys.readouterr().out, "recomputed less")


@pytest.mark.slow
def test_a_micro_batch_is_split_once_it_recomputes_as_the_longest_do(quick, monkeypatch) -> None:
    shorten(monkeypatch, TABLE)
    config = quick(*JOB, "adapter.dropout=0", "training.micro_batch=4")
    loop = ready(config)
    rows = [row for row, length in enumerate(loop.steps.rows["length"][:]) if length <= SHORT][:4]
    inputs = loop.steps.collate([loop.steps.rows[row] for row in rows])
    assert [len(each["input_ids"]) for each in inputs] == [4]
    expected, _ = gradients(loop, inputs)

    def refuse(layer: Any, args: Any) -> None:
        if args[0].shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")

    hook = checkpointing.layers(loop.step.model)[0].register_forward_pre_hook(refuse)
    found, _ = gradients(loop, inputs)
    hook.remove()
    assert found == pytest.approx(expected, rel=1e-5)
    names = [event["event"] for event in RunDirectory(Path(config.output.dir or "")).events()]
    assert names[-2:] == ["recomputes_more", "micro_batch_split"]


@pytest.mark.slow
def test_a_resumed_run_may_have_another_table(quick, alike, monkeypatch) -> None:
    class Stopped(Exception):
        pass

    def act(loop: Loop) -> None:
        shorten(monkeypatch, [UpTo(20, "keep-products")])  # of the next start
        if loop.progress.step == 3 and "resumed" not in [event["event"] for event in run.events()]:
            raise Stopped

    config = quick(*JOB, "output.save_every=2")
    run = RunDirectory(Path(config.output.dir or ""))
    shorten(monkeypatch, TABLE)
    before_each_step(monkeypatch, act)
    with pytest.raises(Stopped):
        finetune.train(config)
    finetune.train(config)
    assert "resumed" in [event["event"] for event in run.events()]
    assert_same(run, alike)


def test_what_another_rank_kept_too_much_for_is_given_up_on_this_one(quick, monkeypatch) -> None:
    shorten(monkeypatch, TABLE)
    config = quick(*JOB)
    loop = ready(config)
    inputs = loop.steps.collate([loop.steps.rows[row] for row in range(4)])
    expected, _ = gradients(loop, inputs)
    [short] = loop.steps.collate([min(loop.steps.rows, key=lambda row: row["length"])])
    failures = [[oom_retry._Failure(short, 1, "CUDA out of memory.")], []]
    monkeypatch.setattr(oom_retry, "_of_all_ranks", lambda step, failure, error, catch_up: failures.pop(0))
    monkeypatch.setattr(loop.step.engine, "world_size", 2)
    found, _ = gradients(loop, inputs)
    assert (found, failures) == (2 * expected, [])
    assert loop.step.levels is not None
    assert loop.step.levels.shorter == ()
    last = RunDirectory(Path(config.output.dir or "")).events()[-1]
    assert (last["event"], last["rank"]) == ("recomputes_more", 1)
