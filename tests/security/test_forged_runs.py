"""Run directories that are damaged or forged: what reads them succeeds or ends in an error of ours, and never hangs.

Every file of a finished run is mutated some dozen times, and what stands there is replaced by things that are no
files. Each command's reading is called in this process, up to where weights would be loaded.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import QUICK, TINY, sampled
from rich.console import Console
from signed import sign

import finetune
from finetune import cli
from finetune.api import compare
from finetune.config import Config
from finetune.data import fingerprint
from finetune.doctor import run_check as run_directory
from finetune.errors import ArtifactError, FinetuneError
from finetune.inference import answers
from finetune.lifecycle import provenance
from finetune.lifecycle import resume as resuming
from finetune.model.source.tokenizer import load_tokenizer
from finetune.report import page, plots
from finetune.report.result import Result
from finetune.report.scores import Scores
from finetune.report.terminal import Terminal
from finetune.settings import load_config
from finetune.storage import checkpoint
from finetune.storage.files import write_json, write_lines
from finetune.storage.rundir import RunDirectory
from finetune.training import state
from finetune.training.progress import read_progress

SEED = 14
WEIGHTS = ".safetensors"
# Written for others; nothing here reads them before it loads the model or tokenizer that they belong to.
NOT_READ = ("README.md", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "lock", "latest")
# Values that a reader may not expect: of another type, out of every range, or harmful where they are shown.
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 3.5, -0.0, 1e308, 5e-324, math.nan, math.inf, 2**53, 2**63, 10**400, 99999999999999,
    "", "x", "3", "../../x", "/etc/passwd", "a\x00b", "\x1b[2J\x1b]0;x\x07", "\ud800", "<script>alert(1)</script>",
    "x" * 5000, [], {}, [[]], [None], {"": None}, {"x": {"y": [1]}}, {"step": 1}, [{"messages": 3}],
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> RunDirectory:
    """A run with every file that a run can have, and one checkpoint."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    job = ["training.max_steps=2", "training.eval_every=1", "output.save_every=2", "output.best=false",
           "output.merge=true",
           f"data.train={rows_file}", "data.eval_share=0.2", f"output.dir={directory}"]  # fmt: skip
    run = finetune.train(load_config(TINY, [*(key for key in QUICK if "merge" not in key), *job])).run
    figure = {"value": 3.5, "low": 3.0, "high": 4.0}
    models = {"base": figure, "adapter": {**figure, "difference": {"value": -0.5, "low": None, "high": None}}}
    loss = {"name": "loss", "better": "lower", "rows": 4, "models": models}
    write_json(run.eval_file, {"steps": 2, "measures": [loss], "interval": "of 95%", "notes": [], "settings": {}})
    return run


@pytest.fixture(scope="module")
def readers(whole: RunDirectory) -> dict[str, Callable[[RunDirectory], object]]:
    """What the commands read of a run before they load weights or train, by command."""
    config = whole.config()
    made_with = checkpoint.manifest_of(whole.complete_checkpoints()[-1])["made_with"]
    tokenizer = load_tokenizer(config.model, config.data)

    def report(run: RunDirectory) -> None:
        RunDirectory.open(run.path)
        page.write(run)
        assert harmless(run.report_file.read_text(encoding="utf-8"))

    def show(run: RunDirectory) -> None:
        console = Console(file=io.StringIO(), width=100)
        terminal = Terminal(console=console)
        terminal.answers(run)
        terminal.finished(run)
        json.dumps(Result(run).summary())
        if scores := Scores.read(run):
            terminal.show(scores)
        compared = compare([whole, run])
        terminal.show(compared)
        assert printable(console.file.getvalue())
        compared.write(run.path / "compared.html")
        assert harmless((run.path / "compared.html").read_text(encoding="utf-8"))

    def doctor(run: RunDirectory) -> None:
        console = Console(file=io.StringIO(), width=100)
        Terminal(console=console).show(run_directory.examine(run.path))
        assert printable(console.file.getvalue())

    def resume(run: RunDirectory) -> None:
        if run.has_results:
            provenance.refuse_changes(config, run)
            resuming._wants_more_steps(config.training, run)
        _ = run.finished, run.steps_done, run.saved_steps
        start = resuming.find(run)
        provenance.changes_since(run, start.checkpoint, made_with)
        if start.checkpoint:
            read_progress(start.checkpoint)
            state.restore_random(start.checkpoint, 0)
        run.forget_metrics_after(start.step)
        run.create(config)

    def answer(run: RunDirectory) -> None:
        """As merge, generate and eval do."""
        _ = run.data(RunDirectory.open(run.path).config().data)
        with run.locked():
            fingerprint.check(tokenizer, run.adapter)
            fingerprint.check(tokenizer, run.merged)

    def plot(run: RunDirectory) -> None:
        plots.training(run)

    return {"report": report, "plot": plot, "show": show, "doctor": doctor, "resume": resume, "answer": answer}


