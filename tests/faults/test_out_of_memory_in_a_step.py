"""Out of memory in forward, backward and update; and one row that does not fit by itself."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from children import PUBLISHING, Fault
from jobs import QUICK, TINY, adapter_weights, same_adapter, write_rows
from messages import refusal
from steps import assert_gradients_close, before_each_step, gradients, micro_batches, out_of_memory, ready
from torch import distributed as dist

import finetune
from finetune.choices import load_config
from finetune.config import Config
from finetune.errors import MachineError, OutOfMemoryError
from finetune.model.recompute import checkpointing
from finetune.runtime import libraries
from finetune.runtime.out_of_memory import StepOutOfMemoryError
from finetune.storage.rundir import RunDirectory, checkpoint_step
from finetune.training.collator import Inputs, halved
from finetune.training.loop import Loop
from finetune.training.oom_retry import Limit
from finetune.training.step import Step

# float32 throughout, so that gradients show what was lost and not what was rounded.
EXACT = ["quantization.kind=none", "data.eval=none", "training.eval_every=null"]
ROWS = [0, 6, 3, 12, 1, 9, 5, 7]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, rows_file: Path, shallow_base: Path) -> Callable[..., Loop]:
    """A function to a loop before its first step; it is made once for the same overrides."""

    @functools.cache
    def make(*overrides: str) -> Loop:
        directory = tmp_path_factory.mktemp("healing") / "run"
        files = [f"model.name={shallow_base}", f"data.train={rows_file}", f"output.dir={directory}"]
        eight = ["training.batch_size=8", "training.micro_batch=8", "kernels.fused=auto"]
        return ready(load_config(TINY, [*QUICK, *EXACT, *files, *eight, *overrides]))

    return make


@pytest.fixture
def plain(make: Callable[..., Loop]) -> Loop:
    loop = make("memory.checkpointing=none")
    loop.retry.limit = Limit()
    return loop


@pytest.fixture
def checkpointed(make: Callable[..., Loop]) -> Loop:
    loop = make("memory.checkpointing=all", "adapter.dropout=0.3")
    loop.retry.limit = Limit()
    return loop


def test_gradients_do_not_depend_on_the_accumulation(plain: Loop) -> None:
    """Whole runs, and micro-batches by tokens, are in tests/training/test_steps.py."""
    assert len({len(plain.steps.rows[row]["input_ids"]) for row in ROWS}) > 4, "ragged"
    loss, expected = gradients(plain, micro_batches(plain, ROWS, 8))
    for size in (4, 1):
        other_loss, found = gradients(plain, micro_batches(plain, ROWS, size))
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert_gradients_close(found, expected)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gradients_equal_those_of_the_undisturbed_step(plain: Loop, where: str) -> None:
    inputs = micro_batches(plain, ROWS, 4)
    loss, expected = gradients(plain, inputs)
    # Only the last micro-batch is too large, so that gradients of an earlier one are there when it fails.
    inputs.sort(key=lambda part: part["input_ids"].numel())
    with out_of_memory(plain, where, inputs[-1]["input_ids"].numel() - 1) as refused:
        healed_loss, healed = gradients(plain, inputs)
    assert refused == [inputs[-1]["input_ids"].numel()], "it failed once, and not again once it was split"
    assert healed_loss == pytest.approx(loss, rel=1e-6)
    assert_gradients_close(healed, expected)
    event = plain.recorder.outlets.run.events()[-1]
    assert (event["event"], event["rows"], event["step"]) == ("micro_batch_split", 4, 1)


@pytest.mark.parametrize("size", [8, 4])
@pytest.mark.parametrize("where", ["forward", "backward", "recompute"])
def test_nothing_of_the_failed_pass_remains(checkpointed: Loop, where: str, size: int) -> None:
    """Bit by bit what the halves of the last micro-batch give from the start, dropout included."""
    loop = checkpointed
    *fit, batch = sorted(micro_batches(loop, ROWS, size), key=lambda part: part["input_ids"].numel())
    expected_loss, expected = gradients(loop, [*fit, *halved(batch)])
    with out_of_memory(loop, where, batch["input_ids"].numel() - 1) as refused:
        loss, found = gradients(loop, [*fit, batch])
    assert len(refused) == 1
    assert loss == expected_loss
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_collective_that_ran_out_of_memory_is_not_repeated(plain: Loop) -> None:
    """The other ranks still wait in it."""
    (batch,) = micro_batches(plain, ROWS, 8)

    def collective(module: object, args: object) -> None:
        raise dist.DistBackendError("ncclUnhandledCudaError: ...\nLast error:\nCuda failure 2 'out of memory'")

    hook = checkpointing.layers(plain.step.model)[1].mlp.register_forward_pre_hook(collective)
    try:
        with pytest.raises(dist.DistBackendError):
            gradients(plain, [batch])
    finally:
        hook.remove()
    assert len(plain.retry.limit.parts([batch])) == 1


def test_it_is_remembered_for_micro_batches_of_that_size_and_what_a_failed_pass_held_is_freed(
    plain: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = micro_batches(plain, ROWS, 8), micro_batches(plain, ROWS, 2)
    freed: list[int] = []
    monkeypatch.setattr(libraries, "return_freed_memory", lambda: freed.append(len(refused)))
    with out_of_memory(plain, "forward", large[0]["input_ids"].numel() // 3) as refused:
        gradients(plain, large)
        found = list(refused)
        assert len(found) >= 2, "halves did not fit either"
        assert freed == [*range(1, len(found) + 1)], "after each failure, before the next pass"
        gradients(plain, large)
        gradients(plain, small)
        assert refused == found
    assert len(plain.retry.limit.parts(small)) == len(small)


def test_several_ranks_that_fail_at_one_size_lower_the_limit_and_a_single_row_does_not(plain: Loop) -> None:
    (batch,), (row, *_) = micro_batches(plain, ROWS, 8), micro_batches(plain, ROWS, 1)
    limit = Limit()
    assert limit.lower(batch)
    assert limit.lower(batch)
    assert len(limit.parts([batch])) == 2
    assert not limit.lower(row)


def test_an_error_of_another_kind_is_not_tried_again(plain: Loop, monkeypatch) -> None:
    def fail(self, *args, **kwargs):
        monkeypatch.undo()
        raise RuntimeError("no matter of memory")

    monkeypatch.setattr(Step, "micro_step", fail)
    with pytest.raises(RuntimeError, match="no matter of memory"):
        gradients(plain, micro_batches(plain, ROWS, 8))


def test_nothing_is_left_of_the_step_when_a_row_is_given_up(checkpointed: Loop, monkeypatch) -> None:
    inputs = micro_batches(checkpointed, [0, 12], 1)
    torch.manual_seed(0)  # as `gradients` does
    random, left = torch.get_rng_state(), []

    def look(error: BaseException, row: Inputs) -> None:
        left.extend(weight for weight in checkpointed.step.trained() if weight.grad is not None)
        left.extend([] if torch.equal(torch.get_rng_state(), random) else ["random numbers"])

    plainly = Step.micro_step

    def second_fails(self: Step, *args) -> torch.Tensor:
        loss = plainly(self, *args)
        if args[1] == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        return loss

    monkeypatch.setattr(checkpointed.retry.report, "give_up", look)
    monkeypatch.setattr(Step, "micro_step", second_fails)
    with pytest.raises(torch.OutOfMemoryError):
        gradients(checkpointed, inputs)
    assert not left


def test_a_step_computes_with_dropout_whatever_was_done_before(checkpointed: Loop) -> None:
    checkpointed.step.model.eval()
    checkpointed.step.forward_backward(micro_batches(checkpointed, [0], 1), 1)
    assert all(module.training for module in checkpointed.step.model.modules())
    checkpointed.step.model.zero_grad()


def full(run: RunDirectory, name: str, **fields: object) -> NoReturn:
    raise MachineError("events.jsonl cannot be written: no space left")


def test_a_step_in_which_other_ranks_wait_ends_the_run_and_records_a_smaller_micro_batch(
    plain: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that record the same command would run out of memory in the same place."""
    inputs = micro_batches(plain, ROWS, 8)
    monkeypatch.setattr(plain.step.engine, "repeatable", False)
    with out_of_memory(plain, "forward", 1) as refused, pytest.raises(StepOutOfMemoryError) as ended:
        gradients(plain, inputs)
    assert len(refused) == 1
    event = plain.recorder.outlets.run.events()[-1]
    assert (event["event"], event["rows"], event["lowered"]) == ("micro_batch_lowered", 8, {"training.micro_batch": 4})
    assert ended.value.next_start == "Start the same again: it goes on with `training.micro_batch: 4`."

    plain.retry.limit = Limit()
    monkeypatch.setattr(RunDirectory, "event", full)
    with out_of_memory(plain, "forward", 1), pytest.raises(torch.OutOfMemoryError) as unrecorded:
        gradients(plain, inputs)
    assert "cannot go on with smaller micro-batches: events.jsonl" in unrecorded.value.__notes__[-1]


