"""Which implementation runs an op, and that every way of taking one apart computes the same."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.core.backend import (
    CacheSpec,
    Epilogue,
    GemmSpec,
    GroupedGemmSpec,
    KVCacheSpec,
    KVLayout,
    NormPrologue,
    Ops,
    OpSet,
    OpSpec,
    PlainWeight,
    QuantFormat,
    QuantizedTensor,
    QuantScheme,
    ReferenceOps,
    RowSpec,
    SingleRank,
    Unsupported,
    WeightSpec,
)
from octavo.core.backend.composites import Scratch
from octavo.core.base.errors import BackendUnavailable, UnsupportedOp
from tests.backend.ragged import make_cache

CPU = torch.device("cpu")
F64 = torch.float64
reference = ReferenceOps(CPU)


class Partial:
    """A backend's ops: some of the reference's, at the specs that `accept` takes, with their calls noted."""

    def __init__(self, names: tuple[str, ...], accept: Any = lambda op, spec: True) -> None:
        self._accept = accept
        self.calls: list[str] = []
        for name in names:
            setattr(self, name, self._noting(name))

    def _noting(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return getattr(reference, name)(*args, **kwargs)

        return call

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        return None if self._accept(op, spec) else Unsupported(f"no {op} like that")


class Weight(PlainWeight):
    """Tells an own weight from the reference's."""


class PlainGemm(Partial):
    """A backend whose gemm has neither prologue nor epilogue."""

    def __init__(self, *others: str) -> None:
        super().__init__(("gemm", *others), lambda op, spec: op != "gemm" or is_plain(spec))

    def prepare_weight(self, spec: WeightSpec) -> Weight:
        return Weight(spec, CPU)


def is_plain(spec: GemmSpec) -> bool:
    fused = (spec.norm, spec.bias, spec.residual, spec.argmax, spec.gate is not None, spec.quantize is not None)
    return not any(fused)


def opset(ops: Any, *, strict: bool = False) -> OpSet:
    backend: Any = SimpleNamespace(name="acme", ops=ops, device=CPU, empty=lambda n, dtype: torch.empty(n, dtype=dtype))
    return OpSet(backend, strict=strict)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


NORM = RowSpec(8, torch.float32)


# -- the choice -------------------------------------------------------------------------------------------------


def test_an_own_op_is_the_backends_method_itself() -> None:
    ops = Partial(("rms_norm",))
    assert opset(ops).bind("rms_norm", NORM) is ops.rms_norm  # type: ignore[attr-defined]


def test_a_fallback_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    chosen = opset(Partial(()))
    with caplog.at_level(logging.WARNING):
        norm = chosen.bind("rms_norm", NORM)
        chosen.bind("rms_norm", RowSpec(16, torch.float32))
        assert chosen.bind("rms_norm", NORM) is norm
    assert [r.getMessage() for r in caplog.records] == ["rms_norm runs on the reference (slow): acme has no rms_norm"]
    x, out = torch.ones(2, 8), torch.empty(2, 8)
    for _ in range(3):
        norm(x, torch.ones(8), out=out, eps=0.0)
    assert torch.equal(out, x)
    assert [(c.op, c.implementation, c.calls) for c in chosen.report()] == [
        ("rms_norm", "fallback", 3),
        ("rms_norm", "fallback", 0),
    ]


def test_a_refusal_by_supports_is_the_reason() -> None:
    chosen = opset(Partial(("rms_norm",), lambda op, spec: spec.width == 16))
    chosen.bind("rms_norm", NORM)
    chosen.bind("rms_norm", RowSpec(16, torch.float32))
    assert [(c.implementation, c.reason) for c in chosen.report()] == [
        ("fallback", "no rms_norm like that"),
        ("own", ""),
    ]


def test_inheriting_the_protocol_is_not_implementing_it() -> None:
    class Inheriting(Ops):
        def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
            return None

    chosen = opset(Inheriting())  # type: ignore[abstract]
    chosen.bind("rms_norm", NORM)
    assert chosen.report()[0].implementation == "fallback"
    meta: Any = object()
    assert chosen.plan(meta).meta is meta


def test_strict_names_everything_that_is_missing_and_refuses_the_call() -> None:
    chosen = opset(Partial(("rms_norm",)), strict=True)
    chosen.bind("rms_norm", NORM)
    chosen.verify()
    act = chosen.bind("act_mul", RowSpec(8, torch.float32, "silu"))
    chosen.bind("embed", RowSpec(8, torch.float32))
    with pytest.raises(BackendUnavailable, match=r"--strict-backend: backend acme .* act_mul .*; embed"):
        chosen.verify()
    with pytest.raises(UnsupportedOp, match="act_mul would fall back"):
        act(torch.ones(1, 8), out=torch.empty(1, 4), gate="silu")


