"""Pairs of answers that several processes train: one mean over all pairs, however they are divided."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from children import Children
from jobs import QUICK, adapter_weights, metric
from together import Together, assert_all

from finetune.storage.rundir import RunDirectory

# Three pairs a rank, in micro-batches of unlike sizes. Plain descent, so that a gradient that is off shows as such.
JOB = [*QUICK, "training.objective=dpo", "quantization.kind=none", "training.precision=fp32", "adapter.dropout=0",
       "training.batch_size=6", "training.micro_batch=3", "training.max_steps=3", "optimizer.kind=sgd",
       "training.learning_rate=1", "training.warmup=0", "data.eval=none", "training.eval_every=null",
       "kernels.fused=off"]  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of pairs of many lengths."""
    file, lengths = tmp_path_factory.mktemp("pairs") / "pairs.jsonl", random.Random(0)
    rows = [
        {"prompt": f"To {n}. ", "chosen": "yes " * lengths.randint(1, 30), "rejected": "no " * lengths.randint(1, 9)}
        for n in range(24)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def alone(children: Children, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The job as one process trains it."""
    run = RunDirectory(tmp_path_factory.mktemp("alone") / "run")
    assert_all(Together(children, [*JOB, f"data.train={pairs}", "preference.reference=in_step"], run).go(1), 0)
    return run


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(["preference.reference=in_step"], id="copies"),
        pytest.param(["preference.reference=cached"], id="copies, cached reference"),
        pytest.param(["preference.reference=in_step", "distributed.kind=fsdp"], id="slices"),
    ],
)
def test_two_ranks_train_as_one_does(
    children: Children, pairs: Path, alone: RunDirectory, tmp_path: Path, way: list[str]
) -> None:
    together = Together(children, [*JOB, f"data.train={pairs}", *way], RunDirectory(tmp_path / "run"))
    assert_all(together.go(2), 0)
    for name in ("loss", "rewards_margins", "rewards_accuracies"):
        assert metric(together.run, name) == pytest.approx(metric(alone, name), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(adapter_weights(together.run), adapter_weights(alone), rtol=0, atol=1e-6)
    assert metric(alone, "loss")[-1] < metric(alone, "loss")[0]


def test_two_ranks_with_a_slice_of_the_model_compute_a_prompt_once(
    children: Children, pairs: Path, tmp_path: Path
) -> None:
    job = [*JOB, f"data.train={pairs}", "preference.reference=in_step", "data.packing=true"]
    alone = Together(children, job, RunDirectory(tmp_path / "alone"))
    assert_all(alone.go(1), 0)
    together = Together(children, [*job, "distributed.kind=fsdp"], RunDirectory(tmp_path / "run"))
    assert_all(together.go(2), 0)
    assert metric(together.run, "tokens") == metric(alone.run, "tokens")
    assert metric(together.run, "loss") == pytest.approx(metric(alone.run, "loss"), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(adapter_weights(together.run), adapter_weights(alone.run), rtol=0, atol=1e-6)
