"""When a run evaluates, saves and ends: the loop, around a training of three numbers."""

from __future__ import annotations

import json
import math
import pickle
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from datasets import Dataset

from finetune.data.batching import MicroBatching, RowOrder
from finetune.errors import DataError, Terminated
from finetune.model.distributed.engine import OneProcess
from finetune.objectives import Objective, trained_tokens
from finetune.runtime import ranks
from finetune.runtime.memory_monitor import Monitor, meter_for
from finetune.runtime.randomness import RandomState
from finetune.runtime.signals import Signals
from finetune.training.batches import PreparedRows
from finetune.training.callbacks import Callback, Callbacks
from finetune.training.collator import StepCollator
from finetune.training.loop import Intervals, Loop
from finetune.training.oom_retry import Retry
from finetune.training.progress import Progress
from finetune.training.recorder import StepNumbers
from finetune.training.state import STATE_FILE, snapshot
from finetune.training.step import Step

ROWS = Dataset.from_list([{"input_ids": [1, row], "labels": [1, row]} for row in range(8)])
IN_EPOCH = 4
EVALUATION = ["evaluation", "loss 1.0", "clock"]


class Asked:
    """Recorder, checkpoints and evaluation of a loop in one: notes what is asked of them, and acts at some notes.

    `losses` are those of its evaluations, in order; by default 1.0. `passes` are the random number that a step's pass
    drew, as dropout does, and its rows. An act may be at the nth note of a text: "evaluation #2".
    """

    def __init__(self, losses: Sequence[float | None] | None, acts: dict[str, Callable[[], object]]) -> None:
        self.notes: list[str] = []
        self.lines: list[tuple[StepNumbers, float, bool]] = []
        self.passes: list[tuple[float, list[list[int]]]] = []
        self._losses = iter(losses) if losses else iter(lambda: 1.0, None)
        self._acts = acts
        self.outlets = SimpleNamespace(callbacks=Callbacks())
        self.higher_is_better = False

    def note(self, text: str) -> None:
        self.notes.append(text)
        for act in (text, f"{text} #{self.notes.count(text)}"):
            self._acts.get(act, lambda: None)()

    def started(self, progress: Progress) -> None:
        self.note(f"started at {progress.step}")

    def stepped(self, progress: Progress, numbers: StepNumbers, rate: float, updated: bool, scaler: object) -> None:
        self.lines.append((numbers, rate, updated))
        self.note(f"step {progress.step}")

    def evaluated(self, progress: Progress, loss: float) -> None:
        self.note(f"loss {loss}")

    def forget_evaluation(self, progress: Progress) -> None:
        self.note(f"evaluation at {progress.step} forgotten")

    def restart_clock(self) -> None:
        self.note("clock")

    def holds(self, progress: Progress) -> bool:
        return f"saved {progress.step}" in self.notes

    def ended(self) -> None:
        self.note("ended")

    def wait(self) -> None:
        self.note("nothing is being written")

    def save(self, progress: Progress) -> None:
        self.note(f"saved {progress.step}")

    def value(self) -> float | None:
        torch.rand(1)
        self.note("evaluation")
        return next(self._losses)

    def of(self, *kinds: str) -> list[str]:
        """The notes of these kinds."""
        return [note for note in self.notes if note.split()[0] in kinds]


