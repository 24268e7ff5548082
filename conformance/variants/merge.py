"""Merging two parts of attention with the weights formed otherwise."""

from __future__ import annotations

import math

import torch

from octavo.conformance.variants.base import Op, Variant


def quotient(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Both parts relative to the larger maximum, divided at the end: (e^(a-m)·A + e^(b-m)·B) / (e^(a-m) + e^(b-m))."""
    top = torch.maximum(lse_a, lse_b)
    parts = [_relative(part, part_lse, top) for part, part_lse in ((out_a, lse_a), (out_b, lse_b))]
    mass = parts[0][0] + parts[1][0]
    total = parts[0][1] + parts[1][1]
    is_empty = top == -torch.inf
    out.copy_(torch.where(is_empty[..., None], 0.0, total / mass[..., None]))
    if lse is not None:
        lse.copy_(torch.where(is_empty, -torch.inf, top + mass.log()))


def _relative(part: torch.Tensor, lse: torch.Tensor, top: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.where(lse == -torch.inf, 0.0, (lse - top).exp())
    return weight, torch.where(weight[..., None] > 0, weight[..., None] * part.float(), 0.0)


def base_2(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """One weight from the difference alone, w = 1 / (1 + 2^((b - a)·log₂e)), and 1 - w formed the same way."""
    is_a, is_b = lse_a > -torch.inf, lse_b > -torch.inf
    apart = torch.where(is_a & is_b, (lse_b - lse_a) / math.log(2), 0.0)
    share_a = torch.where(is_b, 1 / (1 + torch.exp2(apart)), 1.0)
    share_b = torch.where(is_a, 1 / (1 + torch.exp2(-apart)), 1.0)
    a = torch.where(is_a[..., None], share_a[..., None] * out_a.float(), 0.0)
    b = torch.where(is_b[..., None], share_b[..., None] * out_b.float(), 0.0)
    out.copy_(a + b)
    if lse is not None:
        more = torch.log1p((-(lse_a - lse_b).abs()).exp())
        lse.copy_(torch.where(is_a & is_b, torch.maximum(lse_a, lse_b) + more, torch.maximum(lse_a, lse_b)))


def _variant(name: str, what: str, op: Op) -> Variant:
    return Variant(f"merge-{name}", what, ("merge_attention",), {"merge_attention": op})


VARIANTS = (
    _variant("quotient", "one division at the end", quotient),
    _variant("base-2", "weights from the difference, in powers of 2", base_2),
)