def test_memory_that_runs_out_before_a_pass_is_not_tried_again(plain: Loop, monkeypatch) -> None:
    """The micro-batch that was computed last, in the step before, is not the one that did not fit."""
    inputs, refused = micro_batches(plain, range(4), 4), []
    gradients(plain, inputs)

    def exhausted(*args: object) -> NoReturn:
        refused.append(args)
        assert len(refused) == 1
        raise MemoryError

    monkeypatch.setattr(Limit, "parts", exhausted)
    with pytest.raises(MemoryError):
        gradients(plain, inputs)


def test_a_real_limit_on_memory_is_trained_through_to_the_same_adapter(train_apart, tmp_path: Path) -> None:
    """The host's allocator refuses a pass of eight long rows at once, and takes one of fewer."""
    rows = [" ".join(f"{number} {word}" for word in range(400)) for number in range(16)]
    file = write_rows(tmp_path / "long.jsonl", [{"text": row} for row in rows])

    def train(name: str, fault: Fault | None = None) -> RunDirectory:
        run, ended = train_apart(
            fault, *EXACT, f"data.train={file}", "data.format=text", "data.max_length=256", "training.batch_size=8",
            "training.micro_batch=8", "training.max_steps=1", "training.warmup=0", "memory.checkpointing=none",
            "training.precision=fp32", "optimizer.kind=sgd", "training.learning_rate=0.1", run=name,
        )  # fmt: skip
        assert ended.code == 0, ended.output
        return run

    expected = train("roomy")
    little = Fault("finetune.training.step:Step.forward_backward", memory_bytes=32 * 2**20, until=PUBLISHING)
    found = train("tight", little)
    splits = [event for event in found.events() if event["event"] == "micro_batch_split"]
    assert splits
    assert not [event for event in expected.events() if event["event"] == "micro_batch_split"]
    torch.testing.assert_close(adapter_weights(found), adapter_weights(expected), rtol=0, atol=1e-6)