def made(
    *,
    progress: Progress | None = None,
    total: int = 3,
    evaluate_every: int | None = None,
    save_every: int | None = None,
    save_best: bool = False,
    patience: int | None = None,
    evaluates: bool = True,
    losses: Sequence[float | None] | None = None,
    acts: dict[str, Callable[[], object]] | None = None,
    world_size: int = 1,
) -> tuple[Loop, Asked]:
    """A loop of four steps an epoch, each of one micro-batch of two rows; and what it asks."""
    asked = Asked(losses, acts or {})
    progress = progress or Progress()
    progress.total = total

    def loss(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        asked.note(f"pass {progress.step + 1}")
        asked.passes.append((float(torch.rand(1)), batch["input_ids"].tolist()))
        return model(batch["input_ids"].float()).sum(), trained_tokens(batch)

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.7}]
    optimizer = torch.optim.SGD(groups)
    optimizer.register_step_pre_hook(lambda *_: asked.note("update"))
    monitor = Monitor(meter_for("cpu"))
    everything, never = cast(Any, asked), cast(Any, pytest.fail)
    loop = Loop(
        step=Step(OneProcess(model, optimizer, world_size=world_size), Objective("", loss, trained_tokens), "fp32", 0.0,
                  False, torch.device("cpu"), monitor),
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        steps=PreparedRows(
            ROWS, RowOrder([2] * len(ROWS), 2, 0, False), StepCollator(MicroBatching(2), 0), 2, on_card=False
        ),
        progress=progress,
        intervals=Intervals(evaluate_every, save_every, save_best, patience),
        retry=Retry(never),
        recorder=everything,
        checkpoints=everything,
        evaluation=everything if evaluates else None,
        signals=Signals(),
    )  # fmt: skip
    return loop, asked


def run(loop: Loop) -> None:
    """With the signals of this process handled as in a training."""
    with loop.signals, loop.signals.waiting():
        loop.run(None)


def ran(**job: Any) -> tuple[Loop, Asked]:
    loop, asked = made(**job)
    run(loop)
    return loop, asked


def step(number: int) -> list[str]:
    return [f"pass {number}", "nothing is being written", "update", f"step {number}"]


# -- steps -------------------------------------------------------------------------------------------------------------


def test_a_run_evaluates_at_both_ends_saves_its_last_step_and_leaves_both_out_of_the_next_steps_time() -> None:
    _, asked = ran(total=3, evaluate_every=2)
    assert asked.notes == [
        "started at 0", *EVALUATION, *step(1), *step(2), *EVALUATION, *step(3), *EVALUATION, "saved 3", "clock",
        "ended",
    ]  # fmt: skip


def test_without_an_evaluation_set_it_trains_and_saves_as_often_as_asked_and_at_its_end() -> None:
    _, asked = ran(total=2, evaluate_every=1, evaluates=False)
    assert asked.notes == ["started at 0", *step(1), *step(2), "saved 2", "clock", "ended"]
    _, asked = ran(total=5, save_every=2, evaluates=False)
    assert asked.of("saved", "clock") == ["saved 2", "clock", "saved 4", "clock", "saved 5", "clock"]


def test_an_epoch_takes_each_row_once_and_the_next_one_in_another_order() -> None:
    loop, asked = ran(total=2 * IN_EPOCH + 3, evaluates=False)
    order = [row for _, rows in asked.passes for _, row in rows]
    assert sorted(order[:8]) == sorted(order[8:16]) == list(range(8))
    assert order[:8] != order[8:16]
    assert len(order) == 22
    assert (loop.progress.step, loop.progress.updates, loop.progress.epoch) == (11, 11, 2.75)


def test_a_step_reports_the_rate_of_the_first_group_with_which_it_was_taken_and_frees_its_gradients() -> None:
    loop, asked = ran(total=3, evaluates=False)
    assert [rate for _, rate, _ in asked.lines] == pytest.approx([0.1, 0.1 / 2, 0.1 / 3])
    assert all(weight.grad is None for weight in loop.step.trained())


def test_a_step_reports_its_loss_per_trained_token_the_norm_of_its_gradients_and_its_tokens() -> None:
    loop, asked = made(total=1, evaluates=False)
    with torch.no_grad():
        loop.step.model.weight.fill_(1.0)
        loop.step.model.bias.fill_(0.5)
    loop.run(None)
    [(_, [[one, first], [_, second]])] = asked.passes
    loss, gradient = (2 * (one + 0.5) + first + second) / 2, [one, (first + second) / 2, 1]
    assert asked.lines[0][0] == StepNumbers(pytest.approx(loss), pytest.approx(math.hypot(*gradient)), 4, 4)


