"""CpuOps: the CPU's own ops, put together from groups of native kernels.

    gemm.py         gemm, embed, prepare_weight
    attention.py    plan, attention over paged and contiguous keys, merge
    cache.py        writes into the KV cache, moves of blocks
    elementwise.py  norm, rotary, gated activation
    sampling.py     sample

A group answers `supports(op, spec)` for its ops and has a method for each. CpuOps takes those methods as attributes of
its own, so that a call costs nothing extra, and an op that no group brings is absent, by which OpSet knows. Without
the native library there are no groups: every op falls back to the reference.
"""

from __future__ import annotations

from typing import Protocol

from octavo.backends.cpu.attention import AttentionOps
from octavo.backends.cpu.cache import CacheOps
from octavo.backends.cpu.elementwise import ElementwiseOps
from octavo.backends.cpu.gemm import GemmOps
from octavo.backends.cpu.native import NativeContext
from octavo.backends.cpu.sampling import SamplingOps
from octavo.core.backend.specs import OpSpec, Unsupported


class KernelGroup(Protocol):
    """Some ops of the CPU over one part of the native library."""

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when the group runs `op` at `spec`; asked only for its own ops."""


class CpuOps:
    """The native ops of one CPU backend. Which methods it has depends on what could be built."""

    def __init__(self, context: NativeContext | None) -> None:
        self._groups: dict[str, KernelGroup] = {}
        if context is not None:
            self._take(GemmOps(context), ops=("gemm", "embed"), besides=("prepare_weight", "settle_weights"))
            self._take(ElementwiseOps(context), ops=("rms_norm", "act_mul", "rotary"))
            self._take(SamplingOps(context), ops=("sample",))
            self._take(
                CacheOps(context),
                ops=("write_kv", "rope_write_kv", "copy_blocks", "gather_blocks", "scatter_blocks"),
            )
            self._take(
                AttentionOps(context), ops=("paged_attention", "attention", "merge_attention"), besides=("plan",)
            )

    def settle_weights(self) -> None:
        """Loading is done. Only weights of native products have anything to settle."""

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when a native kernel runs `op` at `spec`, else why not."""
        group = self._groups.get(op)
        if group is None:
            return Unsupported(f"cpu has no native {op}")
        return group.supports(op, spec)

    def _take(self, group: KernelGroup, *, ops: tuple[str, ...], besides: tuple[str, ...] = ()) -> None:
        """Adopt a group's methods: its ops, and what else of the Ops protocol it implements."""
        self._groups |= dict.fromkeys(ops, group)
        for name in (*ops, *besides):
            setattr(self, name, getattr(group, name))
