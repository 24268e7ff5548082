"""Ops on rows in float64. Shapes as in the contract; every argument is widened, nothing is rounded but where said."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


def rms_norm(x: torch.Tensor, weight_M: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean(x²) + eps) · weight, over the last axis."""
    x = x.double()
    mean: torch.Tensor = x.square().sum(dim=-1, keepdim=True) / x.shape[-1]
    return x / (mean + eps).sqrt() * weight_M.double()


def add_residual(residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """residual + x as stored, in residual's dtype, widened again: what the norm is taken of."""
    return (residual.double() + x.double()).to(residual.dtype).double()


@dataclass(frozen=True)
class LayerNorm:
    """A layer norm, and the sizes that its bound needs.

    Attributes:
        out: (x - mean) · r · weight + bias.
        scaled: out without the bias.
        shift: |weight| · r: what an error of the mean becomes.
        size: the mean of |x|, [..., 1]; what a sum over the row is made of.
        inverse: r = 1/√(variance + eps), [..., 1].
    """

    out: torch.Tensor
    scaled: torch.Tensor
    shift: torch.Tensor
    size: torch.Tensor
    inverse: torch.Tensor


def layer_norm(x: torch.Tensor, weight_M: torch.Tensor, bias_M: torch.Tensor | None, eps: float) -> LayerNorm:
    """Over the last axis; the variance is the mean of squared distances from the mean."""
    x, weight = x.double(), weight_M.double()
    count = x.shape[-1]
    distance = x - x.sum(dim=-1, keepdim=True) / count
    inverse = 1 / (distance.square().sum(dim=-1, keepdim=True) / count + eps).sqrt()
    scaled = distance * inverse * weight
    out = scaled if bias_M is None else scaled + bias_M.double()
    size = x.abs().sum(dim=-1, keepdim=True) / count
    return LayerNorm(out, scaled, weight.abs() * inverse, size, inverse)


def activation(g: torch.Tensor, kind: str) -> torch.Tensor:
    """silu, relu, gelu, or gelu by tanh. Written without cancellation for negative arguments."""
    g = g.double()
    if kind == "silu":
        return g / (1 + (-g).exp())
    if kind == "relu":
        return torch.where(g < 0, torch.zeros_like(g), g)
    if kind == "gelu":
        return 0.5 * g * torch.erfc(-g / math.sqrt(2))
    inner = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    return g / (1 + (-2 * inner).exp())


@dataclass(frozen=True)
class Pair:
    """A gated pair.

    Attributes:
        out: what becomes of it.
        gate, up: the sizes of the two factors before the activation, as far as they count.
    """

    out: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor


def gated(g: torch.Tensor, up: torch.Tensor, gate: str) -> Pair:
    """act(g) · up; of "swiglu_clamped" g·sigmoid(1.702 g) · (up + 1), g at most 7 and up between -7 and 7."""
    g, up = g.double(), up.double()
    if gate != "swiglu_clamped":
        return Pair(activation(g, gate) * up, g.abs(), up.abs())
    g = torch.where(g > 7, torch.full_like(g, 7.0), g)
    up = torch.where(up > 7, torch.full_like(g, 7.0), torch.where(up < -7, torch.full_like(g, -7.0), up))
    return Pair(g / (1 + (-1.702 * g).exp()) * (up + 1), g.abs(), up.abs() + 1)


def act_mul(x: torch.Tensor, gate: str) -> Pair:
    """The first half of the last axis and the second."""
    half = x.shape[-1] // 2
    return gated(x[..., :half], x[..., half:], gate)


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
