"""The model of the CUDA caching allocator: what its published rules come to, worked out by hand for each of them."""

import time
from itertools import pairwise
from typing import NamedTuple

import pytest
from allocator_recording import RELEASE, Peaks, Recording, replay
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.forecast.allocator import (
    LARGE_SEGMENT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    CachingAllocator,
    CapacityError,
    block_bytes,
    segment_bytes,
)

MIB = 2**20
GIB = 2**30


def expandable(capacity_bytes: int | None = None) -> CachingAllocator:
    return CachingAllocator(capacity_bytes, expandable_segments=True)


class Span(NamedTuple):
    """A block as seen from outside: `state` is "allocated", "free" or, in an expandable segment, "unmapped"."""

    address: int
    size_bytes: int
    state: str


def segments(allocator: CachingAllocator) -> list[list[Span]]:
    """Every segment's blocks in the order of their addresses, as torch.cuda.memory_snapshot shows them."""
    made = []
    for block in [block for _, block in sorted(allocator._blocks.items()) if block.before is None]:
        spans = []
        while block:
            state = "allocated" if block.allocated else "free" if block.mapped else "unmapped"
            spans.append(Span(block.address, block.size, state))
            block = block.after
        made.append(spans)
    return made


def states(allocator: CachingAllocator) -> list[list[tuple[int, str]]]:
    """Sizes and states of every segment's blocks, the endless unmapped end of an expandable one left out."""
    return [
        [(span.size_bytes, span.state) for span in segment if span.state != "unmapped" or span is not segment[-1]]
        for segment in segments(allocator)
    ]


def counts(allocator: CachingAllocator) -> tuple[int, int]:
    return allocator.allocated_bytes, allocator.reserved_bytes


def test_sizes_round_size_and_get_allocation_size(subtests: pytest.Subtests) -> None:
    for requested, block, segment in [
        (1, 512, 2 * MIB), (512, 512, 2 * MIB), (513, 1024, 2 * MIB), (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB), (10 * MIB - 1, 10 * MIB, 10 * MIB), (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB), (23 * MIB, 23 * MIB, 24 * MIB),
    ]:  # fmt: skip
        with subtests.test(requested=requested):
            assert (block_bytes(requested), segment_bytes(block_bytes(requested))) == (block, segment)
            allocator = CachingAllocator()
            allocator.allocate(requested)
            assert allocator.reserved_bytes == segment


def test_a_request_of_zero_bytes_takes_no_block(subtests: pytest.Subtests) -> None:
    for make in [CachingAllocator, expandable]:
        with subtests.test(make=make):
            allocator = make()
            handle = allocator.allocate(0)
            allocator.free(handle)
            allocator.free(handle)
            assert counts(allocator) == (0, 0)


def test_small_requests_share_a_segment_of_2_mib() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(MIB // 2)
    assert counts(allocator) == (2 * MIB, 2 * MIB)
    allocator.allocate(1)
    assert counts(allocator) == (2 * MIB + 512, 4 * MIB)


def test_requests_below_10_mib_share_a_segment_of_20_mib() -> None:
    allocator = CachingAllocator()
    for _ in range(2):
        allocator.allocate(8 * MIB)
    assert counts(allocator) == (16 * MIB, 20 * MIB)
    allocator.allocate(4 * MIB)
    assert counts(allocator) == (20 * MIB, 20 * MIB)


def test_the_pools_do_not_lend_to_each_other() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(9 * MIB))
    allocator.allocate(512)
    assert counts(allocator) == (512, 22 * MIB)
    allocator.free(allocator.allocate(MIB + 512))
    assert allocator.reserved_bytes == 22 * MIB


def test_a_large_block_is_split_where_more_than_1_mib_remains(subtests: pytest.Subtests) -> None:
    for requested, allocated in [
        (15 * MIB - 512, 15 * MIB - 512),
        (15 * MIB, 16 * MIB),
        (15 * MIB + 512, 16 * MIB),
        (16 * MIB, 16 * MIB),
    ]:
        with subtests.test(requested=requested):
            allocator = CachingAllocator()
            allocator.free(allocator.allocate(16 * MIB))
            allocator.allocate(requested)
            assert counts(allocator) == (allocated, 16 * MIB)


