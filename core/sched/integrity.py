"""The block manager's invariants, checked from scratch. Slow: for tests, after every step.

    free + referenced = usable          no block is both free and in a table         references = tables that name it
    a block that will be written has one reference        cached <= computed <= num_tokens        hash = content

Only BlockManager.check_integrity() calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from octavo.core.sched.block_pool import BlockPool
from octavo.core.sched.kv_groups import KVGroupSpec
from octavo.core.sched.prefix import ContentHasher
from octavo.core.sched.request import Request

if TYPE_CHECKING:
    from octavo.core.sched.block_manager import HeldBlocks


class IntegrityError(AssertionError):
    """An invariant of the block manager does not hold: a bug in Octavo."""


def check(
    pool: BlockPool,
    groups: Sequence[KVGroupSpec],
    held_by_id: Mapping[str, HeldBlocks],
    computing: Mapping[bytes, Request],
    hasher: ContentHasher,
) -> None:
    """Check the pool against the tables that requests hold.

    Raises:
        IntegrityError: naming what is wrong.
    """
    named: Counter[int] = Counter()
    for held in held_by_id.values():
        _check_counters(held)
        for group in groups:
            _check_table(pool, group, held, hasher)
            named.update(block.block_id for block in held.tables[group.group_id] if block is not pool.null_block)
    _check_pool(pool, named)
    for request in computing.values():
        _require(request.request_id in held_by_id, f"{request.request_id} holds nothing, but is said to compute")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)


def _check_counters(held: HeldBlocks) -> None:
    request = held.request
    counters = (request.num_cached_tokens, request.num_computed_tokens, request.num_tokens)
    # What was cached at the first start may exceed what a preempted request has computed again so far.
    cached = 0 if request.num_preemptions else request.num_cached_tokens
    _require(
        0 <= cached <= request.num_computed_tokens <= request.num_tokens,
        f"{request.request_id}: cached, computed, known tokens are {counters}",
    )
    _require(request.num_computed_tokens <= held.capacity_tokens, f"{request.request_id}: computed beyond its blocks")


def _check_table(pool: BlockPool, group: KVGroupSpec, held: HeldBlocks, hasher: ContentHasher) -> None:
    request, table = held.request, held.tables[group.group_id]
    first_visible = group.first_visible_block(request.num_computed_tokens)
    chain = hasher.chain(request, group.block_size)
    _require(held.capacity_tokens <= len(table) * group.block_size, f"{request.request_id}: capacity beyond its table")
    for i, block in enumerate(table):
        where = f"{request.request_id}, group {group.group_id}, table entry {i} ({block})"
        _require((block is pool.null_block) == (i < first_visible), f"{where}: null exactly left of the window")
        if block is pool.null_block:
            continue
        if (i + 1) * group.block_size > request.num_computed_tokens:
            _require(block.ref_count == 1, f"{where}: will be written, but is shared")
            _require(block.content_hash is None, f"{where}: will be written, but is published")
        elif block.content_hash is not None:
            _require(
                block.content_hash == chain[i] and block.group_id == group.group_id,
                f"{where}: published under another content's hash",
            )


def _check_pool(pool: BlockPool, named: Counter[int]) -> None:
    free = [block.block_id for block in pool.free_blocks()]
    _require(len(free) == len(set(free)) == pool.num_free, "the free list's length is wrong, or it names a block twice")
    _require(pool.null_block.block_id not in free, "the null block is free")
    _require(pool.null_block.content_hash is None, "the null block is published")
    _require(not set(free) & named.keys(), f"blocks both free and in a table: {set(free) & named.keys()}")
    _require(len(free) + len(named) == pool.num_usable, "free + referenced blocks are not all blocks")
    for block in pool.blocks[1:]:
        _require(block.ref_count == named[block.block_id], f"{block}: named by {named[block.block_id]} tables")
        if block.content_hash is not None:
            indexed = pool.lookup(block.group_id, block.content_hash)
            _require(indexed is block, f"{block}: its content leads to {indexed}")
    with_content = sum(block.content_hash is not None for block in pool.blocks)
    _require(with_content == pool.num_cached, "the index names blocks that do not know of it")
