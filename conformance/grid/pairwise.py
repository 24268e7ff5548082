"""Pairwise covering: every two values of two axes meet in some point, with far fewer points than the product.

    axes a × b × c of 9, 8 and 6 values: 432 points; pairwise some 75

Greedy and without chance beyond a fixed seed: the same axes give the same points in every process and release.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

TRIES = 24
"""Fillings tried for each pair that is still missing; the valid one that covers most new pairs wins."""


def pairwise(
    axes: Mapping[str, Sequence[Any]], is_valid: Callable[[dict[str, Any]], bool] = lambda _: True
) -> Iterator[dict[str, Any]]:
    """Points until every pair that occurs in some valid point has been in one.

    Args:
        axes: name -> values.
        is_valid: whether a full point makes sense. A pair for which TRIES fillings are all invalid is left out.
    """
    chance = random.Random(0)
    sizes = [len(values) for values in axes.values()]
    missing = dict.fromkeys(
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(sizes)), 2)
        for x, y in itertools.product(range(sizes[a]), range(sizes[b]))
    )
    while missing:
        pair = next(iter(missing))
        fillings = [_filling(sizes, pair, chance) for _ in range(TRIES)]
        ranked = sorted(fillings, key=lambda filling: -sum(p in missing for p in _pairs(filling)))
        points = ((f, {name: axes[name][i] for name, i in zip(axes, f, strict=True)}) for f in ranked)
        best = next((found for found in points if is_valid(found[1])), None)
        if best is None:
            del missing[pair]
            continue
        for covered in _pairs(best[0]):
            missing.pop(covered, None)
        yield best[1]


def _filling(sizes: Sequence[int], pair: tuple[int, int, int, int], chance: random.Random) -> list[int]:
    """An index per axis, at random but for the pair."""
    filling = [int(chance.random() * count) for count in sizes]
    filling[pair[0]], filling[pair[2]] = pair[1], pair[3]
    return filling


def _pairs(filling: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    for a, b in itertools.combinations(range(len(filling)), 2):
        yield a, filling[a], b, filling[b]