# -- the update --------------------------------------------------------------------------------------------------------


def updated(loop: Loop) -> dict[str, torch.Tensor]:
    """The trained weights after one update, which is then taken back."""
    trained = {name: weight for name, weight in loop.step.model.named_parameters() if weight.requires_grad}
    before = {name: weight.detach().clone() for name, weight in trained.items()}
    generator = torch.Generator().manual_seed(1)
    for weight in trained.values():
        weight.grad = torch.randn(weight.shape, generator=generator)
    loop.step.clip()
    for group in loop.step.engine.optimizer.param_groups:
        group["lr"] = 1e-3
    try:
        loop.retry.update(loop.step)
        return {name: weight.detach().clone() for name, weight in trained.items()}
    finally:
        with torch.no_grad():
            for name, weight in trained.items():
                weight.copy_(before[name])
                weight.grad = None


def test_an_update_that_changed_nothing_is_done_again(make: Callable[..., Loop], monkeypatch) -> None:
    """PyTorch makes the states of all weights before it changes the first; one that is half made must not stay."""
    loop = make("optimizer.kind=adamw_torch_fused")
    loop.step.engine.optimizer.state.clear()
    expected = updated(loop)
    loop.step.engine.optimizer.state.clear()
    zeros_like, made = torch.zeros_like, []

    def exhausted(*args, **kwargs) -> torch.Tensor:
        made.append(args)
        if len(made) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        return zeros_like(*args, **kwargs)

    known, freed = len(loop.recorder.outlets.run.events()), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", exhausted)
        patch.setattr(libraries, "return_freed_memory", lambda: freed.append(len(made)))
        found = updated(loop)
    assert len(made) > 6
    assert freed == [6], "before the second try"
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [event["event"] for event in loop.recorder.outlets.run.events()[known:]] == ["update_retried"]


