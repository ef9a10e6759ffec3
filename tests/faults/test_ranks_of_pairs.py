"""Pairs of answers that several processes train: one mean over all pairs, however they are divided.

KTO takes the answers of the pairs one by one, and each depends on a mean over those of all ranks.
"""

from __future__ import annotations

import random
import shutil

import pytest
import torch
from children import Fault
from jobs import adapter_weights, metric, sampled, write_rows
from rank_jobs import EXACT, FSDP, PLAIN, UNEVALUATED, ZERO, Jobs
from together import assert_all

from finetune.storage import private
from finetune.storage.rundir import RunDirectory

# Two or four rows a rank, of unlike lengths.
JOB = [*EXACT, *UNEVALUATED, PLAIN, "training.batch_size=8", "training.micro_batch=2", "training.max_steps=2",
       "training.learning_rate=1", "training.group_by_length=false"]  # fmt: skip


RECORDED = {"dpo": ("loss", "rewards_margins", "rewards_accuracies"), "kto": ("loss", "rewards_margins", "kl")}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Pairs of many lengths."""
    file, lengths = tmp_path_factory.mktemp("pairs") / "pairs.jsonl", random.Random(0)
    rows = [
        {"prompt": f"To {n}. ", "chosen": "yes " * lengths.randint(1, 30), "rejected": "no " * lengths.randint(1, 9)}
        for n in range(24)
    ]
    return f"data.train={write_rows(file, rows)}"


IN_STEP = "preference.reference=in_step"
CACHED = "preference.reference=cached"
WAYS = {
    "two copies": (2, [IN_STEP]),
    "two copies, cached reference": (2, [CACHED]),
    "ZeRO": (2, [CACHED, ZERO]),
    "two shards, prompts computed once": (2, [IN_STEP, FSDP, "data.packing=true"]),
    "four shards, cached reference": (4, [CACHED, FSDP]),
}
"""Numbers of ranks and what they are told."""
OFTEN = (("dpo", "two shards, prompts computed once"),)


def assert_as_one(
    found: RunDirectory, alone: RunDirectory, objective: str, *, rel: float = 1e-6, nearly: float = 1e-6
) -> None:
    for name in RECORDED[objective]:
        # Before the first update both rewards are zero, so that rounding decides which one is greater.
        first = 1 if name == "rewards_accuracies" else 0
        assert metric(found, name)[first:] == pytest.approx(metric(alone, name)[first:], rel=rel, abs=nearly)
    torch.testing.assert_close(adapter_weights(found), adapter_weights(alone), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("objective", "way"), sampled([(objective, way) for objective in RECORDED for way in WAYS], *OFTEN)
)
def test_ranks_train_as_one_does(jobs: Jobs, pairs: str, objective: str, way: str) -> None:
    if way == "ZeRO":
        pytest.importorskip("deepspeed")
    shutil.rmtree(private.cache_folder() / "references", ignore_errors=True)  # so that these ranks score their own
    job, (ranks, told) = [*JOB, pairs, f"training.objective={objective}"], WAYS[way]
    together, alone = jobs(*job, *told), jobs.alone(*job, IN_STEP)
    assert_all(together.go(ranks), 0)
    scored = [event for event in together.run.events() if event["event"] == "reference_scored"]
    assert len(scored) == (CACHED in told)
    # Other batches round the sums of a reference otherwise.
    assert_as_one(together.run, alone, objective, nearly=1e-5 if CACHED in told else 1e-6)
    assert metric(alone, "loss")[-1] < metric(alone, "loss")[0]


@pytest.mark.parametrize(
    "attention", [pytest.param(2, id="for the mean"), pytest.param(10, id="after it", marks=pytest.mark.long)]
)
def test_memory_that_runs_out_on_one_rank_changes_no_mean(jobs: Jobs, pairs: str, attention: int) -> None:
    """The mean over all ranks is exchanged within a step, in which the other rank waits for it."""
    job = [*JOB, pairs, "training.objective=kto", IN_STEP]
    together = jobs(*job)
    fault = Fault(
        "torch.nn.functional:scaled_dot_product_attention", "^$", attention, "memory",
        after="finetune.training.step:Step.sum_before",
    )  # fmt: skip
    assert_all(together.go(2, {1: fault}), 0)
    for run in (together.run, together.run.of_rank(1)):
        [split] = [event for event in run.events() if event["event"] == "micro_batch_split"]
        assert (split["rank"], split["rows"]) == (1, 2)
    assert_as_one(together.run, jobs.alone(*job), "kto", rel=1e-5)
