"""The seam by which the prefix cache tells what it holds: each content that enters the index, and each that leaves it.

    BlockManager._publish ── stored ──┐
    BlockPool.forget ─────── removed ─┼──> CacheObserver        in the order in which it happens
    BlockPool.forget_all ─── cleared ─┘

Who applies them in order to a set of (group id, content hash) has the index of the pool at every moment. Without an
observer nothing is built and nothing is called. An observer keeps no request and calls nothing back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo.core.sched.kv_groups import KVGroupSpec
from octavo.core.sched.request import Request


class CacheObserver(Protocol):
    """Hears of every change of the index."""

    def stored(self, group: KVGroupSpec, request: Request, index: int, chain: Sequence[bytes]) -> None:
        """Block `index` of a request is in the index from now on, under chain[index]; it was not before."""

    def removed(self, group_id: int, content_hash: bytes) -> None:
        """A content is in a group's index no more."""

    def cleared(self) -> None:
        """The index is empty, in all groups."""
