"""Ops on rows with sums in other orders, approximate roots, fused multiply-adds, and activations by other formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from octavo.conformance.variants.base import Op, Variant
from octavo.core.backend import ActivationKind, Gate, KVCache
from octavo.core.backend.reference.cache import write_kv

LANES = 16
ULP = 2.0**-23

MeanSquare = Callable[[torch.Tensor], torch.Tensor]
"""[..., M] -> [..., 1] fp32."""


def rms_norm_with(mean_square: MeanSquare, scale: Callable[..., torch.Tensor]) -> Op:
    """The contract's rms_norm: the mean of squares, and how x, mean + eps and weight come together."""

    def rms_norm(
        x: torch.Tensor,
        weight_M: torch.Tensor,
        *,
        out: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> None:
        if residual is not None:
            residual.add_(x)
            x = residual
        wide = x.float()
        out.copy_(scale(wide, mean_square(wide) + eps, weight_M.float()))

    return rms_norm


def in_lanes(x: torch.Tensor) -> torch.Tensor:
    """One running sum per lane, as vector code has it."""
    squares = torch.zeros(*x.shape[:-1], LANES)
    for start in range(0, x.shape[-1], LANES):
        piece = x[..., start : start + LANES]
        squares[..., : piece.shape[-1]] += piece.square()
    return squares.sum(dim=-1, keepdim=True) / x.shape[-1]


def in_a_chain(x: torch.Tensor) -> torch.Tensor:
    """One square after the other, the last one first: the longest chain of roundings there is."""
    return x.square().flip(-1).cumsum(dim=-1)[..., -1:] * (1 / x.shape[-1])


def by_root(x: torch.Tensor, mean: torch.Tensor, weight_M: torch.Tensor) -> torch.Tensor:
    """Divides by the root instead of multiplying by its inverse."""
    return x / mean.sqrt() * weight_M


def by_near_inverse_root(x: torch.Tensor, mean: torch.Tensor, weight_M: torch.Tensor) -> torch.Tensor:
    """An inverse root that is one unit in the last place off, up in one row and down in the next; weight first."""
    inverse = torch.rsqrt(mean)
    sign = 1 - 2 * (torch.arange(inverse.numel()) % 2).view(inverse.shape)
    return x * (inverse * (1 + sign * ULP) * weight_M)


def fused_turn(x_THD: torch.Tensor, cos_sin_TR: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """Each sum of two products with one product rounded and the other not, as a fused multiply-add has it."""
    rotary_dim = cos_sin_TR.shape[-1]
    half = rotary_dim // 2
    index = torch.arange(half)
    first, second = (2 * index, 2 * index + 1) if is_interleaved else (index, index + half)
    cos, sin = cos_sin_TR[:, None, :half], cos_sin_TR[:, None, half:]
    a, b = x_THD[..., first].float(), x_THD[..., second].float()
    out = x_THD.float().clone()
    out[..., first] = (a.double() * cos.double() - (b * sin).double()).float()
    out[..., second] = (b.double() * cos.double() + (a * sin).double()).float()
    return out


def rotary(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    positions_T: torch.Tensor,
    cos_sin_PR: torch.Tensor,
    *,
    out_q: torch.Tensor,
    out_k: torch.Tensor,
    interleaved: bool = False,
) -> None:
    for x, out in ((q_THD, out_q), (k_TKD, out_k)):
        out.copy_(fused_turn(x, cos_sin_PR[positions_T], interleaved))


def rope_write_kv(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    positions_T: torch.Tensor,
    cos_sin_PR: torch.Tensor,
    kv: KVCache,
    slot_mapping_T: torch.Tensor,
    *,
    out_q: torch.Tensor,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    table = cos_sin_PR[positions_T]
    out_q.copy_(fused_turn(q_THD, table, interleaved))
    turned = fused_turn(k_TKD, table, interleaved).to(k_TKD.dtype)
    write_kv(turned, v_TKD, kv, slot_mapping_T, k_scale=k_scale, v_scale=v_scale)


def act_mul_with(activation: Callable[[torch.Tensor, Gate], torch.Tensor]) -> Op:
    """The contract's act_mul around another activation."""

    def act_mul(x: torch.Tensor, *, out: torch.Tensor, gate: Gate) -> None:
        first, second = x.float().chunk(2, dim=-1)
        if gate == "swiglu_clamped":
            # g·sigmoid(s·g) = silu(s·g) / s; one product and one sum in place of (u + 1) times it.
            turned = activation(1.702 * first.clamp(max=7.0), "silu") * (1 / 1.702)
            out.copy_(second.clamp(-7.0, 7.0) * turned + turned)
        else:
            out.copy_(activation(first, gate) * second)

    return act_mul


def layer_norm_with(mean_square: MeanSquare, scale: Callable[..., torch.Tensor]) -> Op:
    """The contract's layer_norm: a mean that is summed in lanes, then as `rms_norm_with`."""

    def layer_norm(
        x: torch.Tensor,
        weight_M: torch.Tensor,
        *,
        out: torch.Tensor,
        eps: float,
        bias_M: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        if residual is not None:
            residual.add_(x)
            x = residual
        wide = x.float()
        distance = wide - wide.flip(-1).cumsum(dim=-1)[..., -1:] * (1 / x.shape[-1])
        y = scale(distance, mean_square(distance) + eps, weight_M.float())
        out.copy_(y if bias_M is None else y + bias_M.float())

    return layer_norm


def activation_with(other: Callable[[torch.Tensor, Gate], torch.Tensor]) -> Op:
    """The contract's activation by another formula."""

    def activation(x: torch.Tensor, *, out: torch.Tensor, kind: ActivationKind) -> None:
        out.copy_(torch.where(x > 0, x, x * 0) if kind == "relu" else other(x.float(), kind))

    return activation


def by_powers_of_2(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """silu and tanh's gelu from 2^x; erf by Abramowitz & Stegun 7.1.26."""
    if gate == "gelu":
        return 0.5 * x * (1 + _erf(x / math.sqrt(2)))
    inner = x if gate == "silu" else 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return x / (1 + torch.exp2(inner * -1.4426950408889634))


def by_tanh(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """silu(x) = x/2 · (1 + tanh(x/2)), which cancels where x is far below 0."""
    if gate == "silu":
        return 0.5 * x * (1 + torch.tanh(0.5 * x))
    if gate == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + torch.erf(x * (1 / math.sqrt(2))))


def _erf(x: torch.Tensor) -> torch.Tensor:
    t = 1 / (1 + 0.3275911 * x.abs())
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    return x.sign() * (1 - series * (-x * x).exp())


def _norm(name: str, what: str, mean: MeanSquare, scale: Callable[..., torch.Tensor]) -> Variant:
    ops = {"rms_norm": rms_norm_with(mean, scale), "layer_norm": layer_norm_with(mean, scale)}
    return Variant(f"norm-{name}", what, tuple(ops), ops)


VARIANTS = (
    _norm("lanes", "a sum of squares per lane, divided by the root", in_lanes, by_root),
    _norm("near-root", "an inverse root one ulp off, times the weight first", in_lanes, by_near_inverse_root),
    _norm("chain", "squares added one by one, the last one first", in_a_chain, by_near_inverse_root),
    Variant(
        "rotary-fused",
        "a fused multiply-add per element",
        ("rotary", "rope_write_kv"),
        {"rotary": rotary, "rope_write_kv": rope_write_kv},
    ),
    Variant(
        "activation-base-2",
        "powers of 2; erf by a polynomial",
        ("act_mul", "activation"),
        {"act_mul": act_mul_with(by_powers_of_2), "activation": activation_with(by_powers_of_2)},
    ),
    Variant(
        "activation-tanh",
        "silu and gelu by 1 + tanh",
        ("act_mul", "activation"),
        {"act_mul": act_mul_with(by_tanh), "activation": activation_with(by_tanh)},
    ),
)
