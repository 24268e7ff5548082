"""Products with one packed weight that may fuse several checkpoint tensors, and that may be split over ranks.

    q_proj.weight [H·D, M]  ┐ rows 0 ..
    k_proj.weight [K·D, M]  ├ rows H·D ..            one packed weight [(H + 2K)·D, M], placed part by part
    v_proj.weight [K·D, M]  ┘ rows (H + K)·D ..      as the loader streams; never whole in plain form

A gated pair is fused the same way, gate rows first. Over ranks a weight is split in one of two ways:

    by rows      each part says which of its rows this rank holds; every rank computes its own outputs
    by columns   x holds only this rank's inputs; each rank computes a summand, and the layer adds them up

Where the engine serves adapters, each part has slots for them, which add to the product before a gate and before a sum
over ranks; a gate is then an op of its own in every step, so that no row's bits depend on whether adapters run beside
it. Only the layer talks to its packed weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from octavo.core.backend.ops import Epilogue
from octavo.core.backend.quant import QuantizedTensor
from octavo.core.backend.specs import Gate, GemmSpec, RowSpec, WeightSpec
from octavo.core.layers.context import LayerContext
from octavo.core.layers.stored import PartCut, stored_product
from octavo.core.load.stream import WeightTarget
from octavo.core.lora.parts import PartKind, PartShape, ProductAdapters
from octavo.core.parallel.mesh import Range


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint layer inside a fused weight.

    Attributes:
        name: of the checkpoint layer.
        rows: of its tensor in the checkpoint.
        kept: the row ranges that this rank holds, in the order of the fused weight; None: all.
    """

    name: str
    rows: int
    kept: tuple[Range, ...] | None = None

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The row ranges that this rank holds."""
        return ((0, self.rows),) if self.kept is None else self.kept

    @property
    def kept_rows(self) -> int:
        """How many rows this rank holds."""
        return sum(stop - start for start, stop in self.ranges)


class Linear:
    """out = act(x @ W.T + b) + residual, where W stacks the parts.

    Args:
        context: the model's.
        parts: checkpoint layers, in the order of their rows.
        in_features: K of the checkpoint's tensors.
        bias: each part has a bias.
        gate: the parts are [gate; up] and out is act(gate) * up, half as wide.
        residual: a call adds a residual, which may be `out` itself.
        columns: the inputs that this rank holds, where the product is split by columns; None: all.
        out_dtype: of `out`; None: the activations'.
        adapter_kind: what the product is to adapters.
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
        columns: Range | None = None,
        out_dtype: torch.dtype | None = None,
        adapter_kind: PartKind = "linear",
    ) -> None:
        self._columns = None if columns is None or context.shard.is_whole else columns
        is_summand = self._columns is not None
        # Of a sum over ranks, the first one's summand holds what is to be added once.
        self._adds_once = not is_summand or context.shard.rank == 0
        rows = sum(part.kept_rows for part in parts)
        width = in_features if self._columns is None else self._columns[1] - self._columns[0]
        fused_gate = gate if context.adapters is None else None
        plain = GemmSpec(
            weight=WeightSpec(rows, width, context.dtype, gated=fused_gate is not None),
            x_dtype=context.activation_dtype,
            out_dtype=out_dtype or context.activation_dtype,
            bias=bias and self._adds_once,
            residual=residual and self._adds_once,
            gate=fused_gate,
        )
        kept_columns = (0, in_features) if self._columns is None else self._columns
        self._cuts = [PartCut(part.name, (part.rows, in_features), part.ranges, kept_columns) for part in parts]
        spec, self._format = stored_product(context, plain, self._cuts)
        order = self._format.input_order
        self._input_order = None if order is None else context.backend.from_host(order)
        self.weight = context.opset.prepare_weight(spec)
        self.bias_N = context.backend.empty(rows, dtype=torch.float32) if spec.bias else None
        self._backend = context.backend
        self._comm = context.shard.comm if is_summand else None
        self._parts = tuple(parts)
        self._in_features = in_features
        self._has_bias = bias
        self._gate = fused_gate
        self._residual = spec.residual
        self._fixed_epilogue = Epilogue(bias_N=self.bias_N, gate=fused_gate) if spec.bias or fused_gate else None
        self._gemm = context.bind(Linear, self, "gemm", spec)
        self._adapters = self._register(context, adapter_kind, out_dtype)
        self._gate_after: Gate | None = None
        if gate is not None and fused_gate is None:
            self._gate_after = gate
            self._pair_TN = context.workspace.claim(f"pair_{rows}", rows, dtype=context.activation_dtype)
            self._act_mul = context.bind(Linear, self, "act_mul", RowSpec(rows, context.activation_dtype, gate))
        if self._input_order is not None:
            self._ordered_TK = context.workspace.claim(f"ordered_{width}", width, dtype=context.activation_dtype)

    def __call__(
        self,
        x_TK: torch.Tensor,
        *,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        adapter_T: torch.Tensor | None = None,
    ) -> None:
        """Write the product to `out`; `residual` is given exactly when the layer was built with one.

        adapter_T [T] int32 is the adapter slot of each row, -1 for none; None: no row has one.
        """
        product_TN = out if self._gate_after is None else self._pair_TN[: len(x_TK)]
        ordered_TK = x_TK
        if self._input_order is not None:
            ordered_TK = torch.index_select(x_TK, 1, self._input_order, out=self._ordered_TK[: len(x_TK)])
        epilogue = self._fixed_epilogue
        if self._residual:
            epilogue = Epilogue(bias_N=self.bias_N, gate=self._gate, residual=residual)
        self._gemm(ordered_TK, self.weight, out=product_TN, epilogue=epilogue)
        if self._adapters is not None and adapter_T is not None:
            self._adapters.add(x_TK, adapter_T, out=product_TN)
        if self._gate_after is not None:
            self._act_mul(product_TN, out=out, gate=self._gate_after)
        if self._comm is not None:
            self._comm.all_reduce(out, out=out)

    def targets(self) -> dict[str, WeightTarget]:
        """The checkpoint tensors that fill the weight and the bias."""
        targets: dict[str, WeightTarget] = {}
        offset = 0
        for part, cut in zip(self._parts, self._cuts, strict=True):
            targets[f"{part.name}.weight"] = WeightTarget(cut.shape, partial(self._place, cut, offset))
            if self._has_bias:
                targets[f"{part.name}.bias"] = WeightTarget((part.rows,), partial(self._place_bias, part, offset))
            offset += part.kept_rows
        return targets

    def _register(self, context: LayerContext, kind: PartKind, out_dtype: torch.dtype | None) -> ProductAdapters | None:
        """The parts' adapter slots; none for a replacement of this layer, whose call may know nothing of them."""
        if context.adapters is None or type(self).__call__ is not Linear.__call__:
            return None
        shapes = [
            PartShape((part.name,), part.rows, self._in_features, part.ranges, self._columns, kind)
            for part in self._parts
        ]
        return context.adapters.product(shapes, dtype=out_dtype)

    def _place(self, cut: PartCut, offset: int, weight_NK: torch.Tensor | QuantizedTensor) -> None:
        for piece in cut.pieces(self._format.part(cut.name, weight_NK)):
            if self.weight.spec.scheme is None and isinstance(piece, QuantizedTensor):
                piece = piece.dequantize()
            self.weight.place(piece, offset)
            offset += piece.shape[0]

    def _place_bias(self, part: Part, offset: int, bias_N: torch.Tensor) -> None:
        if self.bias_N is None:  # another rank adds it
            return
        for start, stop in part.ranges:
            piece = bias_N[start:stop].to(torch.float32)
            self._backend.from_host(piece, out=self.bias_N[offset : offset + stop - start])
            offset += stop - start
