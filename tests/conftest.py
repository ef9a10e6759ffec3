"""What every test starts from: one thread, no network, an empty cache, and a small run that several tests look at."""

import fcntl
import gc
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator

# Before torch is imported: two busy processes on two cores would otherwise spin on each other's locks.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read by `datasets` on import: what the tests prepare is kept for this session, and not among the user's own.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="finetune-tests-")

from pathlib import Path

import hypothesis
import pytest

from finetune.runtime import libraries

with libraries.importing():  # as the command line does
    import torch
    from children import Children
    from jobs import QUICK, TINY, sampled
    from safetensors.torch import load_file, save_file
    from seeing_jobs import AFTER, SeeingRun

    import finetune
    from finetune import cli
    from finetune.choices import load_config
    from finetune.config import Config
    from finetune.forecast import kept_plan
    from finetune.forecast.cache import Kept
    from finetune.model.source.locate import BUILTIN_BASE, locate
    from finetune.report import plots
    from finetune.storage.files import write_bytes
    from finetune.storage.rundir import RunDirectory
    from finetune.training import run as training_run
    from finetune.training import sample_answers
    from finetune.training.job import TrainingJob
    from finetune.training.loop import Loop

pytest_plugins = ["messages"]

# The same examples in each run, however slow the machine is.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")

# Nothing here outlives a loss of power, which alone fsync is for, and waiting for a disk is a tenth of a short run.
os.fsync = lambda descriptor: None

# Folders and files whose tests take seconds each: processes that are started and killed, whole trainings.
_SLOW = {
    "faults", "golden", "test_damaged_runs.py", "test_hub.py", "test_notebooks.py", "test_parity.py",
    "test_plain_prompts.py", "test_restart.py", "test_startup.py", "test_triton_kernels.py",
}  # fmt: skip


# Those whose longest tests would keep one process busy after the others are done, were they started last.
_FIRST = {
    "test_gpu_bodies.py", "test_gpu_slices.py", "test_model_doctor.py", "test_notebooks.py", "test_startup.py",
    "test_triton_kernels.py",
}  # fmt: skip
assert {path.name for path in Path(__file__).parent.rglob("*")} >= _SLOW | _FIRST, "they may have been renamed"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _SLOW & {item.path.name, item.path.parent.name}:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name not in _FIRST)