def test_a_step_reports_the_mean_of_each_statistic_over_its_own_rows() -> None:
    loop, asked = made(total=3, evaluates=False)
    plain = loop.step.objective.loss

    def with_statistics(model: Any, batch: Any) -> Any:
        rows = batch["input_ids"][:, 1]
        return *plain(model, batch), {"row": (rows.sum(), torch.tensor(2)), "twice": (2 * rows.sum(), torch.tensor(4))}

    objective = replace(loop.step.objective, loss=with_statistics, statistics=("row", "twice"))
    loop.step = replace(loop.step, objective=objective)
    loop.run(None)
    means = [(one + other) / 2 for _, [[_, one], [_, other]] in asked.passes]
    assert [numbers.statistics for numbers, *_ in asked.lines] == [{"row": mean, "twice": mean} for mean in means]
    assert len(set(means)) > 1


def test_what_a_micro_batch_recomputes_is_chosen_by_its_tokens_before_its_pass() -> None:
    loop, asked = made(total=2, evaluates=False)
    levels = SimpleNamespace(choose=lambda tokens: asked.note(f"of {tokens} tokens"))
    loop.step = replace(loop.step, levels=cast(Any, levels))
    loop.run(None)
    assert asked.of("of", "pass") == ["of 2 tokens", "pass 1", "of 2 tokens", "pass 2"]


def test_a_step_whose_gradients_are_not_finite_is_counted_and_changes_neither_weights_nor_rate() -> None:
    loop, asked = made(total=2)
    loop.step.model.weight.register_hook(lambda gradient: gradient * math.nan)
    before = loop.step.model.weight.detach().clone()
    loop.run(None)
    assert "update" not in asked.notes
    assert torch.equal(loop.step.model.weight, before)
    assert [(rate, updated) for _, rate, updated in asked.lines] == [(0.1, False)] * 2
    assert (loop.progress.step, loop.progress.updates) == (2, 0)


# -- evaluations -------------------------------------------------------------------------------------------------------


def test_an_evaluation_with_the_lowest_loss_so_far_is_saved_where_that_is_asked() -> None:
    """The one before training is not among them: that model needs no checkpoint."""
    for save_best, saved in ((True, ["saved 1", "saved 3", "saved 4"]), (False, ["saved 4"])):
        loop, asked = ran(total=4, evaluate_every=1, save_best=save_best, losses=[0.5, 3.0, 4.0, 2.0, 2.0])
        assert asked.of("saved") == saved
        assert (loop.progress.best_step, loop.progress.best_value) == (3, 2.0)


def test_a_run_whose_loss_no_longer_falls_is_saved_and_ends() -> None:
    loop, asked = ran(total=9, evaluate_every=1, patience=2, losses=[9.0, 3.0, 4.0, 2.0, 2.0, 2.0])
    assert loop.progress.step == 5
    assert asked.notes[-3:] == ["saved 5", "clock", "ended"]


def test_where_a_higher_value_is_better_that_is_what_is_saved_and_what_ends_a_run() -> None:
    loop, asked = made(total=9, evaluate_every=1, save_best=True, patience=2, losses=[9.0, 0.1, 0.3, 0.2, 0.3])
    asked.higher_is_better = True
    run(loop)
    assert asked.of("saved") == ["saved 1", "saved 2", "saved 4"]
    assert loop.progress.best_step == 2


def test_a_run_is_over_at_its_last_step_or_when_it_stopped_early() -> None:
    for done, without_gain, patience, stopped, over in (
        (2, 1, 2, False, False), (2, 2, 2, True, True), (2, 9, None, False, False), (3, 0, 2, False, True),
    ):  # fmt: skip
        loop, _ = made(progress=Progress(done, without_gain=without_gain), total=3, patience=patience)
        assert (loop.stopped_early, loop.is_over) == (stopped, over)


