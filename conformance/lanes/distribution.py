"""The lane of sampling: never a token that can't be, then how often each one came.

    valid set   every drawn token is possible                             share = inf for the first that isn't
    chi-square  Σ(n_i - N·p_i)²/(N·p_i) over bins of ≥ 8 expected draws   against a quantile at 1e-6 per test
    (the rare tokens share one bin; with fewer than 2 bins total variation is meaningless as well, and is left out)

The quantile is Wilson & Hilferty's: χ²(d, z) ≈ d·(1 - 2/(9d) + z·√(2/(9d)))³, z = 4.75 for 1e-6.
"""

from __future__ import annotations

import math

import torch

from octavo.conformance.finding import Finding

FEWEST_EXPECTED = 8.0
Z = 4.75


def valid(output: str, tokens_R: torch.Tensor, possible_RV: torch.Tensor) -> Finding:
    """Every row's token is one that the row may give."""
    ids = tokens_R.to(torch.int64)
    vocabulary = possible_RV.shape[1]
    in_range = (ids >= 0) & (ids < vocabulary)
    good = in_range & possible_RV.gather(1, ids.clamp(0, vocabulary - 1)[:, None])[:, 0]
    if bool(good.all()):
        return Finding(lane="distribution", output=output, compared=ids.numel())
    row = int((~good).nonzero()[0])
    message = f"row {row} gave token {int(ids[row])}, which can't be; {int((~good).sum())} rows of {ids.numel()}"
    return Finding(
        lane="distribution", output=output, compared=ids.numel(), share=math.inf, index=(row,), message=message
    )


def fits(output: str, tokens_R: torch.Tensor, probability_V: torch.Tensor) -> Finding:
    """Chi-square of independent draws from one distribution."""
    draws = tokens_R.numel()
    counts = torch.bincount(tokens_R.to(torch.int64).clamp(0, len(probability_V) - 1), minlength=len(probability_V))
    expected = probability_V.double() * draws
    is_own_bin = expected >= FEWEST_EXPECTED
    observed_bins = torch.cat((counts[is_own_bin].double(), counts[~is_own_bin].sum()[None].double()))
    expected_bins = torch.cat((expected[is_own_bin], expected[~is_own_bin].sum()[None]))
    if expected_bins[-1] < FEWEST_EXPECTED:
        # Too rare for a bin of its own: together with the last of the others.
        observed_bins = torch.cat((observed_bins[:-2], observed_bins[-2:].sum()[None]))
        expected_bins = torch.cat((expected_bins[:-2], expected_bins[-2:].sum()[None]))
    freedom = len(expected_bins) - 1
    if freedom < 1:
        return Finding(lane="distribution", output=output, compared=draws)
    statistic = float(((observed_bins - expected_bins).square() / expected_bins).sum())
    spread = 2 / (9 * freedom)
    limit = freedom * (1 - spread + Z * math.sqrt(spread)) ** 3
    distance = float((observed_bins - expected_bins).abs().sum()) / (2 * draws)
    message = f"chi-square {statistic:.1f} over {freedom} degrees (limit {limit:.1f}), total variation {distance:.3f}"
    return Finding(
        lane="distribution",
        output=output,
        compared=draws,
        share=statistic / limit,
        message=message if statistic > limit else "",
    )
