"""The run directory: incomplete data never looks finished, and complete data survives failures."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import refusal

from finetune.config import Config, ModelSection, OutputSection
from finetune.errors import ArtifactError, MachineError
from finetune.storage import records
from finetune.storage.files import append_line, dispose, staged, write_json, write_text
from finetune.storage.rundir import RunDirectory, checkpoint_step


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create(Config(output=OutputSection(dir=str(run.path))))
    return run


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- creating and opening --------------------------------------------------------------------------------------------


def test_a_run_keeps_the_config_it_was_started_with_and_its_files_if_it_is_created_again(tmp_path: Path) -> None:
    config = Config(model=ModelSection(name="no", revision="1234567e89"), output=OutputSection(dir="elsewhere"))
    run = RunDirectory(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    run.create(config)
    assert RunDirectory.open(run.path).config() == config
    run.event("started")
    run.create(config)
    assert [line["event"] for line in run.events()] == ["started"]


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_without_a_config_is_not_a_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with refusal(ArtifactError, "config.yaml"):
        RunDirectory.open(tmp_path / name)


def test_a_run_that_cannot_be_created_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refusal(MachineError, "`output.dir`"):
        RunDirectory(tmp_path / "file" / "run").create(Config())


# -- directories that appear when they are whole ---------------------------------------------------------------------


def test_a_staged_directory_appears_when_the_block_ends_and_leaves_no_file_open(tmp_path: Path) -> None:
    target, before = tmp_path / "deep" / "adapter", os.listdir("/proc/self/fd")
    with staged(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "weights").write_text("new")
        assert not target.exists()
    assert contents(target) == {"sub/weights": "new"}
    assert [path.name for path in target.parent.iterdir()] == ["adapter"]
    assert os.listdir("/proc/self/fd") == before


def test_only_the_same_inputs_complete_an_interrupted_staged_directory(tmp_path: Path) -> None:
    """After a kill or Ctrl-C the block continues; after an error or with other inputs it starts afresh."""
    target = tmp_path / "merged"

    def stage(seed: int, error: BaseException | None = None) -> set[str]:
        with contextlib.suppress(KeyboardInterrupt, OSError), staged(target, {"seed": seed}) as folder:
            earlier = {path.name for path in folder.iterdir()} - {"made_from.json"}
            write_text(folder / str(seed), "")
            if error:
                raise error
        return earlier

    assert stage(1, KeyboardInterrupt()) == set()
    assert stage(1, KeyboardInterrupt()) == {"1"}
    assert stage(2, KeyboardInterrupt()) == set()
    assert stage(2, OSError()) == {"2"}
    assert stage(2) == set()
    assert [path.name for path in target.iterdir()] == ["2"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
def test_a_failed_block_publishes_nothing_and_keeps_the_earlier_directory(
    error: type[BaseException], tmp_path: Path
) -> None:
    target = tmp_path / "adapter"

    def fail() -> None:
        with staged(target) as folder:
            (folder / "weights").write_text("half")
            raise error

    for earlier in ({}, {"weights": "old"}):
        with pytest.raises(error):
            fail()
        assert contents(target) == earlier
        assert not issubclass(error, Exception) or list(tmp_path.iterdir()) == [target] * bool(earlier)
        with staged(target) as folder:
            assert list(folder.iterdir()) == []
            (folder / "weights").write_text("old" if not earlier else "new")
            assert contents(target) == earlier, "replaced whole"
    assert contents(tmp_path) == {"adapter/weights": "new"}


def test_a_failed_rename_keeps_the_earlier_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rename of a publication fails in turn, until none does."""
    target = tmp_path / "adapter"
    with staged(target) as folder:
        (folder / "weights").write_text("old")
    calls = Calls(monkeypatch)

    def publish() -> None:
        with staged(target) as folder:
            (folder / "weights").write_text("new")

    for failing in range(1, 10):
        calls.start(failing)
        try:
            publish()
        except OSError:
            assert contents(target) == {"weights": "old"}, f"rename {failing} failed and the earlier version is gone"
        else:
            break
    assert failing > 1
    assert contents(tmp_path) == {"adapter/weights": "new"}


