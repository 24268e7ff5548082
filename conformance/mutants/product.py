"""Faults of matrix products."""

from __future__ import annotations

from typing import Any

import torch

from octavo.conformance.mutants.base import Mutant, Op
from octavo.core.backend import PackedWeight

TILE_K = 16


def drop_k_tail(honest: Op) -> Op:
    """The last K % 16 columns never reach the sum: a loop over whole tiles without a masked last one."""

    def gemm(x_TK: torch.Tensor, w: PackedWeight, **kwargs: Any) -> None:
        whole = x_TK.shape[1] // TILE_K * TILE_K
        if whole == x_TK.shape[1] or whole == 0:
            honest(x_TK, w, **kwargs)
            return
        cut_TK = x_TK.clone()
        cut_TK[:, whole:] = 0
        honest(cut_TK, w, **kwargs)

    return gemm


MUTANTS = (
    Mutant(
        "gemm-k-tail-dropped",
        "K that is no multiple of the tile: the last columns are left out of the sum",
        "GEMM kernels tuned for powers of two",
        "gemm",
        drop_k_tail,
    ),
)
