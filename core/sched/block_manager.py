"""Which blocks hold whose KV: block tables, prefix hits, copy on write, and what is freed when.

    request ──> tables   group 0   [b3][b7][b9][b4]        one list per KV group; block i holds tokens
                         group 1   [0 ][0 ][b5][b8]        i * block_size ..< (i + 1) * block_size
                                    ▲ left of the window: freed, names the null block
    computed ────────────────────────────────┤            full blocks left of it are published; only blocks
                                                           right of it are written, and those have one reference

Only the Scheduler talks to the BlockManager; only the BlockManager talks to the pool and owns tables, reference
counts and hashes. One pool serves all groups, since all blocks have the same number of bytes. A block that others
reference is never written: a hit that ends inside a block (a sibling choice sharing its prompt) has that block copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.sched import integrity
from octavo.core.sched.block_map import BlockMap, draw
from octavo.core.sched.block_pool import Block, BlockPool
from octavo.core.sched.cache_observer import CacheObserver
from octavo.core.sched.kv_groups import KVGroupSpec, peak_blocks
from octavo.core.sched.output import BlockIds
from octavo.core.sched.prefix import ContentHasher, PrefixFinder, PrefixHit
from octavo.core.sched.request import Request


@dataclass(slots=True, eq=False)
class HeldBlocks:
    """What one running request holds.

    Attributes:
        tables: per group, the blocks in order of their tokens.
        num_published: per group, leading blocks that were published, or hits.
        num_dropped: per group, leading blocks that left the window.
        capacity_tokens: tokens that every group has room for.
        next_event_tokens: num_computed_tokens at which a block becomes full or leaves a window.
        publishes: False after a cache reset: what it computed before is not to be found again.
    """

    request: Request
    tables: list[list[Block]]
    num_published: list[int]
    num_dropped: list[int]
    capacity_tokens: int = 0
    next_event_tokens: float = 0
    publishes: bool = True


class BlockManager:
    """Block tables of all running requests over one pool.

    Args:
        num_blocks: blocks of the KV cache, block 0 (which holds nothing) included.
        groups: the KV groups, group_id = position.
        enable_prefix_caching: publish full blocks and find them again.
        kv_dtype: how keys and values are stored; a part of every content hash.
        prefix_hash: "sha256", or "xxh3_128" where all requests trust each other.
        observer: hears what enters and leaves the prefix cache.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[KVGroupSpec],
        *,
        enable_prefix_caching: bool = True,
        kv_dtype: str,
        prefix_hash: str = "sha256",
        observer: CacheObserver | None = None,
    ) -> None:
        if [group.group_id for group in groups] != list(range(len(groups))) or not groups:
            raise ValueError("groups must be numbered from 0 in their order")
        self.groups = tuple(groups)
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks, len(groups), observer)
        self._observer = observer
        self._hasher = ContentHasher(prefix_hash, kv_dtype)
        self._finder = PrefixFinder(self._pool, self._hasher, groups)
        self._held: dict[str, HeldBlocks] = {}
        self._copies: list[tuple[int, int]] = []
        self._no_new_blocks: BlockIds = ((),) * len(groups)
        # Who is computing which content, by the hashes of one group; a full one, where no block leaves early.
        self._leading_group = next((group for group in groups if group.window is None), groups[0])
        self._computing: dict[bytes, Request] = {}

    # ------------------------------------------------------------------------------------------ figures

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can hold KV."""
        return self._pool.num_usable

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self._pool.num_usable - self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that a prefix hit can find, held or free."""
        return self._pool.num_cached

    def draw(self) -> BlockMap:
        """A picture of the pool; slow, for those who look."""
        return draw(self._pool, self._leading_group.block_size)

    def peak_blocks(self, num_tokens: int) -> int:
        """The fewest blocks with which num_tokens tokens of one request alone can be computed."""
        return peak_blocks(self.groups, num_tokens)

    def longest_request(self, limit_tokens: int) -> int:
        """The most tokens, up to limit_tokens, that one request alone can have in the KV cache."""
        low, high = 0, limit_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.peak_blocks(middle) <= self.num_usable_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    # ------------------------------------------------------------------------------------------ queries

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest prefix of `request` in the cache, at least one token short of all of it."""
        if not self.enable_prefix_caching or request.needs_every_token:
            return self.no_prefix()
        return self._finder.find(request)

    def no_prefix(self) -> PrefixHit:
        """A hit of length 0."""
        return PrefixHit(0, ((),) * len(self.groups))

    def find_fork(self, parent: Request, child: Request) -> PrefixHit | None:
        """The prompt of a running `parent`, but for its last token, as a prefix of its sibling `child`.

        None when the parent does not hold all of it: it is not that far yet, or a window has passed over it.
        """
        held = self._held.get(parent.request_id)
        length = child.num_prompt_tokens - 1
        if held is None or parent.num_computed_tokens < length or child.needs_every_token:
            return None
        blocks = []
        for group, table in zip(self.groups, held.tables, strict=True):
            first, end = group.first_visible_block(length), group.blocks_for(length)
            if first < held.num_dropped[group.group_id]:
                return None
            blocks.append((self._pool.null_block,) * min(first, end) + tuple(table[first:end]))
        return PrefixHit(length, tuple(blocks))

    def computing_prefix(self, request: Request) -> Request | None:
        """A running request that is computing blocks which a prefix hit of `request` could use, if there is one."""
        if not self._computing or request.needs_every_token:
            return None
        block_size = self._leading_group.block_size
        chain = self._hasher.chain(request, block_size)
        for i in range(self._finder.limit(request) // block_size):
            if (other := self._computing.get(chain[i])) is not None:
                return other
        return None

    # ------------------------------------------------------------------------------------------ changes

    def try_allocate(
        self, request: Request, num_new_tokens: int, *, prefix: PrefixHit | None = None, keep_free: int = 0
    ) -> BlockIds | None:
        """Room for `num_new_tokens` tokens after those that are computed, or after `prefix` when it starts.

        Full groups get room for all tokens that are known, though a step may compute only a chunk of them: they
        will all be needed, and a prompt that was let in is not put out again halfway for want of blocks.

        Args:
            prefix: given when, and only when, the request holds nothing yet.
            keep_free: blocks that must stay free.

        Returns:
            Per group the ids to append to its table (the whole table when it starts), or None and nothing changed.
        """
        if prefix is not None:
            return self._try_start(request, num_new_tokens, prefix, keep_free)
        held = self._held[request.request_id]
        num_tokens = request.num_computed_tokens + num_new_tokens
        if num_tokens <= held.capacity_tokens:
            return self._no_new_blocks
        counts = [
            max(0, _blocks_wanted(group, request, num_tokens) - len(table))
            for group, table in zip(self.groups, held.tables, strict=True)
        ]
        if sum(counts) + keep_free > self._pool.num_free:
            return None
        new_ids = tuple(self._extend(table, count) for table, count in zip(held.tables, counts, strict=True))
        self._update_capacity(held)
        return new_ids

    def advance(self, request: Request) -> None:
        """Call after num_computed_tokens grew: publish blocks that are full, free those that left a window."""
        held = self._held[request.request_id]
        num_computed = request.num_computed_tokens
        if num_computed < held.next_event_tokens:
            return
        for group in self.groups:
            if held.publishes:
                self._publish(held, group, num_computed // group.block_size)
            if group.window is not None:
                self._drop_invisible(held, group, group.first_visible_block(num_computed))
        held.next_event_tokens = self._next_event(held)

    def free(self, request: Request, *, discard: bool = False) -> None:
        """Give back all blocks of a request, if it holds any.

        The later a block's tokens, the sooner it is reused, so that the beginning of a prompt survives longest.

        Args:
            discard: also forget all content under the request's hashes, because it can't be trusted.
        """
        held = self._held.pop(request.request_id, None)
        if held is None:
            return
        self._stop_computing(held)
        if discard:
            self._discard(request)
        by_start = [
            (i * group.block_size, block)
            for group, table in zip(self.groups, held.tables, strict=True)
            for i, block in enumerate(table)
            if block is not self._pool.null_block
        ]
        for _, block in sorted(by_start, key=lambda item: item[0], reverse=True):
            self._pool.release(block)

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Drain the block copies (source, destination) to be made before the step writes, in order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def reset_prefix_cache(self) -> None:
        """Forget all cached content; running requests keep their blocks, but publish nothing any more."""
        self._pool.forget_all()
        self._computing.clear()
        for held in self._held.values():
            held.publishes = False

    def check_integrity(self) -> None:
        """Check every invariant of tables, counts, index and free list; slow, for tests.

        Raises:
            IntegrityError: naming what is wrong.
        """
        integrity.check(self._pool, self.groups, self._held, self._computing, self._hasher)

    # ------------------------------------------------------------------------------------------ details

    def _try_start(self, request: Request, num_new_tokens: int, prefix: PrefixHit, keep_free: int) -> BlockIds | None:
        num_tokens = prefix.num_tokens + num_new_tokens
        partial = [prefix.num_tokens % group.block_size != 0 for group in self.groups]
        counts = [
            max(0, _blocks_wanted(group, request, num_tokens) - len(blocks))
            for group, blocks in zip(self.groups, prefix.blocks, strict=True)
        ]
        null = self._pool.null_block
        revived = sum(block.ref_count == 0 for blocks in prefix.blocks for block in blocks if block is not null)
        if sum(counts) + sum(partial) + revived + keep_free > self._pool.num_free:
            return None
        for blocks in prefix.blocks:
            for block in blocks:
                if block is not null:
                    self._pool.share(block)
        held = HeldBlocks(
            request=request,
            tables=[list(blocks) for blocks in prefix.blocks],
            num_published=[prefix.num_tokens // group.block_size for group in self.groups],
            num_dropped=[group.first_visible_block(prefix.num_tokens) for group in self.groups],
            publishes=self.enable_prefix_caching,
        )
        for table, count, ends_inside in zip(held.tables, counts, partial, strict=True):
            if ends_inside:
                table[-1] = self._copy_on_write(table[-1])
            self._extend(table, count)
        self._held[request.request_id] = held
        self._update_capacity(held)
        held.next_event_tokens = self._next_event(held)
        self._start_computing(held)
        return tuple(tuple(block.block_id for block in table) for table in held.tables)

    def _discard(self, request: Request) -> None:
        for group in self.groups:
            for content in self._hasher.chain(request, group.block_size):
                if (block := self._pool.lookup(group.group_id, content)) is not None:
                    self._pool.forget(block)

    def _extend(self, table: list[Block], count: int) -> tuple[int, ...]:
        new_blocks = [self._pool.take() for _ in range(count)]
        table.extend(new_blocks)
        return tuple(block.block_id for block in new_blocks)

    def _copy_on_write(self, shared: Block) -> Block:
        own = self._pool.take()
        self._copies.append((shared.block_id, own.block_id))
        self._pool.release(shared)
        return own

    def _update_capacity(self, held: HeldBlocks) -> None:
        held.capacity_tokens = min(
            len(table) * group.block_size for group, table in zip(self.groups, held.tables, strict=True)
        )

    def _publish(self, held: HeldBlocks, group: KVGroupSpec, num_full: int) -> None:
        published = held.num_published[group.group_id]
        if num_full <= published:
            return
        chain = self._hasher.chain(held.request, group.block_size)
        table = held.tables[group.group_id]
        for i in range(published, num_full):
            is_new = self._pool.publish(table[i], group.group_id, chain[i])
            if is_new and self._observer is not None:
                self._observer.stored(group, held.request, i, chain)
            if group is self._leading_group:
                self._computing.pop(chain[i], None)
        held.num_published[group.group_id] = num_full

    def _drop_invisible(self, held: HeldBlocks, group: KVGroupSpec, first_visible: int) -> None:
        table = held.tables[group.group_id]
        for i in range(first_visible - 1, held.num_dropped[group.group_id] - 1, -1):
            self._pool.release(table[i])
            table[i] = self._pool.null_block
        held.num_dropped[group.group_id] = first_visible

    def _next_event(self, held: HeldBlocks) -> float:
        """The smallest num_computed_tokens at which advance() has something to do."""
        events = [math.inf]
        for group in self.groups:
            if held.publishes:
                events.append((held.num_published[group.group_id] + 1) * group.block_size)
            if group.window is not None:
                first_kept = held.num_dropped[group.group_id]
                events.append((first_kept + 1) * group.block_size + group.window - 1)
        return min(events)

    def _start_computing(self, held: HeldBlocks) -> None:
        if held.publishes:
            chain = self._hasher.chain(held.request, self._leading_group.block_size)
            for content in chain[held.num_published[self._leading_group.group_id] :]:
                self._computing.setdefault(content, held.request)

    def _stop_computing(self, held: HeldBlocks) -> None:
        if held.publishes:
            chain = self._hasher.chain(held.request, self._leading_group.block_size)
            for content in chain[held.num_published[self._leading_group.group_id] :]:
                if self._computing.get(content) is held.request:
                    del self._computing[content]


def _blocks_wanted(group: KVGroupSpec, request: Request, num_tokens: int) -> int:
    """Length of a group's table when `num_tokens` tokens of the request are about to be in the cache."""
    return group.blocks_for(num_tokens if group.window is not None else max(num_tokens, request.num_tokens))