def test_without_strict_verify_says_nothing() -> None:
    chosen = opset(Partial(()))
    chosen.bind("rms_norm", NORM)
    chosen.verify()


def test_an_unknown_op_is_an_error() -> None:
    for bind in (opset(Partial(())).bind, opset(Partial(())).bind_when_called):
        with pytest.raises(ValueError, match="'conv' is no op"):
            bind("conv", NORM)


def test_an_op_that_may_never_be_called_counts_from_its_first_call(caplog: pytest.LogCaptureFixture) -> None:
    chosen = opset(Partial(()))
    with caplog.at_level(logging.WARNING):
        norm = chosen.bind_when_called("rms_norm", NORM)
        chosen.verify()
        assert (chosen.report(), caplog.text) == ((), "")
        out = torch.empty(2, 8)
        for _ in range(2):
            norm(torch.ones(2, 8), torch.ones(8), out=out, eps=0.0)
    assert torch.equal(out, torch.ones(2, 8))
    assert [(c.op, c.implementation, c.calls) for c in chosen.report()] == [("rms_norm", "fallback", 2)]
    assert caplog.text.count("rms_norm runs on the reference") == 1


def test_supports_is_asked_at_start_for_an_op_that_may_never_be_called() -> None:
    asked: list[str] = []
    chosen = opset(Partial(("rms_norm",), lambda op, spec: asked.append(op) or True))
    norm = chosen.bind_when_called("rms_norm", NORM)
    assert asked == ["rms_norm"]
    norm(torch.ones(2, 8), torch.ones(8), out=torch.empty(2, 8), eps=0.0)
    assert asked == ["rms_norm"]


def test_strict_refuses_an_op_that_was_called_after_all() -> None:
    chosen = opset(Partial(()), strict=True)
    norm = chosen.bind_when_called("rms_norm", NORM)
    chosen.verify()
    with pytest.raises(UnsupportedOp, match="rms_norm would fall back"):
        norm(torch.ones(2, 8), torch.ones(8), out=torch.empty(2, 8), eps=0.0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda op, spec: True, r"supports\('rms_norm', …\) of backend acme answered True; it must answer None or"),
        (lambda op, spec: 1 / 0, "of backend acme failed: ZeroDivisionError: .*upgrade the package or report"),
    ],
)
def test_supports_must_answer(answer: Any, message: str) -> None:
    ops: Any = Partial(("rms_norm",))
    ops.supports = answer
    with pytest.raises(BackendUnavailable, match=message):
        opset(ops).bind("rms_norm", NORM)


# -- weights ----------------------------------------------------------------------------------------------------


def gemm_spec(n: int = 8, k: int = 6, **kw: Any) -> GemmSpec:
    gate = kw.get("gate")
    return GemmSpec(WeightSpec(n, k, F64, gated=gate is not None), F64, kw.pop("out_dtype", F64), **kw)


def test_a_weight_is_packed_by_whoever_multiplies_it() -> None:
    own, none = opset(PlainGemm()), opset(Partial(()))
    for spec in (gemm_spec(), gemm_spec(norm=True, residual=True, bias=True)):
        assert type(own.prepare_weight(spec)) is Weight
        assert type(none.prepare_weight(spec)) is PlainWeight
    experts = GroupedGemmSpec(WeightSpec(8, 6, F64), 4, F64, F64)
    assert type(own.prepare_weight(experts)) is Weight
    assert type(none.prepare_weight(experts)) is PlainWeight


def test_a_gate_taken_off_a_product_leaves_a_plain_weight() -> None:
    """A backend may interleave gate and up rows for the gates it fuses; without a gate it must see plain rows."""
    ops = PlainGemm("act_mul")
    ops._accept = lambda op, spec: (
        op != "gemm" or (spec.gate != "gelu" and spec.weight.gated == (spec.gate is not None))
    )
    chosen, spec = opset(ops), gemm_spec(gate="gelu", residual=True)
    gemm, w = chosen.bind("gemm", spec), chosen.prepare_weight(spec)
    w.place(rand(8, 6, seed=1), 0)
    x, got = rand(3, 6), rand(3, 4, seed=2)
    expected = got.clone()
    reference.gemm(x, w, out=expected, epilogue=Epilogue(gate="gelu", residual=expected))
    gemm(x, w, out=got, epilogue=Epilogue(gate="gelu", residual=got))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert (type(w), w.spec.gated, ops.calls) == (Weight, False, ["gemm", "act_mul"])