def test_files_are_fsynced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system calls are recorded in their order."""
    calls = Calls(monkeypatch)
    with staged(tmp_path / "adapter") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("a")
        (folder / "b").write_text("b")
    publish = calls.asked.index(("rename", str(tmp_path / "adapter")))
    before = {Path(path).name for what, path in calls.asked[:publish] if what == "fsync"}
    assert {"a", "b"} <= before
    assert ("fsync", str(tmp_path)) in calls.asked[publish:]


class Calls:
    """Records each fsync and rename, and lets the n-th rename fail, as on a full or broken disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, str]] = []
        self.start(failing=0)
        fsync = os.fsync
        monkeypatch.setattr(os, "fsync", lambda file: (self._note_fsync(file), fsync(file))[1])
        for name in ("rename", "replace"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda path, to, real=real: (self._note_rename(to), real(path, to))[1])

    def start(self, failing: int) -> None:
        self.renames, self.failing = 0, failing

    def _note_fsync(self, file: int) -> None:
        self.asked.append(("fsync", os.readlink(f"/proc/self/fd/{file}")))

    def _note_rename(self, to: Any) -> None:
        self.renames += 1
        self.asked.append(("rename", str(to)))
        if self.renames == self.failing:
            raise OSError("no space")


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_are_listed_oldest_first_by_step(run: RunDirectory) -> None:
    assert run.complete_checkpoints() == []
    for step in (900, 20, 100_000):
        with staged(run.checkpoint(step)) as folder:
            (folder / "weights").write_text("x")
    assert [checkpoint_step(path) for path in run.complete_checkpoints()] == [20, 900, 100_000]


def test_other_files_beside_checkpoints_are_not_listed(run: RunDirectory) -> None:
    with staged(run.checkpoint(5)):
        pass
    for name in ("step-00000009.incomplete", "step-00000009.replaced", "step-x", "step-00000009.bak"):
        (run.checkpoints / name).mkdir()
    (run.checkpoints / "step-00000010").write_text("a file")
    assert run.complete_checkpoints() == [run.checkpoint(5)]


# -- lines that grow -------------------------------------------------------------------------------------------------


def test_an_event_has_its_name_time_and_details(run: RunDirectory) -> None:
    assert (run.events(), run.metrics(), run.finished) == ([], [], False)
    run.event("saved", step=5, seconds=0.1)
    run.event("finished")
    first, second = run.events()
    assert (first["event"], first["step"], first["seconds"]) == ("saved", 5, 0.1)
    assert 0 <= second["time"] - first["time"] < 60


@pytest.mark.parametrize(
    ("names", "finished"),
    [
        ("started", False), ("started saved", False), ("started finished", True), ("started finished merged", True),
        ("started finished resumed", False), ("started finished started saved", False), ("started stopped", False),
    ],
)  # fmt: skip
def test_a_run_is_finished_when_its_last_event_says_so(names: str, finished: bool, run: RunDirectory) -> None:
    for name in names.split():
        run.event(name)
    assert run.finished is finished
    assert RunDirectory.open(run.path).finished is finished


@pytest.mark.parametrize("half", ['{"time": 5, "event": "finis', "{", '{"time": 5, "event": "saved", "step"', "\0\0\0"])
def test_a_torn_line_is_skipped_and_a_line_written_after_it_kept(half: str, run: RunDirectory) -> None:
    run.event("started")
    with open(run.events_file, "a") as file:
        file.write(half)
    assert [line["event"] for line in run.events()] == ["started"]
    assert not run.finished
    run.event("finished")
    assert [line["event"] for line in run.events()] == ["started", "finished"]
    assert run.finished


_LINE = st.dictionaries(st.text(max_size=5), st.text(max_size=8) | st.integers() | st.none(), max_size=3)


