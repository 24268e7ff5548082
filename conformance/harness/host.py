"""The reference ops as a device on the host: what mutants and honest variants are made from.

    HostBackend(ops)      ops count as the device's own: a mutant, a variant, or ReferenceOps themselves
    HostBackend(NoOps())  a device without any op: every case runs on the fallback

Also the backend named "reference" of `octavo conform`. It takes any KV layout, strided and interleaved ones included,
since mutants must be able to show what a kernel does with them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from octavo.core.backend import (
    AttentionMetadata,
    Capabilities,
    Communicator,
    HostDevice,
    KVCache,
    KVCacheSpec,
    KVLayout,
    KVPool,
    MemoryInfo,
    Ops,
    OpSpec,
    ReferenceOps,
    SingleRank,
    StepPlan,
    Unsupported,
    torch_kv_view,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)

CAPABILITIES = Capabilities(
    device_name="host",
    arch="torch",
    activation_dtype={dtype: dtype for dtype in FLOATS},
    default_dtype=torch.float32,
    kv_dtypes=(*FLOATS, *FP8, torch.int8),
    total_memory_bytes=2**40,
    fp8="e4m3fn",
    world_sizes=(1, 2, 4, 8),
)


class NoOps:
    """A device that implements nothing."""

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        return Unsupported("it has no ops of its own")

    def plan(self, meta: AttentionMetadata) -> StepPlan:
        return StepPlan(meta)


class HostBackend(HostDevice):
    """A DeviceBackend over plain host tensors, in any layout."""

    def __init__(
        self,
        ops: object | None = None,
        *,
        name: str = "reference",
        layout: KVLayout = KVLayout.NHD,
        is_interleaved: bool = False,
        **capabilities: Any,
    ) -> None:
        """
        Args:
            ops: its operations; None for the reference's.
            layout: of its KV blocks.
            is_interleaved: K and V of a token lie side by side, so that neither is contiguous.
            capabilities: fields of Capabilities that differ from CAPABILITIES.
        """
        self.name = name
        self.ops = cast(Ops, ops if ops is not None else ReferenceOps(self.device))
        self.capabilities = replace(CAPABILITIES, **capabilities)
        self._layout = layout
        self._is_interleaved = is_interleaved

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(2**40, 2**40)

    def kv_view(self, pool: KVPool, spec: KVCacheSpec) -> KVCache:
        if spec.v_head_dim == 0:
            return torch_kv_view(pool, spec, KVLayout.MLA)
        if self._is_interleaved:
            return _interleaved(pool, spec)
        return torch_kv_view(pool, spec, self._layout)

    def communicator(self, rank: int, world_size: int, address: str) -> Communicator:
        if world_size == 1:
            return SingleRank()
        from octavo.backends.common.comm import gloo_communicator  # only groups need torch.distributed

        return gloo_communicator(rank, world_size, address)


def _interleaved(pool: KVPool, spec: KVCacheSpec) -> KVCache:
    """Each token's heads hold K then V: [block, slot, head, K D | V Dv]."""
    flat = pool.storage.view(spec.dtype)
    first = int(flat.storage_offset())  # as_strided counts from the memory's beginning, not the tensor's
    width = spec.head_dim + spec.v_head_dim
    strides = (pool.block_bytes // spec.dtype.itemsize, spec.num_kv_heads * width, width, 1)
    shape = (pool.num_blocks, spec.block_size, spec.num_kv_heads)
    key = flat.as_strided((*shape, spec.head_dim), strides, first)
    value = flat.as_strided((*shape, spec.v_head_dim), strides, first + spec.head_dim)
    return KVCache(spec, KVLayout.NHD, pool.num_blocks, key, value, pool.storage)
