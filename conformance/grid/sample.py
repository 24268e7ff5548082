"""Drawing tokens: never one outside the valid set, then the right frequencies; greedy, ties, rows that have no token.

    sample.valid/…        rows of different parameters in one batch: every token is one that its row may give
    sample.frequencies/…  one distribution, DRAWS rows: valid, and chi-square at a fixed sample size
    sample.exact/…        greedy (the lowest id of the maximum), one valid token, all -inf, NaN and +inf rows (-1)

Uniform numbers include 0 and the largest below 1. Logits of rows that must not be drawn from hold whatever they like.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case
from octavo.conformance.draw import Draw
from octavo.conformance.finding import Finding
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes import distribution
from octavo.conformance.lanes.exact import exact
from octavo.conformance.oracle import sampling
from octavo.conformance.trial import Outputs, Trial, given, row_strides, wanted
from octavo.core.backend import RowSpec

F32 = torch.float32
DRAWS = 4000
FEW_DRAWS = 400
"""For interpreters, where each row is a program: a minute and more for DRAWS of them."""

BELOW_ONE = 1 - 2.0**-24

Parameters = tuple[float, int, float, float]
"""temperature, top_k, top_p, min_p"""

PLAIN: Parameters = (1.0, 0, 1.0, 0.0)
GREEDY: Parameters = (0.0, 0, 1.0, 0.0)
MIXED: tuple[Parameters, ...] = (
    PLAIN,
    GREEDY,
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.6, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.9, 20, 0.8, 0.05),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (0.01, 0, 0.95, 0.0),
    (5.0, 10**6, 0.999, 1.0),
)


@dataclass(frozen=True)
class Point:
    """rows × vocabulary logits. fill: how logits are drawn; parameters: dealt to the rows in turn."""

    lane: str
    fill: str
    rows: int
    vocabulary: int
    parameters: tuple[Parameters, ...] = MIXED
    gap: int = 0

    @property
    def name(self) -> str:
        parts = [self.fill, f"{self.rows}x{self.vocabulary}"]
        if len(self.parameters) == 1:
            temperature, top_k, top_p, min_p = self.parameters[0]
            parts += [f"t{temperature:g}-k{top_k}-p{top_p:g}-m{min_p:g}"]
        return f"sample.{self.lane}/{'-'.join(parts)}" + (f"-gap{self.gap}" if self.gap else "")

    @property
    def spec(self) -> RowSpec:
        return RowSpec(self.vocabulary, F32)


def cases() -> Iterable[Case]:
    builders = {"valid": build_valid, "frequencies": build_frequencies, "exact": build_exact}
    for point in _points():
        yield Case(
            name=point.name,
            op="sample",
            spec=point.spec,
            axes={
                "rows": str(point.rows),
                "vocabulary": str(point.vocabulary),
                "logits": point.fill,
                "parameters": "mixed" if len(point.parameters) > 1 else "one",
                "stride": "strided" if point.gap else "dense",
            },
            lanes=("exact",) if point.lane == "exact" else ("distribution",),
            build=functools.partial(builders[point.lane], point),
            profiles=_profiles(point),
            faults=_faults(point),
        )


def _points() -> Iterable[Point]:
    for fill in ("normal", "ties", "peaked", "flat"):
        yield Point("valid", fill, 60, 257)
        yield Point("valid", fill, 20, 5000)
    for rows in (0, 1, 2, 7, 33):
        yield Point("valid", "normal", rows, 100)
    yield Point("valid", "normal", 20, 1)
    yield Point("valid", "normal", 20, 2)
    yield Point("valid", "normal", 20, 257, gap=31)
    yield Point("valid", "normal", 10, 151_936)
    for draws in (DRAWS, FEW_DRAWS):
        yield from _frequencies(draws)
    for fill in ("normal", "ties", "one-token", "no-token"):
        for rows, vocabulary in ((9, 64), (5, 1031), (1, 17)):
            greedy = (GREEDY,) if fill in {"normal", "ties"} else MIXED
            yield Point("exact", fill, rows, vocabulary, greedy)


def _frequencies(draws: int) -> Iterable[Point]:
    for parameters in (*MIXED[2:6], PLAIN):
        yield Point("frequencies", "normal", draws, 60, (parameters,))
    yield Point("frequencies", "ties", draws, 40, ((1.0, 7, 1.0, 0.0),))
    yield Point("frequencies", "ties", draws, 40, ((1.0, 0, 0.5, 0.0),))
    yield Point("frequencies", "halves", draws, 12, ((1.0, 0, 0.7, 0.0),))
    yield Point("frequencies", "halves", draws, 12, ((1.0, 0, 1.0, 0.2),))
    yield Point("frequencies", "flat", draws, 200, (PLAIN,))


def _profiles(point: Point) -> frozenset[str]:
    if point.rows == FEW_DRAWS:
        return frozenset({"tiny-full"})
    names = {"core", "deterministic"}
    if (point.rows <= 60 and point.vocabulary in {64, 257}) or point.fill == "halves":
        names.add("smoke")
    if point.vocabulary <= 100 and point.rows <= 60:
        names |= {"tiny"}
    return frozenset(names | ({"tiny-full"} if point.vocabulary <= 1031 and point.rows < DRAWS else set()))


def _faults(point: Point) -> frozenset[str]:
    names = set()
    if point.lane == "exact" and point.fill == "ties" and point.rows > 1:
        names.add("greedy-tie-highest-id")
    if point.fill == "halves" and point.parameters[0][2] < 1:
        names.add("top-p-off-by-one")
    return frozenset(names)


def _logits(point: Point, draw: Draw, rows: int) -> torch.Tensor:
    """[rows, V] fp32."""
    width = point.vocabulary
    if point.fill == "flat":
        return draw.normal(rows, 1).expand(rows, width).clone()
    if point.fill == "ties":
        return draw.integers(-3, 3, rows, width) / 2
    if point.fill == "peaked":
        return draw.normal(rows, width, std=30.0)
    if point.fill == "halves":
        # Probabilities 1/2, 1/4, 1/8, … in random places: a threshold between two of them has a clear answer.
        return -math.log(2) * torch.tensor([draw.permutation(width) for _ in range(rows)], dtype=F32).view(rows, width)
    if point.fill == "one-token":
        x = torch.full((rows, width), -math.inf)
        return x.scatter_(1, draw.integers(0, width - 1, rows, 1, dtype=torch.int64), draw.normal(rows, 1))
    if point.fill == "no-token":
        x = draw.normal(rows, width)
        x[0::3] = -math.inf
        x[1::3, width // 2] = math.nan
        x[2::3, width - 1] = math.inf
        return x
    return draw.normal(rows, width, std=2.0)


def _columns(point: Point) -> dict[str, torch.Tensor]:
    dealt = [point.parameters[r % len(point.parameters)] for r in range(point.rows)]
    temperature, top_k, top_p, min_p = zip(*dealt, strict=True) if dealt else ((), (), (), ())
    return {
        "temperature": torch.tensor(temperature, dtype=F32),
        "top_k": torch.tensor(top_k, dtype=torch.int64),
        "top_p": torch.tensor(top_p, dtype=F32),
        "min_p": torch.tensor(min_p, dtype=F32),
    }


def build_valid(point: Point, draw: Draw) -> Trial:
    logits = _logits(point, draw, point.rows)

    def check(outputs: Outputs) -> list[Finding]:
        possible = [_kept(point, logits[r], r).possible for r in range(point.rows)]
        return [distribution.valid("out", outputs["out"], torch.stack(possible))] if possible else []

    return _trial(point, draw, logits, check)


def build_frequencies(point: Point, draw: Draw) -> Trial:
    """One row of logits, DRAWS times."""
    row = _logits(point, draw, 1)
    logits = row.expand(point.rows, -1).clone()

    def check(outputs: Outputs) -> list[Finding]:
        kept = _kept(point, row[0], 0)
        possible = kept.possible.expand(point.rows, -1)
        out = outputs["out"]
        return [distribution.valid("out", out, possible), distribution.fits("out", out, kept.probability)]

    return _trial(point, draw, logits, check)


def build_exact(point: Point, draw: Draw) -> Trial:
    logits = _logits(point, draw, point.rows)

    def check(outputs: Outputs) -> list[Finding]:
        top = logits.amax(dim=-1, keepdim=True)
        lowest = torch.where(logits == top, torch.arange(point.vocabulary), point.vocabulary).amin(dim=-1)
        return [exact("out", outputs["out"], torch.where(top[:, 0].isfinite(), lowest, -1))]

    return _trial(point, draw, logits, check)


def _kept(point: Point, logits_V: torch.Tensor, row: int) -> sampling.Kept:
    temperature, top_k, top_p, min_p = point.parameters[row % len(point.parameters)]
    return sampling.kept(logits_V, temperature, top_k, top_p, min_p)


def _trial(point: Point, draw: Draw, logits: torch.Tensor, check: Callable[[Outputs], list[Finding]]) -> Trial:
    uniform = draw.uniform(point.rows)
    uniform[:1], uniform[1:2] = 0.0, BELOW_ONE
    columns = _columns(point) | {"uniform": uniform}
    order = ("temperature", "top_k", "top_p", "min_p", "uniform")

    def run(bench: Bench) -> None:
        bench.op("sample", point.spec)(bench["logits"], *(bench[name] for name in order), out=bench["out"])

    tensors = [given("logits", logits, strides=row_strides(logits.shape, point.gap) if point.gap else None)]
    tensors += [given(name, columns[name]) for name in order]
    tensors += [wanted("out", (point.rows,), torch.int64, may_be_zero=True)]
    return Trial(tuple(tensors), run, check, is_empty=point.rows == 0)
