"""The probe lane: attention whose right answer is one key's value, bit for bit, and a sum that shows wrong visibility.

    needle       K are ±1 codes, q = 24·code[target]: softmax saturates, and the output must equal V[target]
                 a hidden target has a visible decoy that agrees in ¾ of its signs: the output must equal V[decoy]
    visible set  q = 0, V are ±1 codes: every visible key weighs 1/L, and a key's own code projects to 1 if it is there

Why the needle saturates: with softmax scale s the target scores 24·D·s, any other at most 24·(D/4)·s (codes are
redrawn until code·target ≤ D/4), so it leads by 18·D·s; for D = 64, s = 1/8 that is 144, and e^-144 times any number
of keys vanishes in fp32. `needle_query` takes a larger factor for smaller D and s. The decoy agrees in ¾ of its signs:
its dot product with the target is D/2, which leads everything else by D/4 · 24 · s.
"""

from __future__ import annotations

import math

import torch

from octavo.conformance.draw import Draw
from octavo.conformance.finding import Finding
from octavo.conformance.lanes.exact import exact

NEEDLE = 24.0
LEAD = 110.0
"""exp(-110) · 2^17 keys is below half an ulp of fp32's, and of any narrower dtype's, weight 1."""

VISIBLE_LIMIT = 0.5
"""Between ~1 for a key wrongly hidden or shown and ~0 when right (measured: 0.93-1.01 against 0.00)."""


def needle_codes(draw: Draw, num_keys: int, dim: int, targets: list[int], decoys: dict[int, int]) -> torch.Tensor:
    """±1 codes [L, D]. Every other key's code·target ≤ D/4 (redrawn until so), a decoy's = D/2.

    Args:
        targets: keys whose code a query will carry.
        decoys: target -> key that must win when the target is hidden.
    """
    codes = draw.signs(num_keys, dim)
    fixed: list[int] = []
    for target in targets:
        group = [target, decoys[target]] if target in decoys else [target]
        while True:
            codes[target] = draw.signs(dim)
            if target in decoys:
                flipped = draw.permutation(dim)[: dim // 4]
                codes[decoys[target]] = codes[target]
                codes[decoys[target], flipped] *= -1
            if not fixed or bool((codes[group] @ codes[fixed].T <= dim / 4).all()):
                break
        fixed += group
    free = torch.tensor(sorted(set(range(num_keys)) - set(fixed)), dtype=torch.int64)
    while fixed and free.numel():
        free = free[(codes[free] @ codes[fixed].T > dim / 4).any(dim=1)]
        codes[free] = draw.signs(free.numel(), dim)
    return codes


def needle_query(codes_LD: torch.Tensor, target: int, softmax_scale: float, *, has_decoy: bool = False) -> torch.Tensor:
    """q [D] = c·code[target], c = 24 or more, a power of two times 24, so that the leader leads by LEAD."""
    dim = codes_LD.shape[1]
    lead = dim / 4 if has_decoy else 3 * dim / 4
    factor = NEEDLE
    while factor * lead * softmax_scale < LEAD:
        factor *= 2
    return codes_LD[target] * factor


def needle_values(draw: Draw, num_keys: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """V [L, K, Dv] with 1 ≤ |v| < 2: no two keys alike, no subnormal, no zero."""
    return (draw.uniform(num_keys, heads, dim, low=1.0, high=1.99) * draw.signs(num_keys, heads, dim)).to(dtype)


def found(output: str, got: torch.Tensor, want: torch.Tensor) -> Finding:
    """The needle's comparison: bit for bit, in the probe lane."""
    finding = exact(output, got, want)
    return Finding(
        lane="probe",
        output=output,
        compared=finding.compared,
        share=finding.share,
        index=finding.index,
        message=finding.message and f"not the needle's value: {finding.message}",
    )


def visible_set(output: str, got_HD: torch.Tensor, codes_LHD: torch.Tensor, seen_L: torch.Tensor) -> Finding:
    """One row with q = 0: mean of the visible codes. Shows any key wrongly hidden or shown.

    Args:
        got_HD: the row's output, per query head.
        codes_LHD: ±1 values that each query head would see, hidden keys included.
        seen_L: bool, what the row ought to see.

    residual r = got - mean of the seen codes; the projection L·⟨r, code_j⟩/D, pooled over heads, is 1 for a key j that
    is shown although hidden, -1 for one that is hidden although visible, and noise of L·u + √(L/(D·H)) · (error) else.
    """
    count = int(seen_L.sum())
    if not count:
        return Finding(lane="probe", output=output, compared=0)
    codes = codes_LHD.double()
    residual = got_HD.double() - codes[seen_L].mean(dim=0)
    projection = (codes * residual).mean(dim=(1, 2)) * count
    worst = int(projection.abs().argmax())
    share = float(projection.abs()[worst]) / VISIBLE_LIMIT
    verb = "shown" if not bool(seen_L[worst]) else "hidden"
    return Finding(
        lane="probe",
        output=output,
        compared=got_HD.numel(),
        share=math.inf if math.isnan(share) else share,
        index=(worst,),
        message=f"key {worst} is wrongly {verb}: projection {float(projection[worst]):.2f}" if not share <= 1 else "",
    )
