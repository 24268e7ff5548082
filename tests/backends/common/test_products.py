"""Products of GPU backends against the reference: forms of weights, epilogues, strides, experts, and packed bytes."""

from __future__ import annotations

import functools
import importlib
import weakref
from dataclasses import replace
from typing import get_args

import pytest
import torch

from octavo.backends.common.experts import ExpertOps, ExpertTables
from octavo.backends.common.gpu import Gpu
from octavo.backends.common.launch import Recorder
from octavo.backends.common.packed import GpuWeight
from octavo.backends.common.products import ProductOps
from octavo.backends.common.quantize import QuantizeOps
from octavo.backends.common.tuning import PinnedTable
from octavo.core.backend.ops import Epilogue, NormPrologue, PackedWeight
from octavo.core.backend.quant import QuantFormat, QuantizedTensor, QuantScheme
from octavo.core.backend.reference.ops import ReferenceOps
from octavo.core.backend.specs import Gate, GemmSpec, WeightSpec
from octavo.core.base.errors import UnsupportedOp

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INT4, INT8, FN, FNUZ = QuantFormat.INT4, QuantFormat.INT8, QuantFormat.FP8_E4M3FN, QuantFormat.FP8_E4M3FNUZ
TOLERANCE = {F32: 3e-5, BF16: 2e-2, F16: 2e-3}
SCHEMES = {
    "int4-g32-zp": QuantScheme(INT4, 32, symmetric=False),
    "int4-g128": QuantScheme(INT4, 128),
    "int4-row-zp": QuantScheme(INT4, 0, symmetric=False),
    "int4-a8": QuantScheme(INT4, 64, activation=INT8),
    "int4-zp-a8-groups": QuantScheme(INT4, 32, symmetric=False, activation=INT8, activation_group_size=32),
    "int8-g64": QuantScheme(INT8, 64),
    "int8-tensor": QuantScheme(INT8, -1),
    "int8-a8": QuantScheme(INT8, activation=INT8),
    "int8-a8-groups": QuantScheme(INT8, 64, activation=INT8, activation_group_size=32),
    "int8-zp-a8": QuantScheme(INT8, symmetric=False, activation=INT8),
    "mxfp4": QuantScheme(QuantFormat.MXFP4, 32),
    "fp8-blocks": QuantScheme(FN, 128, block_rows=128),
    "q4_1": QuantScheme(QuantFormat.GGUF_Q4_1),
    "q6_k": QuantScheme(QuantFormat.GGUF_Q6_K),
}


class Ops:
    """The products of one vendor."""

    def __init__(self, gpu: Gpu) -> None:
        vendor = {"e4m3fn": "cuda", "e4m3fnuz": "rocm"}[gpu.chip.fp8]
        self.quantize = QuantizeOps(gpu).quantize
        self.products: ProductOps = importlib.import_module(f"octavo.backends.{vendor}.gemm").GemmOps(
            gpu, self.quantize
        )
        self.experts: ExpertOps = importlib.import_module(f"octavo.backends.{vendor}.moe").MoeOps(gpu, self.products)


