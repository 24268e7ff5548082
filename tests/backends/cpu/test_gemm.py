"""The CPU's products against float64, and their bits against themselves across batches, threads, instruction sets."""

import pytest
import torch
from torch.nn import functional as F

from octavo.backends.cpu.gemm import GemmOps
from octavo.backends.cpu.memory import WeightArena
from octavo.backends.cpu.native import NativeError
from octavo.core.backend.ops import Epilogue, NormPrologue
from octavo.core.backend.quant import QuantFormat, QuantizedTensor, QuantScheme
from octavo.core.backend.specs import GemmSpec, RowSpec, Unsupported, WeightSpec
from octavo.core.base.errors import UnsupportedOp

SHAPES = [(1, 1), (17, 3), (33, 17), (100, 576), (48, 1536), (34, 2500), (960, 576)]
ROWS = [1, 2, 3, 6, 7, 12, 13, 31, 130]
GATES = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(ops, plain, dtype=torch.float32, *, gated=False):
    weight = ops.prepare_weight(WeightSpec(*plain.shape, dtype, gated=gated))
    weight.place(plain, 0)
    return weight


def product(ops, x, w, width=None, **epilogue):
    out = torch.full((x.shape[0], width or w.spec.out_features), float("nan"))
    ops.gemm(x, w, out=out, epilogue=Epilogue(**epilogue) if epilogue else None)
    return out


def assert_close(out, expected, k):
    """Within the error bound of k fused multiply-adds in fp32, of unit-scale terms."""
    assert (out.double() - expected).abs().max() <= 4e-7 * k**0.5 * max(1.0, expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_product_matches_float64(make_context, isa, n, k, dtype):
    ops = GemmOps(make_context(2, isa))
    plain = random(n, k, seed=1) / k**0.5
    w = packed(ops, plain, dtype)
    exact = plain.to(dtype).double()
    for m in ROWS if isa != "portable" else (1, 3):
        x = random(m, k, seed=m)
        assert_close(product(ops, x, w), x.double() @ exact.T, k)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("n", "k"), [(2, 5), (34, 17), (62, 576), (64, 1030)])