def printable(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


def harmless(markup: str) -> bool:
    """Whether the page has no scripts but the two that draw its curves, and no control characters."""
    own = 2 * ('id="curves"' in markup)
    return markup.count("<script") == own and not any(ord(letter) < 32 and letter not in "\t\n" for letter in markup)


class Forger:
    """Mutates the files of a copy of a run, one at a time, and puts them back."""

    def __init__(self, whole: RunDirectory, folder: Path) -> None:
        self.run = RunDirectory(folder / "run")
        self._whole = whole.path
        self.files = sorted(
            path.relative_to(whole.path)
            for path in whole.path.rglob("*")
            if path.is_file() and path.suffix not in (".png", ".html") and path.name not in NOT_READ
        )
        self.chance = random.Random(SEED)
        shutil.copytree(whole.path, self.run.path)

    def undo(self, name: Path) -> None:
        """Put back what `mutate` and the readers changed."""
        for changed in {name, name.with_name("manifest.json"), Path("config.yaml"), Path("metrics.jsonl")}:
            if (self._whole / changed).exists():
                shutil.copyfile(self._whole / changed, self.run.path / changed)

    def restore(self) -> None:
        """As the run was, whatever was made of it."""
        before = {path.relative_to(self._whole) for path in self._whole.rglob("*")}
        for path in sorted(self.run.path.rglob("*"), reverse=True):
            name = path.relative_to(self.run.path)
            is_as_before = name in before and not path.is_symlink() and path.is_dir() == (self._whole / name).is_dir()
            if not is_as_before or not (path.is_file() or path.is_dir()):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for name in sorted(before):
            theirs, ours = self._whole / name, self.run.path / name
            if theirs.is_dir():
                ours.mkdir(exist_ok=True)
            elif not ours.exists() or _stamp(ours) != _stamp(theirs):
                shutil.copy2(theirs, ours)

    def mutate(self, name: Path) -> str:
        """Change one file in one way; what was done."""
        path = self.run.path / name
        content = path.read_bytes()
        kind = self.chance.choice(["value"] * 8 + ["bytes", "cut", "empty", "lines", "swap"])
        if path.suffix == WEIGHTS and kind in ("value", "lines"):
            kind = "bytes"
        if kind == "value":
            done = self._change_values(path, content)
        elif kind == "lines":
            lines = content.splitlines(keepends=True)
            path.write_bytes(b"".join(self.chance.choices(lines, k=len(lines) + 1)) if lines else b"{}\n[]\n")
            done = "lines in another order"
        elif kind == "swap":
            other = self.chance.choice(self.files)
            path.write_bytes((self._whole / other).read_bytes())
            done = f"what {other} holds"
        else:
            changed = bytearray(content)
            if kind == "bytes" and changed:
                for _ in range(self.chance.randint(1, 4)):
                    changed[self.chance.randrange(len(changed))] = self.chance.randrange(256)
            else:
                del changed[self.chance.randrange(len(changed) + 1) if kind == "cut" else 0 :]
            path.write_bytes(changed)
            done = kind
        if name.parts[0] == "checkpoints" and self.chance.random() < 0.8:
            # Mostly with a manifest that fits, unless the change made that impossible.
            with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError, OSError, RecursionError):
                sign(path.parent)
        return done

    def _change_values(self, path: Path, content: bytes) -> str:
        """Change a value or two of JSON, or of one line of JSON; of anything else, append some."""
        try:
            if path.suffix == ".jsonl":
                lines = [json.loads(line) for line in content.splitlines()]
                done = self._change(lines)
                path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            else:
                value = [json.loads(content)]
                done = self._change(value)
                path.write_text(json.dumps(value[0]) if value else "")
        except ValueError:
            path.write_bytes(content + b"\n" + json.dumps(self.chance.choice(ODD)).encode())
            done = "appended"
        return done

    def _change(self, value: Any) -> str:
        """Change something below `value`, a list: a key dropped or added, an item of another kind, or nested deep."""
        steps: list[Any] = []
        while isinstance(value, (dict, list)) and value:
            key = self.chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
            steps.append(key)
            if not isinstance(value[key], (dict, list)) or not value[key] or self.chance.random() < 0.15:
                break
            value = value[key]
        if not steps:
            return "nothing to change"
        how = self.chance.choice(["odd", "odd", "odd", "drop", "add", "deep"])
        if how == "drop":
            del value[steps[-1]]
        elif how == "add":
            new = self.chance.choice(ODD)
            if isinstance(value, dict):
                value[self.chance.choice(["new", "\x1b[31m", "memory", "loss", "eval_loss", "step"])] = new
            else:
                value.append(new)
        elif how == "deep":
            nested: Any = 1
            for _ in range(self.chance.choice([10, 100, 400])):
                nested = [nested] if self.chance.random() < 0.5 else {"x": nested}
            value[steps[-1]] = nested
        else:
            value[steps[-1]] = self.chance.choice(ODD)
        return f"{how} at {steps}"