def test_an_update_that_fails_otherwise_is_not_done_again(plain: Loop, monkeypatch) -> None:
    calls = []

    def fail(self: Step) -> None:
        calls.append(self)
        raise RuntimeError("no matter of memory")

    monkeypatch.setattr(Step, "update", fail)
    with pytest.raises(RuntimeError, match="no matter of memory"):
        plain.retry.update(plain.step)
    assert len(calls) == 1


def test_an_update_that_changed_some_weights_is_not_done_again(plain: Loop, monkeypatch) -> None:
    optimizer, calls = plain.step.engine.optimizer, []
    update = optimizer.update_step

    def exhausted(*args) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        update(*args)

    monkeypatch.setattr(optimizer, "update_step", exhausted)
    with pytest.raises(torch.OutOfMemoryError) as stopped:
        updated(plain)
    assert len(calls) == 3
    assert "some weights but not others" in stopped.value.__notes__[0]


# -- one row -----------------------------------------------------------------------------------------------------------


def test_a_row_that_does_not_fit_alone_is_named_and_the_steps_before_it_are_saved(
    quick, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*EXACT, "training.max_steps=4", "adapter.dropout=0.1"]
    whole = finetune.train(quick(*overrides, run="whole")).run
    refused = []
    config: Config = quick(*overrides)
    with monkeypatch.context() as patch:

        def exhausted(inputs: Inputs, masked: bool) -> Inputs:
            refused.append(inputs["input_ids"].shape)
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")

        def act(loop: Loop) -> None:
            if loop.progress.step == 2:
                patch.setattr("finetune.training.step.for_model", exhausted)

        before_each_step(patch, act)
        with refusal(OutOfMemoryError, "memory.loss_tokens") as stopped:
            finetune.train(config)
    assert stopped.value.exit_code == 6
    assert [shape[0] for shape in refused] == [2, 1]
    run = RunDirectory(config.output.dir)
    (named,) = [event for event in run.events() if event["event"] == "row_does_not_fit"]
    assert named["step"] == 3
    file, line = named["place"].rsplit(":", 1)
    assert file == str(rows_file)
    assert 1 <= int(line) <= 24
    assert named["place"] in str(stopped.value)
    assert [checkpoint_step(path) for path in run.complete_checkpoints()] == [2]

    finetune.train(config)
    assert same_adapter(run, whole)
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]


def test_a_disk_that_is_full_as_well_does_not_hide_a_row_that_does_not_fit(
    quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(inputs: Inputs, masked: bool) -> NoReturn:
        monkeypatch.setattr(RunDirectory, "event", full)
        raise torch.OutOfMemoryError("CUDA out of memory. (injected)")

    monkeypatch.setattr("finetune.training.step.for_model", exhausted)
    with refusal(OutOfMemoryError, "The row that does not fit, alone"):
        finetune.train(quick(*EXACT, "training.micro_batch=1"))


def test_an_error_that_a_notebook_keeps_does_not_keep_the_model(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[weakref.ref[torch.nn.Module]] = []

    def clip(step: Step) -> NoReturn:
        models.append(weakref.ref(step.model))
        raise torch.OutOfMemoryError("CUDA out of memory. (injected)")

    monkeypatch.setattr(Step, "clip", clip)
    with pytest.raises(OutOfMemoryError) as kept:
        finetune.train(quick(*EXACT))
    gc.collect()
    assert kept.value.__context__ is not None
    assert [model() for model in models] == [None]
