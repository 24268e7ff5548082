"""Collectives of the communicator, exact: whole numbers whose sums any order gets right, or bytes that only move.

    collectives/…        all of them in a group of one: copies, and everything else that they do
    all_reduce/…         in place and not; sizes either side of changes of algorithm; rows that lie apart; many calls
    all_gather/…         every rank's message at its own place
    reduce_scatter/…     every rank's slice of the sum
    broadcast/…          from each root in turn
    barrier/…            nobody leaves before the last has arrived

Every rank has numbers of its own. Σ|x| over the ranks stays ≤ 2^p units, p the bits of the dtype that goes over the
wire (8 for bf16), so that every partial sum is representable in it: what differs is a fault, not rounding.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from octavo.conformance.case import COMMUNICATOR, Case, all_of, computes_in, forms_groups_of
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.grid.all_reduce_norm import DTYPES, FEWER, GROUP_TIMEOUT_S, LARGE_KIB, rows_of
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import OUTPUT_BITS, exact
from octavo.conformance.trial import Outputs, Trial, given, row_strides, updated, wanted

LATE_S = 0.1
"""How long the late rank lets the others wait at a barrier."""
CLOCK_BITS = 24
"""Milliseconds of the machine's clock, modulo 2^24 (4.7 hours): whole numbers that fp32 holds."""


@dataclass(frozen=True)
class Point:
    """A message [T, M] on each of `world` ranks; gap: elements between its rows."""

    what: str
    dtype: torch.dtype
    tokens: int
    width: int
    world: int = 1
    calls: int = 1
    gap: int = 0

    @property
    def name(self) -> str:
        parts = [f"world{self.world}"] if self.world > 1 else []
        parts += [dtype_name(self.dtype), f"{self.tokens}x{self.width}"]
        parts += [f"calls{self.calls}"] if self.calls > 1 else []
        return f"{self.what}/{'-'.join(parts + ([f'gap{self.gap}'] if self.gap else []))}"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.tokens, self.width)

    def strides(self, *leading: int) -> tuple[int, ...] | None:
        """Of a tensor [*leading, T, M] of this point."""
        return row_strides((*leading, *self.shape), self.gap) if self.gap else None


def cases() -> Iterable[Case]:
    for point in (*_alone(), *_groups()):
        yield Case(
            name=point.name,
            op=COMMUNICATOR,
            spec=None,
            axes={
                "dtype": dtype_name(point.dtype),
                "width": str(point.width),
                "bytes": str(point.tokens * point.width * point.dtype.itemsize),
                "world": str(point.world),
                "calls": str(point.calls),
            },
            lanes=("exact",),
            build=functools.partial(BUILDERS[point.what], point),
            profiles=_profiles(point),
            faults=_faults(point),
            requires=all_of(computes_in(point.dtype), forms_groups_of(point.world)),
            world=point.world,
            timeout_s=GROUP_TIMEOUT_S if point.world > 1 else 60.0,
        )


def _alone() -> Iterable[Point]:
    for dtype in DTYPES:
        for tokens, width in ((1, 64), (5, 577), (1030, 64)):
            yield Point("collectives", dtype, tokens, width)


def _groups() -> Iterable[Point]:
    """Ordered by the group's size, as workers are started."""
    for world in (2, 4, 8):
        for dtype in DTYPES:
            yield from _sums(world, dtype)
            for what in ("all_gather", "reduce_scatter", "broadcast"):
                for tokens, width in ((1, 64), (5, 577), (130, 512)):
                    yield Point(what, dtype, tokens, width, world)
                yield Point(what, dtype, 3, 80, world, gap=16)
        large_kib = LARGE_KIB if world == 2 else 1024
        yield Point("all_reduce", torch.float32, rows_of(large_kib, torch.float32) + 1, 1024, world)
        yield Point("all_reduce", torch.float32, 2, 64, world, calls=FEWER)
        yield Point("barrier", torch.float32, 1, world, world)