@pytest.fixture
def ops(gpu: Gpu) -> Ops:
    return Ops(gpu)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within a few roundings of the output and of dequantised weights, relative to the size of a row."""
    size = want.float().square().mean().sqrt()
    assert ((got.float() - want.float()).abs() <= TOLERANCE[want.dtype] * (want.float().abs() + size)).all()


def drawn(scheme: QuantScheme, rows: int, columns: int) -> QuantizedTensor:
    """Codes over their whole range, zero points too, and scales that differ everywhere."""
    block = scheme.format.block
    if block is not None:
        count = rows * columns // block.elements
        packed = torch.randint(0, 256, (count, block.num_bytes), dtype=torch.uint8)
        halves = {QuantFormat.GGUF_Q4_1: (0, 2), QuantFormat.GGUF_Q6_K: (208,)}[scheme.format]
        for at in halves:
            packed[:, at : at + 2] = (torch.rand(count, 1).half() * 0.1 + 0.01).view(torch.uint8)
        return QuantizedTensor.of_blocks(scheme.format, packed.view(rows, -1))
    grid = scheme.scale_shape(rows, columns)
    scales, zero_points = torch.rand(grid) * 0.1 + 0.01, None
    if scheme.format in (INT4, INT8):
        top = 2 ** (4 if scheme.format is INT4 else 7) - 1
        low, high = (0, top) if not scheme.symmetric else (-8, 7) if scheme.format is INT4 else (-127, 127)
        codes = torch.randint(low, high + 1, (rows, columns)).to(torch.int8)
        zero_points = None if scheme.symmetric else torch.randint(low, high + 1, grid).float()
    elif scheme.format is QuantFormat.MXFP4:
        codes, scales = torch.randint(0, 16, (rows, columns)).to(torch.uint8), torch.exp2(torch.randint(-3, 4, grid))
    else:
        codes = (torch.randn(rows, columns) * 20).clamp(-240, 240).to(scheme.format.code_dtype)
    return QuantizedTensor(scheme, codes, scales.float(), zero_points)


def pair(
    ops: Ops, reference: ReferenceOps, spec: WeightSpec, part: torch.Tensor | QuantizedTensor
) -> list[PackedWeight]:
    """The weight as the backend packs it, and as the reference does."""
    weights: list[PackedWeight] = [ops.products.prepare_weight(spec), reference.prepare_weight(spec)]
    for weight in weights:
        weight.place(part, 0)
    return weights


@pytest.mark.parametrize(("dtype", "stored"), [(F32, F32), (BF16, BF16), (F16, F16), (F32, BF16), (BF16, F32)])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 16, 32), (1, 48, 100), (17, 48, 64), (70, 34, 33)])
def test_plain(
    ops: Ops, reference: ReferenceOps, m: int, n: int, k: int, dtype: torch.dtype, stored: torch.dtype
) -> None:
    own, other = pair(ops, reference, WeightSpec(n, k, stored), torch.randn(n, k).to(stored))
    x = torch.randn(m, k + 3).to(dtype)[:, :k]
    out, want = torch.full((m, n + 5), torch.nan, dtype=dtype)[:, :n], torch.empty(m, n, dtype=dtype)
    ops.products.gemm(x, own, out=out)
    reference.gemm(x, other, out=want)
    close(out, want)


@pytest.mark.parametrize("gate", [*get_args(Gate), None])
def test_epilogue(ops: Ops, reference: ReferenceOps, gate: str | None) -> None:
    """Bias, gate and residual in this order, where out is the residual; gate and up come in parts that cross them."""
    m, n, k = 65, 84, 48
    spec, plain = WeightSpec(n, k, F32, gated=gate is not None), torch.randn(n, k)
    own, other = ops.products.prepare_weight(spec), reference.prepare_weight(spec)
    for weight in (own, other):
        for first, end in ((0, 30), (30, 60), (60, 84)):
            weight.place(plain[first:end], first)
    x, residual = torch.randn(m, k), torch.randn(m, n // 2 if gate else n)
    out, bias = residual.clone(), torch.randn(n)
    want = torch.empty_like(out)
    ops.products.gemm(x, own, out=out, epilogue=Epilogue(bias, gate, out))  # type: ignore[arg-type]
    reference.gemm(x, other, out=want, epilogue=Epilogue(bias, gate, residual))  # type: ignore[arg-type]
    close(out, want)
    assert torch.equal(own.dense(), plain)


@pytest.mark.parametrize("name", SCHEMES)
def test_quantised(ops: Ops, reference: ReferenceOps, name: str) -> None:
    """In fp32; every other scheme in bf16 with a gate."""
    scheme, gate = SCHEMES[name], "silu" if list(SCHEMES).index(name) % 2 else None
    n, k = 256 if scheme.block_rows > 1 else 48, 256 if scheme.format.block else 224
    dtype = F32 if gate is None else BF16
    spec = WeightSpec(n, k, dtype, scheme, gated=gate is not None)
    part = drawn(scheme, n, k)
    own, other = pair(ops, reference, spec, part)
    torch.testing.assert_close(own.dense(), other.dense(), rtol=2e-7, atol=2e-6)
    x = torch.randn(5, k).to(dtype)
    out, want = (torch.full((5, n // 2 if gate else n), torch.nan, dtype=dtype) for _ in range(2))
    ops.products.gemm(x, own, out=out, epilogue=Epilogue(gate=gate))  # type: ignore[arg-type]
    reference.gemm(x, other, out=want, epilogue=Epilogue(gate=gate))  # type: ignore[arg-type]
    close(out, want)


@pytest.mark.parametrize("m", [3, 70])
@pytest.mark.parametrize("grouped", [False, True])
def test_fp8_on_both_sides(ops: Ops, reference: ReferenceOps, gpu: Gpu, m: int, grouped: bool) -> None:
    """In the chip's flavour, and on the chip of e4m3fnuz in the other one, -0 and the largest code included."""
    for flavour in (FN,) if gpu.chip.fp8 == "e4m3fn" else (FNUZ, FN):
        scheme = QuantScheme(flavour, activation=flavour)
        if grouped:
            scheme = replace(scheme, group_size=128, block_rows=128, activation_group_size=128)
        part = drawn(scheme, 160, 200)
        part.codes_NK[:, 0] = torch.finfo(flavour.code_dtype).max
        part.codes_NK[:, 1] = -0.0
        own, other = pair(ops, reference, WeightSpec(160, 200, BF16, scheme), part)
        assert torch.equal(own.dense(), other.dense())
        x = torch.randn(m, 200).bfloat16()
        x[0, 3] = -1e-30  # its code is -0
        out, want = torch.empty(m, 160, dtype=BF16), torch.empty(m, 160, dtype=BF16)
        ops.products.gemm(x, own, out=out)
        reference.gemm(x, other, out=want)
        close(out, want)


