"""Low-rank adapters: ranks 8 to 128, of one batch and mixed, an empty slot, rows without an adapter, no rows at all.

    lora_gemm.exact/…        h = A·x climbs and cancels to |h| ≤ 8; four entries ±1 in a row of B, one of the last rank,
                             so that |scale · B·h| ≤ 64 whatever the rank
    lora_gemm.statistical/…  normal numbers; adapters of very different sizes, so that a neighbour's stands out

`out` holds what the base layer left; rows of adapter -1 must keep it bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from octavo.conformance.case import Case, computes_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact, product
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import lora_bound
from octavo.conformance.trial import Outputs, Trial, given, updated
from octavo.core.backend import LoraSpec

ENTRIES = 4
"""Non-zero entries of a row of B in the exact lane."""


@dataclass(frozen=True)
class Point:
    """x [T, K], one adapter per rank; `rows`: "mixed" (with -1 among them), "none" (all -1), "runs" or "last"."""

    lane: str
    dtype: torch.dtype
    tokens: int
    k: int
    n: int
    ranks: tuple[int, ...]
    rows: str = "mixed"

    @property
    def name(self) -> str:
        ranks = ".".join(map(str, self.ranks))
        return f"lora_gemm.{self.lane}/{dtype_name(self.dtype)}-t{self.tokens}-k{self.k}-n{self.n}-r{ranks}-{self.rows}"

    @property
    def spec(self) -> LoraSpec:
        return LoraSpec(self.k, self.n, max(self.ranks), self.dtype)


@dataclass(frozen=True)
class Adapters:
    """a[i] [rank, K], b[i] [N, rank] in x's dtype; scales fp32. Ranks differ."""

    a: Sequence[torch.Tensor]
    b: Sequence[torch.Tensor]
    scales: torch.Tensor

    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """a [L, R, K] and b [L, N, R] as the op takes them, padded with zeros to the highest rank."""
        rank = max(a.shape[0] for a in self.a)
        a = torch.stack([pad(a, (0, 0, 0, rank - a.shape[0])) for a in self.a])
        return a, torch.stack([pad(b, (0, rank - b.shape[1])) for b in self.b])


def cases() -> Iterable[Case]:
    for point in dict.fromkeys(_points()):
        yield Case(
            name=point.name,
            op="lora_gemm",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "rank": str(max(point.ranks)),
                "adapters": str(len(point.ranks)),
                "tokens": str(point.tokens),
                "rows": point.rows,
            },
            lanes=(point.lane,),
            build=functools.partial(build_exact if point.lane == "exact" else build_statistical, point),
            profiles=_profiles(point),
            faults=_faults(point),
            requires=computes_in(point.dtype),
        )


def _points() -> Iterable[Point]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        at = functools.partial(Point, "exact", dtype)
        for rank in (8, 16, 32, 64, 128):
            yield at(9, 100, 48, (rank, rank))
            yield Point("statistical", dtype, 9, 96, 40, (rank,))
        yield at(17, 100, 48, (8, 16, 32, 64, 128))
        yield at(64, 64, 33, (16, 8, 16), "runs")
        yield at(5, 64, 48, (16, 16), "none")
        yield at(5, 64, 48, (16, 8), "last")
        yield at(9, 64, 48, (16, 0, 8))
        for tokens in (0, 1, 2, 65):
            yield at(tokens, 48, 48, (16, 32), "last" if tokens == 1 else "mixed")
        yield at(3, 1000, 257, (8,))
        yield Point("statistical", dtype, 33, 576, 130, (8, 64))


def _profiles(point: Point) -> frozenset[str]:
    names = {"core", "lora", "deterministic"}
    if point.tokens == 17:
        names.add("smoke")
    if point.tokens <= 5 and point.k == 64:
        names |= {"tiny", "smoke"}
    return frozenset(names | ({"tiny-full"} if point.tokens <= 17 and point.k <= 100 else set()))


def _faults(point: Point) -> frozenset[str]:
    names = set()
    if point.dtype == torch.float32 and point.tokens in {5, 9}:
        if point.ranks[0] == 32:
            names |= {"lora-rank-32", "lora-atomics"}
        if point.lane == "exact" and point.rows == "none":
            names.add("lora-row-without-adapter")
    return frozenset(names)


