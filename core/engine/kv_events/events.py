"""KV events as they stand on the wire, in the form of vLLM that llm-d and other routers read, and who notes them.

    payload      [ts, [event, …], rank]                                             msgpack; rank is always 0
    event        ["BlockStored", hashes, parent, token ids, block size, null, "GPU", adapter's name, extra keys,
                  group, kind of the group, its window]
                 ["BlockRemoved", hashes, "GPU", group]
                 ["AllBlocksCleared"]

A hash is the content hash of core/sched/prefix.py, as bytes; readers that keep eight bytes take the last. Source:
vLLM's vllm/distributed/kv_events.py and llm-d-router's pkg/kvevents/engineadapter/vllm_msgpack.go. That reads events
as arrays, by place, and as maps, by name; its older releases read the arrays alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from octavo.core.sched.kv_groups import KVGroupSpec
from octavo.core.sched.request import Request

MEDIUM = "GPU"
"""The wire's word for the memory in which the engine computes, whatever the device is; readers take no other for it."""

ExtraKeys = list[list[str] | None]


class BlockStored(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Blocks that follow one another in one sequence entered the cache.

    Attributes:
        block_hashes: one for each block.
        parent_block_hash: of the block before them; None at a sequence's beginning.
        token_ids: of all the blocks, block_size for each.
        lora_id: None; lora_name tells the adapter.
        lora_name: a name of the adapter that computed them; None: the base model.
        extra_keys: what else tells equal tokens apart, one entry for each block; None where there is nothing.
        group_idx, kv_cache_spec_kind, kv_cache_spec_sliding_window: the KV group.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: ExtraKeys | None
    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Contents left the cache of one group."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Nothing is cached any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What one step changed. ts: Unix time in seconds."""

    ts: float
    events: list[Event]
    data_parallel_rank: int


class EventRecorder:
    """Notes what the cache tells until it is taken; neighbours become one event.

    Args:
        adapter_name: a name for the adapter with this content.
    """

    def __init__(self, adapter_name: Callable[[str], str]) -> None:
        self._adapter_name = adapter_name
        self._events: list[Event] = []
        # What would go on with the last BlockStored: the next block of this request in this group.
        self._next: tuple[str, int, int] | None = None

    def take(self) -> list[Event]:
        """Drain the events, in the order in which they happened."""
        events, self._events = self._events, []
        self._next = None
        return events

    def stored(self, group: KVGroupSpec, request: Request, index: int, chain: Sequence[bytes]) -> None:
        """Note a block that entered the cache."""
        size = group.block_size
        token_ids = request.token_ids[index * size : (index + 1) * size]
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and self._next == (request.request_id, group.group_id, index):
            last.block_hashes.append(chain[index])
            last.token_ids += token_ids
            if last.extra_keys is not None:
                last.extra_keys.append(None)
        else:
            self._events.append(self._opened(group, request, index, chain, token_ids))
        self._next = (request.request_id, group.group_id, index + 1)

    def removed(self, group_id: int, content_hash: bytes) -> None:
        """Note a content that left the cache."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group_id:
            last.block_hashes.append(content_hash)
        else:
            self._events.append(BlockRemoved([content_hash], MEDIUM, group_id))

    def cleared(self) -> None:
        """Note that the cache is empty; what happened to it before does not matter any more."""
        self._events = [AllBlocksCleared()]

    def _opened(
        self, group: KVGroupSpec, request: Request, index: int, chain: Sequence[bytes], token_ids: list[int]
    ) -> BlockStored:
        adapter_id = request.adapter_id
        return BlockStored(
            block_hashes=[chain[index]],
            parent_block_hash=chain[index - 1] if index else None,
            token_ids=token_ids,
            block_size=group.block_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None if adapter_id is None else self._adapter_name(adapter_id),
            # Only a sequence's first block has them: the others have the first among their parents.
            extra_keys=[keys] if index == 0 and (keys := _extra_keys(request)) else None,
            group_idx=group.group_id,
            kv_cache_spec_kind="full_attention" if group.window is None else "sliding_window",
            kv_cache_spec_sliding_window=group.window,
        )


def _extra_keys(request: Request) -> list[str]:
    """What tells this request's blocks from those of equal tokens, beside the adapter."""
    keys = [] if request.cache_salt is None else [request.cache_salt]
    if request.rotary_offset:
        keys.append(f"rotary_offset={request.rotary_offset}")
    return keys
