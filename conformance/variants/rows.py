"""Norms that add up in another order."""

from __future__ import annotations

import torch

from octavo.conformance.variants.base import Variant

LANES = 16


def rms_norm(
    x: torch.Tensor,
    weight_M: torch.Tensor,
    *,
    out: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
) -> None:
    """One running sum per lane, as vector code has it; divides by the root instead of multiplying by its inverse."""
    if residual is not None:
        residual.add_(x)
        x = residual
    wide = x.float()
    squares = torch.zeros(*x.shape[:-1], LANES)
    for start in range(0, x.shape[-1], LANES):
        piece = wide[..., start : start + LANES]
        squares[..., : piece.shape[-1]] += piece.square()
    root = (squares.sum(dim=-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    out.copy_(wide / root * weight_M)


VARIANTS = (Variant("norm-lanes", "a sum of squares per lane", ("rms_norm",), {"rms_norm": rms_norm}),)
