"""Pairs of answers that several processes train: one mean over all pairs, however they are divided."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from children import Children
from jobs import QUICK, adapter_weights, metric
from together import Together, assert_all

from finetune.storage import private
from finetune.storage.rundir import RunDirectory

# Two or four pairs a rank, of unlike lengths. Plain descent, so that a gradient that is off shows as such.
JOB = [*QUICK, "training.objective=dpo", "quantization.kind=none", "training.precision=fp32", "adapter.dropout=0",
       "training.batch_size=8", "training.micro_batch=2", "training.max_steps=3", "optimizer.kind=sgd",
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
    ("ranks", "way"),
    [
        pytest.param(2, ["preference.reference=in_step"], id="two copies"),
        pytest.param(2, ["preference.reference=cached"], id="two copies, cached reference"),
        pytest.param(2, ["preference.reference=in_step", "distributed.kind=fsdp"], id="two slices"),
        pytest.param(4, ["preference.reference=in_step"], id="four copies"),
        pytest.param(4, ["preference.reference=cached", "distributed.kind=fsdp"], id="four slices, cached reference"),
    ],
)
def test_ranks_train_as_one_does(
    children: Children, pairs: Path, alone: RunDirectory, tmp_path: Path, ranks: int, way: list[str]
) -> None:
    shutil.rmtree(private.cache_folder() / "references", ignore_errors=True)  # so that these ranks score their own
    together = Together(children, [*JOB, f"data.train={pairs}", *way], RunDirectory(tmp_path / "run"))
    assert_all(together.go(ranks), 0)
    scored = [event["rows"] for event in together.run.events() if event["event"] == "reference_scored"]
    assert scored == ([24] if "preference.reference=cached" in way else [])
    for name in ("loss", "rewards_margins", "rewards_accuracies"):
        assert metric(together.run, name) == pytest.approx(metric(alone, name), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(adapter_weights(together.run), adapter_weights(alone), rtol=0, atol=1e-6)
    assert metric(alone, "loss")[-1] < metric(alone, "loss")[0]