def test_a_quantised_weight_is_dequantised_for_a_product_over_plain_ones() -> None:
    ops = PlainGemm()
    ops._accept = lambda op, spec: op != "gemm" or spec.weight.scheme is None
    scheme = QuantScheme(QuantFormat.INT4, 3, symmetric=False)
    spec = GemmSpec(WeightSpec(8, 6, torch.bfloat16, scheme), torch.float32, torch.float32)
    scales = rand(8, 2, dtype=torch.float32).abs()
    part = QuantizedTensor(scheme, torch.arange(48).view(8, 6) % 16, scales, torch.arange(16.0).view(8, 2))
    chosen, x, out = opset(ops), rand(3, 6, dtype=torch.float32), torch.empty(3, 8)
    w = chosen.prepare_weight(spec)
    w.place(part, 0)
    chosen.bind("gemm", spec)(x, w, out=out)
    torch.testing.assert_close(out, x @ part.dequantize().T)
    assert (type(w), w.spec.scheme, w.spec.dtype) == (Weight, None, torch.float32)
    quantised_activations = replace(spec, weight=replace(spec.weight, scheme=replace(scheme, activation=scheme.format)))
    assert type(chosen.prepare_weight(quantised_activations)) is PlainWeight


class OwnLookup(Partial):
    """A backend that looks up and multiplies fp64 weights, in a packing that it alone reads."""

    def __init__(self, *, multiplies: bool) -> None:
        super().__init__(("gemm",), lambda op, spec: op == "embed" or multiplies)

    def prepare_weight(self, spec: WeightSpec) -> Weight:
        return Weight(spec, CPU)

    def embed(self, ids_T: torch.Tensor, w: Any, *, out: torch.Tensor, scale: float = 1.0) -> None:
        assert type(w) is Weight, "a packing that this backend can't read"
        w.rows(ids_T, out=out)


@pytest.mark.parametrize("multiplies", [True, False])
def test_rows_are_looked_up_by_whoever_packed_the_weight(multiplies: bool) -> None:
    ops = OwnLookup(multiplies=multiplies)
    chosen, product = opset(ops), gemm_spec(n=8, k=6)
    w, row = chosen.prepare_weight(product), RowSpec(6, F64, extent=8)
    w.place(table := rand(8, 6, seed=1), 0)
    out = torch.empty(2, 6, dtype=F64)
    chosen.bind("embed", row, product=product)(torch.tensor([7, 0]), w, out=out)
    assert torch.equal(out, table[[7, 0]])
    (choice,) = (c for c in chosen.report() if c.op == "embed")
    if multiplies:
        assert (type(w), choice.implementation, choice.reason) == (Weight, "own", "")
        assert choice.spec == replace(row, weight=product.weight)
    else:
        assert (type(w), choice.implementation, choice.calls) == (PlainWeight, "fallback", 1)
        assert choice.reason == "the reference packed its weight, since no gemm like that"


def test_a_backend_may_refuse_to_look_rows_up_in_what_it_packed() -> None:
    """Its product takes the weight quantised, and its embed plain rows only."""
    ops = OwnLookup(multiplies=True)
    ops._accept = lambda op, spec: op != "embed" or spec.weight.scheme is None
    scheme = QuantScheme(QuantFormat.INT8)
    product = GemmSpec(WeightSpec(8, 6, F64, scheme, embedding=True), F64, F64)
    chosen = opset(ops)
    chosen.bind("embed", RowSpec(6, F64, extent=8), product=product)
    (choice,) = chosen.report()
    assert (choice.implementation, choice.reason) == ("fallback", "no embed like that")
    assert chosen.prepare_weight(product).spec.scheme == scheme


# -- composites -------------------------------------------------------------------------------------------------


def epilogues() -> Iterator[dict[str, Any]]:
    for gate in (None, "silu", "gelu_tanh"):
        for norm in (False, True):
            for bias in (False, True):
                for residual in (False, True):
                    yield {"gate": gate, "norm": norm, "bias": bias, "residual": residual}


