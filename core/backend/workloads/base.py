"""What a workload is: a call, what it asks of `supports`, and its cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.core.backend.kv import KVCache, KVCacheSpec
from octavo.core.backend.ops import PackedWeight
from octavo.core.backend.quant import QuantFormat
from octavo.core.backend.specs import OpSpec, WeightSpec
from octavo.core.backend.workloads.fill import fill_cache, filled_weight

F32, INT32, INT64 = torch.float32, torch.int32, torch.int64

TURNOVER = 3
"""As many times a cache's size is read before anything is read again: caches don't forget the oldest first."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one call, or of one launch in it.

    Attributes:
        bytes: read from and written to the device's memory, each byte once.
        flops: a multiply-add counted twice, by operand ("bfloat16", "float16", "float8", "int8", "float32").
    """

    bytes: float
    flops: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Cost) -> Cost:
        operands = {**self.flops, **other.flops}
        return Cost(
            self.bytes + other.bytes,
            {operand: self.flops.get(operand, 0) + other.flops.get(operand, 0) for operand in operands},
        )


@dataclass(frozen=True, slots=True)
class Tensors:
    """Makes a workload's tensors on one device; on "meta" they hold no data.

    Attributes:
        dtype: of activations, and of what is stored plain.
        make_kv: (spec, number of blocks) -> a layer's KV cache, in the backend's layout, whatever stands in it.
    """

    device: torch.device
    dtype: torch.dtype
    make_kv: Callable[[KVCacheSpec, int], KVCache]

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Small numbers of both signs."""
        return self.empty(*shape, dtype=dtype).normal_(std=0.1)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """For outputs."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def weight(self, ops: Any, spec: WeightSpec) -> PackedWeight:
        """Packed by `ops`, random."""
        return filled_weight(ops, spec, self.device)

    def kv(self, spec: KVCacheSpec, num_blocks: int) -> KVCache:
        """Random keys and values."""
        cache = self.make_kv(spec, num_blocks)
        fill_cache(cache)
        return cache

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """A host tensor's copy: indices, which must be valid ones."""
        return values.to(self.device)


Prepared = functools.partial[None]
"""A call of an op with all of its arguments; what it writes is the keyword `out`, or `out_q`."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One call of one op.

    Attributes:
        name: stable, of letters, digits and "-".
        spec: what `supports` is asked first.
        prepare: makes the tensors and returns the call, which may be made again and again.
        cost: of one call.
        wide_loads: its speed hangs on loads of 16 bytes.
        from_memory: what it reads most of, weights or a KV cache, comes from memory in a model, which reads much else
            before it comes to them again.
    """

    name: str
    op: str
    spec: OpSpec
    prepare: Callable[[Any, Tensors], Prepared]
    cost: Cost
    wide_loads: bool = False
    from_memory: bool = False

    def prepare_all(self, ops: Any, tensors: Tensors, cache_bytes: int) -> list[Prepared]:
        """Calls with tensors of their own: as many as find nothing of these in a cache when they are made in turn.

        cache_bytes: of the device's last cache; 0: not known, one call.
        """
        return [self.prepare(ops, tensors) for _ in range(self.num_copies(cache_bytes))]

    def num_copies(self, cache_bytes: int) -> int:
        """How many calls those are."""
        return max(1, math.ceil(TURNOVER * cache_bytes / self.cost.bytes)) if self.from_memory else 1


def operand(dtype: torch.dtype) -> str:
    """The dtype as `Cost.flops` names it."""
    return str(dtype).removeprefix("torch.")


def fp8_format(fp8: torch.dtype) -> QuantFormat:
    """The weight format of a device's 8-bit float."""
    return QuantFormat.FP8_E4M3FN if fp8 is torch.float8_e4m3fn else QuantFormat.FP8_E4M3FNUZ
