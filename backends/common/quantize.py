"""Quantisation of activations on a GPU: the launches of kernels/quantize.py, and what each must move."""

from __future__ import annotations

import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.kernels import quantize as kernels
from octavo.backends.common.rows import FLOATS
from octavo.core.backend.quant import CODE_DTYPE, QuantFormat, QuantScheme
from octavo.core.backend.specs import OpSpec, RowSpec, Unsupported
from octavo.core.base.errors import UnsupportedOp

LARGEST_CODE = {
    QuantFormat.INT8: 127.0,
    QuantFormat.INT4: 7.0,
    QuantFormat.FP8_E4M3FN: 448.0,
    QuantFormat.FP8_E4M3FNUZ: 240.0,
}
"""Of the formats that activations can have. Never written to."""

_FLAVOURS = {
    "e4m3fn": (QuantFormat.FP8_E4M3FN,),
    "e4m3fnuz": (QuantFormat.FP8_E4M3FNUZ, QuantFormat.FP8_E4M3FN),  # the latter's bits mean half as much there
}
"""8-bit floats that products on a chip of either flavour take. Never written to."""

PARTS = 512
"""Most partial maxima of a tensor: so many programs fill any of the chips, and one load reads them all."""


class QuantizeOps:
    """`quantize` of one device."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._formats = (QuantFormat.INT8, QuantFormat.INT4, *_FLAVOURS[gpu.chip.fp8])
        self._partial = torch.empty(PARTS, dtype=torch.float32, device=gpu.device)

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when the group runs `op` at `spec`, else why not."""
        if op != "quantize" or not isinstance(spec, RowSpec):
            return Unsupported(f"no kernel for {op}")
        if spec.dtype not in FLOATS:
            return Unsupported(f"rows are fp32, bf16 or fp16, not {spec.dtype}")
        if spec.variant not in self._formats:
            return Unsupported(f"activations become {', '.join(self._formats)}, not {spec.variant!r}")
        return None

    def quantize(self, x_TK: torch.Tensor, scheme: QuantScheme, *, out: torch.Tensor, scales: torch.Tensor) -> None:
        """Codes [T, K] to out; scales [T, ceil(K / group_size)], [T, 1] or [1, 1] as the scheme says.

        Raises UnsupportedOp for what supports() refuses, and for a scheme that is none of activations.
        """
        if not scheme.symmetric or scheme.block_rows > 1 or scheme.format not in self._formats:
            raise UnsupportedOp(
                f"quantize: activations are quantised symmetrically, each row alone, to one of "
                f"{', '.join(self._formats)}, not by {scheme}"
            )
        if x_TK.dtype not in FLOATS or out.dtype != CODE_DTYPE[scheme.format]:
            raise UnsupportedOp(f"quantize takes fp32, bf16 or fp16 into {CODE_DTYPE[scheme.format]}, not {x_TK.dtype}")
        if scheme.group_size == -1:
            self._whole_tensor(x_TK, out, scales, LARGEST_CODE[scheme.format])
        else:
            self._segments(x_TK, out, scales, LARGEST_CODE[scheme.format], scheme.group_size or x_TK.shape[1])

    def _segments(self, x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, limit: float, length: int) -> None:
        tokens, width = x.shape
        per_row = -(-width // length)
        entry = self._gpu.tuning.pick("quantize_segments", length=length)
        grid = (-(-tokens * per_row // entry.tile["ROWS"]),)
        self._gpu.launch(
            kernels.quantize_segments, grid, x, out, scales, tokens * per_row, per_row, length, width, x.stride(0),
            out.stride(0), scales.stride(0), LIMIT=limit, IS_WHOLE=length <= entry.tile["COLS"], **entry.constants,
        )  # fmt: skip

    def _whole_tensor(self, x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, limit: float) -> None:
        tokens, width = x.shape
        entry = self._gpu.tuning.pick("quantize_tensor")
        chunks = -(-x.numel() // entry.tile["CHUNK"])
        parts = min(PARTS, chunks)
        self._gpu.launch(
            kernels.tensor_maximum, (parts,), x, self._partial, tokens, width, x.stride(0), chunks, parts,
            **entry.constants,
        )  # fmt: skip
        self._gpu.launch(
            kernels.quantize_tensor, (chunks,), x, out, scales, self._partial, tokens, width, x.stride(0),
            out.stride(0), parts, LIMIT=limit, PARTS=PARTS, **entry.constants,
        )  # fmt: skip
