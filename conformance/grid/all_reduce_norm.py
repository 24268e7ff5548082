"""The sum over the ranks with residual and norm fused to it.

    sizes      either side of where implementations change their algorithm, in bytes of the message
    calls      the same call a thousand times, of two messages in turn, so that a stale one shows
    ranks      1, 2, 4, 8: each with a message of its own and the residual of all; the same bits on each afterwards

A group of one has nothing to wait for and nothing to add, but everything else that this op does, and is in `core`; the
others are `dist`. Collectives alone: collectives.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, all_of, computes_in, forms_groups_of
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import UNIT, norm_bound, reduced_norm_bound, rounding_bound, sum_error
from octavo.conformance.oracle import rows
from octavo.conformance.trial import Outputs, Trial, given, updated, wanted
from octavo.core.backend import RowSpec

EPS = 1e-5
MANY = 1001
"""Odd: were the last call the second of a pair, a call that reads its predecessor's message would add up the same."""
FEWER = 301
"""Still more than eight bits count: of eight ranks on few cores a thousand calls take half a minute."""
PAIRS_PER_ROUND = 100
"""Each pair of calls adds 1 to every element; 8 bits of bf16 hold so many before the residual is put back."""
GROUP_TIMEOUT_S = 180.0
"""Eight ranks on two busy cores are slow; none of these cases takes half a minute on idle ones."""
LARGE_KIB = 8192
"""From here on a message takes a second to judge: `dist` only."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Point:
    """x [T, M] on each of `world` ranks; `calls` of the op, two messages in turn."""

    dtype: torch.dtype
    tokens: int
    width: int
    calls: int = 1
    world: int = 1

    @property
    def name(self) -> str:
        shape = f"{dtype_name(self.dtype)}-{self.tokens}x{self.width}"
        parts = [f"world{self.world}"] if self.world > 1 else []
        return "-".join([*parts, shape, *([f"calls{self.calls}"] if self.calls > 1 else [])])

    @property
    def spec(self) -> RowSpec:
        return RowSpec(self.width, self.dtype)

    @property
    def nbytes(self) -> int:
        """Of one rank's message."""
        return self.tokens * self.width * self.dtype.itemsize


def cases() -> Iterable[Case]:
    for point in (*_points(), *_group_points()):
        yield Case(
            name=f"all_reduce_norm/{point.name}",
            op="all_reduce_norm",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "width": str(point.width),
                "bytes": str(point.nbytes),
                "world": str(point.world),
                "calls": str(point.calls),
            },
            lanes=("statistical",) if point.calls == 1 else ("exact", "statistical"),
            build=functools.partial(build, point),
            profiles=_profiles(point),
            faults=_faults(point),
            requires=all_of(computes_in(point.dtype), forms_groups_of(point.world)),
            world=point.world,
            timeout_s=GROUP_TIMEOUT_S if point.world > 1 else 60.0,
        )


def rows_of(kib: int, dtype: torch.dtype) -> int:
    """Rows of 1024 elements that make up so many KiB."""
    return kib * 1024 // (1024 * dtype.itemsize)


def _points() -> Iterable[Point]:
    for dtype in DTYPES:
        for tokens, width in ((0, 64), (1, 64), (5, 577), (3, 4097), (64, 64)):
            yield Point(dtype, tokens, width)
        for kib in (32, 256, 512, LARGE_KIB):
            for around in (0, 1):
                yield Point(dtype, rows_of(kib, dtype) + around, 1024)
        yield Point(dtype, 2, 64, calls=MANY)


def _group_points() -> Iterable[Point]:
    """Ordered by the group's size, as workers are started. Many calls in fp32 only: a count knows no dtype."""
    for world in (2, 4, 8):
        for dtype in DTYPES:
            for tokens, width in ((0, 64), (1, 64), (5, 577)):
                yield Point(dtype, tokens, width, world=world)
            for kib in (32, 256, 512) if world == 2 else (256,):
                for around in (0, 1):
                    yield Point(dtype, rows_of(kib, dtype) + around, 1024, world=world)
        yield Point(torch.float32, 2, 64, calls=MANY if world == 2 else FEWER, world=world)
    for around in (0, 1):
        yield Point(torch.float32, rows_of(LARGE_KIB, torch.float32) + around, 1024, world=2)


