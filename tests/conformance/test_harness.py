"""Backends that lie, scribble or leave things out: each is found, by the defence that is meant for it."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.conformance.case import Case
from octavo.conformance.draw import Draw
from octavo.conformance.facts import Facts
from octavo.conformance.finding import Finding
from octavo.conformance.gaps import Gap, GapKind
from octavo.conformance.harness.attempt import WATCH_S, is_watched
from octavo.conformance.harness.host import CAPABILITIES, HostBackend, NoOps
from octavo.conformance.harness.judge import judge
from octavo.conformance.harness.result import Status
from octavo.conformance.lanes.exact import exact
from octavo.conformance.mutants.base import broken
from octavo.conformance.suite import families
from octavo.conformance.trial import HostPool, Trial, given, wanted
from octavo.core.backend import CacheSpec, KVCache, KVCacheSpec, KVLayout, KVPool, RowSpec, Unsupported
from octavo.core.base.errors import UnsupportedOp

NORM = "rms_norm/float32-5x576-gap5"


def norm_with(scribble: Callable[..., Any], **backend: Any) -> HostBackend:
    """A backend whose rms_norm runs the honest one, then `scribble(x, out)`."""

    def wrap(honest):
        def rms_norm(x, weight_M, *, out, eps, residual=None):
            honest(x, weight_M, out=out, eps=eps, residual=residual)
            scribble(x, out)

        return rms_norm

    return HostBackend(broken(("rms_norm",), wrap), **backend)


def verdict(scribble: Callable[..., Any], **backend: Any):
    return judge(families()[NORM], norm_with(scribble, **backend), seed=1)


def draw_of(case: Case) -> Draw:
    return Draw(1, case.name, case.op, Facts.of(CAPABILITIES))


def past_the_end(x: torch.Tensor, out: torch.Tensor) -> None:
    out.as_strided((1,), (1,), out.storage_offset() + out.stride(0) * 4 + 576).fill_(1.0)


def into_a_gap(x: torch.Tensor, out: torch.Tensor) -> None:
    out.as_strided((1,), (1,), out.storage_offset() + 576).fill_(1.0)


def over_the_input(x: torch.Tensor, out: torch.Tensor) -> None:
    x[0, 0] += 1


def not_all(x: torch.Tensor, out: torch.Tensor) -> None:
    out.as_strided((1,), (1,), out.storage_offset()).copy_(x.as_strided((1,), (1,), x.storage_offset() + 576))


@pytest.mark.parametrize(
    ("scribble", "message"),
    [
        (past_the_end, "out: 4 bytes of the guard band after it were overwritten"),
        (into_a_gap, "out: 4 bytes of a gap between its rows were overwritten"),
        (over_the_input, "x: .* bytes of the input itself were overwritten"),
        (lambda x, out: out.zero_(), "out: all zero"),
        (lambda x, out: out[0, 0].fill_(torch.inf), "1 of 2880 values are not finite"),
        (lambda x, out: out.mul_(1.01), r"of its bound at \[\d+, \d+\]"),
        (not_all, "not finite"),
    ],
)
def test_scribbles_are_found(scribble: Callable[..., Any], message: str) -> None:
    result = verdict(scribble)
    assert result.status is Status.FAIL
    assert re.search(message, result.detail), result.detail


def test_an_output_never_written_is_found_in_both_attempts() -> None:
    def wrap(_honest):
        return lambda x, weight_M, *, out, eps, residual=None: None

    result = judge(families()[NORM], HostBackend(broken(("rms_norm",), wrap)), seed=1)
    assert result.status is Status.FAIL
    assert "2880 of 2880 values are not finite (under nan poison)" in result.detail
    assert "2880 of 2880 elements were never written (under huge poison)" in result.detail


def test_runs_that_differ_fail_unless_declared() -> None:
    flips = iter(range(100))

    def flip(x: torch.Tensor, out: torch.Tensor) -> None:
        out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(0.0)) if next(flips) % 2 else out[0, 0]

    assert "elements differ between two runs" in verdict(flip).detail
    assert verdict(flip, deterministic=False).status is Status.PASS


def test_a_refusal_needs_supports_and_the_op_to_agree() -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedOp("not here")

    liar = broken(("rms_norm",), lambda _: refuse)
    assert "supports() accepted the spec, and the op refused it" in judge(families()[NORM], HostBackend(liar), 1).detail
    honest = broken(("rms_norm",), lambda _: refuse)
    honest.supports = lambda op, spec: Unsupported("no norm")
    assert judge(families()[NORM], HostBackend(honest), 1).status is Status.FALLBACK
    assert judge(families()[NORM], HostBackend(honest), 1, strict=True).status is Status.UNSUPPORTED
    lacking = broken((), lambda _: refuse)
    lacking.supports = lambda op, spec: Unsupported("no norm")
    hides = judge(families()[NORM], HostBackend(lacking), 1, strict=True)
    assert hides.status is Status.FAIL
    assert "supports() refused (no norm), and the op, called all the same, ran: it must raise" in hides.detail


def test_an_op_that_is_not_there_may_be_refused() -> None:
    assert judge(families()[NORM], HostBackend(NoOps()), 1, strict=True).status is Status.UNSUPPORTED


def test_a_refused_composite_is_a_refusal_and_no_lie() -> None:
    """Without its own gate the product is taken apart, and strictly the part that is missing is refused."""
    gated = next(case for name, case in families().items() if case.op == "gemm" and case.spec.gate)

    def no_gate(*args: Any, epilogue: Any = None, **kwargs: Any) -> None:
        if epilogue is not None and epilogue.gate:
            raise UnsupportedOp("no gate")
        product(*args, epilogue=epilogue, **kwargs)

    ops = broken(("gemm",), lambda _: no_gate)
    product = HostBackend().ops.gemm
    ops.supports = lambda op, spec: None if op == "gemm" and not spec.gate else Unsupported(f"no {op} like that")
    assert judge(gated, HostBackend(ops), 1).status in (Status.PASS, Status.FALLBACK)
    assert judge(gated, HostBackend(ops), 1, strict=True).status is Status.UNSUPPORTED


@pytest.mark.parametrize("period", [2, 3])
def test_supports_that_changes_its_mind_is_found(period: int) -> None:
    turns = iter(range(10**6))
    fickle = broken((), lambda honest: honest)
    fickle.supports = lambda op, spec: Unsupported("not now") if next(turns) % period == period - 1 else None
    result = judge(families()[NORM], HostBackend(fickle), 1)
    assert result.status is Status.FAIL
    assert "supports() is not pure: it answered" in result.detail


def test_an_own_lookup_without_an_own_product_is_a_truthful_fallback() -> None:
    """The reference packs the weight, and looks its rows up: the backend's embed is never given what it can't read."""

    def own_packing_only(*_: Any, **__: Any) -> None:
        raise AssertionError("a packing that this backend can't read")

    looks_up = broken(("embed",), lambda _: own_packing_only)
    looks_up.supports = lambda op, spec: None if op == "embed" else Unsupported(f"no {op}")
    result = judge(families()["embed/float32-t9-257x64"], HostBackend(looks_up), 1)
    assert result.status is Status.FALLBACK
    assert result.detail == "the reference packed its weight, since no gemm"


def test_a_write_after_the_device_was_done_is_waited_for() -> None:
    late: list[threading.Timer] = []

    def later(x: torch.Tensor, out: torch.Tensor) -> None:
        late.append(threading.Timer(WATCH_S / 2, lambda: out[0, 0].fill_(5.0)))
        late[-1].start()

    case = families()[NORM]
    seed = next(seed for seed in range(100) if is_watched(case, seed))
    result = judge(case, norm_with(later), seed)
    for timer in late:
        timer.join()
    assert result.status is Status.MISTRUSTED, result.detail
    assert "still changed after the device said that all its work was done" in result.detail


@pytest.mark.parametrize("case", ["gemm.exact/float32-m1-n48-k100", "grouped_gemm.exact/float32-e8-t2-ragged-n32-k100"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_weight_is_used_by_both_attempts(case: str, deterministic: bool) -> None:
    """Packed once; what the first product does to it the second one shows, whatever the backend declares."""
    made = []

    def counting(honest):
        def prepare_weight(spec):
            made.append(honest(spec))
            return made[-1]

        return prepare_weight

    def spoiling(honest):
        def product(*args: Any, **kwargs: Any) -> None:
            honest(*args, **kwargs)
            for weight in made:
                weight.data_NK += 1

        return product

    chosen = families()[case]
    sound = judge(chosen, HostBackend(broken(("prepare_weight",), counting)), 1)
    assert sound.status is Status.PASS
    once = len(made)
    made.clear()
    ops = broken(("prepare_weight",), counting)
    setattr(ops, chosen.op, spoiling(getattr(ops, chosen.op)))
    result = judge(chosen, HostBackend(ops, deterministic=deterministic), 1)
    assert result.status is Status.FAIL
    assert len(made) == once == len(chosen.build(draw_of(chosen)).weights)


def test_gaps_turn_failures_into_xfail_and_passes_into_xpass() -> None:
    case = families()[NORM]
    gap = Gap(NORM, GapKind.NOTYET, "strides")
    zero = HostBackend(broken(("rms_norm",), lambda _: lambda x, w, *, out, eps, residual=None: out.zero_()))
    assert judge(case, zero, 1, gap=gap).status is Status.XFAIL
    assert judge(case, zero, 1, gap=Gap(NORM, GapKind.NEVER, "strides")).status is Status.WAIVED
    assert judge(case, HostBackend(), 1, gap=gap).status is Status.XPASS
    missing = Gap(NORM, GapKind.NOTIMPL, "no kernel")
    assert judge(case, HostBackend(NoOps()), 1, gap=missing).status is Status.XFAIL
    assert judge(case, HostBackend(NoOps()), 1, gap=gap).status is Status.XPASS


def case_of(trial: Trial, op: str = "act_mul", spec: Any = None) -> Case:
    spec = spec or RowSpec(8, torch.float32, "silu")
    return Case("test/one", op, spec, {}, ("exact",), lambda _: trial)


def test_comparing_nothing_fails() -> None:
    def run(bench) -> None:
        bench.op("act_mul", RowSpec(8, torch.float32, "silu"))(bench["x"], out=bench["out"], gate="silu")

    tensors = (given("x", torch.full((2, 8), 40.0)), wanted("out", (2, 4), torch.float32))
    nothing = [Finding(lane="exact", output="out", compared=0)]
    for findings in ([], nothing):
        result = judge(case_of(Trial(tensors, run, lambda _, found=findings: found)), HostBackend(), 1)
        assert (result.status, "nothing was compared" in result.detail) == (Status.FAIL, True)


def write_kv_trial(written: frozenset[int]) -> Case:
    spec = KVCacheSpec(2, 4, 4, torch.bfloat16, 4)
    cache = CacheSpec(2, 4, 4, torch.bfloat16, torch.bfloat16, 4, KVLayout.NHD)
    k, v = (torch.arange(48.0).view(6, 2, 4)[:2].to(torch.bfloat16) + i for i in (1, 2))
    pool = HostPool("kv", spec, num_blocks=3, blocks={1: None}, written=written, pad_bytes=6)

    def run(bench) -> None:
        bench.op("write_kv", cache)(bench["k"], bench["v"], bench.kv("kv"), bench["slots"])

    def check(outputs) -> list[Finding]:
        return [exact("kv.key", outputs["kv.key"], k), exact("kv.value", outputs["kv.value"], v)]

    tensors = (given("k", k), given("v", v), given("slots", torch.tensor([5, 6])))
    return case_of(Trial(tensors, run, check, pools=(pool,)), "write_kv", cache)


@pytest.mark.parametrize("layout", [{}, {"layout": KVLayout.HND}, {"is_interleaved": True}])
def test_pools_in_any_layout_and_slots_that_must_not_be_written(layout: dict[str, Any]) -> None:
    assert judge(write_kv_trial(frozenset({5, 6})), HostBackend(**layout), 1).status is Status.PASS
    result = judge(write_kv_trial(frozenset({5})), HostBackend(**layout), 1)
    assert "kv.key: 1 slots were overwritten that must not be: block 1 slot 2" in result.detail


def storage_of(kv: KVCache) -> torch.Tensor:
    """All bytes of the memory under a cache's views."""
    return torch.empty(0, dtype=torch.uint8).set_(kv.key_NSKD.untyped_storage())


