"""Names for KV content, and the longest prefix of a request that all KV groups still hold.

    root(adapter, salt, kv dtype, rotary offset) ─> H(root, tokens[0:s]) ─> H(·, tokens[s:2s]) ─> …     s = block size

A hash covers its parent's hash, the whole token ids of its block and everything else that changes the content, so
equal hashes mean equal content, up to a collision of the hash function. The default is SHA-256 because requests of
different users share the cache: with a function that is not collision-resistant a crafted prompt could be answered
from somebody else's blocks. Hashes are equal on every machine.

Only the block manager uses this file. The chains are memos on the request and grow with it; a hash is computed once.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.core.base.errors import ConfigError
from octavo.core.sched.block_pool import Block, BlockPool
from octavo.core.sched.kv_groups import KVGroupSpec, alignment_of
from octavo.core.sched.request import Request

HASHES = ("sha256", "xxh3_128")


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The beginning of a request whose KV exists already.

    Attributes:
        num_tokens: length; it may end inside a block, which is then copied before the request writes to it.
        blocks: per group, the table's beginning; the null block left of the window.
    """

    num_tokens: int
    blocks: tuple[tuple[Block, ...], ...]


class ContentHasher:
    """Hash chains over the blocks of requests.

    Args:
        algorithm: one of HASHES.
        kv_dtype: how keys and values are stored.
    """

    def __init__(self, algorithm: str, kv_dtype: str) -> None:
        self._digest = _digest_function(algorithm)
        self._kv_dtype = kv_dtype
        self._packers: dict[int, Callable[..., bytes]] = {}

    def chain(self, request: Request, block_size: int) -> list[bytes]:
        """The hash of each full block of `request`, first to last."""
        chain = request.block_hashes.setdefault(block_size, [])
        token_ids = request.token_ids
        if (len(chain) + 1) * block_size > len(token_ids):
            return chain
        pack = self._packers.setdefault(block_size, struct.Struct(f"<{block_size}q").pack)
        parent = chain[-1] if chain else self._root(request)
        for start in range(len(chain) * block_size, len(token_ids) - block_size + 1, block_size):
            parent = self._digest(parent + pack(*token_ids[start : start + block_size]))
            chain.append(parent)
        return chain

    def _root(self, request: Request) -> bytes:
        # repr keeps None, "" and every pair of strings apart.
        owner = (self._kv_dtype, request.adapter_id, request.cache_salt, request.rotary_offset)
        return self._digest(repr(owner).encode())


class PrefixFinder:
    """Longest cached prefixes over all groups.

    Args:
        pool: only looked at.
        hasher: names the content.
        groups: as in BlockManager.
    """

    def __init__(self, pool: BlockPool, hasher: ContentHasher, groups: Sequence[KVGroupSpec]) -> None:
        self._pool = pool
        self._hasher = hasher
        self._groups = tuple(groups)
        self._full = tuple(group for group in groups if group.window is None)
        self._windowed = tuple(group for group in groups if group.window is not None)
        self._alignment = alignment_of(groups)

    def limit(self, request: Request) -> int:
        """The longest hit that leaves a token to compute, in tokens."""
        return (request.num_tokens - 1) // self._alignment * self._alignment

    def find(self, request: Request) -> PrefixHit:
        """The longest prefix that every group holds: full groups all of it, windowed ones what is still visible."""
        length = self.limit(request)
        for group in self._full:
            length = self._fit_full(request, group, length)
        before = -1
        while length != before:
            before = length
            for group in self._windowed:
                length = self._fit_window(request, group, length)
        return PrefixHit(length, tuple(self._blocks(request, group, length) for group in self._groups))

    def _fit_full(self, request: Request, group: KVGroupSpec, length: int) -> int:
        chain = self._hasher.chain(request, group.block_size)
        index = self._pool.index_of(group.group_id)
        for i in range(length // group.block_size):
            if chain[i] not in index:
                return self._aligned(i * group.block_size)
        return length

    def _fit_window(self, request: Request, group: KVGroupSpec, length: int) -> int:
        """From the right: a missing block that a query at `length` sees moves `length` to the left of that block."""
        chain = self._hasher.chain(request, group.block_size)
        index = self._pool.index_of(group.group_id)
        i = length // group.block_size - 1
        while i >= group.first_visible_block(length):
            if chain[i] in index:
                i -= 1
            else:
                length = self._aligned(i * group.block_size)
                i = length // group.block_size - 1
        return length

    def _blocks(self, request: Request, group: KVGroupSpec, length: int) -> tuple[Block, ...]:
        first, end = group.first_visible_block(length), length // group.block_size
        index = self._pool.index_of(group.group_id)
        chain = self._hasher.chain(request, group.block_size)
        return (self._pool.null_block,) * min(first, end) + tuple(index[chain[i]] for i in range(first, end))

    def _aligned(self, num_tokens: int) -> int:
        return num_tokens // self._alignment * self._alignment


def _digest_function(algorithm: str) -> Callable[[bytes], bytes]:
    if algorithm == "sha256":
        return _sha256
    if algorithm == "xxh3_128":
        import xxhash  # only where it is chosen

        return lambda data: bytes(xxhash.xxh3_128_digest(data))
    raise ConfigError(f"prefix hash is {algorithm!r}; give one of {', '.join(HASHES)}", field="prefix_hash")


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