@pytest.mark.parametrize("others", [(), ("rms_norm", "act_mul")], ids=["plain gemm", "parts"])
@pytest.mark.parametrize("fused", list(epilogues()), ids=lambda f: "+".join(k for k, v in f.items() if v) or "plain")
def test_a_gemm_taken_apart_equals_the_whole(fused: dict[str, Any], others: tuple[str, ...]) -> None:
    ops = PlainGemm(*others)
    chosen, spec = opset(ops), gemm_spec(**fused)
    gemm, w = chosen.bind("gemm", spec), chosen.prepare_weight(spec)
    w.place(rand(8, 6, seed=1), 0)
    width = 4 if fused["gate"] else 8
    for rows in (3, 5, 1, 0):  # a scratch that grows and is reused
        x, residual = rand(rows, 6), rand(rows, width, seed=3)
        prologue = NormPrologue(rand(6, seed=4), 1e-6) if fused["norm"] else None

        def run(call: Any, out: torch.Tensor, x: torch.Tensor = x, prologue: Any = prologue) -> torch.Tensor:
            bias = rand(8, seed=2) if fused["bias"] else None
            epilogue = Epilogue(bias_N=bias, gate=fused["gate"], residual=out if fused["residual"] else None)
            call(x, w, out=out, prologue=prologue, epilogue=epilogue)
            return out

        got, expected = run(gemm, residual.clone()), run(reference.gemm, residual.clone())
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert "gemm" in ops.calls
    assert set(ops.calls) == {"gemm", *(n for n in others if fused["norm" if n == "rms_norm" else "gate"])}


def test_argmax_taken_apart_takes_the_lowest_id() -> None:
    chosen, spec = opset(PlainGemm()), gemm_spec(argmax=True, bias=True, out_dtype=torch.int64)
    gemm, w = chosen.bind("gemm", spec), chosen.prepare_weight(spec)
    w.place(torch.zeros(8, 6), 0)
    out = torch.empty(2, dtype=torch.int64)
    bias = torch.tensor([0.0, 3, 1, 3, 0, 0, 0, 0])
    gemm(rand(2, 6), w, out=out, epilogue=Epilogue(argmax=True, bias_N=bias))
    assert out.tolist() == [1, 1]


def test_a_quantising_epilogue_taken_apart_equals_the_whole() -> None:
    scheme = QuantScheme(QuantFormat.INT8)
    chosen, spec = opset(PlainGemm("quantize")), gemm_spec(quantize=scheme, out_dtype=torch.int8)
    gemm, w = chosen.bind("gemm", spec), chosen.prepare_weight(spec)
    w.place(rand(8, 6, seed=1), 0)
    results = []
    for call in (gemm, reference.gemm):
        out, scales = torch.empty(3, 8, dtype=torch.int8), torch.empty(3, 1)
        call(rand(3, 6), w, out=out, epilogue=Epilogue(quantize=scheme, out_scales=scales))
        results.append((out, scales))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_the_way_with_fewest_cuts_is_taken() -> None:
    """A gemm that fuses everything but the norm loses the norm and nothing else."""

    class NoNorm(PlainGemm):
        def supports(self, op: str, spec: Any) -> Unsupported | None:
            return Unsupported("no norm") if op == "gemm" and spec.norm else None

    chosen = opset(NoNorm())
    chosen.bind("gemm", gemm_spec(norm=True, bias=True, residual=True, gate="silu"))
    found = [(c.op, c.implementation) for c in chosen.report()]
    assert found == [("rms_norm", "fallback"), ("gemm", "own"), ("gemm", "composite")]


CACHE = CacheSpec(2, 8, 8, torch.float32, torch.float32, 4, KVLayout.HND, num_heads=4, rotary_dim=8)


@pytest.mark.parametrize("own", [("rotary",), ("write_kv",), ("rotary", "write_kv")])
def test_rope_write_kv_taken_apart_equals_the_whole(own: tuple[str, ...]) -> None:
    ops = Partial(own)
    rope_write = opset(ops).bind("rope_write_kv", CACHE)
    results = []
    for call in (rope_write, reference.rope_write_kv):
        kv = make_cache(3, KVCacheSpec(2, 8, 8, torch.float32, 4), KVLayout.HND, fill=0)
        q, k, v = (rand(4, h, 8, seed=s, dtype=torch.float32) for h, s in ((4, 1), (2, 2), (2, 3)))
        before = k.clone()
        positions, slots = torch.tensor([3, 4, 5, 0]), torch.tensor([7, 8, -1, 0])
        cos_sin = rand(6, 8, seed=9, dtype=torch.float32)
        scale = torch.tensor(0.5)
        call(q, k, v, positions, cos_sin, kv, slots, out_q=q, interleaved=True, k_scale=scale, v_scale=2 * scale)
        assert torch.equal(k, before)
        results.append((q, kv.storage))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert ops.calls == list(own)