def _profiles(point: Point) -> frozenset[str]:
    if point.world > 1 or point.nbytes >= LARGE_KIB * 1024:
        return frozenset({"dist"})
    names = {"core", "dist", "deterministic"}
    if point.tokens <= 5 and point.calls == 1:
        names |= {"tiny", "smoke"}
    return frozenset(names | ({"tiny-full"} if point.tokens <= 64 and point.calls == 1 else set()))


def _faults(point: Point) -> frozenset[str]:
    names = set()
    if point.dtype != torch.float32:
        return frozenset()
    if point.calls > 1 and point.world == 1:
        names.add("all-reduce-norm-after-many-calls")
    elif point.world == 1 and 32 * 1024 < point.nbytes <= 64 * 1024:
        names.add("all-reduce-norm-above-size")
    elif point.world == 4 and point.tokens == 5:
        names.add("all-reduce-own-first")
    return frozenset(names)


def build(point: Point, draw: Draw) -> Trial:
    """Many calls: whole messages in turn, so that the residual's sum is exact and ends near where it began."""
    if point.calls > 1:
        return _build_many(point, draw)
    shape = (point.tokens, point.width)
    size = torch.exp2(draw.integers(-3, 3, point.tokens, 1))
    messages = (draw.normal(point.world, *shape, mean=0.2) * size).to(point.dtype)
    residual = (draw.normal(*shape) * size).to(point.dtype)
    weight = draw.normal(point.width, mean=1.0, std=0.3)

    def run(bench: Bench) -> None:
        call = bench.op("all_reduce_norm", point.spec)
        call(bench["x"], bench.communicator(), bench["weight"], out=bench["out"], residual=bench["residual"], eps=EPS)

    def check(outputs: Outputs) -> list[Finding]:
        total = residual.double() + messages.double().sum(0)
        error = sum_error(messages, dtype=point.dtype)
        findings = [
            statistical("residual", outputs["residual"], total, rounding_bound(total, dtype=point.dtype, inner=error))
        ]
        if point.world == 1:
            want = rows.rms_norm(total.to(point.dtype), weight, EPS)
            bound = norm_bound(want, width=point.width, dtype=point.dtype)
        else:  # Whether the sum is rounded before the norm is taken of it is left open.
            want = rows.rms_norm(total, weight, EPS)
            off = error + UNIT[point.dtype] * total.abs()
            bound = reduced_norm_bound(total, weight, want, error=off, dtype=point.dtype)
        return [statistical("out", outputs["out"], want, bound), *findings]

    return _trial(point, (messages[draw.rank],), weight, residual, run, check)


def _build_many(point: Point, draw: Draw) -> Trial:
    """Rank r sends first[r] and second[r] in turn, all of them whole; the two sums add up to 1 everywhere."""
    shape = (point.tokens, point.width)
    first = draw.integers(1, 3, point.world, *shape, dtype=point.dtype)
    second = -first
    second[0] += 1
    residual = draw.integers(1, 4, *shape, dtype=point.dtype)
    weight = draw.normal(point.width, mean=1.0, std=0.3)

    def run(bench: Bench) -> None:
        call, comm = bench.op("all_reduce_norm", point.spec), bench.communicator()
        for i in range(point.calls):
            if i % (2 * PAIRS_PER_ROUND) == 0:
                bench["residual"].copy_(bench["start"])
            message = bench["x"] if i % 2 == 0 else bench["y"]
            call(message, comm, bench["weight"], out=bench["out"], residual=bench["residual"], eps=EPS)

    def check(outputs: Outputs) -> list[Finding]:
        pairs = (point.calls - 1) % (2 * PAIRS_PER_ROUND) // 2
        total = residual.double() + first.double().sum(0) + pairs
        want = rows.rms_norm(total, weight, EPS)
        bound = norm_bound(want, width=point.width, dtype=point.dtype)
        return [statistical("out", outputs["out"], want, bound), exact("residual", outputs["residual"], total)]

    return _trial(point, (first[draw.rank], second[draw.rank]), weight, residual, run, check)


def _trial(
    point: Point,
    messages: tuple[torch.Tensor, ...],
    weight: torch.Tensor,
    residual: torch.Tensor,
    run: Callable[[Bench], None],
    check: Callable[[Outputs], list[Finding]],
) -> Trial:
    tensors = [given("x", messages[0]), given("weight", weight), updated("residual", residual)]
    tensors += [given("y", messages[1]), given("start", residual)] if len(messages) > 1 else []
    tensors.append(wanted("out", (point.tokens, point.width), point.dtype))
    shared = frozenset({"out", "residual"})
    return Trial(tuple(tensors), run, check, shared=shared, is_empty=point.tokens == 0)