def scribbling(at: Callable[[KVCache], int], **layout: Any) -> HostBackend:
    """write_kv changes one more byte, at(kv) bytes from block 0's first."""

    def wrap(honest):
        def write_kv(k, v, kv, slots, **scales: Any) -> None:
            honest(k, v, kv, slots, **scales)
            first = min(view.data_ptr() for view in (kv.key_NSKD, kv.value_NSKD))
            memory = storage_of(kv)
            memory[first - memory.data_ptr() + at(kv)] ^= 0xFF

        return write_kv

    return HostBackend(broken(("write_kv",), wrap), **layout)


BYTES = 2 * (4 + 4) * 4 * 2
"""Of a block of write_kv_trial; 6 bytes of padding follow each."""


@pytest.mark.parametrize("layout", [{}, {"layout": KVLayout.HND}, {"layout": KVLayout.HDN}, {"is_interleaved": True}])
@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("at", [-1, BYTES + 6 + BYTES, 2 * (BYTES + 6) - 1, 3 * (BYTES + 6)])
def test_bytes_between_and_around_blocks_must_not_be_written(layout: dict[str, Any], is_lazy: bool, at: int) -> None:
    case = write_kv_trial(frozenset({5, 6}))
    trial = case.build(draw_of(case))
    case = case_of(replace(trial, pools=(replace(trial.pools[0], is_lazy=is_lazy),)), "write_kv", case.spec)
    assert judge(case, HostBackend(**layout), 1).status is Status.PASS
    result = judge(case, scribbling(lambda _: at, **layout), 1)
    assert f"kv: 1 bytes between or around its blocks were overwritten, bytes {at} to {at}" in result.detail