def _stamp(file: Path) -> tuple[int, int]:
    return file.stat().st_size, file.stat().st_mtime_ns


@pytest.fixture
def forger(whole: RunDirectory, tmp_path: Path) -> Forger:
    return Forger(whole, tmp_path)


@contextlib.contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """What waits for a pipe waits for good: end it."""

    def stop(*_: object) -> None:
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def read(run: RunDirectory, what: str, reader: Callable[[RunDirectory], object]) -> str:
    """ "read", or the kind of error of ours; fails the test for any other."""
    try:
        with no_longer_than(600), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader(run)
    except FinetuneError as error:
        return type(error).__name__
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {str(error)[:300]}") from error
    return "read"


RECORDS = ("answers.json", "environment.json", "eval.json", "forecast.json", "data.json", "merge.json", "config.yaml")
# What reads which files. A mutation is read by one of them; the plot comes seldom.
AREAS: dict[str, tuple[Callable[[Path], bool], list[str]]] = {
    "lines": (lambda name: name.suffix == ".jsonl", [*["report", "show", "doctor", "resume"] * 3, "plot"]),
    "records": (lambda name: name.name in RECORDS, ["report", "show", "doctor", "resume", "answer"]),
    "checkpoint": (lambda name: name.parts[0] == "checkpoints", ["resume", "resume", "doctor"]),
    "exports": (
        lambda name: name.parts[0] in ("adapter", "merged") and name.name != "merge.json",
        ["doctor", "answer"],
    ),
}
MUTATIONS = 25


@pytest.mark.parametrize("area", AREAS)
def test_a_forged_file_is_read_or_refused_and_nothing_else(
    forger: Forger, readers: dict[str, Callable[[RunDirectory], object]], area: str
) -> None:
    belongs, reading = AREAS[area]
    files = [name for name in forger.files if belongs(name)]
    assert files
    ended: Counter[str] = Counter()
    for number in range(MUTATIONS):
        name = files[number % len(files)]
        done = forger.mutate(name)
        command = forger.chance.choice(reading)
        ended[read(forger.run, f"{command} after {name}: {done}", readers[command])] += 1
        forger.undo(name)
    assert ended["read"] > MUTATIONS / 20
    assert area == "lines" or ended["ArtifactError"] > MUTATIONS / 20


# -- things that are no files ------------------------------------------------------------------------------------------


def _folder(path: Path) -> None:
    path.mkdir()


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _empty(path: Path) -> None:
    path.touch()


def _nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


IN_ITS_PLACE = {"folder": _folder, "loop": _loop, "pipe": os.mkfifo, "empty file": _empty, "dangling link": _nowhere}


@pytest.mark.parametrize("kind", sampled(IN_ITS_PLACE, "folder", "pipe", "empty file"))
def test_a_pipe_or_folder_instead_of_a_file_is_named_without_blocking(
    forger: Forger, readers: dict[str, Callable[[RunDirectory], object]], kind: str
) -> None:
    for name in [*forger.files, Path("lock"), Path("training.png"), Path("report.html"), Path("checkpoints/latest")]:
        path = forger.run.path / name
        path.unlink()
        IN_ITS_PLACE[kind](path)
        commands = {command for belongs, commands in AREAS.values() if belongs(name) for command in commands}
        for command in sorted(commands or readers.keys()):
            if command != "plot":
                read(forger.run, f"{command} with a {kind} in the place of {name}", readers[command])
        forger.restore()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_unreadable_files_are_reported(forger: Forger, readers: dict[str, Callable[[RunDirectory], object]]) -> None:
    for path in [forger.run.path, *forger.run.path.rglob("*"), *[*forger.run.path.parents][:4]]:
        path.chmod(path.stat().st_mode | 0o055)
    for command in ("report", "show", "doctor"):
        assert read(forger.run, command, readers[command]) == "read"
    for name in forger.files:
        (forger.run.path / name).chmod(0)
        os.seteuid(65534)
        try:
            for command in ("report", "show", "doctor"):
                read(forger.run, f"{command} without the right to read {name}", readers[command])
        finally:
            os.seteuid(0)
        (forger.run.path / name).chmod(0o600)


