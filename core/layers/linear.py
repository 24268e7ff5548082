"""Products with one packed weight that may fuse several checkpoint tensors.

    q_proj.weight [H·D, M]  ┐ rows 0 ..
    k_proj.weight [K·D, M]  ├ rows H·D ..            one packed weight [(H + 2K)·D, M], placed part by part
    v_proj.weight [K·D, M]  ┘ rows (H + K)·D ..      as the loader streams; never whole in plain form

A gated pair is fused the same way, gate rows first. Only the layer talks to its packed weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from octavo.core.backend.ops import Epilogue
from octavo.core.backend.specs import Gate, GemmSpec, WeightSpec
from octavo.core.layers.context import LayerContext
from octavo.core.load.stream import WeightTarget


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint layer inside a fused weight: its name, and the rows it contributes."""

    name: str
    rows: int


class Linear:
    """out = act(x @ W.T + b) + residual, where W stacks the parts.

    Args:
        context: the model's.
        parts: checkpoint layers, in the order of their rows.
        in_features: K.
        bias: each part has a bias.
        gate: the parts are [gate; up] and out is act(gate) * up, half as wide.
        residual: a call adds a residual, which may be `out` itself.
    """

    def __init__(
        self,
        context: LayerContext,
        parts: Sequence[Part],
        in_features: int,
        *,
        bias: bool = False,
        gate: Gate | None = None,
        residual: bool = False,
    ) -> None:
        rows = sum(part.rows for part in parts)
        spec = GemmSpec(
            weight=WeightSpec(rows, in_features, context.dtype, gated=gate is not None),
            x_dtype=context.activation_dtype,
            out_dtype=context.activation_dtype,
            bias=bias,
            residual=residual,
            gate=gate,
        )
        self.weight = context.opset.prepare_weight(spec)
        self.bias_N = context.backend.empty(rows, dtype=torch.float32) if bias else None
        self._backend = context.backend
        self._parts = tuple(parts)
        self._in_features = in_features
        self._gate = gate
        self._residual = residual
        self._fixed_epilogue = Epilogue(bias_N=self.bias_N, gate=gate) if bias or gate else None
        self._gemm = context.bind(Linear, self, "gemm", spec)

    def __call__(self, x_TK: torch.Tensor, *, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Write the product to `out`; `residual` is given exactly when the layer was built with one."""
        epilogue = self._fixed_epilogue
        if self._residual:
            epilogue = Epilogue(bias_N=self.bias_N, gate=self._gate, residual=residual)
        self._gemm(x_TK, self.weight, out=out, epilogue=epilogue)

    def targets(self) -> dict[str, WeightTarget]:
        """The checkpoint tensors that fill the weight and the bias."""
        targets: dict[str, WeightTarget] = {}
        offset = 0
        for part in self._parts:
            shape = (part.rows, self._in_features)
            targets[f"{part.name}.weight"] = WeightTarget(shape, partial(self.weight.place, row_offset=offset))
            if self.bias_N is not None:
                place = partial(self._place_bias, self.bias_N[offset : offset + part.rows])
                targets[f"{part.name}.bias"] = WeightTarget((part.rows,), place)
            offset += part.rows
        return targets

    def _place_bias(self, out_N: torch.Tensor, bias_N: torch.Tensor) -> None:
        self._backend.from_host(bias_N.to(torch.float32), out=out_N)
