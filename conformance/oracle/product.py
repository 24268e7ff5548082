"""Products in float64, with what fuses around them, and the sizes that their bounds need."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.conformance.oracle.rows import gated


@dataclass(frozen=True)
class Product:
    """A product and its epilogue.

    Attributes:
        out: after the epilogue, [M, N'].
        squares: Σ(ab)² of the terms behind each output, [M, N'].
        slope: by how much the epilogue stretches an error of the product.
    """

    out: torch.Tensor
    squares: torch.Tensor
    slope: torch.Tensor | float


def gemm(
    x_MK: torch.Tensor,
    w_NK: torch.Tensor,
    *,
    bias_N: torch.Tensor | None = None,
    gate: str | None = None,
    residual: torch.Tensor | None = None,
) -> Product:
    """x @ w.T, then bias, gate, residual, in this order. A gated product holds [gate; up] rows, N / 2 each."""
    x, w = x_MK.double(), w_NK.double()
    c, squares = x @ w.T, (x * x) @ (w * w).T
    if bias_N is not None:
        c = c + bias_N.double()
    slope: torch.Tensor | float = 1.0
    if gate is not None:
        g, up = c.chunk(2, dim=-1)
        squares_g, squares_up = squares.chunk(2, dim=-1)
        # d(act(g)·u) = act'(g)·u·dg + act(g)·du, and |act'| ≤ 1.13 for all gates.
        pair = gated(g, up, gate)
        c, squares, slope = pair.out, squares_g + squares_up, 1.2 * (pair.up + pair.gate)
    if residual is not None:
        c = c + residual.double()
    return Product(c, squares, slope)
