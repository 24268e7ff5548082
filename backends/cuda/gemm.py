"""Products on Hopper: the launches of kernels/gemm.py and kernels/gemm_quant.py.

A grid has as many programs as fit the chip at once, PER_UNIT of them a unit; each takes tile after tile. Operands are
described to the tensor memory accelerator here; where rows of x don't begin at multiples of 16 bytes they are pointers.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.kernels.codes import COMPUTE_TYPES
from octavo.backends.common.packed import GpuWeight
from octavo.backends.common.products import Activations, ProductOps, Quantize, Tail, is_even, narrowed, taken
from octavo.backends.cuda.kernels import gemm as kernels
from octavo.backends.cuda.kernels import gemm_quant as quant_kernels
from octavo.backends.cuda.weights import FP8_FORMATS, repack_fp8, weight_form


class GemmOps(ProductOps):
    """`prepare_weight`, `gemm` and `embed` of one device."""

    def __init__(self, gpu: Gpu, quantize: Quantize) -> None:
        super().__init__(gpu, weight_form, FP8_FORMATS, repack_fp8, quantize)

    def _gemm_plain(
        self, x_TK: torch.Tensor, w: GpuWeight, out: torch.Tensor, tail: Tail, constants: dict[str, Any]
    ) -> None:
        M, N, K = x_TK.shape[0], w.spec.out_features, w.spec.in_features
        block_m, block_n, block_k = (constants[f"BLOCK_{axis}"] for axis in "MNK")
        is_described = kernels.can_describe(x_TK)
        self._gpu.launch(
            kernels.gemm, self._grid(M, N, constants),
            kernels.describe(x_TK, K, [block_m, block_k]) if is_described else x_TK,
            kernels.describe(w.codes, K, [block_n, block_k]) if is_described else w.codes,
            out, tail.bias_N, tail.residual, M, N, K, x_TK.stride(0), w.codes.stride(0), out.stride(0),
            tail.residual_stride, GATE=tail.gate, DESCRIPTORS=is_described, EVEN_K=K % block_k == 0, **constants,
        )  # fmt: skip

    def _gemm_scaled(self, x: Activations, w: GpuWeight, out: torch.Tensor, tail: Tail) -> None:
        M, N, K = x.codes_TK.shape[0], w.spec.out_features, w.spec.in_features
        entry = self.entry("gemm_scaled", x.codes_TK.dtype, M, N, groups=int(x.group or w.form.group))
        constants = narrowed(entry, w.form.group, x.group)
        block_m, block_n, block_k = (constants[f"BLOCK_{axis}"] for axis in "MNK")
        self._gpu.launch(
            quant_kernels.gemm_scaled, self._grid(M, N, constants),
            kernels.describe(x.codes_TK, K, [block_m, block_k]), kernels.describe(w.codes, K, [block_n, block_k]),
            x.scales, w.scales_GN, out, tail.bias_N, tail.residual, M, N, K, x.scale_stride, N, out.stride(0),
            tail.residual_stride, X_GROUP=x.group, W_GROUP=w.form.group, GATE=tail.gate, **constants,
        )  # fmt: skip

    def _gemm_codes(self, x: Activations, w: GpuWeight, out: torch.Tensor, tail: Tail) -> None:
        M, N, K = x.codes_TK.shape[0], w.spec.out_features, w.spec.in_features
        constants = narrowed(self.entry("gemm_codes", x.compute, M, N), x.group)
        self._gpu.launch(
            quant_kernels.gemm_codes, self._grid(M, N, constants), x.codes_TK, w.codes, w.scales_GN, w.offsets_GN,
            x.scales, out, tail.bias_N, tail.residual, M, N, K, w.form.half(K), w.form.groups(K),
            x.codes_TK.stride(0), w.codes.stride(0), N, x.scale_stride, out.stride(0), tail.residual_stride,
            FORM=w.form.name, GROUP=w.form.group, X_GROUP=x.group, COMPUTE=COMPUTE_TYPES[x.compute], GATE=tail.gate,
            EVEN_K=is_even(w.form, K, constants["BLOCK_K"]), **constants,
        )  # fmt: skip

    def _grid(self, tokens: int, width: int, constants: dict[str, Any]) -> tuple[int]:
        """One program a tile, or as many as the chip holds; takes PER_UNIT out of the constants."""
        tiles = -(-tokens // constants["BLOCK_M"]) * -(-width // constants["BLOCK_N"])
        return (min(tiles, self._gpu.chip.num_units * taken(constants, "PER_UNIT", 1)),)
