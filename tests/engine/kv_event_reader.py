"""A reader of KV events that knows the wire alone, and reads it as llm-d-router (pkg/kvevents) does: fields by place.

Nothing here imports what writes the events.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Any

import msgspec

END_SEQ = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True)
class Stored:
    """A BlockStored event. hashes, parent: as sent; see `short` for what an index keeps of them."""

    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None
    group: int
    kind: str
    window: int | None


@dataclass(frozen=True)
class Removed:
    hashes: list[bytes]
    medium: str
    group: int


@dataclass(frozen=True)
class Cleared:
    pass


def parse_frames(frames: list[bytes]) -> tuple[str, int, bytes]:
    """Topic, sequence number and payload of a live message, or of one that was given again."""
    assert len(frames) == 3, frames
    topic, seq, payload = frames
    assert len(seq) == 8
    return topic.decode(), int.from_bytes(seq, "big"), payload


def parse_payload(payload: bytes) -> list[Stored | Removed | Cleared]:
    """The events of a batch, each field of the type that the Go decoder demands."""
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert isinstance(ts, float)  # DecodeFloat64: an integer would be an error
    assert rank == 0
    return [_event(event) for event in events]


def _event(event: list[Any]) -> Stored | Removed | Cleared:
    tag, *fields = event
    assert isinstance(tag, str)
    if tag == "AllBlocksCleared":
        return Cleared()
    for content in fields[0]:
        assert isinstance(content, bytes)
        assert len(content) >= 8
    if tag == "BlockRemoved":
        return Removed(*fields)
    assert tag == "BlockStored"
    stored = Stored(*fields)
    assert all(isinstance(token, int) and 0 <= token < 2**32 for token in stored.tokens)
    # "non_dense_block_span": such events are passed over.
    assert len(stored.tokens) == stored.block_size * len(stored.hashes) > 0
    assert stored.medium.lower() == "gpu"
    assert stored.kind in ("full_attention", "sliding_window")
    assert stored.extra_keys is None or len(stored.extra_keys) == len(stored.hashes)
    return stored


def short(content: bytes) -> int:
    """What the index keeps of a hash: its last eight bytes, big-endian."""
    return int.from_bytes(content[-8:], "big")


@dataclass
class Index:
    """What a reader knows of one engine's cache after the events so far."""

    cached: set[tuple[int, bytes]] = field(default_factory=set)

    def apply(self, event: Stored | Removed | Cleared) -> None:
        match event:
            case Cleared():
                self.cached.clear()
            case Removed():
                for content in event.hashes:
                    self.cached.remove((event.group, content))  # KeyError: what was never stored can't go
            case Stored():
                self._check_chain(event)
                for content in event.hashes:
                    assert (event.group, content) not in self.cached, "told twice"
                    self.cached.add((event.group, content))

    def _check_chain(self, event: Stored) -> None:
        """A hash is that of its parent and its tokens, where there is a parent."""
        parent, size = event.parent, event.block_size
        for i, content in enumerate(event.hashes):
            if parent is not None:
                tokens = event.tokens[i * size : (i + 1) * size]
                assert content == hashlib.sha256(parent + struct.pack(f"<{size}q", *tokens)).digest()
            parent = content