def test_norms_taken_apart_equal_the_whole() -> None:
    ops = Partial(("rms_norm",), lambda op, spec: spec.variant == "")
    chosen = opset(ops)
    with_residual = chosen.bind("rms_norm", RowSpec(8, torch.float32, "residual"))
    reduce_norm = chosen.bind("all_reduce_norm", NORM)
    w = rand(8, seed=2, dtype=torch.float32)
    expected, expected_residual = torch.empty(4, 8), rand(4, 8, seed=1, dtype=torch.float32)
    x = rand(4, 8, dtype=torch.float32)
    reference.rms_norm(x, w, out=expected, eps=1e-6, residual=expected_residual)
    for call, args in ((with_residual, (x, w)), (reduce_norm, (x, SingleRank(), w))):
        out, residual = torch.empty(4, 8), rand(4, 8, seed=1, dtype=torch.float32)
        call(*args, out=out, eps=1e-6, residual=residual)
        assert torch.equal(out, expected)
        assert torch.equal(residual, expected_residual)
    assert ops.calls == ["rms_norm", "rms_norm"]


class PlainProducts(PlainGemm):
    """Brings products of experts too, but without their gate."""

    def __init__(self, *others: str) -> None:
        super().__init__("grouped_gemm", *others)
        self._accept = lambda op, spec: is_plain(spec) if op == "gemm" else op != "grouped_gemm" or spec.gate is None


@pytest.mark.parametrize("gate", ["silu", "swiglu_clamped"])
@pytest.mark.parametrize(
    ("ops", "calls"),
    [
        (Partial(("gemm", "grouped_gemm"), lambda op, spec: op == "gemm"), ["gemm"] * 2),
        (PlainGemm("act_mul"), ["gemm"] * 2 + ["act_mul"]),
        (PlainProducts("act_mul"), ["grouped_gemm", "act_mul"]),
        (PlainProducts(), ["grouped_gemm"]),
        (Partial(()), []),
    ],
)
def test_a_grouped_gemm_becomes_a_gemm_per_expert_or_leaves_its_gate_behind(ops: Any, calls: Any, gate: Any) -> None:
    ops.calls.clear()
    ops.prepare_weight = lambda spec: Weight(spec, CPU)
    chosen = opset(ops)
    spec = GroupedGemmSpec(WeightSpec(8, 6, F64, gated=True), 3, F64, F64, gate=gate)
    grouped = chosen.bind("grouped_gemm", spec)
    weights = [chosen.prepare_weight(spec) for _ in range(3)]
    assert all(isinstance(w, Weight) == bool(calls) for w in weights)
    for seed, w in enumerate(weights):
        w.place(rand(8, 6, seed=seed), 0)
    x, starts = rand(6, 6), torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    out, expected = torch.empty(6, 4, dtype=F64), torch.empty(6, 4, dtype=F64)
    grouped(x, weights, starts, out=out, gate=gate)
    reference.grouped_gemm(x, weights, starts, out=expected, gate=gate)
    torch.testing.assert_close(out[:5], expected[:5], rtol=1e-12, atol=1e-12)  # no segment has the last row
    assert ops.calls == calls


def test_a_layer_norm_with_residual_becomes_an_add_and_a_norm() -> None:
    ops = Partial(("layer_norm",), lambda op, spec: spec.variant == "")
    x, residual, w, bias = rand(4, 8), rand(4, 8, seed=1), rand(8, seed=2), rand(8, seed=3)
    total, out, expected = x + residual, torch.empty(4, 8, dtype=F64), torch.empty(4, 8, dtype=F64)
    for add in ({}, {"bias_M": bias}):
        reference.layer_norm(total, w, out=expected, eps=1e-5, **add)
        kept = residual.clone()
        norm = opset(ops).bind("layer_norm", RowSpec(8, F64, "residual"))
        norm(x, w, out=out, eps=1e-5, residual=kept, **add)
        assert torch.equal(out, expected)
        assert torch.equal(kept, total)
    assert ops.calls == ["layer_norm"] * 2


def test_an_outgrown_scratch_stays_for_the_programs_that_know_its_address() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.empty(count, dtype=dtype)
        made.append(weakref.ref(buffer))
        return buffer

    scratch = Scratch(empty, torch.float32)
    sizes = [scratch.take(rows, 8).shape[0] for rows in (*range(1, 100), 3)]
    assert sizes == [*range(1, 100), 3]
    buffers = [buffer() for buffer in made]
    assert all(buffer is not None for buffer in buffers)
    assert len(buffers) <= 8
    assert sum(buffer.numel() for buffer in buffers if buffer is not None) < 2 * 128 * 8
