"""Quantised products as kernels compute them: scales that come after the sums, and weights unpacked to x's dtype.

    scaled sums     Σ_g scale_g · (x_g · codes_g) - offset_g · Σ x_g        the codes themselves are multiplied
    unpacked        x · round(weight to x's dtype)                          16-bit kernels, and weights unpacked at load

The other products' variants run the same cases: one per kind of weight and lane (`quantised_cases`).
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from octavo.conformance.case import Case
from octavo.conformance.grid import gemm_quant, grouped_quant
from octavo.conformance.variants.base import Variant
from octavo.core.backend import (
    Epilogue,
    Gate,
    NormPrologue,
    PackedWeight,
    PlainWeight,
    QuantFormat,
    QuantizedTensor,
    WeightSpec,
)
from octavo.core.backend.reference.product import finish
from octavo.core.backend.reference.quantize import fake_quantized
from octavo.core.backend.reference.rows import normalized

INTEGERS = (QuantFormat.INT8, QuantFormat.INT4)


def quantised_cases(dtype: str = "float32") -> list[Case]:
    """One case of each lane and kind of weight, of x in one dtype."""
    found: dict[tuple[str, ...], Case] = {}
    for case in (*gemm_quant.cases(), *grouped_quant.cases()):
        axes = case.axes
        if axes["dtype"] == dtype and axes.get("m", axes.get("tokens")) in {"3", "17", "9", "19"}:
            is_in_blocks = str("x" in axes["group"])
            found.setdefault((case.op, case.lanes[0], axes["weight"], is_in_blocks, axes["activation"]), case)
    return list(found.values())


class CodedWeight(PlainWeight):
    """A weight that keeps codes, scales and offsets apart, in fp32, besides its plain form."""

    def __init__(self, spec: WeightSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._parts: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor | None, int]] = []

    def place(self, part_NK: torch.Tensor | QuantizedTensor, row_offset: int) -> None:
        super().place(part_NK, row_offset)
        if isinstance(part_NK, QuantizedTensor):
            self._parts.append((row_offset, *_taken_apart(part_NK)))

    def times(self, x_TK: torch.Tensor) -> torch.Tensor:
        """x @ w.T in fp32 [T, N], a partial sum per group of K."""
        total = torch.zeros(x_TK.shape[0], self.spec.out_features)
        for row, codes, scales, offsets, group in self._parts:
            into = total[:, row : row + codes.shape[0]]
            for index, start in enumerate(range(0, codes.shape[1], group)):
                x = x_TK[:, start : start + group]
                into += (x @ codes[:, start : start + group].T) * scales[:, index]
                if offsets is not None:
                    into -= x.sum(dim=1, keepdim=True) * offsets[:, index]
        return total


def _taken_apart(part: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
    """codes [N, K], scales and offsets [N, G], and elements per group."""
    scheme = part.scheme
    if scheme.format.block is not None or scheme.format in INTEGERS:
        form = part.affine()
        return form.codes_NK.float(), form.scales_NG, form.offsets_NG, form.group_size
    rows, columns = part.shape
    codes = replace(part, scales=torch.ones_like(part.scales)).dequantize()
    scales = part.scales.repeat_interleave(scheme.block_rows, 0)[:rows].expand(rows, -1)
    return codes, scales, None, scheme.group_size if scheme.group_size > 0 else columns


def _product(x_TK: torch.Tensor, w: PackedWeight, *, is_unpacked: bool) -> torch.Tensor:
    dtype, scheme = x_TK.dtype, None if w.spec.scheme is None else w.spec.scheme.for_activations()
    x_TK = x_TK.float() if scheme is None else fake_quantized(x_TK.float(), scheme)
    if isinstance(w, CodedWeight) and w.spec.scheme is not None:
        return w.times(x_TK)
    return x_TK @ (w.dense().to(dtype).float() if is_unpacked else w.dense()).T


def gemm(
    x_TK: torch.Tensor,
    w: PackedWeight,
    *,
    out: torch.Tensor,
    prologue: NormPrologue | None = None,
    epilogue: Epilogue | None = None,
    is_unpacked: bool,
) -> None:
    """The contract's gemm."""
    if prologue is not None:
        x_TK = normalized(x_TK, prologue.weight_K, prologue.eps)
    finish(_product(x_TK, w, is_unpacked=is_unpacked), epilogue or Epilogue(), out)


def grouped_gemm(
    x_TK: torch.Tensor,
    weights: list[PackedWeight],
    segment_start: torch.Tensor,
    *,
    out: torch.Tensor,
    gate: Gate | None = None,
    is_unpacked: bool,
) -> None:
    """The contract's grouped_gemm."""
    bounds = segment_start.tolist()
    for expert, weight in enumerate(weights):
        rows = slice(bounds[expert], bounds[expert + 1])
        if rows.start < rows.stop:
            finish(_product(x_TK[rows], weight, is_unpacked=is_unpacked), Epilogue(gate=gate), out[rows])


def _prepare_coded(spec: WeightSpec) -> CodedWeight:
    return CodedWeight(spec, torch.device("cpu"))


def _ops(*, is_unpacked: bool) -> dict[str, functools.partial[None]]:
    return {op.__name__: functools.partial(op, is_unpacked=is_unpacked) for op in (gemm, grouped_gemm)}


VARIANTS = (
    Variant(
        "quantised-scaled-sums",
        "codes are multiplied, and a group's sum is scaled",
        ("gemm", "grouped_gemm"),
        {**_ops(is_unpacked=False), "prepare_weight": _prepare_coded},
        cases=quantised_cases,
    ),
    Variant(
        "quantised-unpacked",
        "quantised weights are unpacked to the activations' dtype",
        ("gemm", "grouped_gemm"),
        _ops(is_unpacked=True),
        cases=functools.partial(quantised_cases, "bfloat16"),
    ),
)