def test_nibbles_lie_half_a_row_apart(ops: Ops) -> None:
    """The layout of packed.py's picture: a byte holds columns j and HALF + j; interleaved gate and up."""
    scheme = QuantScheme(INT4, 32)
    weight = ops.products.prepare_weight(WeightSpec(4, 96, F32, scheme, gated=True))
    codes = (torch.arange(4 * 96) % 16 - 8).view(4, 96).to(torch.int8)
    scales = torch.tensor([[1.0, 2, 3]] * 4) * torch.tensor([[1.0], [10], [100], [1000]])
    weight.place(QuantizedTensor(scheme, codes, scales), 0)
    order = [0, 2, 1, 3]
    half = weight.form.half(96)
    assert half == 64
    assert torch.equal((weight.codes & 15).to(torch.int8)[:, :half] - 8, codes[order][:, :half])
    assert torch.equal((weight.codes >> 4).to(torch.int8)[:, : 96 - half] - 8, codes[order][:, half:])
    assert weight.scales_GN is not None
    assert torch.equal(weight.scales_GN[:3], scales[order].T)
    assert weight.nbytes == 4 * 64 + 4 * 4 * 4  # a fourth group, which only the padding reaches


def test_signed_codes_with_zero_points(ops: Ops, reference: ReferenceOps) -> None:
    scheme = QuantScheme(INT4, 32, symmetric=False)
    codes = torch.randint(-8, 8, (16, 64)).to(torch.int8)
    part = QuantizedTensor(scheme, codes, torch.ones(16, 2), torch.randint(-8, 8, (16, 2)).float())
    own, other = pair(ops, reference, WeightSpec(16, 64, F32, scheme), part)
    assert torch.equal(own.dense(), other.dense())


