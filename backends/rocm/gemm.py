"""Products on CDNA3: the launches of kernels/gemm.py and kernels/gemm_quant.py.

A grid has a program for each tile: what a die's cache holds is decided by the order in which they are dealt out. 8-bit
floats of the other flavour, which activations may be quantised to, go to the kernel as bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.kernels.codes import COMPUTE_TYPES
from octavo.backends.common.packed import GpuWeight
from octavo.backends.common.products import Activations, ProductOps, Quantize, Tail, is_even, narrowed
from octavo.backends.rocm.kernels import gemm as kernels
from octavo.backends.rocm.kernels import gemm_quant as quant_kernels
from octavo.backends.rocm.weights import FP8_FORMATS, repack_fp8, weight_form


class GemmOps(ProductOps):
    """`prepare_weight`, `gemm` and `embed` of one device."""

    def __init__(self, gpu: Gpu, quantize: Quantize) -> None:
        super().__init__(gpu, weight_form, FP8_FORMATS, repack_fp8, quantize)

    def _gemm_plain(
        self, x_TK: torch.Tensor, w: GpuWeight, out: torch.Tensor, tail: Tail, constants: dict[str, Any]
    ) -> None:
        M, N, K = x_TK.shape[0], w.spec.out_features, w.spec.in_features
        self._gpu.launch(
            kernels.gemm, self._grid(M, N, constants), x_TK, w.codes, out, tail.bias_N, tail.residual, M, N, K,
            x_TK.stride(0), w.codes.stride(0), out.stride(0), tail.residual_stride, GATE=tail.gate,
            EVEN_K=K % constants["BLOCK_K"] == 0, DIES=self._gpu.chip.num_dies, **constants,
        )  # fmt: skip

    def _gemm_scaled(self, x: Activations, w: GpuWeight, out: torch.Tensor, tail: Tail) -> None:
        M, N, K = x.codes_TK.shape[0], w.spec.out_features, w.spec.in_features
        entry = self.entry("gemm_scaled", x.codes_TK.dtype, M, N, groups=int(x.group or w.form.group))
        constants = narrowed(entry, w.form.group, x.group)
        is_foreign = x.codes_TK.dtype == torch.float8_e4m3fn
        codes = x.codes_TK.view(torch.uint8) if is_foreign else x.codes_TK
        self._gpu.launch(
            quant_kernels.gemm_scaled, self._grid(M, N, constants), codes, w.codes, x.scales, w.scales_GN, out,
            tail.bias_N, tail.residual, M, N, K, codes.stride(0), w.codes.stride(0), x.scale_stride, N, out.stride(0),
            tail.residual_stride, X_GROUP=x.group, W_GROUP=w.form.group, X_ENCODING="e4m3fn" if is_foreign else "",
            GATE=tail.gate, EVEN_K=K % constants["BLOCK_K"] == 0, DIES=self._gpu.chip.num_dies, **constants,
        )  # fmt: skip

    def _gemm_codes(self, x: Activations, w: GpuWeight, out: torch.Tensor, tail: Tail) -> None:
        M, N, K = x.codes_TK.shape[0], w.spec.out_features, w.spec.in_features
        constants = narrowed(self.entry("gemm_codes", x.compute, M, N), x.group)
        self._gpu.launch(
            quant_kernels.gemm_codes, self._grid(M, N, constants), x.codes_TK, w.codes, w.scales_GN, w.offsets_GN,
            x.scales, out, tail.bias_N, tail.residual, M, N, K, w.form.half(K), w.form.groups(K),
            x.codes_TK.stride(0), w.codes.stride(0), N, x.scale_stride, out.stride(0), tail.residual_stride,
            FORM=w.form.name, GROUP=w.form.group, X_GROUP=x.group, COMPUTE=COMPUTE_TYPES[x.compute], GATE=tail.gate,
            EVEN_K=is_even(w.form, K, constants["BLOCK_K"]), DIES=self._gpu.chip.num_dies, **constants,
        )  # fmt: skip

    def _grid(self, tokens: int, width: int, constants: dict[str, Any]) -> tuple[int]:
        """One program a tile."""
        return (-(-tokens // constants["BLOCK_M"]) * -(-width // constants["BLOCK_N"]),)
