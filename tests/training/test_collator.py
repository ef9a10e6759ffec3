"""Micro-batches hold what their rows hold, however a step is shared out."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.batching import MicroBatching
from finetune.data.chat import IGNORE
from finetune.training.collator import MicroBatches

PAD = 0
TOKEN = st.tuples(st.integers(0, 9), st.booleans())  # a token may be the padding token, as where pad equals eos
STEP = st.lists(st.lists(TOKEN, min_size=1, max_size=9), min_size=1, max_size=8)
WAYS = st.sampled_from([
    MicroBatching(1), MicroBatching(3), MicroBatching(8), MicroBatching(1, 12), MicroBatching(1, 100),
    MicroBatching(1, 12, packed=True), MicroBatching(1, 100, packed=True),
])  # fmt: skip


def rows_of(step: list[list[tuple[int, bool]]]) -> list[dict[str, list[int]]]:
    return [
        {"input_ids": [token for token, _ in row], "labels": [token if trained else IGNORE for token, trained in row]}
        for row in step
    ]


@settings(deadline=None, derandomize=True)
@given(step=STEP, way=WAYS)
def test_each_row_is_there_once_with_its_labels_and_nothing_else_is_trained(
    step: list[list[tuple[int, bool]]], way: MicroBatching
) -> None:
    rows = rows_of(step)
    found = []
    for inputs in MicroBatches(way, PAD)(rows):
        ids, labels = inputs["input_ids"], inputs["labels"]
        if way.packed:
            starts = inputs["cu_seq_lens_q"].tolist()
            spans = [(0, slice(start, end)) for start, end in itertools.pairwise(starts)]
            assert starts[-1] == ids.shape[1], "nothing after the last row"
            for _, span in spans:
                assert inputs["position_ids"][0, span].tolist() == list(range(span.stop - span.start))
        else:
            spans = [(row, slice(0, int(mask.sum()))) for row, mask in enumerate(inputs["attention_mask"])]
        for row, span in spans:
            # The first token of a row has no predecessor: no batch predicts it.
            found.append((ids[row, span].tolist(), labels[row, span][1:].tolist()))
            labels[row, span] = IGNORE
        assert torch.all(labels == IGNORE), "no padding is trained"
    wanted = [(row["input_ids"], row["labels"][1:]) for row in rows]
    assert sorted(found) == sorted(wanted)


@settings(deadline=None, derandomize=True)
@given(step=STEP, way=WAYS)
def test_the_trained_tokens_are_as_many_in_every_way(step: list[list[tuple[int, bool]]], way: MicroBatching) -> None:
    """As the loss counts them: predicted from the place before, within a row of the micro-batch."""
    trained = sum(int((inputs["labels"][:, 1:] != IGNORE).sum()) for inputs in MicroBatches(way, PAD)(rows_of(step)))
    assert trained == sum(is_trained for row in step for _, is_trained in row[1:])
