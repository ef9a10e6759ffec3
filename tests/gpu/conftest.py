"""Tests that need a CUDA device: skipped with the reason where there is none; `make gpu-check` runs them.

To try a test's logic on a machine without a GPU, set FINETUNE_GPU_TESTS_ON=cpu: tests that do not need CUDA itself
(fixture `cuda`) then run on the CPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from finetune.config import Config
from finetune.settings import load_config

# A card has a number: torch.cuda.set_per_process_memory_fraction takes no device without one.
DEVICE = torch.device(os.environ.get("FINETUNE_GPU_TESTS_ON", "cuda:0"))

# cuBLAS reads it before the process's first product; later runs here are deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

_SENTENCES = (
    "The lake was still, and the boat lay where we had left it.",
    "A memory peak is measured, never guessed, and stands in the log.",
    "Four bits are enough for a weight that nobody changes.",
    "She counted the tokens twice and found the same number.",
)


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none here"))


@pytest.fixture
def device() -> torch.device:
    """The device the test runs on."""
    return DEVICE


@pytest.fixture
def cuda() -> torch.device:
    """A CUDA device; the test is skipped where its logic is tried on a CPU."""
    if DEVICE.type != "cuda":
        pytest.skip("this test is about CUDA itself")
    return DEVICE


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """64 rows of plain text, each longer than 512 tokens of the built-in tokenizer, no two alike."""
    path = tmp_path / "rows.jsonl"
    lines = [" ".join(_SENTENCES[(row + at) % 4] for at in range(50)) + f" {row}" for row in range(64)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def configure(tmp_path: Path, rows: Path) -> Callable[..., Config]:
    """Makes the config of a short job on the built-in base; keyword `training__max_steps=4` sets a key."""

    def make(**changes: object) -> Config:
        file = tmp_path / "gpu.yaml"
        file.write_text("")
        settings = {
            "data.train": rows,
            "data.format": "text",
            "data.eval": "none",
            "data.max_length": 128,
            "training.batch_size": 4,
            "training.micro_batch": 2,
            "training.max_steps": 12,
            "training.learning_rate": 3e-3,
            "output.dir": tmp_path / "run",
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        return load_config(file, [f"{key}={_yaml(value)}" for key, value in settings.items()])

    return make


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
