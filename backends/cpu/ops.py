"""CpuOps: the CPU's own ops, put together from groups of native kernels.

    gemm.py         gemm, embed, prepare_weight
    attention.py    plan, attention over paged and contiguous keys, merge
    cache.py        writes into the KV cache, moves of blocks
    elementwise.py  norm, rotary, gated activation
    sampling.py     sample

Without the native library there are no groups: every op falls back to the reference.
"""

from __future__ import annotations

from octavo.backends.common.op_groups import OpGroups
from octavo.backends.cpu.attention import AttentionOps
from octavo.backends.cpu.cache import CacheOps
from octavo.backends.cpu.elementwise import ElementwiseOps
from octavo.backends.cpu.gemm import GemmOps
from octavo.backends.cpu.native import NativeContext
from octavo.backends.cpu.sampling import SamplingOps


class CpuOps(OpGroups):
    """The native ops of one CPU backend. Which methods it has depends on what could be built."""

    def __init__(self, context: NativeContext | None) -> None:
        super().__init__("cpu")
        if context is not None:
            self.take(GemmOps(context), ops=("gemm", "embed"), besides=("prepare_weight", "settle_weights"))
            self.take(ElementwiseOps(context), ops=("rms_norm", "act_mul", "rotary"))
            self.take(SamplingOps(context), ops=("sample",))
            self.take(
                CacheOps(context),
                ops=("write_kv", "rope_write_kv", "write_mla", "copy_blocks", "gather_blocks", "scatter_blocks"),
            )
            self.take(
                AttentionOps(context),
                ops=("paged_attention", "attention", "mla_attention", "merge_attention"),
                besides=("plan",),
            )

    def settle_weights(self) -> None:
        """Loading is done. Only weights of native products have anything to settle."""
