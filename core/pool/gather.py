"""Rows of one text, gathered chunk by chunk into one vector.

    text      t0  t1 │ t2  t3  t4 │ t5          chunks, as a scheduler gives them
    mean      ──── sum, in fp64 ─────►  / n     so that where the text was cut changes nothing
    cls       t0
    last                            t5

Only the rows that count are asked for and moved from the device: one of a text but for a mean.
"""

from __future__ import annotations

import torch

from octavo.core.pool.pooler import PoolingKind


class GatheredRows:
    """What is known of one text's vector.

    Args:
        kind: which rows count.
        num_tokens: of the text.
        first_token: the first one that a mean counts.
    """

    def __init__(self, kind: PoolingKind, num_tokens: int, first_token: int = 0) -> None:
        last = num_tokens - 1
        self._first, self._last = {"mean": (first_token, last), "cls": (0, 0), "last": (last, last)}[kind]
        self._num_tokens = num_tokens
        self._sum_M: torch.Tensor | None = None

    def wanted(self, start: int, stop: int) -> range:
        """Which of the tokens start .. stop - 1 count."""
        return range(max(start, self._first), max(start, self._first, min(stop, self._last + 1)))

    def add(self, rows_RM: torch.Tensor) -> None:
        """Take in the wanted rows of a chunk, fp32 on the host."""
        if len(rows_RM):
            added_M = rows_RM.sum(dim=0, dtype=torch.float64)
            self._sum_M = added_M if self._sum_M is None else self._sum_M + added_M

    def vector(self) -> torch.Tensor:
        """The pooled row [M] fp32, once all chunks were taken in."""
        assert self._sum_M is not None
        return (self._sum_M / (self._last - self._first + 1)).to(torch.float32)
