"""Attention that falls off linearly with distance, in place of rotated positions."""

from __future__ import annotations

import math

import torch


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """What each head subtracts per token of distance, fp32 [H] on the host.

    With a power of two, head h of H has 2^(-8 (h + 1) / H). Any other number takes the slopes of the next lower power
    of two and fills up with every second one of the next higher power.

    Source: Press et al. 2022 (ALiBi).
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = [_slope(head + 1, lower) for head in range(lower)]
    slopes += [_slope(2 * extra + 1, 2 * lower) for extra in range(num_heads - lower)]
    return torch.tensor(slopes, dtype=torch.float32)


def _slope(step: int, num_heads: int) -> float:
    return float(2.0 ** (-8.0 * step / num_heads))
