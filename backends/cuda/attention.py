"""Attention on Hopper: the common ops over Hopper's kernels."""

from __future__ import annotations

from octavo.backends.common.attention import PagedAttentionOps
from octavo.backends.common.gpu import Gpu
from octavo.backends.cuda.kernels import attention as kernels

PROGRAMS_PER_UNIT = 4
"""A decode program has 64 keys and values on their way, 32 KB at head 128; bandwidth x latency asks 29 KB a unit. Four
are what registers and shared memory hold, and small pieces of work leave no unit idle at the end."""


class AttentionOps(PagedAttentionOps):
    """The attention ops of one NVIDIA device."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(
            gpu,
            tile=kernels.attention_tile,
            split=kernels.attention_split,
            programs_per_unit=PROGRAMS_PER_UNIT,
        )
