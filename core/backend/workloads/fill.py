"""Numbers for the weights and caches of workloads: finite, of the size that models have, and quickly there.

    weight   │ ROWS random rows │ the same │ the same │ …        cache   │ BLOCKS random blocks │ the same │ …

A kernel's time hangs on its numbers: zeros switch no wires, and a chip at its power limit then runs faster than with
a model's; numbers nobody wrote may be NaN, or denormal. That rows come again tells nothing: kernels read them all.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo.core.backend.kv import KVCache
from octavo.core.backend.ops import PackedWeight
from octavo.core.backend.quant import QuantFormat, QuantizedTensor, QuantScheme
from octavo.core.backend.specs import WeightSpec

ROWS = 512
BLOCKS = 64

SPREAD = 0.02
"""Standard deviation of a weight, as models are initialised."""

CODE_SPREAD = {
    QuantFormat.INT8: 40.0,
    QuantFormat.INT4: 3.0,
    QuantFormat.FP8_E4M3FN: 64.0,
    QuantFormat.FP8_E4M3FNUZ: 32.0,
}
"""Standard deviation of codes: few reach the format's end. Never written to."""

HALVES = {
    QuantFormat.GGUF_Q8_0: ((0, 1),),
    QuantFormat.GGUF_Q4_0: ((0, 1),),
    QuantFormat.GGUF_Q4_1: ((0, 1), (2, -8)),
    QuantFormat.GGUF_Q5_0: ((0, 1),),
    QuantFormat.GGUF_Q5_1: ((0, 1), (2, -16)),
    QuantFormat.GGUF_Q4_K: ((0, 1), (2, 8)),
    QuantFormat.GGUF_Q5_K: ((0, 1), (2, 16)),
    QuantFormat.GGUF_Q6_K: ((208, 1),),
}
"""Where a block has numbers in fp16, and by how much they are larger than a scale: minimums take off the middle of
the codes. All other bytes are codes and whole numbers, of any value. Never written to."""


def filled_weight(ops: Any, spec: WeightSpec, device: torch.device) -> PackedWeight:
    """A weight that `ops` packed, full of random numbers; on "meta" without any."""
    weight: PackedWeight = ops.prepare_weight(spec)
    if torch.empty(0, device=device).is_meta:
        return weight
    part = random_rows(spec, min(ROWS, spec.out_features), device)
    for first in range(0, spec.out_features, ROWS):
        left = spec.out_features - first
        weight.place(part if left >= part.shape[0] else random_rows(spec, left, device), first)
    return weight


def random_rows(spec: WeightSpec, rows: int, device: torch.device) -> torch.Tensor | QuantizedTensor:
    """Rows of a weight as a checkpoint of its scheme has them."""
    scheme, columns = spec.scheme, spec.in_features
    if scheme is None:
        return torch.empty(rows, columns, dtype=spec.dtype, device=device).normal_(std=SPREAD)
    if scheme.format.block is not None:
        return _random_blocks(scheme, rows, columns, device)
    grid = scheme.scale_shape(rows, columns)
    uniform = torch.rand(grid, device=device)
    if scheme.format is QuantFormat.MXFP4:
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device)
        return QuantizedTensor(scheme, codes, torch.exp2((uniform * 3).floor() - 8))
    spread = CODE_SPREAD[scheme.format]
    scales, numbers = (uniform + 0.5) * SPREAD / spread, torch.randn(rows, columns, device=device) * spread
    if scheme.format.code_dtype.is_floating_point:
        largest = torch.finfo(scheme.format.code_dtype).max
        return QuantizedTensor(scheme, numbers.clamp_(-largest, largest).to(scheme.format.code_dtype), scales)
    half = 8 if scheme.format is QuantFormat.INT4 else 128
    codes = numbers.round_().clamp_(-half, half - 1).to(torch.int8)
    if scheme.symmetric:
        return QuantizedTensor(scheme, codes, scales)
    zero_points = torch.randint(-1, 2, grid, dtype=torch.int8, device=device)
    shift = half if scheme.format is QuantFormat.INT4 else 0  # with zero points 4 bits begin at 0
    return QuantizedTensor(scheme, codes + shift, scales, zero_points + shift)


def _random_blocks(scheme: QuantScheme, rows: int, columns: int, device: torch.device) -> QuantizedTensor:
    block = scheme.format.block
    assert block is not None
    count = rows * columns // block.elements
    packed = torch.randint(0, 256, (count, block.num_bytes), dtype=torch.uint8, device=device)
    for at, factor in HALVES[scheme.format]:
        halves = (torch.rand(count, 1, device=device) + 1) * 1e-4 * factor
        packed[:, at : at + 2] = halves.to(torch.float16).view(torch.uint8)
    return QuantizedTensor(scheme, packed.view(rows, -1), torch.empty(rows, 0, device=device))


def fill_cache(kv: KVCache) -> None:
    """Random keys and values in every slot; nothing on "meta", nor where a device's memory is not torch's."""
    for view in (kv.key_NSKD, kv.value_NSKD):
        if view is None or view.is_meta or not view.numel():
            continue
        pattern = torch.empty_like(view[:BLOCKS], dtype=torch.float32).normal_().to(view.dtype)
        for first in range(0, view.shape[0], BLOCKS):
            into = view[first : first + BLOCKS]
            into.copy_(pattern[: into.shape[0]])