# -- training on top of what was forged --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory, rows_file: Path, shallow_base: Path) -> RunDirectory:
    """Two steps of a job of four. Do not write to it."""
    job = ["output.save_every=1", "training.max_steps=2", "output.best=false", f"data.train={rows_file}",
           f"model.name={shallow_base}"]  # fmt: skip
    directory = tmp_path_factory.mktemp("half") / "run"
    return finetune.train(load_config(TINY, [*QUICK, *job, "data.eval_share=0.2", f"output.dir={directory}"])).run


@pytest.fixture
def unfinished(half: RunDirectory, tmp_path: Path, hurried: None) -> Config:
    """The job of four steps, two of which are done."""
    directory = shutil.copytree(half.path, tmp_path / "run")
    return half.config().changed({"training.max_steps": 4, "output.dir": str(directory)})


@pytest.mark.parametrize(
    "text",
    ["[", "[3]", '[{"question": "x", "reference": "y", "before": "z", "after": null, "messages": [{"role": 3}]}]'],
)
def test_forged_answers_do_not_stop_training_and_are_generated_again(
    unfinished: Config, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(unfinished.output.dir)
    before = run.answers()
    run.answers_file.write_text(text)
    monkeypatch.setattr(answers, "_QUESTIONS", len(before))
    assert finetune.train(unfinished).run.steps_done == 4
    assert [(row["question"], row["before"]) for row in run.answers()] == [
        (row["question"], row["before"]) for row in before
    ]
    assert all(row["after"] is not None for row in run.answers())


FORGERIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "another step": lambda state, progress: progress.update(global_step=3),
    "a counter of another type": lambda state, progress: progress.update(evaluations_without_gain="x"),
    "a generator": lambda state, progress: state["random"][0].update(torch="00"),
    "no generators": lambda state, progress: state.pop("random"),
    "a schedule": lambda state, progress: state["schedule"].update(step=3),
    "a rate": lambda state, progress: state["optimizer"]["groups"][0].update(lr="x"),
    "parameters": lambda state, progress: state["optimizer"]["groups"][0].update(params=[]),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_state_is_refused_before_the_first_step(unfinished: Config, forgery: str) -> None:
    run = RunDirectory(unfinished.output.dir)
    older, newest = run.complete_checkpoints()
    shutil.rmtree(older)
    files = [newest / "state.json", newest / "trainer_state.json"]
    values = [json.loads(file.read_bytes()) for file in files]
    FORGERIES[forgery](*values)
    for file, value in zip(files, values, strict=True):
        file.write_text(json.dumps(value))
    sign(newest)
    with pytest.raises(ArtifactError, match=newest.name):
        finetune.train(unfinished)
    assert max(line["step"] for line in run.metrics()) == 2


# -- a run that is not finished ----------------------------------------------------------------------------------------


def test_the_report_of_an_unfinished_run_is_marked_unfinished(
    forger: Forger, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = forger.run
    rows = [{**row, "after": None} for row in run.answers()]
    run.answers_file.write_text(json.dumps(rows))
    write_lines(run.events_file, run.events()[:1])
    for path in (run.adapter, run.merged, run.checkpoints):
        shutil.rmtree(path)
    for metrics in ("", run.metrics_file.read_text()):
        run.metrics_file.write_text(metrics)
        monkeypatch.setattr(sys, "argv", ["finetune", "report", str(run.path)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        out, err = capsys.readouterr()
        assert out == f"{run.report_file}\n"
        assert "is not finished" in err
        page_text = run.report_file.read_text()
        assert "not finished" in page_text
        assert "before training" in page_text
        assert "after training" not in page_text


def test_a_finished_run_is_not_called_unfinished(whole: RunDirectory) -> None:
    assert "not finished" not in whole.report_file.read_text()