def test_an_evaluation_without_a_loss_is_neither_recorded_nor_the_best() -> None:
    loop, asked = ran(total=2, evaluate_every=1, save_best=True, losses=[None, None, 2.0])
    assert asked.of("loss", "saved") == ["loss 2.0", "saved 2"]
    assert (loop.progress.best_step, loop.progress.without_gain) == (2, 0)


def test_training_draws_the_same_random_numbers_however_often_it_is_evaluated() -> None:
    runs = made(total=5, evaluate_every=1), made(total=5, evaluates=False)
    for loop, _ in runs:
        torch.manual_seed(1)
        loop.run(None)
    (_, often), (_, never) = runs
    assert often.passes == never.passes


# -- the next start ----------------------------------------------------------------------------------------------------


def write_random_numbers(loop: Loop, folder: Path) -> None:
    values = snapshot(loop.step, loop.schedule, loop.progress, {}, [RandomState().as_json()]).values
    (folder / STATE_FILE).write_text(json.dumps(values[STATE_FILE]))


@pytest.mark.parametrize("done", [2, IN_EPOCH])
def test_a_resumed_run_draws_the_random_numbers_and_rows_of_the_uninterrupted_one(tmp_path: Path, done: int) -> None:
    whole, expected = made(
        total=7, save_every=done, acts={f"saved {done}": lambda: write_random_numbers(whole, tmp_path)}
    )
    whole.run(None)
    resumed, found = made(total=7, progress=Progress(done))
    torch.manual_seed(9)
    resumed.run(tmp_path)
    assert found.passes == expected.passes[done:]
    assert found.notes[:2] == [f"started at {done}", f"pass {done + 1}"], "without an evaluation at its start"


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evaluation_that_was_postponed_is_made_up_for_once(world_size: int) -> None:
    progress = Progress(2, owes_evaluation=True)
    progress.updates = 2
    loop, asked = made(progress=progress, world_size=world_size)
    assert loop.evaluate_if_owed() is False
    assert loop.evaluate_if_owed() is False
    assert asked.notes == ["evaluation at 2 forgotten", *EVALUATION]
    assert loop.progress.best_step == 2
    assert not loop.progress.owes_evaluation


def test_a_run_that_its_postponed_evaluation_ends_takes_no_step(tmp_path: Path) -> None:
    progress = Progress(2, best_step=1, best_value=0.5, owes_evaluation=True)
    progress.updates = 2
    loop, asked = made(progress=progress, patience=1)
    write_random_numbers(loop, tmp_path)
    loop.run(tmp_path)
    assert asked.notes == ["started at 2", "evaluation at 2 forgotten", *EVALUATION, "ended"]


# -- signals -----------------------------------------------------------------------------------------------------------


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("given", "notes", "owes", "best"),
    [
        ({"acts": {"pass 2": terminate}}, step(2), False, None),
        ({"acts": {"pass 2": terminate}, "evaluate_every": 1}, ["step 2", "clock"], True, 1),
        ({"acts": {"evaluation #3": terminate}, "evaluate_every": 1}, ["step 2", "evaluation", "clock"], True, 1),
        (
            {"acts": {"loss 2.0": terminate}, "evaluate_every": 1, "losses": [4.0, 3.0, 2.0]},
            ["evaluation", "loss 2.0", "clock"], False, 2,
        ),
    ],
    ids=["in a step", "in a step to be evaluated", "in its evaluation", "once the loss is known"],
)  # fmt: skip
def test_a_signal_ends_a_run_with_its_step_saved_and_its_evaluation_counted_or_postponed(
    given: dict[str, Any], notes: list[str], owes: bool, best: int | None
) -> None:
    loop, asked = ran(total=9, **given)
    wanted = [*notes, "saved 2", "clock", "ended"]
    assert asked.notes[-len(wanted) :] == wanted
    assert (loop.progress.owes_evaluation, loop.progress.best_step) == (owes, best)


