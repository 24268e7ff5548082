"""KV blocks: reference counts, the index of cached content, and the free list.

    free list   head ⇄ [no content] ⇄ [oldest content] ⇄ … ⇄ [newest content] ⇄ tail      every block with ref_count 0
                 ▲ take() reuses from here                             ▲ released blocks with content go here
    index       per group: content hash -> block                       blocks in use and free blocks alike

A block is free exactly when nobody references it; while it waits to be reused its content can still be hit, which
takes it out of the middle of the list. The list is intrusive (each block holds its neighbours), so every operation
is O(1) however many blocks there are. Block 0 is the null block: no content, never free, never counted.

Only the block manager talks to the pool. It knows no requests, no tokens and no windows.
"""

from __future__ import annotations

from collections.abc import Iterator

from octavo.core.sched.cache_observer import CacheObserver
from octavo.core.sched.kv_groups import NULL_BLOCK_ID


class Block:
    """One block of the pool.

    Attributes:
        block_id: its number in the backend's tensors.
        ref_count: block tables that name it.
        content_hash, group_id: under which it stands in the index; None and 0 when it is not there.
    """

    __slots__ = ("_next", "_previous", "block_id", "content_hash", "group_id", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.content_hash: bytes | None = None
        self.group_id = 0
        self._previous = self
        self._next = self

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.ref_count}, cached={self.content_hash is not None})"


class FreeList:
    """Doubly linked ring of free blocks around a sentinel."""

    __slots__ = ("_ring", "num_blocks")

    def __init__(self) -> None:
        self._ring = Block(-1)
        self.num_blocks = 0

    def __iter__(self) -> Iterator[Block]:
        block = self._ring._next
        while block is not self._ring:
            yield block
            block = block._next

    def append(self, block: Block) -> None:
        """Add as the last one to be reused."""
        self._insert(block, self._ring._previous, self._ring)

    def append_left(self, block: Block) -> None:
        """Add as the first one to be reused."""
        self._insert(block, self._ring, self._ring._next)

    def remove(self, block: Block) -> None:
        """Unlink a block of the list."""
        block._previous._next = block._next
        block._next._previous = block._previous
        block._previous = block._next = block
        self.num_blocks -= 1

    def pop_left(self) -> Block:
        """Unlink the first block; the list must not be empty."""
        block = self._ring._next
        self.remove(block)
        return block

    def _insert(self, block: Block, previous: Block, following: Block) -> None:
        block._previous, block._next = previous, following
        previous._next = following._previous = block
        self.num_blocks += 1


class BlockPool:
    """All blocks of the KV cache.

    Args:
        num_blocks: including the null block; at least 2.
        num_groups: KV groups, each with its own index.
        observer: hears what leaves the index.
    """

    def __init__(self, num_blocks: int, num_groups: int, observer: CacheObserver | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; block 0 holds nothing, so give at least 2")
        self.blocks = tuple(Block(i) for i in range(num_blocks))
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self._free = FreeList()
        self._observer = observer
        self._index: tuple[dict[bytes, Block], ...] = tuple({} for _ in range(num_groups))
        for block in self.blocks[1:]:
            self._free.append(block)

    @property
    def num_usable(self) -> int:
        """Blocks that can hold content."""
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody references."""
        return self._free.num_blocks

    @property
    def num_cached(self) -> int:
        """Blocks in the index, referenced or free."""
        return sum(len(index) for index in self._index)

    def free_blocks(self) -> Iterator[Block]:
        """The free blocks, in the order in which they would be reused."""
        return iter(self._free)

    def lookup(self, group_id: int, content_hash: bytes) -> Block | None:
        """The block that holds this content."""
        return self._index[group_id].get(content_hash)

    def index_of(self, group_id: int) -> dict[bytes, Block]:
        """A group's index, to read only."""
        return self._index[group_id]

    def take(self) -> Block:
        """The free block least worth keeping, referenced once, its content forgotten; num_free must not be 0."""
        block = self._free.pop_left()
        self.forget(block)
        block.ref_count = 1
        return block

    def share(self, block: Block) -> None:
        """Reference a block once more, with its content."""
        if block.ref_count == 0:
            self._free.remove(block)
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """Drop one reference. The last one frees the block: for reuse last if it has content, else first."""
        block.ref_count -= 1
        if block.ref_count == 0:
            if block.content_hash is None:
                self._free.append_left(block)
            else:
                self._free.append(block)

    def publish(self, block: Block, group_id: int, content_hash: bytes) -> bool:
        """Enter a full block into the index, unless another block already holds that content there.

        Returns:
            Whether the content is new.
        """
        if content_hash in self._index[group_id]:
            return False
        self._index[group_id][content_hash] = block
        block.content_hash = content_hash
        block.group_id = group_id
        return True

    def forget(self, block: Block) -> None:
        """Take a block out of the index."""
        if block.content_hash is not None:
            del self._index[block.group_id][block.content_hash]
            if self._observer is not None:
                self._observer.removed(block.group_id, block.content_hash)
            block.content_hash = None
            block.group_id = 0

    def forget_all(self) -> None:
        """Empty the index; references stay."""
        for index in self._index:
            for block in index.values():
                block.content_hash = None
                block.group_id = 0
            index.clear()
        if self._observer is not None:
            self._observer.cleared()
