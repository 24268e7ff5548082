"""Norms: a weight in fp32 and the op bound to its width.

RMSNorm     x / sqrt(mean(x²) + eps) * w                       Zhang & Sennrich 2019
LayerNorm   (x - mean(x)) / sqrt(var(x) + eps) * w + b         Ba et al. 2016
WidthNorm   RMSNorm over all heads of a token together, which ranks may share
"""

from __future__ import annotations

from typing import Protocol

import torch

from octavo.core.backend.specs import RowSpec
from octavo.core.layers.context import LayerContext
from octavo.core.load.stream import WeightTarget
from octavo.core.parallel.mesh import Range


class Norm(Protocol):
    """What a decoder knows of its norms."""

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """out = norm(x), or with residual: residual += x in place, then out = norm(residual). out may be x."""

    def targets(self, *, weights_include_one: bool = False) -> dict[str, WeightTarget]:
        """The checkpoint tensors that fill it."""


class RMSNorm:
    """Normalises rows, or the heads of rows, by their root mean square.

    Args:
        context: the model's.
        name: of the layer in the checkpoint; None: it has no weight there and multiplies by 1.
        width: elements of a row (or head).
        eps: added to the mean square.
        residual: the call adds its input to a residual first.
        plus_one: the layer multiplies by (1 + weight), as Gemma's do; the packed weight holds the sum.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str | None,
        width: int,
        eps: float,
        *,
        residual: bool = False,
        plus_one: bool = False,
    ) -> None:
        self.weight_M = context.backend.empty(width, dtype=torch.float32)
        self.eps = eps
        self._name = name
        self._plus_one = plus_one
        self._backend = context.backend
        if name is None:
            self._backend.from_host(torch.ones(width), out=self.weight_M)
        variant = "residual" if residual else ""
        self._rms_norm = context.bind(RMSNorm, self, "rms_norm", RowSpec(width, context.activation_dtype, variant))

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """out = norm(x); with residual: residual += x in place, then out = norm(residual). out may be x."""
        self._rms_norm(x, self.weight_M, out=out, eps=self.eps, residual=residual)

    def targets(self, *, weights_include_one: bool = False) -> dict[str, WeightTarget]:
        """The checkpoint tensor that fills the weight.

        Args:
            weights_include_one: the checkpoint already holds 1 + weight.
        """
        if self._name is None:
            return {}
        add_one = self._plus_one and not weights_include_one

        def place(weight: torch.Tensor) -> None:
            weight = weight.to(torch.float32)
            self._backend.from_host(weight + 1.0 if add_one else weight, out=self.weight_M)

        return {f"{self._name}.weight": WeightTarget(tuple(self.weight_M.shape), place)}


class LayerNorm:
    """Normalises rows, or the heads of rows, by their mean and variance.

    Args:
        context, name, width, eps, residual: as for RMSNorm.
        bias: adds a vector.
        heads: where every head has a weight of its own: (heads in the checkpoint, those of this rank).
        head_names: the checkpoint keeps each head's weight as a layer of its own, `name.norms.0` and so on.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        width: int,
        eps: float,
        *,
        residual: bool = False,
        bias: bool = False,
        heads: tuple[int, Range] | None = None,
        head_names: bool = False,
    ) -> None:
        self.eps = eps
        self.weight_M = context.backend.empty(width, dtype=torch.float32)
        self.bias_M = context.backend.empty(width, dtype=torch.float32) if bias else None
        self._name = name
        self._backend = context.backend
        self._heads = heads
        self._head_names = head_names
        if heads is not None:
            context.backend.from_host(torch.ones(width), out=self.weight_M)
            start, stop = heads[1]
            self._weight_HD = context.backend.empty(stop - start, width, dtype=torch.float32)
        variant = "residual" if residual else ""
        self._layer_norm = context.bind(
            LayerNorm, self, "layer_norm", RowSpec(width, context.activation_dtype, variant)
        )

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """out = norm(x); with residual: residual += x in place, then out = norm(residual). out may be x."""
        self._layer_norm(x, self.weight_M, out=out, eps=self.eps, bias_M=self.bias_M, residual=residual)
        if self._heads is not None:
            out.mul_(self._weight_HD)

    def targets(self, *, weights_include_one: bool = False) -> dict[str, WeightTarget]:
        """The checkpoint tensors that fill weight and bias."""
        del weights_include_one  # of norms by the mean square only
        if self._heads is not None:
            return self._head_targets(*self._heads)
        targets = {f"{self._name}.weight": self._vector(self.weight_M)}
        if self.bias_M is not None:
            targets[f"{self._name}.bias"] = self._vector(self.bias_M)
        return targets

    def _head_targets(self, heads: int, kept: Range) -> dict[str, WeightTarget]:
        width = self._weight_HD.shape[1]
        if not self._head_names:

            def place(weight_HD: torch.Tensor) -> None:
                self._backend.from_host(weight_HD[slice(*kept)].to(torch.float32), out=self._weight_HD)

            return {f"{self._name}.weight": WeightTarget((heads, width), place)}
        return {
            f"{self._name}.norms.{head}.weight": self._vector(self._weight_HD[head - kept[0]])
            if kept[0] <= head < kept[1]
            else WeightTarget((width,), lambda _: None)
            for head in range(heads)
        }

    def _vector(self, out_M: torch.Tensor) -> WeightTarget:
        def place(vector_M: torch.Tensor) -> None:
            self._backend.from_host(vector_M.to(torch.float32), out=out_M)

        return WeightTarget(tuple(out_M.shape), place)


class WidthNorm:
    """RMSNorm over all heads of a token at once; where ranks share the heads, over those of all ranks.

    Args:
        context, name, eps: as for RMSNorm.
        heads: in the checkpoint; kept: those of this rank.
        head_dim: elements of a head.
    """

    def __init__(self, context: LayerContext, name: str, heads: int, kept: Range, head_dim: int, eps: float) -> None:
        self._shard = context.shard
        self._backend = context.backend
        self._name = name
        self._width = heads * head_dim
        self._kept = (kept[0] * head_dim, kept[1] * head_dim)
        self._copies = context.shard.size * (kept[1] - kept[0]) // heads
        self._eps = eps
        if self._shard.is_whole:
            self._whole = context.layer(RMSNorm)(context, name, self._width, eps)
        else:
            self._weight_N = context.backend.empty(self._kept[1] - self._kept[0], dtype=torch.float32)

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """out [T, H, D] = norm(x) over H·D. There is no residual to add."""
        x_TN, out_TN = x.flatten(1), out.flatten(1)
        if self._shard.is_whole:
            self._whole(x_TN, out=out_TN)
        else:
            values_TN = x_TN.to(torch.float32)
            squares_T = values_TN.square().sum(1, keepdim=True)
            self._shard.comm.all_reduce(squares_T, out=squares_T)
            scale_T = torch.rsqrt(squares_T / (self._width * self._copies) + self._eps)
            out_TN.copy_(values_TN * scale_T * self._weight_N)

    def targets(self, *, weights_include_one: bool = False) -> dict[str, WeightTarget]:
        """The checkpoint tensor that fills the weight."""
        if self._shard.is_whole:
            return self._whole.targets()

        def place(weight_N: torch.Tensor) -> None:
            self._backend.from_host(weight_N[slice(*self._kept)].to(torch.float32), out=self._weight_N)

        return {f"{self._name}.weight": WeightTarget((self._width,), place)}
