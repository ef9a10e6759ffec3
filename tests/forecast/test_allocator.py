"""The model of the CUDA caching allocator: what its published rules come to, worked out by hand for each of them."""

import time
from itertools import pairwise
from typing import Any, NamedTuple

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


def counts(allocator: CachingAllocator) -> tuple[int, int]:
    return allocator.allocated_bytes, allocator.reserved_bytes


def test_sizes_round_size_and_get_allocation_size() -> None:
    for requested, block, segment in [
        (1, 512, 2 * MIB), (512, 512, 2 * MIB), (513, 1024, 2 * MIB), (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB), (10 * MIB - 1, 10 * MIB, 10 * MIB), (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB), (23 * MIB, 23 * MIB, 24 * MIB),
    ]:  # fmt: skip
        assert (block_bytes(requested), segment_bytes(block_bytes(requested))) == (block, segment)
        allocator = CachingAllocator()
        allocator.allocate(requested)
        assert allocator.reserved_bytes == segment


BYTE, BLOCK = 1 / MIB, 512 / MIB  # in MiB, as all sizes of the tables
EMPTY = "empty_cache"


class At(NamedTuple):
    """An allocation that takes the place of the allocation number `like`, or lies `behind` its start."""

    size: float
    like: int
    behind: float = 0


class Refused(NamedTuple):
    """An allocation that is out of memory."""

    size: float


class Limit(NamedTuple):
    """The capacity from here on."""

    size: int


def play(allocator: CachingAllocator, *steps: Any) -> None:
    """Take the steps: a size allocates, -n frees the n-th allocation, and a tuple has the bytes that are allocated and
    reserved, and perhaps the peak of these; a list has the blocks of every segment, the endless unmapped end left out:
    (a)llocated, (f)ree or (u)nmapped.
    """
    handles: list[int] = []

    def allocate(mib: float) -> int:
        handles.append(allocator.allocate(round(mib * MIB)))
        return handles[-1]

    for number, step in enumerate(steps):
        where = f"step {number} of {steps}"
        match step:
            case At():
                assert allocate(step.size) == handles[step.like - 1] + step.behind * MIB, where
            case Limit():
                allocator.capacity_bytes = step.size * MIB
            case Refused():
                with pytest.raises(CapacityError):
                    allocate(step.size)
            case tuple():
                found = (*counts(allocator), allocator.peak_reserved_bytes)
                assert found[: len(step)] == tuple(mib * MIB for mib in step), where
            case list():
                blocks = [[(span.size_bytes / MIB, span.state[0]) for span in one] for one in segments(allocator)]
                blocks = [one[:-1] if one[-1][1] == "u" else one for one in blocks]
                assert [one for one in blocks if one] == step, where
            case "empty_cache":
                allocator.empty_cache()
            case _ if step < 0:
                allocator.free(handles[-step - 1])
            case _:
                allocate(step)


LOWER = [*[4096 * BYTE] * 4, -3, -1, At(4096 * BYTE, 1), At(4096 * BYTE, 3)]
PLAIN: dict[str, list[Any]] = {
    "a request of zero bytes takes no block": [0, -1, -1, (0, 0)],
    "small requests share a segment of 2 MiB": [0.5, 0.5, 0.5, 0.5, (2, 2), BYTE, (2 + BLOCK, 4)],
    "requests below 10 MiB share a segment of 20 MiB": [8, 8, (16, 20), 4, (20, 20)],
    "the pools do not lend to each other": [9, -1, BLOCK, (BLOCK, 22), 1 + BLOCK, -3, (BLOCK, 22)],
    "a large block is split where more than 1 MiB remains": [16, -1, 15 - BLOCK, (15 - BLOCK, 16)],
    "a large block is not split where 1 MiB remains": [16, -1, 15, (16, 16)],
    "a large block is not split where less remains": [16, -1, 15 + BLOCK, (16, 16)],
    "a large block may be taken whole": [16, -1, 16, (16, 16)],
    "a small block is split where 512 bytes remain": [
        4 * BLOCK, 1, -1, 3 * BLOCK, [[(3 * BLOCK, "a"), (BLOCK, "f"), (1, "a"), (1 - 4 * BLOCK, "f")]],
    ],
    "the smallest free block that fits is taken": [40, 12, 30, 14, -1, -2, -3, -4, At(13, 4), At(20, 3), (34, 96)],
    "of two free blocks of one size the lower is taken": LOWER,
    "free neighbours merge from either side": [
        6, 6, 6, -1, -3, [[(6, "f"), (6, "a"), (8, "f")]], -2, [[(20, "f")]],
    ],
    "blocks of different segments do not merge": [12, 12, -1, -2, 24, (24, 48)],
    "an allocated neighbour keeps free memory in pieces": [6, 6, 6, -1, -3, 9, (15, 40)],
    # The request of 2 MiB is cut from the free 30.
    "empty_cache releases whole segments alone": [
        30, -1, 2, 2, -3, 100 * BYTE, -4, (2, 32), EMPTY, (2, 30), -2, EMPTY, (0, 0), [],
    ],
    "cached memory is released before a request fails": [Limit(64), 20, -1, 30, -2, 60, (60, 60, 60)],
    # The 16 free MiB of the first segment cannot be released, the 12 cached ones are.
    "a request that does not fit is out of memory": [Limit(40), 4, 12, -2, Refused(22), (4, 20), 20, (24, 40)],
    "a segment and not the request must fit": [Limit(19), Refused(2), 18],
}  # fmt: skip
UNMAPPED = [5, 60, 5, (70, 80), -2, EMPTY]
EXPANDABLE: dict[str, list[Any]] = {
    "a request of zero bytes takes no block": [0, -1, -1, (0, 0)],
    "of two free blocks of one size the lower is taken": LOWER,
    "segments grow by pages of 2 and 20 MiB": [BLOCK, (BLOCK, 2), 45, (45 + BLOCK, 62)],
    # 17 of the 18 MiB lie mapped behind the first three, so that one page more holds the rest.
    "growth starts in the free end": [3, 18, [[(3, "a"), (18, "a"), (19, "f")]], (21, 40)],
    "blocks are split to 512 bytes": [20 - BLOCK, [[(20 - BLOCK, "a"), (BLOCK, "f")]]],
    # 2.5 MiB at the end would fit better than the hole of 8.
    "the end of a segment is cut last": [8, 8, 1.5, -2, At(2, 2)],
    # Free are 2 MiB that can grow to 42, the last 5 with no end, and 10 that cannot grow and are not looked at.
    "the search for a block that grows less stops at the first that grows more": [
        18, 52, 5, -2, EMPTY, [[(18, "a"), (2, "f"), (40, "u"), (10, "f"), (5, "a"), (5, "f")]], At(2, 1, 18),
    ],
    # Free from 5 to 65 MiB: the pages 20 to 60 lie inside it, and 70 to 80 holds no whole page.
    "empty_cache unmaps the whole pages inside free blocks": [
        *UNMAPPED, (10, 40), [[(5, "a"), (15, "f"), (40, "u"), (5, "f"), (5, "a"), (10, "f")]],
    ],
    # 15 free MiB, then one page of the gap: 35 hold the 30. The rest of the gap is 5 free, 20 unmapped, 5 free: a page
    # makes it one block, which just holds 30.
    "growth fills the lowest gap": [*UNMAPPED, At(30, 1, 5), (40, 60), At(30, 1, 35), (70, 80)],
    "growth passes over a gap that is too small": [*UNMAPPED, At(61, 1, 70), (71, 100)],
    "a segment that was unmapped grows anew": [90, -1, EMPTY, (0, 0), 30, (30, 40)],
    "pages of one pool are released for the other": [Limit(22), 5, -1, *[1] * 20, (20, 20), Refused(5), (20, 20)],
    "growth maps all pages of a gap or none": [Limit(60), 15, Refused(50), (15, 20), 45, (60, 60)],
}  # fmt: skip