@settings(max_examples=60)
@given(lines=st.lists(_LINE, max_size=5), cut=st.integers(0, 200))
def test_a_truncated_file_yields_its_complete_lines(
    lines: list[dict[str, Any]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    path.unlink(missing_ok=True)
    for line in lines:
        append_line(path, line)
    assert records.read_lines(path, records.OBJECT).rows == lines
    if not lines:
        return
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    found = records.read_lines(path, records.OBJECT).rows
    assert found == lines[: len(found)]
    assert len(found) >= whole[:cut].count(b"\n")


def evaluated(step: int) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {"step": step, "eval_loss": step / 3, "memory": {}}


def test_metrics_of_repeated_steps_and_a_torn_line_are_dropped(run: RunDirectory) -> None:
    run.forget_metrics_after(-1)
    for step in (1, 2, 3, 4, 2):
        append_line(run.metrics_file, evaluated(step))
    with open(run.metrics_file, "a") as file:
        file.write('{"step": 2, "lo')
    run.forget_metrics_after(2)
    append_line(run.metrics_file, evaluated(3))
    assert run.metrics() == [evaluated(1), evaluated(2), evaluated(2), evaluated(3)]
    run.forget_metrics_after(-1)
    assert run.metrics() == []


# -- small files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt("Ctrl-C in answers.json")])
def test_a_file_is_replaced_atomically(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers.json"
    write_text(path, "old")

    def full(descriptor: int) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises((MachineError, KeyboardInterrupt), match=r"answers\.json"):
            write_text(path, "new and longer")
    assert contents(tmp_path) == {"answers.json": "old"}
    brought: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (brought.append(os.fstat(file).st_size), fsync(file))[1])
    write_text(path, "new – ünïcode")
    assert brought == [17], "before its rename"
    assert path.read_text(encoding="utf-8") == "new – ünïcode"
    assert [found.name for found in tmp_path.iterdir()] == ["answers.json"]


def test_a_pipe_is_written_directly() -> None:
    out, into = os.pipe()
    with open(out) as read:
        with open(into, "w"):
            write_text(Path(f"/dev/fd/{into}"), "text")
        assert read.read() == "text"


def test_a_folder_is_not_replaced_by_a_file_and_a_circular_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plots").mkdir()
    with refusal(MachineError, "plots could not be written: it is a folder; name a file"):
        write_text(tmp_path / "plots", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["plots"]
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with refusal(MachineError, "circle:"):
        RunDirectory(tmp_path / "circle").claim()


def test_json_with_nan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": [1, 2.5, None]})
    assert json.loads(path.read_text()) == {"a": [1, 2.5, None]}
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": [1, 2.5, None]}


# -- starting over ---------------------------------------------------------------------------------------------------


def test_an_earlier_run_is_moved_aside_with_all_its_files(run: RunDirectory) -> None:
    earlier = []
    for number in (1, 2, 3):
        run.create(Config())
        run.event("started", number=number)
        with staged(run.checkpoint(number)) as folder:
            (folder / "weights").write_text(str(number))
        earlier.append(contents(run.path))
        assert run.move_aside() == run.path.with_name(f"run.{number}")
        assert not run.path.exists()
    assert [contents(run.path.with_name(f"run.{number}")) for number in (1, 2, 3)] == earlier


# -- what a kill left ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "at_first", "after"),
    [
        ({"adapter.incomplete": "half"}, {}, {}),
        ({"adapter.replaced": "old"}, {"adapter/weights": "old"}, {"adapter/weights": "old"}),
        ({"adapter": "new", "adapter.replaced": "old"}, {"adapter/weights": "new"}, {"adapter/weights": "new"}),
    ],
    ids=["killed in the block", "killed between the renames", "killed after both renames"],
)
def test_staging_first_completes_or_undoes_an_interrupted_replacement(
    left: dict[str, str], at_first: dict[str, str], after: dict[str, str], tmp_path: Path
) -> None:
    for name, text in left.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(text)
    with contextlib.suppress(ZeroDivisionError), staged(tmp_path / "adapter") as folder:
        assert list(folder.iterdir()) == []
        assert contents(tmp_path) == at_first
        raise ZeroDivisionError
    assert contents(tmp_path) == after


def test_a_directory_is_disposed_of_despite_leftovers(tmp_path: Path) -> None:
    for name in ("step-00000001", "step-00000001.incomplete"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("x")
    dispose(tmp_path / "step-00000001")
    assert list(tmp_path.iterdir()) == []


def test_saved_steps_count_from_the_last_fresh_start(run: RunDirectory) -> None:
    assert run.saved_steps == []
    for name in ("started", "saved", "resumed", "saved"):
        run.event(name, step=len(run.events()))
    assert run.saved_steps == [1, 3]
    run.event("started")
    assert run.saved_steps == []


def test_leftovers_are_removed_without_following_links(run: RunDirectory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("x")
    run.checkpoints.mkdir()
    for folder in (run.path, run.checkpoints):
        (folder / "file.incomplete").write_text("half")
        (folder / "link.incomplete").symlink_to(elsewhere)
        (folder / "folder.incomplete").mkdir()
        (folder / "folder.incomplete" / "half").write_text("half")
    run.remove_leftovers()
    assert [path.name for path in run.path.rglob("*.incomplete")] == []
    assert contents(elsewhere) == {"mine": "x"}


def test_a_leftover_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    (tmp_path / "latest.incomplete").symlink_to("mine")
    write_text(tmp_path / "latest", "step-00000001\n")
    assert contents(tmp_path) == {"mine": "x", "latest": "step-00000001\n"}


def test_a_cleanup_error_does_not_hide_the_error_of_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any, **more: Any) -> None:
        raise OSError("input/output error")

    def fail() -> None:
        with staged(tmp_path / "adapter"):
            monkeypatch.setattr(os, "rmdir", failing)
            raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        fail()


def test_appended_lines_are_separated_and_a_failed_append_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    for step in range(3):
        append_line(file, {"step": step})
    assert file.read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'
    with refusal(MachineError, "gone/events.jsonl"):
        append_line(tmp_path / "gone" / "events.jsonl", {})
