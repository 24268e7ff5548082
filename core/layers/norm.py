"""RMSNorm: a weight in fp32 and the op bound to its width."""

from __future__ import annotations

import torch

from octavo.core.backend.specs import RowSpec
from octavo.core.layers.context import LayerContext
from octavo.core.load.stream import WeightTarget


class RMSNorm:
    """Normalises rows, or the heads of rows, by their root mean square.

    Args:
        context: the model's.
        name: of the layer in the checkpoint.
        width: elements of a row (or head).
        eps: added to the mean square.
        residual: the call adds its input to a residual first.
        plus_one: the layer multiplies by (1 + weight), as Gemma's do; the packed weight holds the sum.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
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
        add_one = self._plus_one and not weights_include_one

        def place(weight: torch.Tensor) -> None:
            weight = weight.to(torch.float32)
            self._backend.from_host(weight + 1.0 if add_one else weight, out=self.weight_M)

        return {f"{self._name}.weight": WeightTarget(tuple(self.weight_M.shape), place)}