def adapter_rows(point: Point, draw: Draw) -> torch.Tensor:
    """int32 [T]: the adapter of each row."""
    count, tokens = len(point.ranks), point.tokens
    if point.rows == "none":
        return torch.full((tokens,), -1, dtype=torch.int32)
    if point.rows == "last":
        return torch.full((tokens,), count - 1, dtype=torch.int32)
    if point.rows == "runs":
        return (torch.arange(tokens) * (count + 1) // max(tokens, 1) - 1).to(torch.int32)
    order = torch.tensor(draw.permutation(tokens), dtype=torch.int64)
    return (order % (count + 1) - 1).to(torch.int32)


def build_exact(point: Point, draw: Draw) -> Trial:
    rank_sum = sum(point.ranks)
    drawn = product(draw, point.tokens, rank_sum, point.k, limit=16, operand_bits=8)
    b = [_sparse(draw, point.n, rank) for rank in point.ranks]
    # Neighbours have different scales: 1, 2, 1, 2, … or 2, 1, …
    scales = torch.exp2((torch.arange(len(point.ranks)) + draw.integers(0, 1, 1)) % 2)
    parts = drawn.w_NK.split(list(point.ranks))
    adapters = Adapters([a.to(point.dtype) for a in parts], [x.to(point.dtype) for x in b], scales)
    out = draw.integers(1, 63, point.tokens, point.n, dtype=point.dtype)
    x, rows = drawn.x_MK.to(point.dtype), adapter_rows(point, draw)

    def check(outputs: Outputs) -> list[Finding]:
        return [exact("out", outputs["out"], out.double() + _delta(adapters, x, rows, point.n).delta)]

    return _trial(point, x, adapters, rows, out, check)


def _sparse(draw: Draw, n: int, rank: int) -> torch.Tensor:
    """±1 at the last rank and at ENTRIES - 1 others, in every row."""
    b = torch.zeros(n, rank)
    if not rank:
        return b
    others = draw.integers(0, rank - 2, n, ENTRIES - 1, dtype=torch.int64)
    b.scatter_(1, others, draw.signs(n, ENTRIES - 1))
    b[:, -1] = draw.signs(n)
    return b


def build_statistical(point: Point, draw: Draw) -> Trial:
    x = draw.normal(point.tokens, point.k, mean=0.1, dtype=point.dtype)
    a = [draw.normal(rank, point.k, std=point.k**-0.5, dtype=point.dtype) for rank in point.ranks]
    b = [draw.normal(point.n, rank, std=rank**-0.5 * 4.0**i, dtype=point.dtype) for i, rank in enumerate(point.ranks)]
    adapters = Adapters(a, b, draw.uniform(len(point.ranks), low=0.5, high=2.0))
    out = draw.normal(point.tokens, point.n, dtype=point.dtype)
    rows = adapter_rows(point, draw)

    def check(outputs: Outputs) -> list[Finding]:
        steps = float(point.k) if draw.accumulation.truncating else math.sqrt(point.k)
        found = _delta(adapters, x, rows, point.n, inner_unit=steps * draw.accumulation.unit)
        want = out.double() + found.delta
        bound = lora_bound(
            want,
            found.delta,
            inner_error=found.inner_error,
            squares=found.squares,
            rank=max(point.ranks),
            dtype=point.dtype,
            accumulation=draw.accumulation,
        )
        return [statistical("out", outputs["out"], want, bound)]

    return _trial(point, x, adapters, rows, out, check)


@dataclass(frozen=True)
class _Delta:
    """What adapters add, [T, N] float64, and the sizes that lora_bound needs."""

    delta: torch.Tensor
    squares: torch.Tensor
    inner_error: torch.Tensor


def _delta(adapters: Adapters, x: torch.Tensor, rows: torch.Tensor, n: int, inner_unit: float = 0.0) -> _Delta:
    shape = (x.shape[0], n)
    delta, squares, inner = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    for t, i in enumerate(rows.tolist()):
        if i < 0:
            continue
        a, b = adapters.a[i].double(), adapters.b[i].double() * adapters.scales[i].double()
        h = a @ x[t].double()
        spread = (a.square() @ x[t].double().square()).sqrt()
        delta[t], squares[t] = b @ h, b.square() @ h.square()
        inner[t] = (b.square() @ (inner_unit * (spread + h.abs())).square()).sqrt()
    return _Delta(delta, squares, inner)


def call(point: Point, bench: Bench, rows: slice, out: str) -> None:
    """The op on some of the rows, into the same rows of an output."""
    op = bench.op("lora_gemm", point.spec)
    op(bench["x"][rows], bench["a"], bench["b"], bench["scales"], bench["adapter"][rows], out=bench[out][rows])


def _trial(
    point: Point,
    x: torch.Tensor,
    adapters: Adapters,
    rows: torch.Tensor,
    out: torch.Tensor,
    check: Callable[[Outputs], list[Finding]],
) -> Trial:
    def run(bench: Bench) -> None:
        call(point, bench, slice(0, point.tokens), "out")

    a, b = adapters.slots()
    tensors = (given("a", a), given("b", b), given("scales", adapters.scales), given("adapter", rows))
    return Trial((given("x", x), *tensors, updated("out", out)), run, check, is_empty=point.tokens == 0)