def _sums(world: int, dtype: torch.dtype) -> Iterable[Point]:
    for tokens, width in ((1, 1), (1, 64), (5, 577)):
        yield Point("all_reduce", dtype, tokens, width, world)
    for kib in (32, 256, 512) if world == 2 else (256,):
        for around in (0, 1):
            yield Point("all_reduce", dtype, rows_of(kib, dtype) + around, 1024, world)
    yield Point("all_reduce", dtype, 3, 80, world, gap=16)


def _profiles(point: Point) -> frozenset[str]:
    if point.world > 1:
        return frozenset({"dist"})
    names = {"core", "dist", "deterministic"}
    if point.tokens <= 5:
        names |= {"tiny", "smoke"}
    return frozenset(names | ({"tiny-full"} if point.tokens <= 64 else set()))


def _faults(point: Point) -> frozenset[str]:
    if point.world != 2 or point.dtype != torch.float32:
        return frozenset()
    if point.what == "all_reduce" and point.calls > 1:
        return frozenset({"all-reduce-stale-after-many-calls"})
    if point.what == "all_reduce" and point.width == 1024 and point.tokens == rows_of(32, point.dtype) + 1:
        return frozenset({"all-reduce-last-rank-above-size"})
    if point.tokens != 5:
        return frozenset({"barrier-does-not-wait"}) if point.what == "barrier" else frozenset()
    by_what = {
        "all_reduce": "all-reduce-in-place-overwrites",
        "all_gather": "all-gather-out-of-order",
        "reduce_scatter": "reduce-scatter-wrong-slice",
        "broadcast": "broadcast-ignores-root",
    }
    return frozenset({by_what[point.what]})


def build_alone(point: Point, draw: Draw) -> Trial:
    """Sums over a group of one are copies."""
    shape = point.shape
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

    tensors = (
        given("x", x),
        given("y", y),
        updated("in_place", z),
        updated("sent", z),
        *(wanted(name, shape, point.dtype) for name in ("reduced", "scattered")),
        wanted("gathered", (1, *shape), point.dtype),
    )
    want = {"reduced": x, "in_place": z, "gathered": x[None], "scattered": y[0], "sent": z}
    return Trial(tensors, run, _equal_to(want))


def build_all_reduce(point: Point, draw: Draw) -> Trial:
    """Two messages in turn. Every result is added to `total`, so that a single wrong one among many shows."""
    bits = 8 if point.calls > 1 else OUTPUT_BITS[point.dtype]
    x, y = (_whole(point, draw, bits, point.world) for _ in range(2))

    def run(bench: Bench) -> None:
        comm = bench.communicator()
        for i in range(point.calls):
            comm.all_reduce(bench["x"] if i % 2 == 0 else bench["y"], out=bench["out"])
            bench["total"].add_(bench["out"])
        comm.all_reduce(bench["in_place"], out=bench["in_place"])

    own = draw.rank
    sums = x.double().sum(0), y.double().sum(0)
    pairs = point.calls // 2
    want = {"out": sums[0], "in_place": sums[1], "total": sums[0] * (pairs + 1) + sums[1] * pairs}
    tensors = (
        given("x", x[own], strides=point.strides()),
        *([given("y", y[own])] if point.calls > 1 else []),
        updated("in_place", y[own], strides=point.strides(), may_be_zero=True),
        updated("total", torch.zeros(point.shape), may_be_zero=True),
        wanted("out", point.shape, point.dtype, strides=point.strides(), may_be_zero=True),
    )
    return Trial(tensors, run, _equal_to(want), shared=frozenset(want))


def build_all_gather(point: Point, draw: Draw) -> Trial:
    x = draw.normal(point.world, *point.shape, dtype=point.dtype)

    def run(bench: Bench) -> None:
        bench.communicator().all_gather(bench["x"], out=bench["out"])

    tensors = (
        given("x", x[draw.rank], strides=point.strides()),
        wanted("out", (point.world, *point.shape), point.dtype, strides=point.strides(point.world)),
    )
    return Trial(tensors, run, _equal_to({"out": x}), shared=frozenset({"out"}))


