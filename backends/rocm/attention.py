"""Attention on CDNA3: the common ops over CDNA3's kernels."""

from __future__ import annotations

from octavo.backends.common.attention import PagedAttentionOps
from octavo.backends.common.gpu import Gpu
from octavo.backends.rocm.kernels import attention as kernels

PROGRAMS_PER_UNIT = 2
"""A decode program has 64 keys and values on their way through registers, 32 KB at head 128: more than bandwidth x
latency asks of a unit (14 KB). Two are what LDS holds, and one computes while the other waits."""


class AttentionOps(PagedAttentionOps):
    """The attention ops of one AMD device."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(
            gpu,
            tile=kernels.attention_tile,
            split=kernels.attention_split,
            programs_per_unit=PROGRAMS_PER_UNIT,
        )
