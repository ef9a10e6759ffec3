"""Ranks that split rows train what one process trains, on the same rows, and a run may go on without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from children import Children
from jobs import QUICK, metric
from test_sharded_ranks import assert_close
from together import Together, assert_all

from finetune.storage.rundir import RunDirectory

STEP = "finetune.training.step:Step.clip"
# Rows of uneven and odd lengths, in plain descent, so that a gradient that is off shows as such.
EXACT = [*QUICK, "data.eval_share=0.2", "training.batch_size=6", "training.micro_batch=3", "training.max_steps=4",
         "training.precision=fp32", "training.eval_every=2", "output.save_every=2", "adapter.dropout=0",
         "optimizer.kind=sgd", "training.learning_rate=0.1", "training.warmup=0"]  # fmt: skip
NF4, PLAIN = [], ["quantization.kind=none"]

Make = Callable[..., Together]


@pytest.fixture(scope="module")
def make(children: Children, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("split")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(rows_file.read_text().splitlines(keepends=True)[:21]))
    made = 0

    def make(*overrides: str) -> Together:
        nonlocal made
        made += 1
        return Together(children, [*EXACT, f"data.train={rows}", *overrides], RunDirectory(folder / f"run-{made}"))

    return make


@pytest.fixture(scope="module")
def alone(make: Make) -> Callable[..., RunDirectory]:
    """What one process trains. Do not write to it."""
    found: dict[tuple[str, ...], RunDirectory] = {}

    def trained(*overrides: str) -> RunDirectory:
        if overrides not in found:
            job = make(*overrides)
            assert_all(job.go(1), 0)
            found[overrides] = job.run
        return found[overrides]

    return trained


@pytest.mark.parametrize(
    ("base", "ranks", "overrides"),
    [
        pytest.param(NF4, 2, ["distributed.context=2", "kernels.fused=auto"], id="nf4, fused"),
        pytest.param(NF4, 2, ["distributed.context=2", "data.packing=true"], id="nf4, packed", marks=pytest.mark.long),
        pytest.param(
            PLAIN, 3, ["distributed.context=3", "memory.checkpointing=all"], id="16 bit, more ranks than keys",
            marks=pytest.mark.long,
        ),
        pytest.param(
            PLAIN, 4, ["distributed.context=2", "distributed.kind=fsdp", "data.packing=true", "model.attention=eager"],
            id="16 bit, two groups with shards of the weights, packed", marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_ranks_that_split_rows_train_what_one_process_trains(
    make: Make, alone: Callable[..., RunDirectory], base: list[str], ranks: int, overrides: list[str]
) -> None:
    split = make(*base, *overrides)
    assert_all(split.go(ranks), 0)
    assert_close(split.run, alone(*base))
    if "data.packing=true" not in overrides:  # packing has no padding but that of slices
        assert metric(split.run, "tokens") == metric(alone(*base), "tokens")


def test_one_process_goes_on_with_the_same_rows(make: Make, alone: Callable[..., RunDirectory]) -> None:
    killed = make("distributed.context=2")
    killed.kill(2, step=3, saved=2)
    killed.arguments.append("distributed.context=1")
    assert_all(killed.go(1), 0)
    assert [event["step"] for event in killed.run.events() if event["event"] == "resumed"] == [2]
    assert_close(killed.run, alone())


def test_ranks_that_make_no_groups_are_refused(make: Make) -> None:
    ended = make("distributed.context=2").go(3)
    assert_all(ended, 2)
    assert "3 processes cannot form groups of 2" in ended[0].output
