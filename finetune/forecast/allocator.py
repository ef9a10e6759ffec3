"""A model of PyTorch's CUDA caching allocator: how much memory a sequence of allocations and frees reserves.

The tensors of a training step may fit while their segments do not, and no formula predicts the difference, so the
allocator's rules are reproduced here one by one; nothing is fitted to measurements. Names in brackets are functions of
c10/cuda/CUDACachingAllocator.cpp of pytorch/pytorch; the constants are those of c10/core/AllocatorConfig.h (torch
2.13).

Modelled: the default settings and `expandable_segments:True`, one stream. Not modelled: several streams (each has
free blocks of its own), private pools (CUDA graphs, `torch.cuda.MemPool`), and the settings `max_split_size_mb`,
`garbage_collection_threshold`, `roundup_power2_divisions`, `large_segment_size_mb` and
`per_process_memory_fraction`. Two things depend on the driver and are assumed: a new segment lies above all earlier
ones (addresses only break ties between free blocks of one size), and the address space of an expandable segment (1 1/8
of the device's memory) never runs out, so that each pool has one such segment.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import islice

BLOCK_BYTES = 512
"""kMinBlockSize: every block is a multiple of it."""
SMALL_BYTES = 2**20
"""kSmallSize: the largest request of the small pool."""
SMALL_SEGMENT_BYTES = 2 * 2**20
"""kSmallBuffer: a segment of the small pool, and its page when segments are expandable."""
LARGE_SEGMENT_BYTES = 20 * 2**20
"""large_segment_size: what requests below LARGE_BYTES are cut from, and the large pool's page."""
LARGE_BYTES = 10 * 2**20
"""kMinLargeAlloc: from here on a request has a segment of its own size."""
SEGMENT_GRAIN_BYTES = 2 * 2**20
"""kRoundLarge: such a segment is a multiple of it."""

# The null pointer, which torch returns for a zero-byte request and whose deletion does nothing.
_NULL = 0
# 2 TiB for the small pool and 20 TiB for the large one: the two ranges do not meet, and no device fills them.
_PAGES_OF_ADDRESSES = 2**20


def block_bytes(size_bytes: int) -> int:
    """Bytes of the block that a request asks for [round_size]."""
    return _round_up(max(size_bytes, 1), BLOCK_BYTES)


def segment_bytes(block: int) -> int:
    """Bytes of the segment that is made for a block of this size [get_allocation_size]."""
    if block <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return LARGE_SEGMENT_BYTES if block < LARGE_BYTES else _round_up(block, SEGMENT_GRAIN_BYTES)


