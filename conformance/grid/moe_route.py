"""The choice of experts: every (experts, top-k) pair, groups, a correction bias, sigmoid, NaN rows, no rows, ties.

Logits are multiples of 2^-4: two of them are equal, and then the lowest id wins, or so far apart that no rounding makes
them equal. With a bias the sums score + bias may still lie within a rounding of each other; `_ids` takes either order
there, and only there. Groups with a bias are redrawn until no two groups are that close.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from octavo.conformance.case import Case, computes_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import U32, route_bound
from octavo.conformance.oracle import moe
from octavo.conformance.trial import Outputs, Trial, given, wanted
from octavo.core.backend import RowSpec

EXPERTS = (8, 60, 128, 160, 256, 384, 512)
TOP_KS = range(1, 11)
STEP = 2.0**-4
LARGEST = {"softmax": 8.0, "sigmoid": 5.0}
"""Of |logit|: a sigmoid beyond 5 flattens so much that neighbouring logits would tie. Never written to."""

NEAR = 16 * U32
"""Sums of a score and a bias that are this close may change places: scores of order 1 are off by a few ulp."""


@dataclass(frozen=True)
class Point:
    """logits [T, E]."""

    tokens: int
    experts: int
    top_k: int
    dtype: torch.dtype = torch.float32
    scoring: str = "softmax"
    renormalize: bool = True
    has_bias: bool = False
    groups: tuple[int, int] = (1, 1)
    scale: float = 1.0
    nan_rows: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        parts = [dtype_name(self.dtype), f"t{self.tokens}", f"e{self.experts}", f"k{self.top_k}"]
        parts += [self.scoring] if self.scoring != "softmax" else []
        parts += [] if self.renormalize else ["raw"]
        parts += ["bias"] if self.has_bias else []
        parts += [f"g{self.groups[0]}.{self.groups[1]}"] if self.groups != (1, 1) else []
        parts += [f"scale{self.scale:g}"] if self.scale != 1 else []
        return "moe_route/" + "-".join(parts + (["nan"] if self.nan_rows else []))

    @property
    def rule(self) -> dict[str, Any]:
        """Arguments of the op and of the oracle but for the bias."""
        return {
            "top_k": self.top_k,
            "scoring": self.scoring,
            "renormalize": self.renormalize,
            "num_groups": self.groups[0],
            "top_groups": self.groups[1],
            "scale": self.scale,
        }

    @property
    def spec(self) -> RowSpec:
        return RowSpec(self.experts, self.dtype, self.scoring, self.top_k)


def cases() -> Iterable[Case]:
    for point in dict.fromkeys(_points()):
        yield Case(
            name=point.name,
            op="moe_route",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "experts": str(point.experts),
                "top_k": str(point.top_k),
                "scoring": point.scoring,
                "groups": str(point.groups[0]),
                "bias": "yes" if point.has_bias else "no",
                "tokens": str(point.tokens),
            },
            lanes=("exact", "statistical"),
            build=functools.partial(build, point),
            profiles=_profiles(point),
            faults=_faults(point),
            requires=computes_in(point.dtype),
        )


def _points() -> Iterable[Point]:
    for experts in EXPERTS:
        for top_k in TOP_KS:
            if top_k <= experts:
                yield Point(5, experts, top_k)
    for tokens in (0, 1, 2, 3, 4, 16, 17, 64, 65, 300):
        yield Point(tokens, 128, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield Point(7, 64, 6, dtype)
        yield Point(7, 64, 6, dtype, scoring="sigmoid", has_bias=True)
        yield Point(6, 60, 4, dtype, nan_rows=(0, 4))
        yield Point(6, 256, 8, dtype, "sigmoid", has_bias=True, groups=(8, 4), scale=2.5)
    for scoring in LARGEST:
        for groups in ((1, 1), (8, 3)):
            for has_bias in (False, True):
                for renormalize in (False, True):
                    yield Point(9, 160, 6, torch.float32, scoring, renormalize, has_bias, groups, 1.0)
    yield Point(4, 8, 8)
    yield Point(6, 256, 8, scoring="sigmoid", has_bias=True, groups=(8, 4), nan_rows=(5,))


def _profiles(point: Point) -> frozenset[str]:
    names = {"core", "moe", "deterministic"}
    if point.tokens in {6, 7, 9}:
        names.add("smoke")
    if point.experts <= 64:
        names.add("tiny")
    return frozenset(names | ({"tiny-full"} if point.tokens <= 17 else set()))


def _faults(point: Point) -> frozenset[str]:
    names = {0: {"moe-zero-tokens"}, 3: {"moe-token-bucket-boundary"}, 4: {"moe-token-bucket-boundary"}}.get(
        point.tokens if point.experts == 128 else -1, set()
    )
    if point.nan_rows and point.dtype == torch.float32:
        names = names | {"nan-router-row"}
    if point.tokens == 5:
        names = names | {"moe-weights-wrong-at-one-pair"}
        if point.experts > 256 and point.top_k == 8:
            names = names | {"expert-index-above-255"}
    return frozenset(names)


def build(point: Point, draw: Draw) -> Trial:
    bias = draw.normal(point.experts, std=0.1) if point.has_bias else None
    logits = _logits(point, draw)
    while bias is not None and point.groups[0] > 1 and _has_near_groups(point, logits, bias):
        logits = _logits(point, draw)
    logits[list(point.nan_rows), draw.permutation(point.experts)[0]] = math.nan
    shape = (point.tokens, point.top_k)

    def run(bench: Bench) -> None:
        bench.op("moe_route", point.spec)(
            bench["logits"],
            out_weights=bench["weights"],
            out_ids=bench["ids"],
            bias_E=bench["bias"] if point.has_bias else None,
            **point.rule,
        )

    def check(outputs: Outputs) -> list[Finding]:
        weights, ids = moe.route(logits, bias_E=bias, **point.rule)
        scores = _scores(point, logits)
        choice = scores if bias is None else scores + bias.double()
        return [_ids(outputs["ids"], ids, choice), *_weights(point, outputs, weights, scores, logits)]

    tensors = [
        given("logits", logits),
        wanted("weights", shape, torch.float32, is_finite=not point.nan_rows),
        wanted("ids", shape, torch.int64, may_be_zero=True),
    ]
    tensors += [given("bias", bias)] if bias is not None else []
    return Trial(tuple(tensors), run, check, is_empty=point.tokens == 0)


def _logits(point: Point, draw: Draw) -> torch.Tensor:
    """Normal numbers on the grid. Ties are frequent: there are 128 steps to either side, and up to 512 experts."""
    top = LARGEST[point.scoring]
    x = draw.normal(point.tokens, point.experts, std=2.0).clamp(-top, top)
    return (x / STEP).round().mul(STEP).to(point.dtype)


def _scores(point: Point, logits: torch.Tensor) -> torch.Tensor:
    x = logits.double()
    return torch.softmax(x, dim=-1) if point.scoring == "softmax" else 1 / (1 + (-x).exp())


def _has_near_groups(point: Point, logits: torch.Tensor, bias: torch.Tensor) -> bool:
    """Whether some row has two groups whose worth (the sum of their best two) hangs on a rounding."""
    choice = _scores(point, logits) + bias.double()
    worth = choice.unflatten(1, (point.groups[0], -1)).topk(2, dim=-1).values.sum(-1).sort(dim=-1).values
    return bool((worth.diff(dim=-1) < 2 * NEAR).any())


def _ids(got: torch.Tensor, want: torch.Tensor, choice: torch.Tensor) -> Finding:
    """The wanted ids; another one where its choice value is within NEAR of the wanted one's, but not equal to it."""
    experts = choice.shape[1]
    in_range = (got >= 0) & (got < experts)
    value = choice.gather(1, got.clamp(0, experts - 1))
    gap = (value - choice.gather(1, want)).abs()
    ordered = got.sort(dim=-1).values
    is_distinct = torch.cat((torch.ones_like(in_range[:, :1]), ordered.diff(dim=-1) != 0), dim=-1).all(-1, keepdim=True)
    swapped = in_range & is_distinct & (gap > 0) & (gap <= NEAR)
    return exact("ids", torch.where(swapped, want, got), want)


def _weights(
    point: Point, outputs: Outputs, want: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor
) -> list[Finding]:
    """Against the scores of the experts that were chosen; NaN rows apart."""
    is_bad = logits.isnan().any(dim=-1)
    got = outputs["weights"]
    picked = scores.gather(1, outputs["ids"].clamp(0, point.experts - 1))
    expected = (picked / picked.sum(-1, keepdim=True) if point.renormalize else picked) * point.scale
    x = logits.double()[~is_bad]
    depth = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True) if point.scoring == "softmax" else x.abs().amax()
    bound = route_bound(expected[~is_bad], experts=point.experts, depth=depth)
    findings = [statistical("weights", got[~is_bad], expected[~is_bad], bound)]
    return findings + ([exact("weights", got[is_bad], want[is_bad])] if point.nan_rows else [])