@pytest.mark.parametrize("rule", PLAIN)
def test_plain_segments(rule: str) -> None:
    play(CachingAllocator(), *PLAIN[rule])


@pytest.mark.parametrize("rule", EXPANDABLE)
def test_expandable_segments(rule: str) -> None:
    play(expandable(), *EXPANDABLE[rule])


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
    entry("segment_alloc", 0x1000000, 20 * MIB), entry("alloc", 0x1000000, 5 * MIB - 1),
    entry("segment_alloc", 0x8000000, 30 * MIB), entry("alloc", 0x8000000, 30 * MIB),
    entry("free_requested", 0x8000000, 30 * MIB), entry("free_completed", 0x8000000, 30 * MIB),
    entry("snapshot", 0, 0), entry("segment_free", 0x8000000, 30 * MIB),
    entry("segment_alloc", 0x8000000, 40 * MIB), entry("alloc", 0x8000000, 39 * MIB),
    entry("free_requested", 0x1000000, 5 * MIB - 1), entry("free_completed", 0x1000000, 5 * MIB - 1),
]  # fmt: skip
MAPPED = [
    entry("segment_map", 0x1000000, 40 * MIB), entry("alloc", 0x1000000, 25 * MIB),
    entry("free_completed", 0x1000000, 25 * MIB), entry("segment_unmap", 0x1000000, 20 * MIB),
    entry("segment_unmap", 0x1000000 + 20 * MIB, 20 * MIB), entry("segment_map", 0x1000000, 2 * MIB),
    entry("alloc", 0x1000000, 9),
]  # fmt: skip


def test_a_history_becomes_a_recording_and_is_replayed() -> None:
    recording = Recording.from_history(HISTORY, expandable_segments=False, peak_allocated_bytes=45 * MIB)
    assert recording.events == (5 * MIB - 1, 30 * MIB, -2, RELEASE, 39 * MIB, -1)
    assert Recording.from_json(recording.to_json()) == recording
    # 39 of a segment of 40 MiB: the last one is no block of its own.
    assert replay(recording) == (Peaks(45 * MIB, 60 * MIB), Peaks(45 * MIB, 60 * MIB))
    recording = Recording.from_history(MAPPED, expandable_segments=True)
    assert recording.events == (25 * MIB, -1, RELEASE, 9)
    assert replay(recording) == (Peaks(25 * MIB, 40 * MIB), Peaks(None, 40 * MIB)), "the mapped pages"
    larger = [entry("segment_alloc", 0x1000000, 4 * GIB), entry("alloc", 0x1000000, 512)]
    found = replay(Recording.from_history(larger, expandable_segments=False))
    assert found == (Peaks(512, 2 * MIB), Peaks(None, 4 * GIB)), "what was recorded is not the model's"


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ([entry("free_completed", 0x1000, 512)], "frees 0x1000"),
        ([entry("segment_free", 0x1000, 2 * MIB)], "more segments than it made"),
        ([entry("alloc", 0x1000, 1), entry("alloc", 0x2000, 1, stream=7)], "several streams"),
    ],
)
def test_a_history_that_the_model_cannot_follow_is_refused(history: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recording.from_history(history, expandable_segments=False)