def test_a_small_block_is_split_where_512_bytes_remain() -> None:
    allocator = CachingAllocator()
    first = allocator.allocate(2048)
    allocator.allocate(MIB)
    allocator.free(first)
    allocator.allocate(1536)
    assert states(allocator)[0][:2] == [(1536, "allocated"), (512, "free")]


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    handles = [allocator.allocate(size * MIB) for size in (40, 12, 30, 14)]
    for handle in handles:
        allocator.free(handle)
    assert allocator.allocate(13 * MIB) == handles[3]
    assert allocator.allocate(20 * MIB) == handles[2]
    assert allocator.reserved_bytes == 96 * MIB


def test_of_two_free_blocks_of_one_size_the_lower_is_taken(subtests: pytest.Subtests) -> None:
    for make in [CachingAllocator, expandable]:
        with subtests.test(make=make):
            allocator = make()
            first, _, second, _ = [allocator.allocate(4096) for _ in range(4)]
            allocator.free(second)
            allocator.free(first)
            assert [allocator.allocate(4096), allocator.allocate(4096)] == [first, second]


def test_free_neighbours_merge_from_either_side() -> None:
    allocator = CachingAllocator()
    one, two, three = [allocator.allocate(6 * MIB) for _ in range(3)]
    allocator.free(one)
    allocator.free(three)
    assert states(allocator) == [[(6 * MIB, "free"), (6 * MIB, "allocated"), (8 * MIB, "free")]]
    allocator.free(two)
    assert states(allocator) == [[(20 * MIB, "free")]]


def test_blocks_of_different_segments_do_not_merge() -> None:
    allocator = CachingAllocator()
    for handle in [allocator.allocate(12 * MIB) for _ in range(2)]:
        allocator.free(handle)
    allocator.allocate(24 * MIB)
    assert allocator.reserved_bytes == 48 * MIB


def test_an_allocated_neighbour_keeps_free_memory_in_pieces() -> None:
    allocator = CachingAllocator()
    one, _, three = [allocator.allocate(6 * MIB) for _ in range(3)]
    allocator.free(one)
    allocator.free(three)
    allocator.allocate(9 * MIB)
    assert counts(allocator) == (15 * MIB, 40 * MIB)


def test_empty_cache_releases_whole_segments_alone() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    kept = allocator.allocate(2 * MIB)
    allocator.free(allocator.allocate(2 * MIB))
    allocator.free(allocator.allocate(100))
    # The request of 2 MiB was cut from the free 30.
    assert counts(allocator) == (2 * MIB, 32 * MIB)
    allocator.empty_cache()
    assert counts(allocator) == (2 * MIB, 30 * MIB)
    allocator.free(kept)
    allocator.empty_cache()
    assert counts(allocator) == (0, 0)
    assert segments(allocator) == []


def test_cached_memory_is_released_before_a_request_fails() -> None:
    allocator = CachingAllocator(64 * MIB)
    allocator.free(allocator.allocate(20 * MIB))
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(60 * MIB)
    assert counts(allocator) == (60 * MIB, 60 * MIB)
    assert allocator.peak_reserved_bytes == 60 * MIB


def test_a_request_that_does_not_fit_is_out_of_memory() -> None:
    allocator = CachingAllocator(40 * MIB)
    allocator.allocate(4 * MIB)
    cached = allocator.allocate(12 * MIB)
    allocator.free(cached)
    with pytest.raises(CapacityError):
        allocator.allocate(22 * MIB)
    # The 16 free MiB of the first segment cannot be released, the 12 cached ones were.
    assert counts(allocator) == (4 * MIB, 20 * MIB)
    allocator.allocate(20 * MIB)
    assert counts(allocator) == (24 * MIB, 40 * MIB)


def test_a_segment_and_not_the_request_must_fit() -> None:
    allocator = CachingAllocator(19 * MIB)
    with pytest.raises(CapacityError):
        allocator.allocate(2 * MIB)
    allocator.allocate(18 * MIB)


def test_expandable_segments_grow_by_pages_of_2_and_20_mib() -> None:
    allocator = expandable()
    allocator.allocate(512)
    assert counts(allocator) == (512, 2 * MIB)
    allocator.allocate(45 * MIB)
    assert counts(allocator) == (45 * MIB + 512, 62 * MIB)