def test_a_view_of_other_memory_is_left_without_guards() -> None:
    """A backend may keep blocks where it likes; then the blocks themselves are compared, as ever."""

    class Elsewhere(HostBackend):
        def kv_view(self, pool: KVPool, spec: KVCacheSpec) -> KVCache:
            return super().kv_view(replace(pool, storage=torch.empty_like(pool.storage)), spec)

    assert judge(write_kv_trial(frozenset({5, 6})), Elsewhere(), 1).status is Status.PASS
    assert "1 slots were overwritten" in judge(write_kv_trial(frozenset({5})), Elsewhere(), 1).detail


@pytest.mark.parametrize("share", [1.01, math.inf, math.nan])
@pytest.mark.parametrize("field", ["share", "rms", "gain"])
@pytest.mark.parametrize("is_empty", [False, True])
def test_no_pass_beside_a_figure_beyond_its_limit(share: float, field: str, is_empty: bool) -> None:
    def run(bench) -> None:
        bench.op("act_mul", RowSpec(8, torch.float32, "silu"))(bench["x"], out=bench["out"], gate="silu")

    def trial(value: float) -> Trial:
        found = [Finding(**({"lane": "exact", "output": "out", "compared": 8, field: value}))]
        tensors = (given("x", torch.full((2, 8), 40.0)), wanted("out", (2, 4), torch.float32))
        return Trial(tensors, run, lambda _: found, is_empty=is_empty)

    assert judge(case_of(trial(1.0)), HostBackend(), 1).status is Status.PASS
    assert judge(case_of(trial(share)), HostBackend(), 1).status is Status.FAIL
