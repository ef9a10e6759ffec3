"""Steps that are made ahead are the steps that would have been made."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from jobs import BF16
from transformers import LlamaConfig

from finetune.training import assembly, probe_table
from finetune.training.batches import one_ahead
from finetune.training.collator import Inputs


def steps(made: list[int], ahead: threading.Event) -> Iterator[list[Inputs]]:
    for number in range(4):
        made.append(number)
        if number == 1:
            ahead.set()
        yield [{"number": number}]
    raise RuntimeError("a row that cannot be collated")


def test_each_step_is_made_while_the_one_before_is_used_and_an_error_comes_in_its_place() -> None:
    made: list[int] = []
    ahead = threading.Event()
    found = one_ahead(steps(made, ahead))
    assert next(found) == [{"number": 0}]
    assert ahead.wait(600)  # the second is made with the first one still in use
    assert made[:2] == [0, 1]
    assert [step[0]["number"] for step in (next(found), next(found), next(found))] == [1, 2, 3]
    with pytest.raises(RuntimeError, match="cannot be collated"):
        next(found)


def test_it_ends_where_the_steps_end() -> None:
    assert list(one_ahead(iter([[], [{"number": 1}]]))) == [[], [{"number": 1}]]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job on packed pairs, whose model passes its probes; what prompts share changes which pair is the longest."""
    monkeypatch.setattr(probe_table, "run", lambda stage, subject: [])
    row = {"input_ids": [1] * 40, "labels": [-100] * 40, "length": 40, "trained": 2}
    shapes = [((20 - at, 20), 18 - 2 * at) for at in range(8)]
    rows = [{**row, "segments": [*lengths], "shared": shared} for lengths, shared in shapes]
    config = BF16.changed({"training.objective": "dpo", "training.batch_size": 4, "data.packing": True})
    return SimpleNamespace(
        config=config, architecture=LlamaConfig(), model=None, process=SimpleNamespace(device=torch.device("cpu")),
        data=SimpleNamespace(train=Dataset.from_list(rows), media=None), tokenizer=SimpleNamespace(pad_token_id=0),
        outlets=SimpleNamespace(listener=SimpleNamespace(note=lambda text: None)),
    )  # fmt: skip


def test_a_change_of_what_prompts_share_leaves_the_order_as_it_was(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kernels.compile` may change where a run resumes, within an epoch."""
    shared = assembly.prepared_rows(job, assembly.collator(job))
    job.config = job.config.changed({"kernels.compile": "layers"})
    alone = assembly.prepared_rows(job, assembly.collator(job))
    assert (shared.collate.way.shares, alone.collate.way.shares) == (True, False)
    assert list(shared.order) == list(alone.order)


def test_prompts_are_shared_by_all_ranks_or_none(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with different micro-batches would wait for each other."""
    way = assembly.collator(job).way
    assert way.shares
    monkeypatch.setattr(assembly.ranks, "gathered", lambda value: [value, ["another rank's model is unlike"]])
    assert assembly.collator(job).way == replace(way, shares=False)
