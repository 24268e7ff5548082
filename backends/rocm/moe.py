"""Products of experts on CDNA3: the launches of kernels/moe.py.

A program for each tile that there may be.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo.backends.common.experts import ExpertOps, Experts
from octavo.backends.common.kernels.codes import COMPUTE_TYPES
from octavo.backends.common.products import Activations, is_even
from octavo.backends.rocm.kernels import moe as kernels
from octavo.core.backend import Gate


class MoeOps(ExpertOps):
    """`grouped_gemm` of one device."""

    def _grouped_gemm(
        self, x: Activations, experts: Experts, segment_start: torch.Tensor, out: torch.Tensor, gate: Gate | None,
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        w, T, E = experts.first, x.codes_TK.shape[0], len(experts.weights)
        K = w.spec.in_features
        self._gpu.launch(
            kernels.grouped_gemm, self._grid(T, experts, constants), x.codes_TK, w.codes, experts.addresses[0],
            segment_start, out, E, w.spec.out_features, K, x.codes_TK.stride(0), w.codes.stride(0), out.stride(0),
            GATE=gate, EVEN_K=K % constants["BLOCK_K"] == 0, E_PAD=experts.padded,
            DIES=self._gpu.chip.num_dies, **constants,
        )  # fmt: skip

    def _grouped_scaled(
        self, x: Activations, experts: Experts, segment_start: torch.Tensor, out: torch.Tensor, gate: Gate | None,
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        w, T, E = experts.first, x.codes_TK.shape[0], len(experts.weights)
        N, K = w.spec.out_features, w.spec.in_features
        is_foreign = x.codes_TK.dtype == torch.float8_e4m3fn
        codes = x.codes_TK.view(torch.uint8) if is_foreign else x.codes_TK
        self._gpu.launch(
            kernels.grouped_scaled, self._grid(T, experts, constants), codes, w.codes, x.scales, w.scales_GN,
            experts.addresses[0], experts.addresses[1], segment_start, out, E, N, K, codes.stride(0), w.codes.stride(0),
            x.scale_stride, N, out.stride(0), X_GROUP=x.group, W_GROUP=w.form.group,
            X_ENCODING="e4m3fn" if is_foreign else "", GATE=gate,
            EVEN_K=K % constants["BLOCK_K"] == 0, E_PAD=experts.padded,
            DIES=self._gpu.chip.num_dies, **constants,
        )  # fmt: skip

    def _grouped_codes(
        self, x: Activations, experts: Experts, segment_start: torch.Tensor, out: torch.Tensor, gate: Gate | None,
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        w, T, E = experts.first, x.codes_TK.shape[0], len(experts.weights)
        N, K = w.spec.out_features, w.spec.in_features
        self._gpu.launch(
            kernels.grouped_codes, self._grid(T, experts, constants), x.codes_TK, w.codes, w.scales_GN, w.offsets_GN,
            x.scales, experts.addresses[0], experts.addresses[1], experts.addresses[2], segment_start, out, E, N, K,
            w.form.half(K), w.form.groups(K), x.codes_TK.stride(0), w.codes.stride(0), N, x.scale_stride, out.stride(0),
            FORM=w.form.name, GROUP=w.form.group, X_GROUP=x.group, COMPUTE=COMPUTE_TYPES[x.compute], GATE=gate,
            EVEN_K=is_even(w.form, K, constants["BLOCK_K"]), E_PAD=experts.padded,
            DIES=self._gpu.chip.num_dies, **constants,
        )  # fmt: skip

    def _grid(self, tokens: int, experts: Experts, constants: dict[str, Any]) -> tuple[int]:
        """One program a tile that there may be."""
        return (self._most_tiles(tokens, experts, constants),)