def _round_up(number: int, grain: int) -> int:
    return -(-number // grain) * grain


class CapacityError(Exception):
    """A request that does not fit, even after all cached memory was released."""


class _Pool:
    """One of the two pools [BlockPool]."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.free: list[tuple[int, int]] = []
        """Size and address of each free block: the order of the best fit [BlockComparatorSize]."""
        self.unmapped: list[int] = []
        """Addresses of the ranges of an expandable segment without memory [BlockComparatorAddress]."""


@dataclass(slots=True, eq=False)
class _Block:
    """A stretch of a segment; its neighbours lie next to it in the same segment [Block]."""

    pool: _Pool
    address: int
    size: int
    allocated: bool = False
    mapped: bool = True
    before: _Block | None = None
    after: _Block | None = None

    def reach(self) -> int:
        """Bytes that a free block can grow to [expandable_size in get_free_block]."""
        return self.size + (self.after.size if self.after and not self.after.mapped else 0)


class CachingAllocator:
    """Allocates and frees as torch does on one stream and counts as torch.cuda.memory_stats does.

    `allocated_bytes` is torch.cuda.memory_allocated: whole blocks, with what was too little to split off.
    `reserved_bytes` is torch.cuda.memory_reserved: segments, or mapped pages where segments are expandable.
    """

    def __init__(self, capacity_bytes: int | None = None, *, expandable_segments: bool = False) -> None:
        """`capacity_bytes`: what the driver can give to segments in all; None for no limit."""
        self.capacity_bytes = capacity_bytes
        self.expandable_segments = expandable_segments
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self._small, self._large = _Pool(SMALL_SEGMENT_BYTES), _Pool(LARGE_SEGMENT_BYTES)
        self._blocks: dict[int, _Block] = {}
        self._next_address = SEGMENT_GRAIN_BYTES
        if expandable_segments:
            for pool in (self._small, self._large):
                addresses = pool.page * _PAGES_OF_ADDRESSES
                self._put_unmapped(_Block(pool, addresses, addresses, mapped=False))

    def allocate(self, size_bytes: int) -> int:
        """Take a block for `size_bytes` and return its handle [malloc]. A zero-byte request allocates nothing.

        Raises CapacityError where torch raises OutOfMemoryError; what was released on the way stays released.
        """
        if size_bytes == 0:
            return _NULL
        size = block_bytes(size_bytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._best_fit(pool, size) or self._obtain(pool, size)
        if block is None:
            self.empty_cache()
            block = self._obtain(pool, size)
        if block is None:
            raise CapacityError(f"{size_bytes} bytes do not fit beside {self.reserved_bytes} that are reserved")
        if self._splits(pool, block.size - size):
            self._put_free(self._cut(block, size))
        block.allocated = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block.address

    def free(self, handle: int) -> None:
        """Give a block back to its pool, one with its free neighbours [free, free_block]."""
        if handle == _NULL:
            return
        block = self._blocks[handle]
        assert block.allocated, handle
        block.allocated = False
        self.allocated_bytes -= block.size
        self._join_neighbours(block)
        self._put_free(block)

    def empty_cache(self) -> None:
        """Give to the driver what holds no allocation [release_cached_blocks, release_blocks].

        Those are whole segments, or, where segments are expandable, the whole pages inside each free block.
        """
        for pool in (self._large, self._small):
            for _, address in list(pool.free):
                block = self._blocks[address]
                if self.expandable_segments:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._take_free(block)
                    del self._blocks[address]
                    self.reserved_bytes -= block.size

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """Take the smallest free block that holds `size` [get_free_block].

        A block before unmapped pages counts for as much as it can grow to, so that the end of an expandable segment
        is cut last. The search stops at the first block that is not better, as torch's does.
        """
        index = bisect_left(pool.free, (size, 0))
        if index == len(pool.free):
            return None
        block = self._blocks[pool.free[index][1]]
        if self.expandable_segments:
            for _, address in islice(pool.free, index + 1, None):
                larger = self._blocks[address]
                if larger.reach() >= block.reach():
                    break
                block = larger
        self._take_free(block)
        return block

    def _splits(self, pool: _Pool, remaining: int) -> bool:
        """Whether the rest of a block becomes a block of its own [should_split]."""
        if pool is self._small or self.expandable_segments:
            return remaining >= BLOCK_BYTES
        return remaining > SMALL_BYTES

    def _obtain(self, pool: _Pool, size: int) -> _Block | None:
        """A block that the driver gives, or None past the capacity [alloc_block]."""
        if self.expandable_segments:
            return self._expand(pool, size)
        segment = segment_bytes(size)
        if not self._reserve(segment):
            return None
        block = self._blocks[self._next_address] = _Block(pool, self._next_address, segment)
        self._next_address += segment
        return block

    def _reserve(self, size: int) -> bool:
        if self.capacity_bytes is not None and self.reserved_bytes + size > self.capacity_bytes:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _expand(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages until a block holds `size` [try_allocate_expandable_block].

        Where the driver gives some of the pages but not all, those that it gave stay, as a free block.
        """
        block = self._expandable(pool, size)
        if block is None or (not block.mapped and not self._map(block, min(block.size, size))):
            return None
        while block.size < size:
            gap = block.after
            assert gap is not None, "a stretch that holds the size goes on"
            if not self._map(gap, min(gap.size, size - block.size)):
                return None
            block = gap
        self._take_free(block)
        return block

    def _expandable(self, pool: _Pool, size: int) -> _Block | None:
        """The lowest stretch of free and unmapped blocks that holds `size` [find_expandable_block]."""
        for address in pool.unmapped:
            start = self._blocks[address]
            if start.before is not None and not start.before.allocated:
                start = start.before
            room = 0
            block: _Block | None = start
            while block is not None and not block.allocated and room < size:
                room += block.size
                block = block.after
            if room >= size:
                return start
        return None

    def _map(self, block: _Block, size: int) -> bool:
        """Give memory to the first `size` bytes of an unmapped block, in whole pages, all or none.

        The mapped block is joined to its free neighbours [map_block, ExpandableSegment::map].
        """
        mapped = _round_up(size, block.pool.page)
        if not self._reserve(mapped):
            return False
        self._take_unmapped(block)
        if mapped < block.size:
            self._put_unmapped(self._cut(block, mapped))
        block.mapped = True
        self._join_neighbours(block)
        self._put_free(block)
        return True

    def _unmap(self, block: _Block) -> None:
        """Take the memory from the whole pages inside a free block [unmap_block, ExpandableSegment::unmap]."""
        page = block.pool.page
        start = _round_up(block.address, page)
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        self._take_free(block)
        if start > block.address:
            head, block = block, self._cut(block, start - block.address)
            self._put_free(head)
        if end < block.address + block.size:
            self._put_free(self._cut(block, end - block.address))
        block.mapped = False
        self.reserved_bytes -= block.size
        self._join_neighbours(block)
        self._put_unmapped(block)

    def _cut(self, block: _Block, size: int) -> _Block:
        """Shorten a block that is in no list to `size` and return the rest of it, alike in state."""
        rest = _Block(block.pool, block.address + size, block.size - size, mapped=block.mapped)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        self._blocks[rest.address] = rest
        return rest

    def _join_neighbours(self, block: _Block) -> None:
        """Join a block that is in no list to the neighbours that are free, or unmapped, as it is [try_merge_blocks]."""
        for other in (block.before, block.after):
            if other is None or other.allocated or other.mapped != block.mapped:
                continue
            (self._take_free if other.mapped else self._take_unmapped)(other)
            del self._blocks[max(block.address, other.address)]
            block.address = min(block.address, other.address)
            block.size += other.size
            if other is block.before:
                block.before = other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block
            self._blocks[block.address] = block

    def _put_free(self, block: _Block) -> None:
        insort(block.pool.free, (block.size, block.address))

    def _take_free(self, block: _Block) -> None:
        del block.pool.free[bisect_left(block.pool.free, (block.size, block.address))]

    def _put_unmapped(self, block: _Block) -> None:
        self._blocks[block.address] = block
        insort(block.pool.unmapped, block.address)

    def _take_unmapped(self, block: _Block) -> None:
        del block.pool.unmapped[bisect_left(block.pool.unmapped, block.address)]
