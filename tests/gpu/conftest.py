"""Tests that need a CUDA device: skipped with the reason where there is none; `make gpu-check` runs them.

With FINETUNE_GPU_TESTS_ON=cpu those that do not need CUDA itself run on the CPU, and the bodies of the others as far as
a CPU can (see on_cpu.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import on_cpu
import pytest
import torch

from finetune.choices import load_config
from finetune.config import Config
from finetune.forecast import operator_costs
from finetune.runtime.device import this_device

ROOT = Path(__file__).resolve().parents[2]

# A card has a number: torch.cuda.set_per_process_memory_fraction takes no device without one.
DEVICE = torch.device(os.environ.get("FINETUNE_GPU_TESTS_ON", "cuda:0"))

# cuBLAS reads it before the process's first product; later runs here are deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

if DEVICE.type == "cuda" and torch.cuda.is_available():
    this_device()  # settles what a run settles: the allocator's segments, and Triton where it cannot be built

_SENTENCES = (
    "The lake was still, and the boat lay where we had left it.",
    "A memory peak is measured, never guessed, and stands in the log.",
    "Four bits are enough for a weight that nobody changes.",
    "She counted the tokens twice and found the same number.",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE.type == "cpu":
        # Names and arguments are all that is tried there: of tests that train, with one set of parameters.
        training = [item for item in items if isinstance(item, pytest.Function) and "configure" in item.fixturenames]
        first = {(item.path, item.originalname): item for item in reversed(training)}
        items[:] = [item for item in items if item not in training or item in first.values()]
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none here"))


@pytest.fixture
def device() -> torch.device:
    """The device the test runs on."""
    return DEVICE


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CUDA device; on a CPU there are stand-ins for it, and the test is never passed."""
    if DEVICE.type != "cuda":
        on_cpu.stand_in(monkeypatch)
    return DEVICE


@pytest.fixture
def beside_context(cuda: torch.device) -> Callable[[int], int]:
    """The `memory.limit` that leaves the caching allocator so many bytes."""

    def limit(room_bytes: int) -> int:
        return room_bytes + operator_costs.context_bytes(torch.cuda.get_device_properties(cuda).multi_processor_count)

    return limit


@pytest.fixture
def on_card() -> contextlib.AbstractContextManager[None]:
    """A context for each assertion of a test with `cuda`: on a CPU one that does not hold does not end the test."""
    return contextlib.nullcontext() if DEVICE.type == "cuda" else on_cpu.Assertions()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """On a CPU, a test that asks for a card runs as far as it can."""
    if DEVICE.type == "cuda" or "cuda" not in pyfuncitem.fixturenames:
        return (yield)
    with on_cpu.as_far_as_possible(pyfuncitem.obj, pyfuncitem.funcargs.get("on_card", on_cpu.Assertions())):
        yield
    return True


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """64 rows of plain text, each longer than 512 tokens of the built-in tokenizer, no two alike."""
    path = tmp_path / "rows.jsonl"
    lines = [" ".join(_SENTENCES[(row + at) % 4] for at in range(50)) + f" {row}" for row in range(64)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def configure(request: pytest.FixtureRequest, tmp_path: Path, rows: Path) -> Callable[..., Config]:
    """Makes the config of a short job on the built-in base; keyword `training__max_steps=4` sets a key."""

    def make(**changes: object) -> Config:
        file = tmp_path / "gpu.yaml"
        file.write_text("")
        settings = {
            "data.train": rows, "data.format": "text", "data.eval": "none", "data.max_length": 128,
            "training.batch_size": 4, "training.micro_batch": 2, "training.max_steps": 12,
            "training.learning_rate": 3e-3, "output.dir": tmp_path / "run",
            **{key.replace("__", "."): value for key, value in changes.items()},
        }  # fmt: skip
        if DEVICE.type != "cuda":
            request.getfixturevalue("hurried")
            settings["model.name"] = request.getfixturevalue("shallow_base")
            settings = on_cpu.smaller(settings, a_card_decides="cuda" in request.fixturenames)
        return load_config(file, [f"{key}={_yaml(value)}" for key, value in settings.items()])

    return make


@pytest.fixture
def train_in_a_process(cuda: torch.device) -> Callable[[str, Path], subprocess.CompletedProcess[str]]:
    """`finetune train` on a config's text, written to a file, from this checkout, installed or not."""

    def train(config: str, file: Path) -> subprocess.CompletedProcess[str]:
        file.write_text(config, encoding="utf-8")
        if cuda.type != "cuda":
            return on_cpu.train_here(file)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        return subprocess.run(
            [sys.executable, "-m", "finetune", "train", str(file)],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return train


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
