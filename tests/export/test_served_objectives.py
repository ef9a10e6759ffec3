"""Each objective that trains a language model ends in a file to serve, in each way to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import write_rows

import finetune
from finetune.config import Config
from finetune.export import publish
from finetune.objectives import OBJECTIVES
from finetune.report.terminal import Terminal
from tests.jobs import sampled

pytestmark = pytest.mark.slow

WAYS = {
    "adapter": ["output.serve=q4_k_m"],
    "rounded": ["output.serve=q4_0", "output.way=rounded"],
}
TRAINED = sorted(OBJECTIVES.keys() - {"supervised", "reward", "classification"})


def row(objective: str, number: int) -> dict[str, Any]:
    prompt, answer = f"Say {number}", " ".join(["word"] * (1 + number % 7)) + f" {number}"
    if objective == "distillation":
        ids = [*range(40, 46 + number % 7)]
        known = [[]] * 2 + [[at, at + 1] for at in ids[2:]]
        log_probs = [[math.log(0.6), math.log(0.3)] if own else [] for own in known]
        return {"input_ids": ids, "labels": [-100, -100, *ids[2:]], "teacher_ids": known, "teacher_logprobs": log_probs}
    if objective == "kto":
        return {"prompt": prompt, "completion": answer, "label": number % 2 == 1}
    return {"prompt": prompt, "chosen": answer, "rejected": f"no {number}"}


@pytest.mark.parametrize(
    ("objective", "way"),
    sampled([(objective, way) for objective in TRAINED for way in WAYS], ("distillation", "rounded")),
)
def test_a_run_is_exported_as_it_is_served(
    objective: str, way: str, quick: Callable[..., Config], tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [row(objective, number) for number in range(24)])
    job = [f"data.train={rows}", "data.max_length=64", f"training.objective={objective}", "training.precision=fp32"]
    run = finetune.train(quick(*job, "training.max_steps=2", *WAYS[way]), terminal=Terminal(quiet=True)).run
    record = publish.export_model(run, "adapter" if way == "adapter" else "gguf", terminal=Terminal(quiet=True))
    assert record["served"]["kl"] <= (0.02 if way == "rounded" else 1e-6)
    assert (record["weights"]["differing"] == 0) == (way != "rounded")
    assert finetune.evaluate(run)