def test_gated_product_with_bias_and_residual_matches_float64(make_context, isa, gate, n, k):
    ops = GemmOps(make_context(2, isa))
    plain, bias = random(n, k, seed=1) / k**0.5, random(n, seed=2)
    w = packed(ops, plain, gated=True)
    for m in (1, 5, 20):
        x, residual = random(m, k, seed=m), random(m, n // 2, seed=m + 1)
        y = x.double() @ plain.double().T + bias
        expected = GATES[gate](y[:, : n // 2]) * y[:, n // 2 :] + residual
        assert_close(product(ops, x, w, n // 2, gate=gate, bias_N=bias, residual=residual), expected, k)


def test_residual_may_be_the_output_itself(make_context):
    ops = GemmOps(make_context())
    plain, x, residual = random(40, 64), random(9, 64, seed=1), random(9, 40, seed=2)
    w = packed(ops, plain)
    apart = product(ops, x, w, residual=residual)
    out = residual.clone()
    ops.gemm(x, w, out=out, epilogue=Epilogue(residual=out))
    assert torch.equal(out, apart)


def test_strided_rows_are_read_and_written_in_place(make_context):
    ops = GemmOps(make_context())
    plain = random(20, 24)
    w = packed(ops, plain)
    x, out, residual = random(5, 60, seed=1)[:, 7:31], torch.zeros(5, 50), random(5, 33, seed=2)[:, 1:21]
    ops.gemm(x, w, out=out[:, 3:23], epilogue=Epilogue(residual=residual))
    assert torch.equal(out[:, 3:23], product(ops, x.contiguous(), w, residual=residual.contiguous()))
    assert not out[:, :3].any()
    assert not out[:, 23:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_rows_bits_depend_on_nothing_but_the_row(make_context, dtype):
    """Any batch around it, any number of threads, any instruction set: the same bits."""
    plain, x = random(75, 1100, seed=1), random(130, 1100, seed=2)
    expected = None
    for isa in make_context().library.supported_isas():
        rows = 130 if isa != "portable" else 4
        for threads in (1, 2, 5) if isa != "portable" else (1,):
            ops = GemmOps(make_context(threads, isa))
            w = packed(ops, plain, dtype)
            if expected is None:
                expected = torch.cat([product(ops, row[None], w) for row in x])
            for m in (1, 2, 4, 7, 16, 130):
                m = min(m, rows)
                start = rows - m
                assert torch.equal(product(ops, x[start:rows], w), expected[start:rows]), (isa, threads, m)


def test_gated_bits_are_equal_across_instruction_sets(make_context):
    plain, x = random(96, 40, seed=1), 4 * random(3, 40, seed=2)
    for gate in GATES:
        results = []
        for isa in make_context().library.supported_isas():
            ops = GemmOps(make_context(1, isa))
            results.append(product(ops, x, packed(ops, plain, gated=True), 48, gate=gate))
        assert all(torch.equal(results[0], other) for other in results[1:])


def test_large_and_infinite_gates_stay_right(make_context, isa):
    ops = GemmOps(make_context(1, isa))
    w = packed(ops, torch.tensor([[1.0], [1.0]]), gated=True)
    x = torch.tensor([[200.0], [-200.0], [88.0], [-88.0], [0.0], [-0.0], [float("nan")], [float("inf")]])
    for gate, function in GATES.items():
        out, expected = product(ops, x, w, 1, gate=gate), function(x) * x
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_no_rows_is_no_work(make_context):
    ops = GemmOps(make_context())
    product(ops, torch.empty(0, 8), packed(ops, random(16, 8)))


def test_parts_fill_a_fused_weight_wherever_they_start(make_context, isa):
    ops = GemmOps(make_context(2, isa))
    plain = random(75, 33)
    for dtype in (torch.float32, torch.bfloat16):
        w = ops.prepare_weight(WeightSpec(75, 33, dtype))
        for start, end in ((40, 75), (0, 7), (7, 9), (9, 40)):
            w.place(plain[start:end], start)
        assert torch.equal(w.dense(), plain.to(dtype).float())


def test_a_gated_weight_takes_gate_and_up_apart_or_together(make_context):
    ops = GemmOps(make_context())
    plain = random(70, 24)
    apart = ops.prepare_weight(WeightSpec(70, 24, torch.float32, gated=True))
    apart.place(plain[35:], 35)
    apart.place(plain[:35], 0)
    together = packed(ops, plain, gated=True)
    assert torch.equal(apart.dense(), plain)
    assert torch.equal(together.dense(), plain)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_packing_rounds_as_torch_does(make_context, isa, source, stored):
    special = [
        0.0,
        -0.0,
        1e-40,
        -1e-40,
        65504.0,
        1e30,
        float("inf"),
        float("-inf"),
        float("nan"),
        6e-8,
        3e-5,
        1.00390625,
    ]
    plain = torch.cat([random(400), torch.tensor(special)])[:408].reshape(24, 17).to(source)
    ops = GemmOps(make_context(1, isa))
    w = packed(ops, plain, stored)
    torch.testing.assert_close(w.dense(), plain.to(stored).float(), rtol=0, atol=0, equal_nan=True)


def test_a_column_major_part_is_placed_right(make_context):
    ops = GemmOps(make_context())
    plain = random(33, 20).T
    assert torch.equal(packed(ops, plain).dense(), plain)


def test_a_quantised_part_is_dequantised(make_context):
    ops = GemmOps(make_context())
    codes = torch.randint(-127, 128, (16, 32), dtype=torch.int8)
    part = QuantizedTensor(QuantScheme(QuantFormat.INT8), codes, random(16, 1).abs())
    w = ops.prepare_weight(WeightSpec(16, 32, torch.float32))
    w.place(part, 0)
    assert torch.equal(w.dense(), part.dequantize())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_embedding_reads_rows_of_the_packed_weight(make_context, isa, stored):
    ops = GemmOps(make_context(2, isa))
    plain = random(50, 37)
    w = packed(ops, plain, stored)
    ids = torch.tensor([49, 0, 16, 16, 31])
    out = torch.empty(5, 37)
    ops.embed(ids, w, out=out, scale=24.0)
    assert torch.equal(out, plain.to(stored).float()[ids] * 24.0)
    w.rows(ids, out=out)
    assert torch.equal(out, plain.to(stored).float()[ids])


@pytest.mark.parametrize("bad", [-1, 50])
def test_an_id_outside_the_vocabulary_is_an_error(make_context, bad):
    ops = GemmOps(make_context())
    w = packed(ops, random(50, 8))
    with pytest.raises(NativeError, match="out of range"):
        ops.embed(torch.tensor([3, bad]), w, out=torch.empty(2, 8))


def test_shapes_that_do_not_fit_are_errors(make_context):
    ops = GemmOps(make_context())
    w, gated = packed(ops, random(20, 8)), packed(ops, random(20, 8), gated=True)
    x, out = random(3, 8), torch.empty(3, 20)
    calls = [
        (random(3, 9), w, out, None),
        (x, w, torch.empty(3, 19), None),
        (x, w, torch.empty(2, 20), None),
        (x, w, out.double(), None),
        (x.double(), w, out, None),
        (x, w, torch.empty(3, 10), Epilogue(gate="silu")),
        (x, gated, out, None),
        (x, w, out, Epilogue(bias_N=random(19))),
        (x, w, out, Epilogue(residual=random(2, 20))),
    ]
    for args in calls:
        with pytest.raises(ValueError, match=r"give|fit|fp32"):
            ops.gemm(args[0], args[1], out=args[2], epilogue=args[3])
    with pytest.raises(UnsupportedOp):
        ops.gemm(x, w, out=out, prologue=NormPrologue(random(8), 1e-5))
    with pytest.raises(UnsupportedOp):
        ops.gemm(x, w, out=out, epilogue=Epilogue(argmax=True))
    with pytest.raises(UnsupportedOp):
        ops.embed(torch.tensor([0]), gated, out=torch.empty(1, 8))
    for part, row in ((random(3, 7), 0), (random(3, 8), 18), (random(3, 8), -1), (random(8), 0)):
        with pytest.raises(ValueError, match="does not lie inside"):
            w.place(part, row)


def test_supports_names_what_is_missing(make_context):
    ops = GemmOps(make_context())
    plain, gated = WeightSpec(64, 32, torch.bfloat16), WeightSpec(64, 32, torch.float32, gated=True)
    fp32 = {"x_dtype": torch.float32, "out_dtype": torch.float32}
    assert ops.supports("gemm", GemmSpec(plain, **fp32, bias=True, residual=True)) is None
    assert ops.supports("gemm", GemmSpec(gated, **fp32, gate="gelu_tanh")) is None
    assert ops.supports("embed", RowSpec(32, torch.float32)) is None
    refused = [
        GemmSpec(WeightSpec(64, 32, torch.float16), **fp32),
        GemmSpec(WeightSpec(64, 32, torch.float32, scheme=QuantScheme(QuantFormat.FP8_E4M3FN)), **fp32),
        GemmSpec(WeightSpec(63, 32, torch.float32, gated=True), **fp32, gate="silu"),
        GemmSpec(plain, **fp32, gate="silu"),
        GemmSpec(gated, **fp32, gate="gelu"),
        GemmSpec(gated, **fp32),
        GemmSpec(plain, **fp32, norm=True),
        GemmSpec(plain, **fp32, argmax=True),
        GemmSpec(plain, x_dtype=torch.bfloat16, out_dtype=torch.bfloat16),
    ]
    for spec in refused:
        assert isinstance(ops.supports("gemm", spec), Unsupported)
    with pytest.raises(UnsupportedOp):
        ops.prepare_weight(WeightSpec(64, 32, torch.float16))


def test_nbytes_counts_the_padded_form(make_context):
    ops = GemmOps(make_context())
    assert ops.prepare_weight(WeightSpec(17, 10, torch.bfloat16)).nbytes == 32 * 10 * 2
    assert ops.prepare_weight(WeightSpec(34, 10, torch.float32, gated=True)).nbytes == 64 * 10 * 4


def test_weights_of_all_sizes_share_mappings_and_start_zeroed():
    arena = WeightArena()
    shapes = [(3, 5, 16), (1, 1, 16), (2000, 576, 16), (7, 100, 16), (1, 577, 16)]
    weights = [arena.zeros(*shape, dtype=dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16)]
    for i, weight in enumerate(weights):
        assert not weight.any()
        assert weight.data_ptr() % 64 == 0
        weight.fill_(i + 1)
    del arena
    assert all((weight == i + 1).all() for i, weight in enumerate(weights))
