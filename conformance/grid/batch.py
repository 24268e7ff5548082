"""A step's batch as the host knows it: requests, block tables, slots, and which block of the pool holds what.

    request b   keys 0 … L-1, block i of them in pool block ids[b][i]; slots at and beyond L are poison
    table row   | blocks of the request        | padding                      |
                  those that left the window:    valid ids of poisoned blocks,
                  ids of poisoned blocks         the null block 0 among them
    pool        block 0 and everything that no request names are poison

Padding holds ids that may be read, because pipelined kernels do: whoever uses what they hold gets NaN. Blocks are
handed out in shuffled order; requests may share the blocks of the first request's prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from octavo.conformance.draw import Draw
from octavo.conformance.harness.bench import Bench
from octavo.conformance.trial import Block, HostTensor, given
from octavo.core.backend import AttentionMetadata

SPARE_BLOCKS = 3
"""Poisoned blocks that no request owns; padding names them."""


@dataclass(frozen=True)
class Request:
    """num_rows query rows, the last of num_keys keys; its first shared_blocks blocks are the first request's."""

    num_rows: int
    num_keys: int
    shared_blocks: int = 0


@dataclass(frozen=True)
class Batch:
    """Requests laid out in blocks.

    Attributes:
        ids: pool blocks of each request, None for those that left the window.
        table: [B, W] int32.
        num_blocks: of the pool.
        poisoned: blocks that tables name and that hold nothing.
    """

    requests: tuple[Request, ...]
    block_size: int
    ids: tuple[tuple[int | None, ...], ...]
    table: torch.Tensor
    num_blocks: int
    poisoned: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(r.num_rows for r in self.requests)

    def blocks(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> dict[int, Block]:
        """Pool contents from keys[b] [L, K, D] and values[b] [L, K, Dv], for HostPool."""
        found: dict[int, Block] = dict.fromkeys(self.poisoned)
        for ids, key, value in zip(self.ids, keys, values, strict=True):
            for i, block in enumerate(ids):
                if block is not None:
                    span = slice(i * self.block_size, (i + 1) * self.block_size)
                    found.setdefault(block, (key[span], value[span]))
        return found

    def slots(self) -> torch.Tensor:
        """[T] int64: where each query row's own key lies; -1 for a row without one."""
        slots = []
        for request, ids in zip(self.requests, self.ids, strict=True):
            for position in range(request.num_keys - request.num_rows, request.num_keys):
                block = ids[position // self.block_size] if position >= 0 else None
                slots.append(-1 if block is None else block * self.block_size + position % self.block_size)
        return torch.tensor(slots, dtype=torch.int64)

    def tensors(self, prefix: str = "") -> list[HostTensor]:
        """The four tensors of the step's metadata."""
        starts = [0, *itertools.accumulate(r.num_rows for r in self.requests)]
        return [
            given(f"{prefix}query_start_loc", torch.tensor(starts, dtype=torch.int32)),
            given(f"{prefix}seq_lens", torch.tensor([r.num_keys for r in self.requests], dtype=torch.int32)),
            given(f"{prefix}block_table", self.table),
            given(f"{prefix}slot_mapping", self.slots()),
        ]

    def metadata(self, bench: Bench, prefix: str = "") -> AttentionMetadata:
        """The step's metadata over those tensors on the device."""
        return bench.metadata(
            num_requests=len(self.requests),
            num_tokens=self.num_tokens,
            max_query_len=max(r.num_rows for r in self.requests),
            max_seq_len=max(r.num_keys for r in self.requests),
            block_size=self.block_size,
            prefix=prefix,
        )


def lay_out(
    draw: Draw,
    requests: Sequence[Request],
    block_size: int,
    *,
    window: int | None = None,
    extra_columns: int = 1,
    candidates: Sequence[int] | None = None,
) -> Batch:
    """Give each request its blocks.

    Args:
        window: blocks that no row of a request can see any more are gone from its table.
        extra_columns: padding beyond the longest request's blocks.
        candidates: block ids to take, in order, SPARE_BLOCKS poisoned ones at the end; shuffled ids otherwise.
    """
    needed = [-(-r.num_keys // block_size) for r in requests]
    total = sum(needed) + SPARE_BLOCKS
    free = list(candidates) if candidates is not None else [i + 1 for i in draw.permutation(total)]
    spare = (0, *free[len(free) - SPARE_BLOCKS :])
    table = torch.empty(len(requests), max(1, max(needed) + extra_columns), dtype=torch.int32)
    all_ids: list[tuple[int | None, ...]] = []
    for b, (request, count) in enumerate(zip(requests, needed, strict=True)):
        shared = list(all_ids[0][: request.shared_blocks]) if request.shared_blocks else []
        ids: list[int | None] = shared + [free.pop(0) for _ in range(count - len(shared))]
        ids[: _gone(request, block_size, window)] = [None] * _gone(request, block_size, window)
        row = [spare[(b + i) % len(spare)] if block is None else block for i, block in enumerate(ids)]
        row += [spare[(b + i) % len(spare)] for i in range(table.shape[1] - count)]
        table[b] = torch.tensor(row, dtype=torch.int32)
        all_ids.append(tuple(ids))
    num_blocks = max(total, *(max(candidates, default=0),) if candidates is not None else (0,)) + 1
    return Batch(tuple(requests), block_size, tuple(all_ids), table, num_blocks, spare)


def _gone(request: Request, block_size: int, window: int | None) -> int:
    """Blocks wholly before the window of the request's first row."""
    if window is None or not request.num_rows:
        return 0
    first_seen = request.num_keys - request.num_rows - window + 1
    return min(max(0, first_seen) // block_size, request.num_keys // block_size)


def share(requests: Sequence[Request], block_size: int, contents: Sequence[torch.Tensor]) -> None:
    """Make contents[b] [L, …] of requests that share blocks equal to the first's there, in place."""
    for request, content in zip(requests, contents, strict=True):
        length = request.shared_blocks * block_size
        content[:length] = contents[0][:length]


def scene(name: str, context: int) -> tuple[Request, ...]:
    """A batch of the grid by name: decode, prefill, chunked, mixed, draft2, draft4, draft8, shared."""
    drafts: Mapping[str, int] = {"draft2": 2, "draft4": 4, "draft8": 8}
    if name in drafts:
        rows = drafts[name]
        return Request(min(rows, context), context), Request(rows, rows)
    half = context // 2
    return {
        "decode": (Request(1, context), Request(1, max(half, 1)), Request(1, 1)),
        "prefill": (Request(context, context), Request(3, 3)),
        "chunked": (Request(min(37, context), context), Request(min(5, half + 2), half + 2)),
        "mixed": (Request(1, context), Request(0, 0), Request(min(9, context), context), Request(4, 19), Request(1, 1)),
    }[name]