def test_a_checkpoint_that_a_signal_asks_for_is_saved_and_training_goes_on() -> None:
    _, asked = ran(evaluates=False, acts={"pass 2": lambda: signal.raise_signal(signal.SIGUSR1)})
    assert asked.of("saved") == ["saved 2", "saved 3"]


def test_a_postponed_evaluation_that_a_signal_ends_again_is_still_owed() -> None:
    loop, _ = made(progress=Progress(2, owes_evaluation=True), acts={"evaluation": terminate})
    with loop.signals, loop.signals.waiting():
        assert loop.evaluate_if_owed() is True
    assert loop.progress.owes_evaluation


def test_before_the_first_step_a_signal_ends_an_evaluation_and_the_run_with_nothing_saved() -> None:
    loop, asked = made(total=9, evaluate_every=1, acts={"evaluation #1": terminate})
    with pytest.raises(Terminated):
        run(loop)
    assert asked.notes == ["started at 0", "evaluation", "clock"]


def test_a_held_out_row_that_can_no_longer_be_read_ends_the_run_with_its_step_saved_and_the_evaluation_owed() -> None:
    def broken() -> None:
        raise DataError("rows.jsonl:3: it is gone")

    loop, asked = made(total=9, evaluate_every=1, acts={"evaluation #3": broken})
    with pytest.raises(DataError, match="Step 2 is saved"):
        run(loop)
    assert asked.of("saved") == ["saved 2"]
    assert loop.progress.owes_evaluation


def test_an_interrupt_that_was_no_signal_to_the_run_ends_it_at_once() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    loop, asked = made(total=9, evaluate_every=1, acts={"evaluation #3": interrupt})
    with pytest.raises(KeyboardInterrupt):
        run(loop)
    assert asked.of("saved") == []


# -- callbacks ---------------------------------------------------------------------------------------------------------


class Fails(Callback):
    def on_step(self, metrics: dict[str, Any]) -> None:
        raise LookupError("mine")


def failing(text: str, **job: Any) -> tuple[Loop, Asked]:
    """A loop with a callback that fails at the note `text`."""
    loop, asked = made(total=9, acts={text: lambda: asked.outlets.callbacks.stepped({})}, **job)
    asked.outlets.callbacks = Callbacks([Fails()])
    return loop, asked


def test_a_callback_that_fails_after_a_step_ends_the_run_with_it_saved_and_its_evaluation_owed() -> None:
    loop, asked = failing("step 2", evaluate_every=2)
    run(loop)
    assert asked.notes == ["started at 0", *EVALUATION, *step(1), *step(2), "saved 2", "clock", "ended"]
    assert loop.progress.owes_evaluation
    with pytest.raises(LookupError, match="mine") as error:
        asked.outlets.callbacks.raise_error("Step 2 is saved")
    assert error.value.__notes__ == ["Raised in a callback. Step 2 is saved; the same call goes on from there."]


def test_a_callback_that_fails_at_an_evaluation_ends_the_run_with_that_evaluation_counted() -> None:
    loop, asked = failing("loss 0.5", evaluate_every=1, losses=[1.0, 0.5])
    run(loop)
    assert asked.of("saved", "ended") == ["saved 1", "ended"]
    assert loop.progress.best_step == 1
    assert not loop.progress.owes_evaluation


# -- several ranks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def other_rank(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, str | None, bool]]:
    """A second rank, with the same rows: the list is what it tells of its signals and callbacks at each step."""
    told = [(False, None, False)]
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "summed", lambda values: 2 * values)
    monkeypatch.setattr(ranks, "gathered", lambda value: [value, *told])
    return told


