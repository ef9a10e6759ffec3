"""Pairs of answers that several processes train: one mean over all pairs, however they are divided.

KTO takes the answers of the pairs one by one, and each depends on a mean over those of all ranks.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from children import Children, Fault
from jobs import QUICK, adapter_weights, metric, write_rows
from together import Together, assert_all

from finetune.storage import private
from finetune.storage.rundir import RunDirectory

# Two or four rows a rank, of unlike lengths. Plain descent, so that a gradient that is off shows as such.
JOB = [*QUICK, "quantization.kind=none", "training.precision=fp32", "adapter.dropout=0",
       "training.batch_size=8", "training.micro_batch=2", "training.max_steps=3", "optimizer.kind=sgd",
       "training.learning_rate=1", "training.warmup=0", "data.eval=none", "training.eval_every=null",
       "training.group_by_length=false", "kernels.fused=off"]  # fmt: skip


RECORDED = {"dpo": ("loss", "rewards_margins", "rewards_accuracies"), "kto": ("loss", "rewards_margins", "kl")}


@pytest.fixture(scope="module", params=list(RECORDED))
def objective(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of pairs of many lengths."""
    file, lengths = tmp_path_factory.mktemp("pairs") / "pairs.jsonl", random.Random(0)
    rows = [
        {"prompt": f"To {n}. ", "chosen": "yes " * lengths.randint(1, 30), "rejected": "no " * lengths.randint(1, 9)}
        for n in range(24)
    ]
    return write_rows(file, rows)


@pytest.fixture(scope="module")
def job(objective: str, pairs: Path) -> list[str]:
    return [*JOB, f"training.objective={objective}", f"data.train={pairs}"]


@pytest.fixture(scope="module")
def alone(children: Children, job: list[str], tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The job as one process trains it."""
    run = RunDirectory(tmp_path_factory.mktemp("alone") / "run")
    assert_all(Together(children, [*job, "preference.reference=in_step"], run).go(1), 0)
    return run


WAYS: dict[str, tuple[int, list[str]]] = {
    "two copies": (2, ["preference.reference=in_step"]),
    "two copies, cached reference": (2, ["preference.reference=cached"]),
    "ZeRO": (2, ["preference.reference=cached", "distributed.kind=deepspeed"]),
    "two shards, prompts computed once": (
        2, ["preference.reference=in_step", "distributed.kind=fsdp", "data.packing=true"],
    ),
    "four shards, cached reference": (4, ["preference.reference=cached", "distributed.kind=fsdp"]),
}  # fmt: skip
"""Numbers of ranks and what they are told."""
OFTEN = {"dpo": ("two copies, cached reference",), "kto": ("two shards, prompts computed once",)}
assert WAYS.keys() >= {name for names in OFTEN.values() for name in names}, "they may have been renamed"


@pytest.mark.parametrize(
    ("objective", "ranks", "way"),
    [
        pytest.param(
            objective, *way, id=f"{objective}-{name}",
            marks=[] if name in OFTEN[objective] else pytest.mark.long,
        )
        for objective in RECORDED
        for name, way in WAYS.items()
    ],
    indirect=["objective"],
)  # fmt: skip
def test_ranks_train_as_one_does(
    children: Children, job: list[str], objective: str, alone: RunDirectory, tmp_path: Path, ranks: int, way: list[str]
) -> None:
    shutil.rmtree(private.cache_folder() / "references", ignore_errors=True)  # so that these ranks score their own
    together = Together(children, [*job, *way], RunDirectory(tmp_path / "run"))
    assert_all(together.go(ranks), 0)
    scored = [event["rows"] for event in together.run.events() if event["event"] == "reference_scored"]
    cached = "preference.reference=cached" in way
    assert len(scored) == cached
    nearly = 1e-5 if cached else 1e-6  # other batches round the sums of a reference otherwise
    for name in RECORDED[objective]:
        # Before the first update both rewards are zero, so that rounding decides which one is greater.
        first = 1 if name == "rewards_accuracies" else 0
        assert metric(together.run, name)[first:] == pytest.approx(metric(alone, name)[first:], rel=1e-6, abs=nearly)
    torch.testing.assert_close(adapter_weights(together.run), adapter_weights(alone), rtol=0, atol=1e-6)
    assert metric(alone, "loss")[-1] < metric(alone, "loss")[0]


@pytest.mark.parametrize("objective", ["kto"], indirect=True)
@pytest.mark.parametrize(
    "attention", [pytest.param(2, id="for the mean"), pytest.param(10, id="after it", marks=pytest.mark.long)]
)
def test_memory_that_runs_out_on_one_rank_changes_no_mean(
    children: Children, job: list[str], alone: RunDirectory, tmp_path: Path, attention: int
) -> None:
    """The mean over all ranks is exchanged within a step, in which the other rank waits for it."""
    together = Together(children, [*job, "preference.reference=in_step"], RunDirectory(tmp_path / "run"))
    fault = Fault(
        "torch.nn.functional:scaled_dot_product_attention", "^$", attention, "memory",
        after="finetune.training.step:Step.sum_before",
    )  # fmt: skip
    assert_all(together.go(2, {1: fault}), 0)
    for run in (together.run, together.run.of_rank(1)):
        [split] = [event for event in run.events() if event["event"] == "micro_batch_split"]
        assert (split["rank"], split["rows"]) == (1, 2)
    for name in RECORDED["kto"]:
        assert metric(together.run, name) == pytest.approx(metric(alone, name), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(adapter_weights(together.run), adapter_weights(alone), rtol=0, atol=1e-6)
