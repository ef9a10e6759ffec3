"""Facts about the order of rows: a permutation, a function of seed and epoch, grouped by length and still random."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.config import DataSection, TrainingSection
from finetune.data.batching import (
    LargestBatch,
    MicroBatching,
    RowOrder,
    Sizes,
    chosen_rows,
    longest_batch,
    longest_batches,
    micro_batches,
    worst_batches,
)
from finetune.data.encoded import RowLayout

BATCH = 16
_LOGNORMAL = random.Random(7)
LONG_TAILED = [max(1, int(_LOGNORMAL.lognormvariate(4.5, 1.0))) for _ in range(4000)]


def order(
    lengths: list[int], *, batch_size: int = BATCH, seed: int = 42, epoch: int = 0, group: bool = True
) -> list[int]:
    rows = RowOrder(lengths, batch_size, seed, group)
    rows.set_epoch(epoch)
    return list(rows)


def batches(rows: list[int], size: int) -> list[list[int]]:
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def padding_share(rows: list[int], lengths: list[int], size: int) -> float:
    places = sum(len(batch) * max(lengths[row] for row in batch) for batch in batches(rows, size))
    return 1 - sum(lengths) / places


@given(
    lengths=st.lists(st.integers(1, 500), max_size=300),
    batch_size=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 5),
    group=st.booleans(),
)
def test_every_row_comes_once(lengths: list[int], batch_size: int, seed: int, epoch: int, group: bool) -> None:
    rows = RowOrder(lengths, batch_size, seed, group)
    rows.set_epoch(epoch)
    assert sorted(rows) == list(range(len(lengths))) == list(range(len(rows)))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    for group in (True, False):
        rows = RowOrder(LONG_TAILED, BATCH, 42, group)
        rows.set_epoch(3)
        assert list(rows) == list(rows) == order(LONG_TAILED, epoch=3, group=group)
        assert list(rows) != order(LONG_TAILED, epoch=4, group=group)
        assert list(rows) != order(LONG_TAILED, epoch=3, seed=43, group=group)
        assert list(rows) != sorted(rows)


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_rows_are_shuffled_as_torch_shuffles_them(count: int) -> None:
    for seed, epoch in [(0, 0), (42, 3), (2**40, 1)]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        shuffled = torch.randperm(count, generator=generator).tolist()
        assert order([1] * count, seed=seed, epoch=epoch, group=False) == shuffled


def test_the_order_is_the_one_of_earlier_versions_so_that_their_runs_go_on() -> None:
    assert order(LONG_TAILED, group=False) == order([1] * len(LONG_TAILED), group=False, batch_size=3)
    for seed, epoch, expected in [
        (42, 0, [4, 1, 6, 3, 5, 7, 2, 0]), (42, 1, [5, 6, 7, 3, 0, 2, 4, 1]),
        (2**62 + 1, 0, [6, 1, 2, 3, 4, 7, 5, 0]), (2**62 + 1, 3, [2, 6, 4, 5, 7, 0, 1, 3]),
    ]:  # fmt: skip
        assert order([1] * 8, seed=seed, epoch=epoch, group=False) == expected


def test_two_seeds_order_no_epoch_alike() -> None:
    """Else a second run with the next seed would see the orders of the first, an epoch later."""
    assert order(LONG_TAILED, seed=42, epoch=1) != order(LONG_TAILED, seed=43, epoch=0)


def test_the_order_neither_reads_nor_changes_the_global_random_state() -> None:
    import torch

    torch.manual_seed(1)
    first, state = order(LONG_TAILED), torch.random.get_rng_state()
    torch.manual_seed(2)
    assert order(LONG_TAILED) == first
    torch.manual_seed(1)
    order(LONG_TAILED)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_grouping_pads_much_less_on_lengths_with_a_long_tail() -> None:
    grouped = padding_share(order(LONG_TAILED), LONG_TAILED, BATCH)
    ungrouped = padding_share(order(LONG_TAILED, group=False), LONG_TAILED, BATCH)
    assert ungrouped > 0.5
    assert grouped < 0.2
    assert grouped < ungrouped / 3
    assert padding_share(order(LONG_TAILED), LONG_TAILED, BATCH // 4) < 0.1, "every micro-batch pads little too"
    longest = max(range(len(LONG_TAILED)), key=LONG_TAILED.__getitem__)
    [batch] = [batch for batch in batches(order(LONG_TAILED), BATCH) if longest in batch]
    assert min(LONG_TAILED[row] for row in batch) > 4 * sorted(LONG_TAILED)[len(LONG_TAILED) // 2]


def test_the_order_of_grouped_batches_is_random_in_length() -> None:
    means = [sum(LONG_TAILED[row] for row in batch) / len(batch) for batch in batches(order(LONG_TAILED), BATCH)]
    rising = sum(later > earlier for earlier, later in pairwise(means)) / (len(means) - 1)
    assert 0.4 < rising < 0.6
    whole = sum(means) / len(means)
    quarters = [sum(part) / len(part) for part in batches(means, len(means) // 4)[:4]]
    assert all(abs(mean / whole - 1) < 0.35 for mean in quarters)


def test_a_batch_of_equal_rows_still_mixes_rows_anew_each_epoch() -> None:
    lengths = [10] * 200
    first, second = ({frozenset(b) for b in batches(order(lengths, epoch=epoch), BATCH)} for epoch in (0, 1))
    assert not first & second


@settings(max_examples=40)
@given(rows=st.integers(1, 2000), seed=st.integers(0, 1000))
def test_batches_group_similar_lengths_and_the_short_one_comes_last(rows: int, seed: int) -> None:
    """In one window the batches are the runs of the sorted lengths, so no batch straddles two groups."""
    size = 8
    lengths = random.Random(seed).sample(range(1, 10_000), rows)
    found = [
        sorted(lengths[row] for row in batch) for batch in batches(order(lengths, batch_size=size, seed=seed), size)
    ]
    for start in range(0, len(found), 50):
        window = found[start : start + 50]
        assert all(len(batch) == size for batch in window[:-1])
        inside = sorted(window)
        assert all(a[-1] < b[0] for a, b in pairwise(inside))
        if len(window[-1]) < size:
            assert window[-1] == inside[-1]


# -- the worst batch ---------------------------------------------------------------------------------------------------

ROWS = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=40)


@given(rows=ROWS, micro_batch=st.integers(1, 8), accumulation=st.integers(1, 4), seed=st.integers(0, 9))
def test_no_order_gives_a_larger_micro_batch_and_some_order_reaches_each_of_its_numbers(
    rows: list[tuple[int, int]], micro_batch: int, accumulation: int, seed: int
) -> None:
    lengths, trained = zip(*rows, strict=True)
    worst = worst_batches(Sizes(lengths, trained), MicroBatching(micro_batch), micro_batch, "here")[0]
    by_trained = sorted(range(len(rows)), key=trained.__getitem__)[-micro_batch:]
    assert worst.rows == len(by_trained)
    assert worst.tokens == max(lengths)
    assert worst.trained_tokens == sum(trained[row] for row in by_trained)
    assert worst.padded is (worst.rows > 1 and min(lengths) < max(lengths))
    for group in (True, False):
        found = order(list(lengths), batch_size=micro_batch * accumulation, seed=seed, group=group)
        for step in batches(found, micro_batch * accumulation):
            for batch in batches(step, micro_batch):
                assert len(batch) <= worst.rows
                assert max(lengths[row] for row in batch) <= worst.tokens
                assert sum(trained[row] for row in batch) <= worst.trained_tokens
                assert worst.padded or len({lengths[row] for row in batch}) == 1


@given(rows=ROWS, tokens=st.integers(1, 120), batch_size=st.integers(1, 12), seed=st.integers(0, 9))
def test_micro_batches_by_tokens_hold_each_row_once_within_the_tokens_and_none_is_larger_than_the_worst(
    rows: list[tuple[int, int]], tokens: int, batch_size: int, seed: int
) -> None:
    lengths, trained = zip(*((length, min(count, length - 1)) for length, count in rows), strict=True)
    way = MicroBatching(1, tokens)
    worst = worst_batches(Sizes(lengths, trained), way, batch_size, "here")
    assert len(worst) <= 2
    for group in (True, False):
        for step in batches(order(list(lengths), batch_size=batch_size, seed=seed, group=group), batch_size):
            parts = micro_batches([lengths[row] for row in step], way)
            assert sorted(place for part in parts for place in part) == list(range(len(step)))
            for part in parts:
                found = [lengths[step[place]] for place in part]
                places = len(found) * max(found)
                assert places <= tokens or len(found) == 1
                assert places <= worst[0].rows * worst[0].tokens
                assert max(found) <= max(batch.tokens for batch in worst)
                assert sum(trained[step[place]] for place in part) <= worst[0].trained_tokens


def test_rows_are_sorted_before_they_are_cut_and_those_of_one_length_keep_their_order() -> None:
    assert micro_batches([9, 1, 8, 2, 7, 2], MicroBatching(2)) == [[1, 3], [5, 4], [2, 0]]
    # Of packed rows, the best fit leaves the least room.
    assert micro_batches([3, 6, 2, 7, 1, 11], MicroBatching(1, 10, packed=True)) == [[5], [3, 0], [1, 2, 4]]
    step = order(LONG_TAILED)[:BATCH]
    found = micro_batches([LONG_TAILED[row] for row in step], MicroBatching(4))
    assert found == batches(list(range(BATCH)), 4), "grouped rows stay as they are"


def test_the_worst_micro_batches_by_tokens_are_those_with_most_tokens_and_with_the_longest_row() -> None:
    way = MicroBatching(1, 100)
    lengths, trained = [10] * 20 + [33, 33, 33, 60], [4] * 20 + [30, 30, 30, 9]
    most, longest = worst_batches(Sizes(lengths, trained), way, 8, "here")
    assert (most.rows, most.tokens, most.trained_tokens, most.padded) == (3, 33, 90, True)
    assert (longest.rows, longest.tokens, longest.trained_tokens, longest.padded) == (1, 60, 30, False)
    [only] = worst_batches(Sizes([7, 7], [3, 3]), way, 8, "here")
    assert (only.rows, only.tokens, only.padded) == (2, 7, False)


def test_where_nothing_is_known_of_the_rows_as_many_tokens_as_may_be_are_the_worst() -> None:
    def shapes(tokens: int, batch_size: int, max_length: int) -> list[tuple[int, int]]:
        way = MicroBatching(1, tokens)
        return [(batch.rows, batch.tokens) for batch in longest_batches(way, batch_size, max_length)]

    assert shapes(2048, 16, 512) == [(4, 512)]
    assert shapes(1000, 16, 600) == [(2, 500), (1, 600)]
    assert shapes(100, 16, 600) == [(1, 600)], "a row longer than that goes by itself"
    assert shapes(10_000, 4, 600) == [(4, 600)], "no more rows than a step has"


@given(rows=ROWS, tokens=st.integers(1, 120), batch_size=st.integers(1, 12), seed=st.integers(0, 9))
def test_packed_micro_batches_hold_each_row_once_within_the_tokens_and_none_is_larger_than_the_worst(
    rows: list[tuple[int, int]], tokens: int, batch_size: int, seed: int
) -> None:
    lengths, trained = zip(*((length, min(count, length - 1)) for length, count in rows), strict=True)
    way = MicroBatching(1, tokens, packed=True)
    [worst] = worst_batches(Sizes(lengths, trained), way, batch_size, "here")
    assert worst.rows == 1
    assert sum(worst.packed) == worst.tokens <= max(tokens, *lengths)
    for step in batches(order(list(lengths), batch_size=batch_size, seed=seed, group=False), batch_size):
        parts = micro_batches([lengths[row] for row in step], way)
        assert sorted(place for part in parts for place in part) == list(range(len(step)))
        for part in parts:
            places = sum(lengths[step[place]] for place in part)
            assert places <= tokens or len(part) == 1
            assert places <= worst.tokens
            assert sum(trained[step[place]] for place in part) <= max(worst.trained_tokens, 0)


def test_the_largest_packed_micro_batch_is_that_of_the_rows_together() -> None:
    def worst(lengths: list[int], tokens: int, step_rows: int = 8) -> tuple[int, tuple[int, ...]]:
        way = MicroBatching(1, tokens, packed=True)
        [batch] = worst_batches(Sizes(lengths, [length - 1 for length in lengths]), way, step_rows, "here")
        return batch.tokens, batch.packed

    assert worst([60, 60, 60], 150) == (120, (60, 60)), "no two rows and a half"
    assert worst([60, 60, 30], 150) == (150, (60, 60, 30))
    assert worst([60, 60, 30], 1000) == (150, (60, 60, 30)), "no more than there are"
    assert worst([60, 60, 30], 1000, step_rows=2) == (120, (60, 60)), "no more rows than a step has"
    assert worst([200, 10], 100) == (200, (200,)), "a row longer than that goes by itself"


def test_where_nothing_is_known_packed_rows_fill_the_tokens() -> None:
    way = MicroBatching(1, 1000, packed=True)
    for step_rows, packed in ((16, (400, 400, 200)), (2, (400, 400))):  # no more rows than a step has
        [batch] = longest_batches(way, step_rows, 400)
        assert (batch.tokens, batch.packed) == (sum(packed), packed)
        assert batch.trained_tokens == sum(packed) - len(packed)


def test_where_nothing_is_known_packed_pairs_may_share_nothing_or_almost_all() -> None:
    way = MicroBatching(1, 1000, packed=True, layout=RowLayout(("chosen", "rejected")), shares=True)
    apart, alike = longest_batches(way, 16, 400)
    assert (apart.tokens, apart.shared, apart.keys) == (1000, (), 1000)
    assert (alike.tokens, alike.by_row, alike.shared) == (802, [(400, 1), (400, 1)], (399, 399))
    assert alike.keys == 1600, "as many as of two rows that share nothing"


def test_a_packed_micro_batch_never_exceeds_its_rows_padded() -> None:
    data = DataSection(packing=True, max_length=100)
    assert MicroBatching.of(TrainingSection(micro_batch=4), data) == MicroBatching(1, 400, packed=True)
    assert MicroBatching.of(TrainingSection(micro_batch_tokens=90), data) == MicroBatching(1, 90, packed=True)
    assert MicroBatching.of(TrainingSection(micro_batch=4), DataSection()) == MicroBatching(4)
    # A limit of tokens is one of all segments of a row.
    pairs = RowLayout(("chosen", "rejected"))
    packed = MicroBatching.of(TrainingSection(micro_batch=4), data, pairs)
    assert packed == MicroBatching(1, 800, packed=True, layout=pairs)
    assert MicroBatching(1, 100, layout=pairs).capacity(10) == 5
    assert MicroBatching(1, 100).capacity(10) == 10


def test_without_data_every_row_is_assumed_to_have_the_maximum_length() -> None:
    assert longest_batch(4, 100) == LargestBatch(4, 100, True, 4 * 99)
    assert longest_batch(1, 100).padded is False, "a row by itself needs no mask"
    assert longest_batch(2, 7).as_dict() == {
        "rows": 2, "tokens": 7, "padded": True, "trained_tokens": 12, "source": "data.max_length",
        "packed": (),
    }  # fmt: skip


# Height, width and tokens of the images of six rows.
IMAGES = [(), (8, 8, 1), (32, 32, 16), (), (8, 8, 1, 64, 64, 64), (32, 32, 16)]
SIZES = Sizes([90, 30, 40, 20, 70, 35], [9, 3, 4, 2, 7, 35], images=IMAGES)


def test_rows_with_images_of_like_area_are_together() -> None:
    rows = micro_batches(SIZES.lengths, MicroBatching(2), SIZES.areas)
    assert rows == [[3, 0], [1, 5], [2, 4]]
    by_tokens = micro_batches(SIZES.lengths, MicroBatching(1, 80), SIZES.areas)
    assert by_tokens == [[4], [2, 5], [1], [0], [3]]
    assert all(len(part) * max(SIZES.lengths[row] for row in part) <= 80 for part in by_tokens if len(part) > 1)
    plain, grouped = (
        batches(list(RowOrder([50] * 64, 8, 1, True, areas)), 8) for areas in ((), [row % 4 * 100 for row in range(64)])
    )
    assert [len({row % 4 for row in batch}) for batch in grouped] == [1] * 8
    assert [len({row % 4 for row in batch}) for batch in plain] != [1] * 8


@pytest.mark.parametrize("way", [MicroBatching(2), MicroBatching(1, 100)])
def test_the_largest_micro_batches_are_those_of_rows_that_there_are(way: MicroBatching) -> None:
    longest, largest = (found := worst_batches(SIZES, way, 6, "test"))[0], found[-1]
    assert {(each.order, *chosen_rows(SIZES, each)) for each in found} >= {
        (longest.order, *chosen_rows(SIZES, longest)), ("area", *chosen_rows(SIZES, largest))
    }  # fmt: skip
    for batch in found:
        rows = chosen_rows(SIZES, batch)
        assert batch.images == tuple(IMAGES[row] for row in rows)
        assert batch.tokens == max(SIZES.lengths[row] for row in rows)
    most = max(sum(SIZES.areas[row] for row in part) for part in micro_batches(SIZES.lengths, way, SIZES.areas))
    assert largest.area >= most


def test_the_largest_micro_batch_by_length_has_the_largest_images_beside_its_longest_row() -> None:
    longest, largest = worst_batches(SIZES, MicroBatching(3), 6, "test")
    assert chosen_rows(SIZES, longest) == [0, 4, 2]
    assert chosen_rows(SIZES, largest) == [4, 2, 5]
    assert (longest.tokens, largest.tokens) == (90, 70)
    assert "images" not in worst_batches(Sizes([3], [1]), MicroBatching(1), 1, "test")[0].as_dict()
