"""Collectives of a group of one, and the sum over the ranks with residual and norm fused to it.

    all_reduce_norm/…   sizes on either side of where implementations change their algorithm, in bytes of the message;
                        the same call a thousand times, of two messages in turn, so that a stale one shows
    collectives/…       all_reduce (in place and not), all_gather, reduce_scatter, broadcast: exact

A group of one has nothing to wait for and nothing to add, but everything else that these ops do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, computes_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import norm_bound, rounding_bound
from octavo.conformance.oracle import rows
from octavo.conformance.trial import Outputs, Trial, given, updated, wanted
from octavo.core.backend import RowSpec

EPS = 1e-5
MANY = 1001
"""Odd: were the last call the second of a pair, a call that reads its predecessor's message would add up the same."""
LARGE_KIB = 8192
"""From here on a message takes a second to judge: `dist` only."""


@dataclass(frozen=True)
class Point:
    """x [T, M]; `calls` of the op, two messages in turn."""

    dtype: torch.dtype
    tokens: int
    width: int
    calls: int = 1

    @property
    def name(self) -> str:
        shape = f"{dtype_name(self.dtype)}-{self.tokens}x{self.width}"
        return shape if self.calls == 1 else f"{shape}-calls{self.calls}"

    @property
    def spec(self) -> RowSpec:
        return RowSpec(self.width, self.dtype)


def cases() -> Iterable[Case]:
    for point in _points():
        yield _case(
            point,
            f"all_reduce_norm/{point.name}",
            ("statistical",) if point.calls == 1 else ("exact", "statistical"),
            functools.partial(build, point),
        )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for tokens, width in ((1, 64), (5, 577), (1030, 64)):
            point = Point(dtype, tokens, width)
            yield _case(point, f"collectives/{point.name}", ("exact",), functools.partial(build_collectives, point))


def _points() -> Iterable[Point]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for tokens, width in ((0, 64), (1, 64), (5, 577), (3, 4097), (64, 64)):
            yield Point(dtype, tokens, width)
        for kib in (32, 256, 512, LARGE_KIB):
            for around in (0, 1):
                yield Point(dtype, kib * 1024 // (1024 * dtype.itemsize) + around, 1024)
        yield Point(dtype, 2, 64, calls=MANY)


def _case(point: Point, name: str, lanes: tuple[str, ...], build_trial: functools.partial[Trial]) -> Case:
    return Case(
        name=name,
        op="all_reduce_norm",
        spec=point.spec,
        axes={
            "dtype": dtype_name(point.dtype),
            "width": str(point.width),
            "bytes": str(point.tokens * point.width * point.dtype.itemsize),
            "world": "1",
            "calls": str(point.calls),
        },
        lanes=lanes,
        build=build_trial,
        profiles=_profiles(point),
        faults=_faults(point) if name.startswith("all_reduce_norm") else frozenset(),
        requires=computes_in(point.dtype),
    )


def _profiles(point: Point) -> frozenset[str]:
    if point.tokens * point.width * point.dtype.itemsize >= LARGE_KIB * 1024:
        return frozenset({"dist"})
    names = {"core", "dist", "deterministic"}
    if point.tokens <= 5 and point.calls == 1:
        names |= {"tiny", "smoke"}
    return frozenset(names | ({"tiny-full"} if point.tokens <= 64 and point.calls == 1 else set()))


def _faults(point: Point) -> frozenset[str]:
    names = set()
    if point.dtype == torch.float32:
        if point.calls > 1:
            names.add("all-reduce-norm-after-many-calls")
        elif 32 * 1024 < point.tokens * point.width * 4 <= 64 * 1024:
            names.add("all-reduce-norm-above-size")
    return frozenset(names)


def build(point: Point, draw: Draw) -> Trial:
    """Many calls: whole messages in turn, so that the residual's sum is exact and ends near where it began."""
    is_many = point.calls > 1
    shape = (point.tokens, point.width)
    if is_many:
        messages = [draw.integers(1, 3, *shape, dtype=point.dtype)]
        messages.append(1 - messages[0])
        residual = draw.integers(1, 4, *shape, dtype=point.dtype)
    else:
        size = torch.exp2(draw.integers(-3, 3, point.tokens, 1))
        messages = [(draw.normal(*shape, mean=0.2) * size).to(point.dtype)] * 2
        residual = (draw.normal(*shape) * size).to(point.dtype)
    weight = draw.normal(point.width, mean=1.0, std=0.3)
    # Each pair of calls adds 1 to every element; 8 bits of bf16 hold so many before the residual is put back.
    pairs_per_round = 100

    def run(bench: Bench) -> None:
        call, comm = bench.op("all_reduce_norm", point.spec), bench.communicator()
        for i in range(point.calls):
            if is_many and i % (2 * pairs_per_round) == 0:
                bench["residual"].copy_(bench["start"])
            message = bench["x"] if i % 2 == 0 else bench["y"]
            call(message, comm, bench["weight"], out=bench["out"], residual=bench["residual"], eps=EPS)

    def check(outputs: Outputs) -> list[Finding]:
        calls = (point.calls - 1) % (2 * pairs_per_round) + 1
        total = residual.double() + sum(messages[i % 2].double() for i in range(calls))
        want = rows.rms_norm(total.to(point.dtype), weight, EPS)
        findings = [statistical("out", outputs["out"], want, norm_bound(want, width=point.width, dtype=point.dtype))]
        if is_many:
            return [*findings, exact("residual", outputs["residual"], total)]
        bound = rounding_bound(total, dtype=point.dtype)
        return [*findings, statistical("residual", outputs["residual"], total, bound)]

    tensors = [given("x", messages[0]), given("weight", weight), updated("residual", residual)]
    tensors += [given("y", messages[1]), given("start", residual)] if is_many else []
    return Trial((*tensors, wanted("out", shape, point.dtype)), run, check, is_empty=point.tokens == 0)


def build_collectives(point: Point, draw: Draw) -> Trial:
    """Sums over a group of one are copies."""
    shape = (point.tokens, point.width)
    x, y = draw.normal(*shape, dtype=point.dtype), draw.normal(1, *shape, dtype=point.dtype)
    z = draw.normal(*shape, dtype=point.dtype)

    def run(bench: Bench) -> None:
        comm = bench.communicator()
        comm.all_reduce(bench["x"], out=bench["reduced"])
        comm.all_reduce(bench["in_place"], out=bench["in_place"])
        comm.all_gather(bench["x"], out=bench["gathered"])
        comm.reduce_scatter(bench["y"], out=bench["scattered"])
        comm.broadcast(bench["sent"], root=0)
        comm.barrier()

    def check(outputs: Outputs) -> list[Finding]:
        expected = {"reduced": x, "in_place": z, "gathered": x[None], "scattered": y[0], "sent": z}
        return [exact(name, outputs[name], want) for name, want in expected.items()]

    tensors = (
        given("x", x),
        given("y", y),
        updated("in_place", z),
        updated("sent", z),
        *(wanted(name, shape, point.dtype) for name in ("reduced", "scattered")),
        wanted("gathered", (1, *shape), point.dtype),
    )
    return Trial(tensors, run, check)
