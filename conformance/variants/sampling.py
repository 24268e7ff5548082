"""Sampling that walks the tokens in another order, and adds their mass up in blocks.

descending   sort, cut off, then the running sum over the sorted tokens: another token for the same uniform number
two passes   a sum per block of ids, then the walk inside the block that the number falls into
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.conformance.variants.base import Op, Variant

BLOCK = 48

Draw = Callable[[torch.Tensor, float], int]
"""Weights [V] fp32, unnormalised, 0 for what is cut off; a uniform number -> a token."""


def sample_with(draw: Draw) -> Op:
    """The contract's sample, row by row around another draw."""

    def sample(
        logits_RV: torch.Tensor,
        temperature_R: torch.Tensor,
        top_k_R: torch.Tensor,
        top_p_R: torch.Tensor,
        min_p_R: torch.Tensor,
        uniform_R: torch.Tensor,
        *,
        out: torch.Tensor,
    ) -> None:
        settings = zip(top_k_R.tolist(), top_p_R.tolist(), min_p_R.tolist(), strict=True)
        for r, (top_k, top_p, min_p) in enumerate(settings):
            logits, temperature = logits_RV[r], float(temperature_R[r])
            top = logits.max()
            if not bool(top.isfinite()):
                out[r] = -1
            elif temperature <= 0:
                out[r] = int((logits == top).nonzero()[0])
            else:
                weights = _kept((logits - top) * (1 / temperature), top_k, top_p, min_p)
                out[r] = draw(weights, float(uniform_R[r]))

    return sample


def _kept(x_V: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Weights, after a full sort; thresholds on weights instead of on x."""
    ordered = x_V.sort(descending=True).values
    if 0 < top_k < len(x_V):
        x_V = x_V.masked_fill(x_V < ordered[top_k - 1], -torch.inf)
        ordered = x_V.sort(descending=True).values
    weights = torch.exp2(x_V * 1.4426950408889634)
    if top_p < 1:
        mass = torch.exp2(ordered * 1.4426950408889634).double().cumsum(dim=0)
        reached = int((mass < top_p * mass[-1]).sum())
        weights = weights.masked_fill(x_V < ordered[min(reached, len(ordered) - 1)], 0.0)
    return weights.masked_fill(weights < min_p, 0.0) if min_p > 0 else weights


def descending(weights_V: torch.Tensor, uniform: float) -> int:
    """Along the sorted tokens."""
    order = weights_V.argsort(descending=True, stable=True)
    mass = weights_V[order].cumsum(dim=0)
    reached = int((mass <= uniform * mass[-1]).sum())
    return int(order[min(reached, int((weights_V > 0).sum()) - 1)])


def two_passes(weights_V: torch.Tensor, uniform: float) -> int:
    """Along the blocks of ids, then inside one."""
    blocks = weights_V.split(BLOCK)
    sums = torch.stack([block.sum() for block in blocks])
    mass = sums.cumsum(dim=0)
    target = uniform * mass[-1]
    at = min(int((mass <= target).sum()), int(sums.nonzero()[-1]))
    before = mass[at - 1] if at else torch.zeros(())
    inside = blocks[at].cumsum(dim=0)
    step = min(int((inside <= target - before).sum()), int(blocks[at].nonzero()[-1]))
    return at * BLOCK + step


VARIANTS = (
    Variant("sample-descending", "along the sorted tokens", ("sample",), {"sample": sample_with(descending)}),
    Variant("sample-two-passes", "block sums first", ("sample",), {"sample": sample_with(two_passes)}),
)
