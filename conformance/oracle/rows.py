"""Ops on rows in float64. Shapes as in the contract; every argument is widened, nothing is rounded but where said."""

from __future__ import annotations

import math

import torch


def rms_norm(x: torch.Tensor, weight_M: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean(x²) + eps) · weight, over the last axis."""
    x = x.double()
    mean: torch.Tensor = x.square().sum(dim=-1, keepdim=True) / x.shape[-1]
    return x / (mean + eps).sqrt() * weight_M.double()


def add_residual(residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """residual + x as stored, in residual's dtype, widened again: what the norm is taken of."""
    return (residual.double() + x.double()).to(residual.dtype).double()


def activation(g: torch.Tensor, gate: str) -> torch.Tensor:
    """silu, gelu, or gelu by tanh. Written without cancellation for negative arguments."""
    g = g.double()
    if gate == "silu":
        return g / (1 + (-g).exp())
    if gate == "gelu":
        return 0.5 * g * torch.erfc(-g / math.sqrt(2))
    inner = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    return g / (1 + (-2 * inner).exp())


def act_mul(x: torch.Tensor, gate: str) -> torch.Tensor:
    """act(first half) · second half of the last axis."""
    half = x.shape[-1] // 2
    return activation(x[..., :half], gate) * x[..., half:].double()


def rotary(
    x_THD: torch.Tensor, positions_T: torch.Tensor, cos_sin_PR: torch.Tensor, *, is_interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The turned heads and |a cos| + |b sin| per element, for the bound. Elements from R on are copied."""
    x = x_THD.double()
    half = cos_sin_PR.shape[-1] // 2
    out, size = x.clone(), torch.zeros_like(x)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if is_interleaved else (i, i + half)
        cos, sin = (cos_sin_PR[positions_T, j].double()[:, None] for j in (i, i + half))
        out[..., a], out[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., b] * cos + x[..., a] * sin
        size[..., a] = (x[..., a] * cos).abs() + (x[..., b] * sin).abs()
        size[..., b] = (x[..., b] * cos).abs() + (x[..., a] * sin).abs()
    return out, size
