"""A sweep trains each member as it would be trained alone, goes on where it was interrupted, and compares on rows."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeing
import torch
from children import Children, Fault
from jobs import QUICK, TINY, metric, same_adapter, write_rows
from messages import refusal
from seeing_jobs import config, example

import finetune
from finetune import recipe
from finetune.choices import load_config
from finetune.errors import ConfigError, DataError, InUseError, OutOfMemoryError
from finetune.extras.sweeps import grid, running
from finetune.extras.sweeps.resident import ResidentBase
from finetune.extras.sweeps.view import SweepView
from finetune.model import build
from finetune.model.base import load_architecture
from finetune.report import plots
from finetune.report.terminal import Terminal
from finetune.storage import locks
from finetune.storage.files import write_bytes
from finetune.storage.rundir import SWEEP_TABLE, RunDirectory
from finetune.training import run as training_run
from finetune.training import sample_answers

JOB = [
    *QUICK, "training.max_steps=8", "data.eval_share=0.3", "adapter.rank=4", "adapter.dropout=0.1",
    "quantization.kind=none", "memory.checkpointing=none",
]  # fmt: skip
QUANTIZED = "quantization.kind=nf4"
RATES = {"training.learning_rate": ["1e-3", "3e-3", "1e-2", "1"]}


@pytest.fixture(scope="module", autouse=True)
def _hurried() -> Iterator[None]:
    """As `hurried` and `unwarmed` of conftest.py, but also for the sweeps that several tests look at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "training", lambda run: write_bytes(run.plot_file, b""))
        patch.setattr(sample_answers, "TOKENS", 1)
        patch.setattr(sample_answers, "QUESTIONS", 1)
        patch.setattr(training_run, "warm_up", lambda *_: {})
        yield


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Forty short rows, as an override."""
    lines = [{"prompt": f"Count to {number}.", "completion": " 1 2 3"[: 2 * number]} for number in range(1, 41)]
    file = write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", lines)
    return f"data.train={file}"


@pytest.fixture(scope="module")
def job(rows: str, shallow_base: Path) -> list[str]:
    return [*JOB, rows, f"model.name={shallow_base}"]


def swept(folder: Path, job: list[str], **options: Any) -> running.SweepTable:
    return running.sweep(TINY, [*job, QUANTIZED, f"output.dir={folder}"], RATES, **options)


@pytest.fixture(scope="module")
def killed(
    tmp_path_factory: pytest.TempPathFactory, job: list[str], children: Children
) -> tuple[Path, running.SweepTable]:  # fmt: skip
    """A sweep that was killed while it wrote the last checkpoint of the first member of the second round, and which
    another call ended; then.json is of between them.
    """
    folder = tmp_path_factory.mktemp("sweeps") / "sweep"
    rates = f"training.learning_rate={','.join(RATES['training.learning_rate'])}"
    ended = children.run(
        ["sweep", TINY, *job, QUANTIZED, f"output.dir={folder}", rates], Fault("rename", "step-00000008")
    )
    assert ended.code == -signal.SIGKILL, ended.output
    then = {"table": json.loads((folder / SWEEP_TABLE).read_text()), "compared": [*finetune.compare([folder]).runs]}
    (folder.parent / "then.json").write_text(json.dumps(then))
    return folder, swept(folder, job)


@pytest.mark.slow
def test_members_are_lone_runs_to_the_bit_up_to_where_they_are_stopped(
    killed: tuple[Path, running.SweepTable], tmp_path: Path, job: list[str]
) -> None:
    for setting in (killed[1].settings[1], killed[1].settings[-1]):  # in another process than the first, and stopped
        member, rate = RunDirectory(setting.runs[0]), setting.values["training.learning_rate"]
        lone, steps = RunDirectory(tmp_path / str(rate)), 8 * setting.share
        alone = load_config(TINY, [*job, QUANTIZED, f"output.dir={lone.path}", f"training.learning_rate={rate}"])
        with contextlib.suppress(ZeroDivisionError):
            finetune.train(
                alone, callbacks=[lambda metrics, last=steps: 1 / 0 if metrics["step"] == last < 8 else None]
            )
        assert len(metric(member, "loss")) == steps
        assert metric(member, "loss", "eval_loss") == metric(lone, "loss", "eval_loss")
        assert setting.state == "stopped" or same_adapter(member, lone)


@pytest.mark.slow
def test_half_is_stopped_and_the_table_says_why_and_where(killed: tuple[Path, running.SweepTable]) -> None:
    folder, table = killed
    states = {each.setting: (each.state, each.share) for each in table.settings}
    assert sorted(state for state, _ in states.values()) == ["finished", "finished", "stopped", "stopped"]
    assert states["learning_rate=1"] == ("stopped", 0.25)
    assert not [*folder.rglob("*-0.5000-*.npy")], "two that are left are not halved again"
    for setting in table.settings:
        run = RunDirectory(folder / setting.setting)
        assert run.finished == (setting.state == "finished")
        assert run.saved_steps[-1] == 8 * setting.share
        assert setting.loss is not None
    best, second = table.settings[:2]
    assert [one["share"] for one in best.compared] == [0.25, 1.0]
    assert best.loss < second.loss  # type: ignore[operator]
    assert json.loads((folder / SWEEP_TABLE).read_text()) == table.as_dict()
    note = "one seed was trained, so what another seed would change is not in the intervals"
    assert table.as_dict()["note"] == note
    assert SweepView(table).values()["verdict"].endswith(f"; {note}")


@pytest.mark.parametrize(
    ("count", "said"), [(2, "no winner: "), (6, "winner: learning_rate=1e-3, on 6 evaluation rows")]
)
def test_the_verdict_says_that_few_rows_cannot_tell_settings_apart(
    count: int, said: str, tmp_path: Path, job: list[str]
) -> None:
    members = grid.members(TINY, [*job, f"output.dir={tmp_path}"], {"training.learning_rate": ["1e-2", "1e-3"]})
    worse, better = (np.tile([loss, 10.0], (1, count, 1)) for loss in (30.0, 20.0))
    scores = {members[0].setting: worse, members[1].setting: better}
    table = running._Sweep(tmp_path, members, True, Terminal(), scores={1.0: scores})._table()
    verdict = SweepView(table).values()["verdict"]
    assert [each.loss for each in table.settings] == [2.0, 3.0]
    assert verdict.startswith(said)
    few = "learning_rate=1e-3, learning_rate=1e-2 cannot be told apart on fewer than 6 evaluation rows"
    assert table.undecided == ("" if count == 6 else few)
    assert verdict.endswith("not in the intervals" if count == 6 else "(2 evaluation rows)")


@pytest.mark.slow
def test_the_loss_of_the_best_is_that_of_its_own_evaluation(killed: tuple[Path, running.SweepTable]) -> None:
    folder, table = killed
    last = metric(RunDirectory(folder / table.settings[0].setting), "eval_loss")[-1]
    assert table.settings[0].loss == pytest.approx(last, rel=1e-6)


@pytest.mark.slow
def test_a_sweep_that_is_done_trains_nothing_again(
    killed: tuple[Path, running.SweepTable], monkeypatch: pytest.MonkeyPatch, job: list[str]
) -> None:
    folder, table = killed
    monkeypatch.setattr(recipe, "train", lambda *_, **__: pytest.fail("a member was trained again"))
    assert swept(folder, job).as_dict() == table.as_dict()


@pytest.mark.slow
def test_values_are_added_to_a_sweep_that_has_ended(tmp_path: Path, job: list[str]) -> None:
    """Its members have no checkpoint of the shares after which more settings are halved, nor has a lone run."""
    arguments = [*job, "training.max_steps=2", f"output.dir={tmp_path / 'sweep'}"]
    [(key, rates)] = RATES.items()
    [first, *_] = grid.members(TINY, arguments, RATES)
    finetune.train(first.config)
    before = running.sweep(TINY, arguments, {key: rates[:2]})
    assert [each.state for each in before.settings] == ["finished"] * 2
    after = running.sweep(TINY, arguments, {key: rates[:3]})
    losses = {each.setting: each.loss for each in after.settings}
    assert losses.items() >= {each.setting: each.loss for each in before.settings}.items()
    assert [each.state for each in after.settings] == ["finished"] * 3
    for each in after.settings:
        assert [event["event"] for event in RunDirectory(each.runs[0]).events()].count("started") == 1


def test_a_sweep_has_a_directory_of_its_own(job: list[str], run: RunDirectory) -> None:
    with refusal(ConfigError, "is a run; give the sweep a directory of its own"):
        swept(run.path, job)


def test_a_run_of_another_job_is_no_member_of_this_one(tmp_path: Path, job: list[str]) -> None:
    """Also where it ends just where this sweep would compare it."""
    arguments = [*job, "training.max_steps=4", f"output.dir={tmp_path / 'sweep'}"]
    [first, *_] = grid.members(TINY, arguments, RATES)
    with pytest.raises(ZeroDivisionError):
        finetune.train(first.config, callbacks=[lambda metrics: 1 / 0 if "loss" in metrics else None])
    with pytest.raises(finetune.FinetuneError, match=r"adapter.rank \(4 → 2\)"):
        running.sweep(TINY, [*arguments, "adapter.rank=2"], RATES)


@pytest.mark.slow
def test_members_are_compared_by_the_same_rows_whatever_batch_each_has(tmp_path: Path, job: list[str]) -> None:
    lines = [{"prompt": f"Count to {n}.", "completion": " 1" * (1 + n % 7)} for n in range(40)]
    arguments = [
        *job, f"data.train={write_rows(tmp_path / 'rows.jsonl', lines)}", "training.max_steps=null",
        "training.epochs=1", "data.eval_share=0.7", f"output.dir={tmp_path / 'sweep'}",
    ]  # fmt: skip
    keys = {"training.batch_size": ["6", "14"]}
    table = running.sweep(TINY, arguments, keys, full=True)
    for each in table.settings:
        [last] = metric(RunDirectory(each.runs[0]), "eval_loss")[-1:]
        assert each.loss == pytest.approx(last, rel=1e-6)
    first, *others = (np.load(file)[:, 1] for file in (tmp_path / "sweep" / "scores").glob("*.npy"))
    assert len(set(first)) > 1
    assert [counts.tolist() for counts in others] == [first.tolist()]


@pytest.mark.slow
def test_a_member_that_does_not_fit_is_reported_and_the_others_go_on(
    tmp_path: Path, job: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = recipe.train

    def too_large(config: Any, **options: Any) -> Any:
        if config.adapter.rank == 8:
            raise OutOfMemoryError("it needs 30.0 GiB of 24.0 GiB\nlower the rank")
        return train(config, **options)

    monkeypatch.setattr(recipe, "train", too_large)
    arguments = [*job, "training.max_steps=1", f"output.dir={tmp_path / 'sweep'}"]
    table = running.sweep(TINY, arguments, {"adapter.rank": ["8", "4"]})
    assert [(each.setting, each.state) for each in table.settings] == [("rank=4", "finished"), ("rank=8", "failed")]
    assert table.settings[1].why == "it needs 30.0 GiB of 24.0 GiB"
    assert table.winner == "rank=4"


def test_under_torchrun_it_is_refused(tmp_path: Path, job: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refusal(ConfigError, "without torchrun"):
        swept(tmp_path / "sweep", job)


def test_one_process_trains_a_sweep_and_fresh_moves_it_aside_once_that_has_ended(
    tmp_path: Path, job: list[str]
) -> None:
    """Rows that leave none to evaluate on end each call before anything is trained."""
    folder, few = tmp_path / "sweep", [*job, "data.train=builtin:conversations", "data.eval_share=1e-9"]
    (folder / "scores").mkdir(parents=True)
    with locks.locked(folder / "scores" / "lock", "the sweep", "or wait"):
        for fresh in (False, True):
            with pytest.raises(InUseError):
                swept(folder, few, fresh=fresh)
    with pytest.raises(DataError):
        swept(folder, few, fresh=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep", "sweep.1"]


@pytest.fixture(scope="module")
def with_seeds(tmp_path_factory: pytest.TempPathFactory, job: list[str]) -> tuple[SweepView, list[str]]:
    """A sweep of two settings and two seeds from Python, and the lines that it printed."""
    folder, output = tmp_path_factory.mktemp("sweeps") / "sweep", io.StringIO()
    config = load_config(TINY, [*job, "training.max_steps=1", "training.learning_rate=auto", f"output.dir={folder}"])
    keys = {"adapter.alpha": [32, 33], "training.seed": [1, 2]}
    with contextlib.redirect_stdout(output):
        view = finetune.sweep(config, keys, full=True)
    return view, output.getvalue().splitlines()


@pytest.mark.slow
def test_what_is_the_same_for_all_members_is_printed_once_and_the_rest_by_name(
    with_seeds: tuple[SweepView, list[str]],
) -> None:
    _, lines = with_seeds
    assert lines[0] == "sweep  2 settings x 2 seeds"
    [rate] = [line for line in lines if "training.learning_rate: " in line]
    assert "times 0.5 for a batch of 4" in rate
    for name in ("base", "device", "data", "evaluation set", "capacity"):
        assert len([line for line in lines if line.startswith(f"{name} ")]) == 1, name
    for name in ("alpha=32,seed=1", "alpha=33,seed=2"):
        assert f"{name}: trains from step 0 to 1 of 1" in lines
        [step] = [line for line in lines if line.startswith(f"{name}: step 1/1  loss ")]
        assert step.endswith("0:00 left")


@pytest.mark.slow
def test_seeds_are_averaged_and_too_few_differences_call_no_winner(with_seeds: tuple[SweepView, list[str]]) -> None:
    view, _ = with_seeds
    assert [len(each.runs) for each in view.table.settings] == [2, 2]
    losses = [metric(RunDirectory(run), "eval_loss")[-1] for run in view.table.settings[0].runs]
    assert view.table.settings[0].loss == pytest.approx(sum(losses) / 2, rel=1e-6)
    compared = view.table.settings[0].compared
    assert [(one["run"], one["share"]) for one in compared] == [(run, 1.0) for run in view.table.settings[0].runs]
    assert [one["loss"] for one in compared] == pytest.approx(losses, rel=1e-6)
    assert isinstance(view, SweepView)
    assert (view.winner is None) == ("cannot be told apart on these rows and seeds" in view.table.undecided)
    assert not view.table.note
    assert len(view.frame()) == 2


@pytest.mark.slow
def test_the_page_has_the_table_the_verdict_and_the_curves(
    killed: tuple[Path, running.SweepTable], tmp_path: Path
) -> None:
    view = SweepView(killed[1])
    view.write(str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    for each in view.table.settings:
        assert each.setting in page
    assert view.values()["verdict"] in page
    chart = view.charts()[0]
    assert chart["title"] == "Loss above the best, by learning_rate"
    assert chart["labels"] == ["0.001", "0.003", "0.01", "1.0"], "by size, not by loss"
    high, low, value, stopped = (series["values"] for series in chart["tables"][0]["series"])
    by_rate = sorted(view.table.settings, key=lambda each: each.values["training.learning_rate"])
    best = chart["labels"].index(str(view.table.settings[0].values["training.learning_rate"]))
    assert (low[best], value[best], high[best]) == (0, 0, 0)
    assert all(below <= at <= above for below, at, above in zip(low, value, high, strict=True) if at is not None)
    assert [at is None for at in stopped] == [each.state != "stopped" for each in by_rate]


@pytest.mark.slow
def test_the_directory_of_a_sweep_is_compared_as_its_runs(
    killed: tuple[Path, running.SweepTable], run: RunDirectory
) -> None:
    folder, table = killed
    names = {each.setting for each in table.settings}
    found = finetune.compare([folder]).as_dict()
    assert set(found["runs"]) == names
    assert set(found["differences"]["training.learning_rate"]) == names
    assert set(finetune.compare([str(folder), run]).runs) == {*names, run.path.name}


@pytest.mark.slow
def test_a_killed_sweep_has_a_table_and_is_compared(killed: tuple[Path, running.SweepTable]) -> None:
    then = json.loads((killed[0].parent / "then.json").read_text())
    assert sorted(then["compared"]) == sorted(f"learning_rate={rate}" for rate in RATES["training.learning_rate"])
    assert then["table"]["undecided"].startswith("the sweep has not ended; ")
    assert then["table"]["winner"] is None
    settings = then["table"]["settings"]
    assert sorted((each["state"], each["share"], each["loss"] is None) for each in settings) == [
        ("stopped", 0.25, False), ("stopped", 0.25, False), ("waiting", 0.25, False), ("waiting", 0.25, False),
    ]  # fmt: skip


def test_a_sweep_without_a_trained_member_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "scores").mkdir()
    with pytest.raises(finetune.FinetuneError, match="no member of this sweep has been trained yet"):
        finetune.compare([tmp_path])


def test_a_resident_base_gives_each_training_its_own_modules_around_the_same_weights() -> None:
    config = load_config(TINY)
    architecture = load_architecture(config.model)
    bases, blueprint = ResidentBase(), build.blueprint(config, architecture, "sdpa")
    first, second = (bases.load(blueprint, torch.device("cpu")) for _ in range(2))
    assert first is not second
    pairs = zip(first.named_parameters(), second.named_parameters(), strict=True)
    assert all(one is other for (_, one), (_, other) in pairs)
    exact = config.changed({"training.precision": "fp32", "quantization.kind": "none"})
    for changed in (exact, exact.changed({"training.precision": "bf16"})):
        base = bases.load(build.blueprint(changed, architecture, "sdpa"), torch.device("cpu"))
        assert base.dtype == getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[changed.training.precision])


@pytest.mark.long
def test_members_are_compared_on_rows_with_images(tmp_path: Path) -> None:
    seeing.base(tmp_path / "base", "qwen3_vl")
    seeing.rows(tmp_path, [example(tmp_path, number) for number in range(6)])
    held_out = seeing.rows(tmp_path, [example(tmp_path, number) for number in range(6, 9)], "held_out.jsonl")
    job = config(tmp_path, **{"data.eval": str(held_out)})
    table = running.sweep(job.model_dump(), [], {"training.learning_rate": ["1e-4", "2e-2"]})
    better = [one for one in table.settings if one.loss is not None]
    assert len(better) == 2
    for one in better:
        [name] = one.runs
        losses = metric(RunDirectory(tmp_path / "run" / name), "eval_loss")
        assert losses[-1] == pytest.approx(one.loss, rel=1e-4)