def build_reduce_scatter(point: Point, draw: Draw) -> Trial:
    """x [rank, slice, T, M]."""
    x = _whole(point, draw, OUTPUT_BITS[point.dtype], point.world, point.world)

    def run(bench: Bench) -> None:
        bench.communicator().reduce_scatter(bench["x"], out=bench["out"])

    tensors = (
        given("x", x[draw.rank], strides=point.strides(point.world)),
        wanted("out", point.shape, point.dtype, strides=point.strides()),
    )
    return Trial(tensors, run, _equal_to({"out": x[:, draw.rank].double().sum(0)}))


def build_broadcast(point: Point, draw: Draw) -> Trial:
    """x [root, rank, T, M]: one tensor for each root."""
    x = draw.normal(point.world, point.world, *point.shape, dtype=point.dtype)
    names = [f"from{root}" for root in range(point.world)]

    def run(bench: Bench) -> None:
        comm = bench.communicator()
        for root, name in enumerate(names):
            comm.broadcast(bench[name], root=root)

    tensors = tuple(updated(name, x[root, draw.rank], strides=point.strides()) for root, name in enumerate(names))
    want = {name: x[root, root] for root, name in enumerate(names)}
    return Trial(tensors, run, _equal_to(want), shared=frozenset(names))


def build_barrier(point: Point, draw: Draw) -> Trial:
    """Each rank is late in turn. waited[late, r] = 1 where this rank left no earlier than rank r arrived.

    All ranks are on one machine, whose monotonic clock is the same in every process.
    """
    world, own = point.world, draw.rank

    def run(bench: Bench) -> None:
        comm = bench.communicator()
        waited = torch.zeros(world, world)
        for late in (0, world - 1):
            if late == own:
                time.sleep(LATE_S)
            arrived = _clock_ms()
            comm.barrier()
            left = _clock_ms()
            bench["arrived"].copy_(bench.backend.from_host(torch.full((world,), float(arrived))))
            comm.all_gather(bench["arrived"], out=bench["all"])
            others = bench.backend.to_host(bench["all"])[:, 0].to(torch.int64)
            waited[late] = ((left - others) % 2**CLOCK_BITS < 2 ** (CLOCK_BITS - 1)).float()
        for name in ("arrived", "all"):  # times are not the same in both attempts
            bench[name].fill_(1.0)
        bench["waited"].copy_(bench.backend.from_host(waited))

    tensors = (
        wanted("arrived", (world,), torch.float32),
        wanted("all", (world, world), torch.float32),
        wanted("waited", (world, world), torch.float32),
    )
    want = torch.zeros(world, world)
    want[0] = want[world - 1] = 1.0
    return Trial(tensors, run, _equal_to({"waited": want}))


BUILDERS: dict[str, Callable[[Point, Draw], Trial]] = {
    "collectives": build_alone,
    "all_reduce": build_all_reduce,
    "all_gather": build_all_gather,
    "reduce_scatter": build_reduce_scatter,
    "broadcast": build_broadcast,
    "barrier": build_barrier,
}
"""By the family's name. Never written to."""


def _whole(point: Point, draw: Draw, bits: int, *leading: int) -> torch.Tensor:
    """Whole numbers [*leading, T, M] so small that world of them add up to no more than 2^bits."""
    top = 2**bits // point.world
    return draw.integers(-top, top, *leading, *point.shape, dtype=point.dtype)


def _clock_ms() -> int:
    return time.monotonic_ns() // 1_000_000 % (1 << CLOCK_BITS)


def _equal_to(want: dict[str, torch.Tensor]) -> Callable[[Outputs], list[Finding]]:
    return lambda outputs: [exact(name, outputs[name], expected) for name, expected in want.items()]
