"""Rows of pairs, runs that several tests of a file look at, and a step of eight rows however it is split."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import QUICK, TINY
from steps import assert_gradients_close, gradients, micro_batches

from finetune.choices import load_config
from finetune.config import Config
from finetune.storage.rundir import RunDirectory
from finetune.training.loop import Loop

# For runs and forecasts of a small model, most of whose operations are else those of adapters and of recomputing.
PLAIN = ["adapter.targets=[q_proj]", "memory.checkpointing=none"]


def pairs(number: int) -> list[dict[str, Any]]:
    """Rows with answers of different lengths, and margins."""
    return [
        {
            "prompt": f"To {n}. ",
            "chosen": "yes " * (1 + n % 5),
            "rejected": "no " * (3 + 2 * (n % 5)),
            "margin": n / 9 + 1,
        }
        for n in range(number)
    ]


def quick_in(folder: Path, base: Path) -> Callable[..., Config]:
    """As the fixture `quick`, for runs in `folder` that several tests share."""

    def make(*overrides: str, run: str = "run") -> Config:
        job = [f"model.name={base}", "data.eval_share=0.2", f"output.dir={folder / run}"]
        return load_config(TINY, [*QUICK, *job, *overrides])

    return make


def copied(run: RunDirectory, folder: Path) -> RunDirectory:
    """A copy of a shared run in `folder`, to write to."""
    return RunDirectory(shutil.copytree(run.path, folder / "run"))


def eight_rows(loop: Loop) -> list[dict[str, Any]]:
    """The rows of the step below."""
    return [loop.steps.rows[number] for number in range(8)]


def whole_and_split(
    loop: Loop, sizes: Sequence[int] = (3,), rel: float = 1e-6, within: float = 5e-6
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a step of eight rows, which are those of smaller micro-batches, as are its statistics."""
    loss, expected = gradients(loop, micro_batches(loop, range(8), 8))
    sums = loop.step.sums
    for size in sizes:
        other, found = gradients(loop, micro_batches(loop, range(8), size))
        assert other == pytest.approx(loss, rel=rel)
        assert_gradients_close(found, expected, within=within)
        torch.testing.assert_close(loop.step.sums, sums, rtol=1e-5, atol=1e-6)
    return loss, expected