@pytest.fixture(autouse=True)
def _traced_anew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of forecasts makes its own, and reads none that another test has kept with other functions in place."""
    if request.path.parent.name in {"forecast", "golden"} and request.path.name != "test_forecast_cache.py":
        monkeypatch.setattr(Kept, "get", lambda self, batches, trace: trace())
        if request.path.name != "test_kept_plan.py":
            monkeypatch.setattr(kept_plan, "get", lambda asked, gpu, gpus, make: make())


_modules_at_freeze = 0
gc.set_threshold(10_000, 20, 20)  # the collections of a small training's many objects take a twentieth of its time


def pytest_collection_finish() -> None:
    _freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # What a file's fixtures held is gone, and what it cached stays. Libraries import much of themselves at first use.
    if nextitem is None or nextitem.path != item.path or len(sys.modules) >= _modules_at_freeze + 50:
        _freeze()


def _freeze() -> None:
    """Keep the garbage collector, and what counts tensors, out of the objects that imports and caches made.

    Going through all of them takes a quarter of the time of small trainings, and beside the syntax trees of all
    sources (test_house.py) four fifths of it.
    """
    global _modules_at_freeze
    gc.collect()
    gc.freeze()
    _modules_at_freeze = len(sys.modules)


@pytest.fixture(scope="session", autouse=True)
def own_cache() -> Iterator[None]:
    yield
    shutil.rmtree(os.environ["HF_DATASETS_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def short_answers() -> Iterator[None]:
    """A few tokens of each sample answer: whole ones take most of the time of a run of seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_answers, "TOKENS", 4)
        yield


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 short conversations of uneven length as JSONL."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = []
    for number in range(24):
        answer = " ".join(["word"] * (1 + number % 7)) + f" {number}"
        turns = [{"role": "user", "content": f"Say {number}"}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without what takes a third of a short one and decides nothing: the plot, and sample answers."""
    monkeypatch.setattr(plots, "training", lambda run: write_bytes(run.plot_file, b""))
    monkeypatch.setattr(sample_answers, "TOKENS", 1)
    monkeypatch.setattr(sample_answers, "QUESTIONS", 0)


@pytest.fixture
def one_sample_answer(hurried: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `hurried` run asks one question, before and after."""
    monkeypatch.setattr(sample_answers, "QUESTIONS", 1)


@pytest.fixture
def unwarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without a forecast take no step on the largest batch before the first one, a fifth of a short run's time.

    It changes no state (test_largest_batch_first.py); `golden/` and `faults/` have it. A file whose tests look at it
    overrides this.
    """

    def take_steps(job: TrainingJob, loop: Loop) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if job.config.memory.check == "off":
                patch.setattr(training_run, "warm_up", lambda *arguments: {})
            plain(job, loop)

    plain = training_run.take_steps
    monkeypatch.setattr(training_run, "take_steps", take_steps)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Run `finetune ARGUMENTS` in this process; returns (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["finetune", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


@pytest.fixture
def quick(tmp_path: Path, rows_file: Path, shallow_base: Path, hurried: None, unwarmed: None):
    """A function from overrides to the config of a job of a second in its own run directory."""

    def make(*overrides: str, run: str = "run") -> Config:
        job = [f"model.name={shallow_base}", f"data.train={rows_file}", "data.eval_share=0.2"]
        return load_config(TINY, [*QUICK, *job, f"output.dir={tmp_path / run}", *overrides])

    return make


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this session, that the processes of pytest-xdist share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def _made_once(folder: Path, make: Callable[[], object]) -> None:
    """Make a folder that the processes of pytest-xdist share: the first that asks does, and the others wait."""
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            make()


@pytest.fixture(scope="session")
def trained(shared_folder: Path, rows_file: Path) -> RunDirectory:
    """A finished run of the tiny job, forecast and long enough for the adapter to matter. Do not write to it."""
    run = RunDirectory(shared_folder / "trained")
    job = [
        f"data.train={rows_file}", "data.eval_share=0.2", "training.batch_size=8", "training.max_steps=20",
        "training.eval_every=10", "output.merge=false", f"output.dir={run.path}",
    ]  # fmt: skip
    _made_once(run.path, lambda: finetune.train(load_config(TINY, job)))
    return run


@pytest.fixture
def run(trained: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A copy of the trained run that a test may write to."""
    return RunDirectory(shutil.copytree(trained.path, tmp_path / "run"))


@pytest.fixture(scope="session", params=sampled(AFTER, "qwen3_vl"))
def seeing_run(request: pytest.FixtureRequest, shared_folder: Path) -> SeeingRun:
    """A finished run of each of a few families of bases that see. Do not write to it, nor to its base."""
    seen = SeeingRun(request.param, shared_folder / f"trained-{request.param}")
    _made_once(seen.folder, seen.train)
    return seen


@pytest.fixture(scope="session")
def tiny_base() -> Path:
    """The directory of the built-in base."""
    return Path(locate(BUILTIN_BASE))


@pytest.fixture(scope="session")
def shallow_base(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in base with the first two of its four layers: a run takes half as long."""
    folder = tmp_path_factory.mktemp("shallow") / "base"
    shutil.copytree(tiny_base, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 2}))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if not re.match(r"model\.layers\.[^01]\.", name)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def children(tmp_path_factory: pytest.TempPathFactory, shallow_base: Path, shared_folder: Path) -> Iterator[Children]:
    """Starts processes forked from one that has imported the libraries.

    Jobs in them train two layers of the base, without fused kernels, whose proofs take a third of a short run.
    """
    folder = tmp_path_factory.mktemp("children")
    config = folder / "shallow_cpu.yaml"
    shallow = TINY.read_text().replace("builtin:tiny-llama", str(shallow_base))
    config.write_text(shallow + "\nkernels:\n  fused: 'off'\n")
    with Children(folder, config=config, shared=shared_folder) as started:
        yield started
