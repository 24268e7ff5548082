"""Hypothesis strategies: points of the grids that nobody chose, as cases to judge like any other.

    drawn_cases() ──► Case ──► judge(case, backend, seed)       sizes are small: the harness runs dozens a second

The grid holds the edges that are known to matter; these find those that aren't known yet. A failing example shrinks to
a small point, which then belongs into the grid. Only tests import this module: it needs hypothesis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import get_args

import torch
from hypothesis import strategies as st

from octavo.conformance.case import Case
from octavo.conformance.draw import Draw
from octavo.conformance.grid import (
    act_mul,
    activation,
    gemm,
    gemm_quant,
    grouped_gemm,
    layer_norm,
    lora_gemm,
    moe_combine,
    moe_permute,
    moe_route,
    quantize,
    rms_norm,
    rotary,
)
from octavo.conformance.trial import Trial
from octavo.core.backend import ActivationKind, Gate, OpSpec, QuantFormat, QuantScheme, RowSpec

DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))
GATES = st.sampled_from(get_args(Gate))
TOKENS = st.integers(1, 70)
WIDTH = st.integers(1, 300)
GAP = st.sampled_from((0, 0, 3, 16))


def drawn_cases(dtypes: st.SearchStrategy[torch.dtype] = DTYPES) -> st.SearchStrategy[Case]:
    """Cases of products and row ops in the dtypes given."""
    return st.one_of(
        drawn_products(dtypes), _over_quantised(dtypes), _grouped(dtypes), _loras(dtypes), _norms(dtypes),
        _layer_norms(dtypes), _gates(dtypes), _activations(dtypes), _rotaries(dtypes), _quantisers(dtypes),
        _routes(dtypes), _permutations(), _combinations(dtypes),
    )  # fmt: skip


def _case(op: str, spec: OpSpec, lanes: tuple[str, ...], build: Callable[[Draw], Trial]) -> Case:
    return Case(name=f"drawn.{op}/point", op=op, spec=spec, axes={}, lanes=lanes, build=build)


@st.composite
def drawn_products(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype]) -> Case:
    """Products over plain weights, in both lanes."""
    dtype, gate = draw(dtypes), draw(st.one_of(st.none(), GATES))
    # The clamped gate's results are no integers.
    lane = draw(st.sampled_from(("statistical",) if gate == "swiglu_clamped" else ("exact", "statistical")))
    n = draw(WIDTH) * (2 if gate else 1)
    epilogue = {"has_bias": False, "has_residual": False} if gate else {
        name: draw(st.booleans()) for name in ("has_bias", "has_residual")
    }  # fmt: skip
    k = draw(st.integers(4, 700))
    point = gemm.Point(lane, draw(TOKENS), n, k, dtype, dtype, gate=gate, gap=draw(GAP), **epilogue)
    build = gemm.build_exact if lane == "exact" else gemm.build_statistical
    return _case("gemm", point.spec, (lane,), functools.partial(build, point))


@st.composite
def _schemes(draw: st.DrawFn) -> QuantScheme:
    """Weights of every format, over plain activations."""
    quant_format = draw(st.sampled_from(QuantFormat))
    if quant_format.block is not None:
        return QuantScheme(quant_format)
    if quant_format is QuantFormat.MXFP4:
        return QuantScheme(quant_format, 32)
    group_size = draw(st.sampled_from((0, -1, 16, 32, 48, 128)))
    block_rows = draw(st.sampled_from((1, 2, 16, 128))) if group_size > 0 else 1
    is_integer = quant_format in {QuantFormat.INT8, QuantFormat.INT4}
    symmetric = not is_integer or block_rows > 1 or draw(st.booleans())
    return QuantScheme(quant_format, group_size, symmetric, block_rows=block_rows)


@st.composite
def _over_quantised(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype]) -> Case:
    """Products over quantised weights; N and K need be no multiples of a group, but of a GGUF block."""
    scheme, lane = draw(_schemes()), draw(st.sampled_from(("exact", "statistical")))
    block = scheme.format.block
    k = draw(st.integers(1, 2)) * block.elements if block is not None else draw(st.integers(4, 400))
    dtype = draw(dtypes)
    out_dtype = torch.float32 if lane == "exact" else dtype
    point = gemm_quant.Point(lane, scheme, draw(TOKENS), draw(st.integers(1, 150)), k, dtype, out_dtype)
    build = gemm_quant.build_exact if lane == "exact" else gemm_quant.build_statistical
    return _case("gemm", point.spec, (lane,), functools.partial(build, point))


@st.composite
def _grouped(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype]) -> Case:
    dtype, experts = draw(dtypes), draw(st.integers(1, 40))
    segments = draw(st.sampled_from(("ragged", "even", "empty", "one")))
    n, k = draw(st.integers(1, 40)), draw(st.integers(4, 200))
    point = grouped_gemm.Point("exact", dtype, dtype, experts, draw(TOKENS), segments, n, k, gap=draw(GAP))
    return _case("grouped_gemm", point.spec, ("exact",), functools.partial(grouped_gemm.build_exact, point))


@st.composite
def _loras(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype]) -> Case:
    ranks = tuple(draw(st.lists(st.integers(4, 128), min_size=1, max_size=4)))
    rows = draw(st.sampled_from(("mixed", "none", "runs", "last")))
    k, n = draw(st.integers(4, 200)), draw(WIDTH)
    point = lora_gemm.Point("exact", draw(dtypes), draw(TOKENS), k, n, ranks, rows)
    return _case("lora_gemm", point.spec, ("exact",), functools.partial(lora_gemm.build_exact, point))


@st.composite
def _norms(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype]) -> Case:
    has_residual = draw(st.booleans())
    heads = draw(st.one_of(st.just(()), st.tuples(st.integers(1, 5))))
    point = rms_norm.Point(draw(dtypes), (draw(TOKENS), *heads, draw(WIDTH)), has_residual, draw(GAP))
    spec = RowSpec(point.shape[-1], point.dtype, "residual" if has_residual else "")
    return _case("rms_norm", spec, ("statistical",), functools.partial(rms_norm.build, point))


@st.composite
def _layer_norms(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype]) -> Case:
    heads = draw(st.one_of(st.just(()), st.tuples(st.integers(1, 5))))
    shape = (draw(TOKENS), *heads, draw(WIDTH))
    point = layer_norm.Point(draw(dtypes), shape, draw(st.booleans()), draw(st.booleans()), draw(GAP))
    return _case("layer_norm", point.spec, ("statistical",), functools.partial(layer_norm.build, point))


@st.composite
def _activations(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype]) -> Case:
    kind = draw(st.sampled_from(get_args(ActivationKind)))
    point = activation.Point(draw(dtypes), kind, draw(TOKENS), draw(WIDTH), draw(GAP), draw(st.booleans()))
    return _case("activation", point.spec, ("statistical",), functools.partial(activation.build, point))


@st.composite
def _gates(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype]) -> Case:
    point = act_mul.Point(draw(dtypes), draw(GATES), draw(TOKENS), draw(WIDTH), draw(GAP), draw(st.booleans()))
    return _case("act_mul", point.spec, ("statistical",), functools.partial(act_mul.build, point))


@st.composite
def _rotaries(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype]) -> Case:
    half = draw(st.integers(1, 64))
    heads = draw(st.tuples(st.integers(1, 6), st.integers(1, 3)))
    dim = 2 * half + draw(st.sampled_from((0, 2, 17, 64)))
    table = draw(st.sampled_from(tuple(rotary.TABLES)))
    point = rotary.Point(
        draw(dtypes), draw(TOKENS), heads, dim, 2 * half, draw(st.booleans()), draw(GAP), draw(st.booleans()), table
    )
    lanes = ("statistical",) if dim == 2 * half else ("statistical", "exact")
    return _case("rotary", point.spec, lanes, functools.partial(rotary.build, point))


@st.composite
def _quantisers(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype]) -> Case:
    group = draw(st.sampled_from((0, -1, 32, 64, 128)))
    k = draw(WIDTH)
    quant_format = draw(st.sampled_from(quantize.FORMATS))
    point = quantize.Point("exact", draw(dtypes), quant_format, group, draw(TOKENS), k, draw(GAP))
    spec = RowSpec(k, point.dtype, str(quant_format), group)
    return _case("quantize", spec, ("exact",), functools.partial(quantize.build, point))


@st.composite
def _routes(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype]) -> Case:
    groups, size = draw(st.sampled_from((1, 2, 8))), draw(st.integers(2, 64))
    top_groups = draw(st.integers(1, groups))
    top_k = draw(st.integers(1, min(10, top_groups * size)))
    scoring = draw(st.sampled_from(tuple(moe_route.LARGEST)))
    renormalize, has_bias, limits = draw(st.booleans()), draw(st.booleans()), (groups, top_groups)
    point = moe_route.Point(draw(TOKENS), groups * size, top_k, draw(dtypes), scoring, renormalize, has_bias, limits)
    return _case("moe_route", point.spec, ("exact", "statistical"), functools.partial(moe_route.build, point))


@st.composite
def _permutations(draw: st.DrawFn) -> Case:
    total = draw(st.integers(2, 80))
    first = draw(st.integers(0, total - 1))
    here, top_k = draw(st.integers(1, total - first)), draw(st.integers(1, min(total, 10)))
    ids = draw(st.sampled_from(("even", "one", "few", "stray")))
    dtype = draw(st.sampled_from((torch.int32, torch.int64)))
    point = moe_permute.Point(draw(TOKENS), top_k, total, first, here, ids, dtype, draw(GAP))
    return _case("moe_permute", point.spec, ("exact",), functools.partial(moe_permute.build, point))


@st.composite
def _combinations(draw: st.DrawFn, dtypes: st.SearchStrategy[torch.dtype]) -> Case:
    lane, here = draw(st.sampled_from(("exact", "statistical"))), draw(st.sampled_from(("all", "some", "none")))
    has_residual = draw(st.booleans())
    sizes = draw(TOKENS), draw(st.integers(1, 10)), draw(WIDTH)
    point = moe_combine.Point(
        lane, draw(dtypes), *sizes, has_residual, here, draw(GAP), has_residual and draw(st.booleans())
    )
    return _case("moe_combine", point.spec, (lane,), functools.partial(moe_combine.build, point))
