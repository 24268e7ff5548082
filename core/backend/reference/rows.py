"""Ops on rows: embedding, RMSNorm and LayerNorm, rotary embedding, activations.

Shape letters: T tokens, M hidden, H query heads, K KV heads, D head dim, P positions, R rotary dims.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from octavo.core.backend.comm import Communicator
from octavo.core.backend.ops import PackedWeight
from octavo.core.backend.reference.numeric import accumulator, rounded
from octavo.core.backend.specs import ActivationKind, Gate


def embed(ids_T: torch.Tensor, w: PackedWeight, *, out: torch.Tensor, scale: float = 1.0) -> None:
    w.rows(ids_T, out=out)
    if scale != 1.0:
        out.mul_(scale)


def normalized(x: torch.Tensor, weight_M: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis, in the accumulator's dtype."""
    acc = accumulator(x, weight_M)
    x = x.to(acc)
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight_M.to(acc)


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
    out.copy_(normalized(x, weight_M, eps))


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
    acc = accumulator(x, weight_M)
    bias_M = None if bias_M is None else bias_M.to(acc)
    out.copy_(rounded(F.layer_norm(x.to(acc), weight_M.shape, weight_M.to(acc), bias_M, eps), out.dtype))


def all_reduce_norm(
    x_TM: torch.Tensor,
    comm: Communicator,
    weight_M: torch.Tensor,
    *,
    out: torch.Tensor,
    residual: torch.Tensor,
    eps: float,
) -> None:
    total_TM = torch.empty_like(x_TM)
    comm.all_reduce(x_TM, out=total_TM)
    rms_norm(total_TM, weight_M, out=out, eps=eps, residual=residual)


def rotated(x_THD: torch.Tensor, cos_sin_TR: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x with the first R elements of each head turned by its token's angles, in the accumulator's dtype."""
    acc = accumulator(x_THD, cos_sin_TR)
    rotary_dim = cos_sin_TR.shape[-1]
    cos, sin = cos_sin_TR.to(acc)[:, None, :].chunk(2, dim=-1)
    turned, rest = x_THD.to(acc).split((rotary_dim, x_THD.shape[-1] - rotary_dim), dim=-1)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1)


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
    cos_sin_TR = cos_sin_PR[positions_T]
    out_q.copy_(rotated(q_THD, cos_sin_TR, interleaved))
    out_k.copy_(rotated(k_TKD, cos_sin_TR, interleaved))


def activated(x: torch.Tensor, kind: ActivationKind) -> torch.Tensor:
    """silu(x) = x·sigmoid(x); gelu(x) = x·Φ(x), exactly or by its tanh approximation; relu(x) = max(x, 0)."""
    if kind == "silu":
        return F.silu(x)
    if kind == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def activation(x: torch.Tensor, *, out: torch.Tensor, kind: ActivationKind) -> None:
    out.copy_(rounded(activated(x.to(accumulator(x)), kind), out.dtype))


SWIGLU_LIMIT, SWIGLU_STEEPNESS = 7.0, 1.702
"""Of the gate "swiglu_clamped"."""


def gated(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """The first half of the last axis and the second as `specs.Gate` says, in x's dtype."""
    first, second = x.chunk(2, dim=-1)
    if gate == "swiglu_clamped":
        first = first.clamp(max=SWIGLU_LIMIT)
        return (second.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1) * first * torch.sigmoid(SWIGLU_STEEPNESS * first)
    return activated(first, gate) * second


def act_mul(x: torch.Tensor, *, out: torch.Tensor, gate: Gate) -> None:
    out.copy_(rounded(gated(x.to(accumulator(x)), gate), out.dtype))