def test_embed(ops: Ops, reference: ReferenceOps) -> None:
    for spec, part in (
        (WeightSpec(70, 100, BF16, embedding=True), torch.randn(70, 100).bfloat16()),
        (WeightSpec(70, 96, F32, SCHEMES["int4-g32-zp"], embedding=True), drawn(SCHEMES["int4-g32-zp"], 70, 96)),
    ):
        own, other = pair(ops, reference, spec, part)
        ids = torch.tensor([69, 0, 5, 5, 33, 68, 1, 2, 3, 7])
        out, want = torch.empty(10, spec.in_features), torch.empty(10, spec.in_features)
        ops.products.embed(ids, own, out=out, scale=3.0)
        reference.embed(ids, other, out=want, scale=3.0)
        torch.testing.assert_close(out, want, rtol=3e-7, atol=1e-6)
    ops.products.embed(torch.tensor([-1, 70]), own, out=out[:2])
    assert not out[:2].any(), "an id outside the table reads nothing"


@pytest.mark.parametrize("name", ["plain", "int4-g32-zp", "fp8-blocks", "int8-a8"])
@pytest.mark.parametrize("bounds", [(0, 3, 3, 8, 9), (0, 0, 0, 40, 40), (0, 0, 0, 0, 0)])
def test_grouped(ops: Ops, reference: ReferenceOps, name: str, bounds: tuple[int, ...]) -> None:
    """Experts without rows, with one, with more than a tile; rows beyond the last segment stay as they are."""
    scheme = SCHEMES.get(name)
    n, k, tokens = 256, 96, bounds[-1]
    spec = WeightSpec(n, k, F32, scheme, gated=True)
    parts = [torch.randn(n, k) if scheme is None else drawn(scheme, n, k) for _ in bounds[1:]]
    own, other = zip(*(pair(ops, reference, spec, part) for part in parts), strict=True)
    x, starts = torch.randn(tokens + 2, k), torch.tensor(bounds, dtype=torch.int32)
    out, want = torch.full((tokens + 2, n // 2), 7.0), torch.full((tokens + 2, n // 2), 7.0)
    ops.experts.grouped_gemm(x, list(own), starts, out=out, gate="silu")
    reference.grouped_gemm(x, list(other), starts, out=want, gate="silu")
    close(out, want)
    assert (out[tokens:] == 7).all()


def test_lists_of_experts_that_share_weights_are_told_apart(ops: Ops) -> None:
    """The first weight in common, the same weights in another order, one of them twice: each call gets its own."""
    weights = []
    for factor in (1.0, 2.0, 4.0):
        weights.append(ops.products.prepare_weight(WeightSpec(16, 32, F32)))
        weights[-1].place(torch.full((16, 32), factor), 0)
    a, b, c = weights
    x, starts, out = torch.ones(2, 32), torch.tensor([0, 1, 2], dtype=torch.int32), torch.empty(2, 16)
    for _ in range(2):
        for pair_of, want in (((a, b), (32, 64)), ((a, c), (32, 128)), ((c, a), (128, 32)), ((a, a), (32, 32))):
            ops.experts.grouped_gemm(x, list(pair_of), starts, out=out)
            assert out[:, 0].tolist() == list(want)


def test_a_table_of_experts_stays_while_they_live_and_goes_with_the_first_that_does(ops: Ops) -> None:
    """A recording reads it where it lay; an identity that is used again must not find the table of another weight."""
    tables = ExpertTables()
    make = functools.partial(ops.products.prepare_weight, WeightSpec(16, 32, F32))
    a, b, c = make(), make(), make()
    first = tables.added([a, b])
    assert tables.known([a, c]) is None
    tables.added([a, c])
    assert tables.known([a, b]) is first
    assert first[0].tolist() == [a.codes.data_ptr(), b.codes.data_ptr()]
    gone = weakref.ref(b)
    del b
    assert gone() is None  # the table kept nothing alive
    assert len(tables) == 1
    assert tables.known([a, c]) is not None
    del a
    assert len(tables) == 0


def test_deterministic_rows_have_the_same_bits_alone(gpu: Gpu) -> None:
    ops = Ops(replace(gpu, deterministic=True))
    for scheme in (None, SCHEMES["int4-g128"], SCHEMES["int8-a8"]):
        weight = ops.products.prepare_weight(WeightSpec(80, 256, F32, scheme))
        weight.place(torch.randn(80, 256) if scheme is None else drawn(scheme, 80, 256), 0)
        x = torch.randn(66, 256)
        out, alone = torch.empty(66, 80), torch.empty(2, 80)
        ops.products.gemm(x, weight, out=out)
        ops.products.gemm(x[63:65], weight, out=alone)
        assert torch.equal(out[63:65], alone)


def test_the_library_gets_bare_products_only(gpu: Gpu) -> None:
    """With LIBRARY = 1 a product with nothing fused starts no kernel; with a bias, or when deterministic, it does."""
    entry = gpu.tuning.by_kernel["gemm"][-1]
    table = PinnedTable(gpu.tuning, replace(entry, tile={**entry.tile, "LIBRARY": 1}))
    x, plain, bias = torch.randn(5, 40).bfloat16(), torch.randn(24, 40).bfloat16(), torch.zeros(24)
    started = []
    for is_deterministic, epilogue in ((False, None), (False, Epilogue(bias)), (True, None)):
        recorder = Recorder()
        ops = Ops(replace(gpu, launch=recorder, tuning=table, deterministic=is_deterministic))
        weight = ops.products.prepare_weight(WeightSpec(24, 40, BF16))
        weight.place(plain, 0)
        out = torch.full((5, 24), torch.nan).bfloat16()
        ops.products.gemm(x, weight, out=out, epilogue=epilogue)
        started.append(len(recorder.records))
        assert torch.equal(out, x @ plain.T) == (not recorder.records)
    assert started == [0, 1, 1]


def test_what_is_refused_raises(ops: Ops, gpu: Gpu) -> None:
    products, weight = ops.products, ops.products.prepare_weight(WeightSpec(32, 32, F32))
    x, out = torch.randn(2, 32), torch.empty(2, 32)
    plain = GemmSpec(weight.spec, F32, F32)
    assert products.supports("gemm", plain) is None
    for refused in (replace(plain, norm=True), replace(plain, argmax=True), replace(plain, gate="silu")):
        assert products.supports("gemm", refused) is not None
    with pytest.raises(UnsupportedOp):
        products.gemm(x, weight, out=out, prologue=NormPrologue(torch.ones(32), 1e-6))
    with pytest.raises(UnsupportedOp):
        products.gemm(x.double(), weight, out=out)
    with pytest.raises(UnsupportedOp):
        products.prepare_weight(WeightSpec(32, 96, F32, QuantScheme(INT4, 48)))
    with pytest.raises(ValueError, match="shapes don't fit"):
        products.gemm(x, weight, out=torch.empty(3, 32))
    with pytest.raises(ValueError, match="plain part"):
        products.prepare_weight(WeightSpec(32, 32, F32, QuantScheme(INT8))).place(torch.randn(32, 32), 0)
    if gpu.chip.fp8 == "e4m3fn":
        foreign = replace(plain, weight=WeightSpec(32, 32, F32, QuantScheme(FNUZ)))
        assert products.supports("gemm", foreign) is not None
    with pytest.raises(UnsupportedOp):
        ops.experts.grouped_gemm(x, [], torch.zeros(1, dtype=torch.int32), out=out)


def test_nothing_is_asked_of_the_device_by_packing(ops: Ops) -> None:
    """A weight's bytes are those of its tensors, zero until they are placed."""
    weight = ops.products.prepare_weight(WeightSpec(10, 20, BF16))
    assert isinstance(weight, GpuWeight)
    assert weight.nbytes == 10 * 24 * 2
    assert not weight.dense().any()
