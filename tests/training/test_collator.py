"""Micro-batches hold what their rows hold, however a step is shared out, and however they are split."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import seeing
import torch
from hypothesis import given
from hypothesis import strategies as st
from jobs import BF16
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from finetune.data import vision
from finetune.data.batching import MicroBatching
from finetune.data.cache import digest_of
from finetune.data.encoded import IGNORE, MEDIA, MEDIA_SIZES, RowImage, RowLayout
from finetune.model.base import load_architecture
from finetune.model.source.tokenizer import load_tokenizer
from finetune.objectives.kto import LABELLED
from finetune.objectives.preference import PAIRS
from finetune.training.collator import Idle, Inputs, StepCollator, first_row, halved

Held = tuple[list[int], list[int]]
"""The tokens of a row, and the labels of all but the first, which has no predecessor: no batch predicts it."""

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


def held(inputs: Inputs) -> list[Held]:
    """The rows of a micro-batch; what lies between them must not be trained."""
    ids, labels = inputs["input_ids"], inputs["labels"].clone()
    if "cu_seq_lens_q" in inputs:
        starts = inputs["cu_seq_lens_q"].tolist()
        spans = [(0, slice(start, end)) for start, end in itertools.pairwise(starts)]
        assert ids.shape == (1, starts[-1]), "nothing after the last row"
        for number, (_, span) in enumerate(spans):
            assert inputs["position_ids"][0, span].tolist() == list(range(span.stop - span.start))
            assert set(inputs["seq_idx"][0, span].tolist()) == {number}
        assert inputs["max_length_q"] == max(span.stop - span.start for _, span in spans)
    else:
        spans = [(row, slice(0, int(mask.sum()))) for row, mask in enumerate(inputs["attention_mask"])]
        assert max(span.stop for _, span in spans) == ids.shape[1], "no more padding than must be"
    found = []
    for row, span in spans:
        found.append((ids[row, span].tolist(), labels[row, span][1:].tolist()))
        labels[row, span] = IGNORE
    assert torch.all(labels == IGNORE), "no padding is trained"
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_collated_to_the_tensors_that_trl_makes_of_them(packed: bool) -> None:
    rows = [{"input_ids": list(range(n)), "labels": [IGNORE, *range(1, n)], "length": n} for n in (700, 3, 512)]
    expected = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=packed)(rows)
    found = StepCollator(MicroBatching(3, packed=packed), PAD).micro_batch(rows)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert type(found[name]) is type(value)
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)
        else:
            assert found[name] == value


@pytest.mark.parametrize(
    ("lengths", "shapes"), [((2, 1, 2, 5, 4), [(3, 2), (2, 5)]), ((5, 4, 2, 2, 1), [(3, 5), (2, 2)])]
)
def test_each_half_of_a_split_is_padded_to_its_own_longest_row_and_the_first_has_the_odd_one(
    lengths: tuple[int, ...], shapes: list[tuple[int, int]]
) -> None:
    rows = [{"input_ids": [1] * length, "labels": [1] * length} for length in lengths]
    halves = halved(StepCollator(MicroBatching(8), PAD).micro_batch(rows))
    assert halves is not None
    assert [tuple(half["input_ids"].shape) for half in halves] == shapes


@given(step=STEP, way=WAYS)
def test_each_row_is_there_once_with_its_labels_and_nothing_else_is_trained(
    step: list[list[tuple[int, bool]]], way: MicroBatching
) -> None:
    """The trained tokens are as the loss counts them: predicted from the place before, within a row."""
    rows = rows_of(step)
    micro_batches = StepCollator(way, PAD)(rows)
    found = [row for inputs in micro_batches for row in held(inputs)]
    assert sorted(found) == sorted((row["input_ids"], row["labels"][1:]) for row in rows)
    trained = sum(int((inputs["labels"][:, 1:] != IGNORE).sum()) for inputs in micro_batches)
    assert trained == sum(is_trained for row in step for _, is_trained in row[1:])


@given(step=STEP, way=WAYS)
def test_a_micro_batch_splits_into_two_that_hold_its_rows_in_order(
    step: list[list[tuple[int, bool]]], way: MicroBatching
) -> None:
    for inputs in StepCollator(way, PAD)(rows_of(step)):
        whole = held(inputs)
        assert first_row(inputs) == [whole[0][0]]
        halves = halved(inputs)
        if len(whole) == 1:
            assert halves is None
            continue
        assert halves is not None
        first, second = map(held, halves)
        assert first + second == whole
        assert len(first) - len(second) in (0, 1)


def test_packed_segments_of_a_row_have_the_tokens_that_they_share_once() -> None:
    row = {
        "input_ids": [1, 2, 3, 4, 1, 2, 3, 5, 6], "labels": [*[IGNORE] * 3, 4, *[IGNORE] * 3, 5, 6],
        "segments": [4, 5], "shared": 2,
    }  # fmt: skip
    way = MicroBatching(1, 100, packed=True, layout=PAIRS, shares=True)
    found = StepCollator(way, PAD).micro_batch([row, row])
    assert found["input_ids"].tolist() == [[1, 2, 3, 4, 3, 5, 6] * 2]
    assert found["labels"].tolist() == [[*[IGNORE] * 3, 4, IGNORE, 5, 6] * 2]
    assert found["cu_seq_lens_q"].tolist() == [0, 4, 7, 11, 14]
    assert found["row"].tolist() == [0, 0, 1, 1]


def test_the_first_row_of_a_micro_batch_has_its_segment_that_goes_apart() -> None:
    rows = [
        {"input_ids": [first, 2, 3, first, 5], "labels": [1] * 5, "segments": [3, 2], "desirable": 1}
        for first in (7, 8)
    ]
    inputs = StepCollator(MicroBatching(2, layout=LABELLED), PAD).micro_batch(rows)
    assert first_row(inputs) == [[7, 2, 3], [7, 5]]


def test_a_batch_has_an_optional_value_if_its_rows_have_it() -> None:
    collate = StepCollator(MicroBatching(1, layout=RowLayout(values=("weight",), optional=("margin",))), PAD)
    row = {"input_ids": [1, 2], "labels": [1, 2], "weight": 0.5}
    assert collate.micro_batch([{**row, "margin": 2}])["margin"].tolist() == [2.0]
    assert "margin" not in collate.micro_batch([row])


def test_a_batch_has_the_images_of_each_row_if_any_row_has_some(tmp_path: Path) -> None:
    config = BF16.changed({"model.name": str(seeing.base(tmp_path, "gemma3")), "model.vision": "frozen"})
    seen = vision.of(
        config.model,
        config.data.image_pixels,
        load_architecture(config.model),
        load_tokenizer(config.model, config.data),
    )
    file = seeing.encoded(seeing.Image.new("RGB", (32, 32), "red"))
    [token] = seen.image_tokens
    text = {"input_ids": [5, 6], "labels": [5, 6], MEDIA: [], MEDIA_SIZES: []}
    picture = {
        "input_ids": [5, *[token] * 4], "labels": [5, *[IGNORE] * 4],
        MEDIA: [vars(RowImage(data=file, digest=digest_of(file)))], MEDIA_SIZES: [32, 32, 4],
    }  # fmt: skip
    collate = StepCollator(MicroBatching(2), PAD, media=seen)
    both = collate.micro_batch([text, picture])
    assert [set(row) for row in both[MEDIA]] == [set(), {"pixel_values"}]
    assert both["token_type_ids"].tolist() == [[0] * 5, [0, 1, 1, 1, 1]]
    assert MEDIA not in collate.micro_batch([text, text])


def test_ranks_take_turns_at_the_rows_of_a_step_and_have_as_many_micro_batches() -> None:
    rows = [{"input_ids": [number] * 2, "labels": [number] * 2} for number in range(1, 6)]
    shares = [StepCollator(MicroBatching(2), PAD, rank, 2)(rows) for rank in range(2)]
    taken = [
        [[row[0][0] for row in held(inputs)] for inputs in share if not isinstance(inputs, Idle)] for share in shares
    ]
    assert taken == [[[1, 3], [5]], [[2, 4]]]
    assert [len(share) for share in shares] == [2, 2]
    assert isinstance(shares[1][1], Idle)


@pytest.mark.parametrize(("packed", "tokens"), [(False, [6, 6]), (True, [8, 8])])
def test_ranks_that_split_rows_have_the_same_ones_and_as_many_tokens_as_they_can_share(
    packed: bool, tokens: list[int]
) -> None:
    rows = [
        {name: [number] * length for name in ("input_ids", "labels")} for number, length in enumerate((5, 3, 2, 5), 1)
    ]
    way = MicroBatching(2, 16 if packed else None, packed=packed)
    shares = [StepCollator(way, PAD, rank, 4, context=2)(rows) for rank in range(4)]
    for [one], [other] in (shares[:2], shares[2:]):
        assert {name: str(value) for name, value in one.items()} == {name: str(value) for name, value in other.items()}
    [first], [second] = shares[0], shares[2]
    assert [inputs["input_ids"].shape[1] for inputs in (first, second)] == tokens
    assert [set(inputs["input_ids"].flatten().tolist()) - {PAD} for inputs in (first, second)] == [{1, 3}, {2, 4}]
    for inputs in (first, second):
        assert inputs["position_ids"].shape == inputs["input_ids"].shape
        assert inputs["labels"][inputs["input_ids"] == PAD].eq(IGNORE).all()