def test_two_ranks_with_the_same_rows_report_the_loss_of_one_and_twice_its_tokens(
    other_rank: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, of_two = made(total=1, evaluates=False, world_size=2)
    two.run(None)
    monkeypatch.undo()
    one, of_one = made(total=1, evaluates=False)
    one.run(None)
    assert of_two.lines[0][0].loss == pytest.approx(of_one.lines[0][0].loss)
    assert (of_two.lines[0][0].tokens, of_one.lines[0][0].tokens) == (8, 4)


def test_a_signal_to_another_rank_ends_the_run_and_postpones_the_evaluation(other_rank: list) -> None:
    other_rank[:] = [(False, "SIGTERM", False)]
    loop, asked = ran(total=9, evaluate_every=1, world_size=2)
    assert asked.notes == ["started at 0", *EVALUATION, *step(1), "saved 1", "clock", "ended"]
    assert loop.signals.name == "SIGTERM"
    assert loop.progress.owes_evaluation


def test_a_signal_while_ranks_tell_each_other_of_theirs_counts_at_the_next_step(
    other_rank: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others could not know of it, and would wait for this rank."""
    values: list[object] = []

    def gathered(value: object) -> list:
        values.append(value)
        if len(values) == 1:
            terminate()
        return [value, *other_rank]

    monkeypatch.setattr(ranks, "gathered", gathered)
    _, asked = ran(total=9, evaluates=False, world_size=2)
    assert asked.of("saved") == ["saved 2"]


def test_another_rank_may_ask_for_a_checkpoint(other_rank: list) -> None:
    other_rank[:] = [(True, None, False)]
    _, asked = ran(total=2, evaluates=False, world_size=2)
    assert asked.of("saved") == ["saved 1", "saved 2"]


def test_a_callback_that_fails_on_rank_0_ends_all_ranks_after_the_next_step(other_rank: list) -> None:
    loop, asked = failing("step 1", evaluates=False, world_size=2)
    run(loop)
    assert asked.of("saved") == ["saved 2"]
    other_rank[:] = [(False, None, True)]
    of_other, asked = made(total=9, evaluates=False, world_size=2)
    run(of_other)
    assert asked.of("saved") == ["saved 1"]


class Unsendable(Exception):
    """Cannot be made again from its one argument, as pickle does it."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


@pytest.mark.parametrize(
    ("failed", "raised", "text"),
    [(KeyError("mine"), KeyError, "mine"), (Unsendable("a", "b"), RuntimeError, "Unsendable: ab")],
)
def test_every_rank_raises_what_a_callback_of_rank_0_raised(
    failed: Exception, raised: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Callbacks(), Callbacks()
    first.error = failed
    sent: list[Any] = []
    monkeypatch.setattr(ranks, "gathered", lambda value: sent.append(value) or [value])
    first.share()
    assert first.error is failed
    monkeypatch.setattr(ranks, "gathered", lambda value: pickle.loads(pickle.dumps([*sent, value])))  # noqa: S301
    second.share()
    with pytest.raises(raised, match=text):
        second.raise_error("Step 2 is saved")


def test_of_several_ranks_none_leaves_an_evaluation_at_a_signal(other_rank: object) -> None:
    """The others learn of it at the end of the next step."""
    loop, asked = made(total=9, evaluate_every=1, acts={"evaluation #2": terminate})
    loop.step.engine.world_size = 2
    run(loop)
    assert asked.notes == [
        "started at 0", *EVALUATION, *step(1), *EVALUATION, *step(2), "saved 2", "clock", "ended",
    ]  # fmt: skip
    assert loop.progress.owes_evaluation
    assert loop.progress.best_step == 1


def test_a_second_interrupt_ends_the_evaluation_of_several_ranks_at_once(other_rank: object) -> None:
    def interrupt_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    loop, asked = made(total=9, evaluate_every=1, acts={"evaluation #2": interrupt_twice})
    loop.step.engine.world_size = 2
    with pytest.raises(KeyboardInterrupt):
        run(loop)
    assert asked.of("saved") == []