def test_expandable_growth_starts_in_the_free_end() -> None:
    allocator = expandable()
    allocator.allocate(3 * MIB)
    allocator.allocate(18 * MIB)
    # 17 of the 18 MiB lay mapped behind the first three, so that one page more holds the rest.
    assert states(allocator)[-1] == [(3 * MIB, "allocated"), (18 * MIB, "allocated"), (19 * MIB, "free")]
    assert counts(allocator) == (21 * MIB, 40 * MIB)


def test_expandable_blocks_are_split_to_512_bytes() -> None:
    allocator = expandable()
    allocator.allocate(20 * MIB - 512)
    assert states(allocator)[-1] == [(20 * MIB - 512, "allocated"), (512, "free")]


def test_the_end_of_an_expandable_segment_is_cut_last() -> None:
    allocator = expandable()
    _, hole, _ = [allocator.allocate(size) for size in (8 * MIB, 8 * MIB, 3 * MIB // 2)]
    allocator.free(hole)
    # 2.5 MiB at the end would fit better than the hole of 8.
    assert allocator.allocate(2 * MIB) == hole


def test_the_search_for_a_block_that_grows_less_stops_at_the_first_that_grows_more() -> None:
    allocator = expandable()
    first, middle, _ = [allocator.allocate(size * MIB) for size in (18, 52, 5)]
    allocator.free(middle)
    allocator.empty_cache()
    assert states(allocator)[-1][1:4] == [(2 * MIB, "free"), (40 * MIB, "unmapped"), (10 * MIB, "free")]
    # Free are 2 MiB that can grow to 42, the last 5 with no end, and 10 that cannot grow and are not looked at.
    assert allocator.allocate(2 * MIB) == first + 18 * MIB


def test_expandable_empty_cache_unmaps_the_whole_pages_inside_free_blocks() -> None:
    allocator = expandable()
    _, middle, _ = [allocator.allocate(size * MIB) for size in (5, 60, 5)]
    assert allocator.reserved_bytes == 80 * MIB
    allocator.free(middle)
    allocator.empty_cache()
    # Free from 5 to 65 MiB: the pages 20 to 60 lie inside it, and 70 to 80 holds no whole page.
    assert counts(allocator) == (10 * MIB, 40 * MIB)
    assert states(allocator)[-1] == [
        (5 * MIB, "allocated"),
        (15 * MIB, "free"),
        (40 * MIB, "unmapped"),
        (5 * MIB, "free"),
        (5 * MIB, "allocated"),
        (10 * MIB, "free"),
    ]


def test_expandable_growth_fills_the_lowest_gap() -> None:
    allocator = expandable()
    first, middle, _ = [allocator.allocate(size * MIB) for size in (5, 60, 5)]
    allocator.free(middle)
    allocator.empty_cache()
    # 15 free MiB, then one page of the gap: 35 hold the 30.
    assert allocator.allocate(30 * MIB) == first + 5 * MIB
    assert counts(allocator) == (40 * MIB, 60 * MIB)
    # The rest of the gap is 5 free, 20 unmapped, 5 free: a page makes it one block, which just holds 30.
    assert allocator.allocate(30 * MIB) == first + 35 * MIB
    assert counts(allocator) == (70 * MIB, 80 * MIB)


def test_expandable_growth_passes_over_a_gap_that_is_too_small() -> None:
    allocator = expandable()
    first, middle, _ = [allocator.allocate(size * MIB) for size in (5, 60, 5)]
    allocator.free(middle)
    allocator.empty_cache()
    assert allocator.allocate(61 * MIB) == first + 70 * MIB
    assert counts(allocator) == (71 * MIB, 100 * MIB)


def test_an_expandable_segment_that_was_unmapped_grows_anew() -> None:
    allocator = expandable()
    allocator.free(allocator.allocate(90 * MIB))
    allocator.empty_cache()
    assert counts(allocator) == (0, 0)
    allocator.allocate(30 * MIB)
    assert counts(allocator) == (30 * MIB, 40 * MIB)


def test_expandable_pages_of_one_pool_are_released_for_the_other() -> None:
    allocator = expandable(22 * MIB)
    allocator.free(allocator.allocate(5 * MIB))
    for _ in range(20):
        allocator.allocate(MIB)
    assert counts(allocator) == (20 * MIB, 20 * MIB)
    with pytest.raises(CapacityError):
        allocator.allocate(5 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_expandable_growth_maps_all_pages_of_a_gap_or_none() -> None:
    allocator = expandable(60 * MIB)
    allocator.allocate(15 * MIB)
    with pytest.raises(CapacityError):
        allocator.allocate(50 * MIB)
    assert counts(allocator) == (15 * MIB, 20 * MIB)
    allocator.allocate(45 * MIB)
    assert counts(allocator) == (60 * MIB, 60 * MIB)


def test_a_gap_may_be_mapped_for_a_request_that_then_fails() -> None:
    allocator = expandable(60 * MIB)
    gap, behind = allocator.allocate(20 * MIB), allocator.allocate(40 * MIB)
    allocator.free(gap)
    allocator.empty_cache()
    allocator.free(behind)
    assert counts(allocator) == (0, 40 * MIB)
    allocator.peak_reserved_bytes = 0
    # The gap is mapped and makes 60 MiB of one block, the end is refused, all is released, and 80 MiB are refused.
    with pytest.raises(CapacityError):
        allocator.allocate(70 * MIB)
    assert (allocator.peak_reserved_bytes, allocator.reserved_bytes) == (60 * MIB, 0)


SIZES = st.one_of(
    st.integers(0, 4 * 512),
    st.integers(1, 4 * MIB),
    st.integers(1, 60).map(lambda number: number * MIB),
    st.integers(1, 64 * MIB),
)
STEPS = st.lists(st.tuples(st.sampled_from(["take", "take", "take", "free", "free", "empty"]), SIZES), max_size=60)
CAPACITIES = st.one_of(st.none(), st.integers(1, 128).map(lambda number: number * 2 * MIB))


def fitting(allocator: CachingAllocator, size_bytes: int) -> list[Span]:
    """The free blocks, best first, that may hold a request: segments of 2 MiB are the small pool's."""
    block = block_bytes(size_bytes)
    free = [
        span
        for segment in segments(allocator)
        if (sum(other.size_bytes for other in segment) == SMALL_SEGMENT_BYTES) == (block <= SMALL_BYTES)
        for span in segment
        if span.state == "free" and span.size_bytes >= block
    ]
    return sorted(free, key=lambda span: (span.size_bytes, span.address))


def check_failure(allocator: CachingAllocator, size_bytes: int) -> None:
    """Nothing was left that the driver could have taken back or given."""
    block = block_bytes(size_bytes)
    assert allocator.capacity_bytes is not None
    if allocator.expandable_segments:
        page = SMALL_SEGMENT_BYTES if block <= SMALL_BYTES else LARGE_SEGMENT_BYTES
        needed = -(-block // page) * page
    else:
        needed = segment_bytes(block)
        assert not fitting(allocator, size_bytes)
        assert all(len(segment) > 1 or segment[0].state == "allocated" for segment in segments(allocator))
    assert allocator.reserved_bytes + needed > allocator.capacity_bytes


def check_state(allocator: CachingAllocator, live: list[tuple[int, int]]) -> None:
    spans = [span for segment in segments(allocator) for span in segment]
    for segment in segments(allocator):
        for one, other in pairwise(segment):
            assert one.address + one.size_bytes == other.address
            assert one.state != other.state or one.state == "allocated", "free neighbours are one block"
    allocated = {span.address: span.size_bytes for span in spans if span.state == "allocated"}
    assert sorted(allocated) == sorted(handle for handle, size in live if size)
    assert all(allocated[handle] >= size for handle, size in live if size)
    mapped = sum(span.size_bytes for span in spans if span.state != "unmapped")
    assert counts(allocator) == (sum(allocated.values()), mapped)
    assert mapped <= (allocator.capacity_bytes or mapped)


@pytest.mark.parametrize("expandable_segments", [False, True])
@settings(max_examples=200)
@given(capacity_bytes=CAPACITIES, steps=STEPS)
def test_any_sequence(expandable_segments: bool, capacity_bytes: int | None, steps: list[tuple[str, int]]) -> None:
    allocator = CachingAllocator(capacity_bytes, expandable_segments=expandable_segments)
    live: list[tuple[int, int]] = []
    largest_allocated = largest_reserved = 0
    for kind, size in steps:
        if kind == "empty":
            allocator.empty_cache()
        elif kind == "free" and live:
            allocator.free(live.pop(size % len(live))[0])
        elif kind == "take":
            best = fitting(allocator, size) if size else []
            try:
                live.append((allocator.allocate(size), size))
            except CapacityError:
                check_failure(allocator, size)
            else:
                assert expandable_segments or not best or live[-1][0] == best[0].address
        check_state(allocator, live)
        largest_allocated = max(largest_allocated, allocator.allocated_bytes)
        largest_reserved = max(largest_reserved, allocator.reserved_bytes)
        assert allocator.peak_allocated_bytes == largest_allocated
        assert allocator.peak_reserved_bytes >= largest_reserved
    if capacity_bytes is None:
        assert allocator.peak_reserved_bytes == largest_reserved
    for handle, _ in live:
        allocator.free(handle)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.peak_allocated_bytes == largest_allocated


@pytest.mark.parametrize("expandable_segments", [False, True])
def test_a_long_step_is_replayed_in_seconds(expandable_segments: bool) -> None:
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    start = time.process_time()
    handles: list[int] = []
    for number in range(50_000):
        handles.append(allocator.allocate((number * 7919) % (3 * MIB) + 1))
        if number >= 2_000:
            allocator.free(handles[number - 2_000])
    # It takes about half a second; ten leave room for a slow machine.
    assert time.process_time() - start < 10
    assert allocator.allocated_bytes > 0


def entry(action: str, address: int, size: int, stream: int = 0) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size, "stream": stream, "time_us": 1}


HISTORY = [
    entry("segment_alloc", 0x1000000, 20 * MIB),
    entry("alloc", 0x1000000, 5 * MIB - 1),
    entry("segment_alloc", 0x8000000, 30 * MIB),
    entry("alloc", 0x8000000, 30 * MIB),
    entry("free_requested", 0x8000000, 30 * MIB),
    entry("free_completed", 0x8000000, 30 * MIB),
    entry("snapshot", 0, 0),
    entry("segment_free", 0x8000000, 30 * MIB),
    entry("segment_alloc", 0x8000000, 40 * MIB),
    entry("alloc", 0x8000000, 39 * MIB),
    entry("free_requested", 0x1000000, 5 * MIB - 1),
    entry("free_completed", 0x1000000, 5 * MIB - 1),
]


def test_a_history_becomes_a_recording_and_is_replayed() -> None:
    recording = Recording.from_history(HISTORY, expandable_segments=False, peak_allocated_bytes=45 * MIB)
    assert recording.events == (5 * MIB - 1, 30 * MIB, -2, RELEASE, 39 * MIB, -1)
    assert Recording.from_json(recording.to_json()) == recording
    # 39 of a segment of 40 MiB: the last one is no block of its own.
    assert replay(recording) == (Peaks(45 * MIB, 60 * MIB), Peaks(45 * MIB, 60 * MIB))


def test_an_expandable_history_sums_the_mapped_pages() -> None:
    history = [
        entry("segment_map", 0x1000000, 40 * MIB),
        entry("alloc", 0x1000000, 25 * MIB),
        entry("free_completed", 0x1000000, 25 * MIB),
        entry("segment_unmap", 0x1000000, 20 * MIB),
        entry("segment_unmap", 0x1000000 + 20 * MIB, 20 * MIB),
        entry("segment_map", 0x1000000, 2 * MIB),
        entry("alloc", 0x1000000, 9),
    ]
    recording = Recording.from_history(history, expandable_segments=True)
    assert recording.events == (25 * MIB, -1, RELEASE, 9)
    assert replay(recording) == (Peaks(25 * MIB, 40 * MIB), Peaks(None, 40 * MIB))


def test_the_recorded_peak_is_the_histories_and_not_the_models() -> None:
    history = [entry("segment_alloc", 0x1000000, 4 * GIB), entry("alloc", 0x1000000, 512)]
    assert replay(Recording.from_history(history, expandable_segments=False)) == (
        Peaks(512, 2 * MIB),
        Peaks(None, 4 * GIB),
    )


def test_a_history_that_the_model_cannot_follow_is_refused(subtests: pytest.Subtests) -> None:
    for history, message in [
        ([entry("free_completed", 0x1000, 512)], "frees 0x1000"),
        ([entry("segment_free", 0x1000, 2 * MIB)], "more segments than it made"),
        ([entry("alloc", 0x1000, 1), entry("alloc", 0x2000, 1, stream=7)], "several streams"),
    ]:
        with subtests.test(history=history), pytest.raises(ValueError, match=message):
            Recording.from_history(history, expandable_segments=False)
