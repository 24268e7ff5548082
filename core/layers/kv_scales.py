"""The scales of one layer's KV cache, where it keeps a byte per element: x = code * scale, fp32, one per KV head.

    checkpoint  k_scale, v_scale  ──►  place: rescaled to the cache's type, cut to this rank's heads ──┐
    calibration  largest |K|, |V|  ──►  fill: largest * MARGIN / largest code  (only what is missing)  ├──►  keywords()
    8-bit floats with neither  ──►  1, which needs no scales at all  ──────────────────────────────────┘

Whoever builds a layer's attention owns one; the attention asks for `keywords` when its cache is bound. They never
change after that: what was stored by one scale can't be read by another.
"""

from __future__ import annotations

from functools import partial

import torch

from octavo.core.backend.kv import KVCacheSpec
from octavo.core.base.errors import CheckpointError
from octavo.core.layers.context import LayerContext
from octavo.core.load.stream import WeightTarget
from octavo.core.parallel.mesh import Range
from octavo.core.quant.kv_scheme import LARGEST_FP8, LARGEST_INT8

MARGIN = 1.15
"""How much larger than in the calibration's tokens a value may become before it saturates: docs/quantization.md."""

SIDES = ("k", "v")


class KVScales:
    """Scales of K and V.

    Args:
        context: the model's.
        spec: of the layer's cache, on this rank.
        heads: the KV heads (start, stop) of this rank, of num_heads in all.
        prefix: of the layer's attention in the checkpoint; None: there are no scales in it.
    """

    def __init__(
        self, context: LayerContext, spec: KVCacheSpec, heads: Range, num_heads: int, prefix: str | None
    ) -> None:
        self._backend = context.backend
        self._dtype = spec.dtype
        self._heads = heads
        self._num_heads = num_heads
        scheme = context.formats.kv_scheme
        self._prefix = None if scheme is not None and scheme.refusal else prefix
        self._stored_limit = LARGEST_FP8 if scheme is None else scheme.largest_code
        self._scales: dict[str, torch.Tensor] = {}

    @classmethod
    def of_layer(
        cls, context: LayerContext, spec: KVCacheSpec, heads: Range, num_heads: int, prefix: str | None
    ) -> KVScales | None:
        """The scales that a cache needs; None for one that keeps values as they are."""
        return cls(context, spec, heads, num_heads, prefix) if spec.dtype.itemsize == 1 else None

    @property
    def needs_calibration(self) -> bool:
        """Whether codes would mean nothing: integers without a scale."""
        return self._dtype == torch.int8 and len(self._scales) < len(SIDES)

    def targets(self) -> dict[str, WeightTarget]:
        """Every name that a checkpoint may give its scales: one for all heads, or one each."""
        prefix, targets = self._prefix, {}
        if prefix is None:
            return {}
        shapes = ((1,), (self._num_heads,), (self._num_heads, 1, 1))
        names: dict[str, tuple[str, ...]] = {f"{prefix}.kv_scale": SIDES}
        for side in SIDES:
            product = f"{prefix}.{side}_proj"
            for name in (f"{prefix}.{side}_scale", f"{prefix}.attn.{side}_scale", f"{product}.{side}_scale"):
                names[name] = (side,)
            names[f"{product}.output_scale"] = (side,)
        for name, sides in names.items():
            targets[name] = WeightTarget((), partial(self._place, name, sides), required=False, other_shapes=shapes)
        return targets

    def fill(self, largest_k_K: torch.Tensor, largest_v_K: torch.Tensor) -> None:
        """Set what the checkpoint left open, from each head's largest absolute value in the calibration."""
        for side, largest_K in zip(SIDES, (largest_k_K, largest_v_K), strict=True):
            if side not in self._scales:
                scale_K = largest_K.to(torch.float32) * (MARGIN / self._limit)
                scale_K = torch.where(scale_K > 0, scale_K, 1.0)  # a head that is always 0
                self._scales[side] = self._backend.from_host(scale_K)

    def keywords(self) -> dict[str, torch.Tensor]:
        """The arguments by which the cache's ops take the scales; empty where all are 1."""
        if self.needs_calibration:
            raise RuntimeError("an int8 KV cache is bound before its scales are calibrated")
        if not self._scales:
            return {}
        ones_K = torch.ones(self._heads[1] - self._heads[0])
        return {
            f"{side}_scale": self._scales[side] if side in self._scales else self._backend.from_host(ones_K)
            for side in SIDES
        }

    @property
    def _limit(self) -> float:
        return LARGEST_INT8 if self._dtype == torch.int8 else torch.finfo(self._dtype).max

    def _place(self, name: str, sides: tuple[str, ...], stored: torch.Tensor) -> None:
        scale_K = stored.detach().to(torch.float32, copy=True).flatten().expand(self._num_heads)
        if not bool(((scale_K > 0) & scale_K.isfinite()).all()):
            raise CheckpointError(
                f"{name} is {scale_K.tolist()}; scales of a KV cache are positive: the files are damaged", field=name
            )
        mine_K = (scale_K[slice(*self._heads)] * (self._stored_limit / self._limit)).contiguous()
        for side in sides:
            self._scales[side] = self._backend.from_host(mine_K)
