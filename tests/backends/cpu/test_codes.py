"""Products over quantised weights: the bits of products over the same weights widened, at a fraction of their bytes."""

import pytest
import torch

from octavo.backends.cpu.gemm import GemmOps
from octavo.core.backend.blocks import take_apart
from octavo.core.backend.ops import Epilogue
from octavo.core.backend.quant import QuantFormat, QuantizedTensor, QuantScheme, two_level_scales
from octavo.core.backend.specs import GemmSpec, RowSpec, Unsupported, WeightSpec

INT8, INT4 = QuantFormat.INT8, QuantFormat.INT4
GGUF = [QuantScheme(f) for f in QuantFormat if f.block is not None]
SCHEMES = [
    *GGUF,
    QuantScheme(INT8), QuantScheme(INT8, symmetric=False), QuantScheme(INT8, -1), QuantScheme(INT8, 128),
    QuantScheme(INT8, 128, block_rows=128),
    QuantScheme(INT4), QuantScheme(INT4, 32), QuantScheme(INT4, 64, symmetric=False),
    QuantScheme(INT4, 128, symmetric=False), QuantScheme(INT4, 256), QuantScheme(INT4, 40, symmetric=False),
]  # fmt: skip
FEW = [GGUF[0], GGUF[5], QuantScheme(INT8), QuantScheme(INT4, 32), QuantScheme(INT4, 64, symmetric=False)]
HALVES = {"GGUF_Q6_K": (208,), "GGUF_Q4_K": (0, 2), "GGUF_Q5_K": (0, 2), "GGUF_Q4_1": (0, 2), "GGUF_Q5_1": (0, 2)}
"""Where a block holds fp16 numbers; 0 for the others."""


def name_of(scheme):
    return f"{scheme.format}-g{scheme.group_size}x{scheme.block_rows}{'' if scheme.symmetric else '-zp'}"


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed))


def quantised(scheme, n, k, seed=0):
    """A part with codes over all of the format's range."""
    block = scheme.format.block
    if block is not None:
        blocks = torch.randint(0, 256, (n, k // block.elements, block.num_bytes), generator=generator(seed)).byte()
        for at in HALVES.get(scheme.format.name, (0,)):
            halves = (random(n, k // block.elements, 1, seed=seed + at + 1) * 0.01).half()
            blocks[:, :, at : at + 2] = halves.view(torch.uint8)
        return QuantizedTensor.of_blocks(scheme.format, blocks.view(n, -1))
    low, high = (-127, 128) if scheme.format is INT8 else (-8, 8) if scheme.symmetric else (0, 16)
    shape = scheme.scale_shape(n, k)
    codes = torch.randint(low, high, (n, k), generator=generator(seed)).to(torch.int8)
    zeros = None if scheme.symmetric else torch.randint(low, high, shape, generator=generator(seed + 1))
    return QuantizedTensor(scheme, codes, random(*shape, seed=seed + 2).abs() * 0.01, zeros)


def packed(ops, part, *, gated=False):
    weight = ops.prepare_weight(WeightSpec(*part.shape, torch.float32, part.scheme, gated=gated))
    weight.place(part, 0)
    return weight


def widened(ops, weight):
    """The same weight in fp32."""
    plain = ops.prepare_weight(WeightSpec(*weight.dense().shape, torch.float32, gated=weight.spec.gated))
    plain.place(weight.dense(), 0)
    return plain


def product(ops, x, w, width=None, **epilogue):
    out = torch.full((x.shape[0], width or w.spec.out_features), float("nan"))
    ops.gemm(x, w, out=out, epilogue=Epilogue(**epilogue) if epilogue else None)
    return out


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_weights_mean_what_their_scheme_says(make_context, isa, scheme):
    ops = GemmOps(make_context(2, isa))
    part = quantised(scheme, 72, 512)
    expected, found = part.dequantize(), packed(ops, part).dense()
    if scheme in GGUF or scheme.symmetric:
        assert torch.equal(found, expected)
    else:  # code * scale - zero_point * scale: the second product is rounded, and the difference on either side
        largest = part.affine().offsets_NG.abs().max() + 2 * expected.abs().max()
        assert (found - expected).abs().max() <= 2**-24 * largest


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_a_product_has_the_bits_of_one_over_the_widened_weight(make_context, isa, scheme):
    """At every number of rows: in registers, over several row tiles, and two or four panels at once."""
    ops = GemmOps(make_context(2, isa))
    w = packed(ops, quantised(scheme, 570, 768))
    plain = widened(ops, w)
    x = random(41, 768, seed=5)
    for m in (1, 2, 3, 4, 5, 6, 7, 12, 13, 41) if isa != "portable" else (1, 3):
        assert torch.equal(product(ops, x[:m], w), product(ops, x[:m], plain)), m


@pytest.mark.parametrize("k", [1, 7, 8, 100, 1031, 2500])
@pytest.mark.parametrize("scheme", [QuantScheme(INT8), QuantScheme(INT4, symmetric=False)], ids=name_of)
def test_rows_of_any_length(make_context, isa, scheme, k):
    ops = GemmOps(make_context(2, isa))
    part = quantised(scheme, 19, k)
    w = packed(ops, part)
    torch.testing.assert_close(w.dense(), part.dequantize())
    plain, x = widened(ops, w), random(20, k)
    for m in (1, 3, 20):
        assert torch.equal(product(ops, x[:m], w), product(ops, x[:m], plain))


@pytest.mark.parametrize(
    "scheme", [GGUF[0], QuantScheme(INT4, 32), QuantScheme(INT4, 128, symmetric=False)], ids=name_of
)
def test_a_rows_bits_depend_on_nothing_but_the_row(make_context, scheme):
    part, x = quantised(scheme, 300, 1152), random(60, 1152, seed=1)
    expected = None
    for isa in make_context().library.supported_isas():
        for threads in (1, 2, 5) if isa != "portable" else (1,):
            ops = GemmOps(make_context(threads, isa))
            w = packed(ops, part)
            if expected is None:
                expected = torch.cat([product(ops, row[None], w) for row in x])
            for m in (1, 2, 4, 7, 16, 60) if isa != "portable" else (1, 4):
                assert torch.equal(product(ops, x[60 - m :], w), expected[60 - m :]), (isa, threads, m)


@pytest.mark.parametrize(
    "scheme", [GGUF[0], GGUF[5], QuantScheme(INT8), QuantScheme(INT4, 32, symmetric=False)], ids=name_of
)
def test_gate_and_up_with_bias_and_residual(make_context, isa, scheme):
    ops = GemmOps(make_context(2, isa))
    part = quantised(scheme, 68, 256)
    w = packed(ops, part, gated=True)
    assert torch.equal(w.dense(), packed(ops, part).dense())
    plain, bias, residual = widened(ops, w), random(68, seed=3), random(9, 34, seed=4)
    for m in (1, 9):
        fused = {"gate": "silu", "bias_N": bias, "residual": residual[:m]}
        x = random(m, 256, seed=m)
        assert torch.equal(product(ops, x, w, 34, **fused), product(ops, x, plain, 34, **fused))


@pytest.mark.parametrize("gated", [False, True])
def test_parts_come_in_any_order_and_start_anywhere(make_context, gated):
    ops = GemmOps(make_context())
    for scheme in (QuantScheme(QuantFormat.GGUF_Q4_K), QuantScheme(INT8), QuantScheme(INT4, 32)):
        part = quantised(scheme, 74, 256)
        w = ops.prepare_weight(WeightSpec(74, 256, torch.float32, scheme, gated=gated))
        for start, end in ((40, 74), (0, 7), (7, 9), (9, 40)):
            w.place(part.rows(start, end), start)
        assert torch.equal(w.dense(), part.dequantize())


def test_pieces_of_a_large_part_keep_blocks_of_rows_whole(make_context, monkeypatch):
    monkeypatch.setattr("octavo.backends.cpu.codes.PIECE_ELEMENTS", 1000)
    ops = GemmOps(make_context())
    for scheme in (QuantScheme(INT8, 128, block_rows=128), QuantScheme(INT8, -1), GGUF[0]):
        part = quantised(scheme, 300, 320)
        assert torch.equal(packed(ops, part).dense(), part.dequantize())


def test_signed_codes_with_zero_points_are_shifted(make_context):
    ops = GemmOps(make_context())
    scheme = QuantScheme(INT4, 32, symmetric=False)
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(16, 4)
    part = QuantizedTensor(scheme, codes, torch.full((16, 2), 0.25), torch.arange(-8, 8).repeat(2, 1).T.float())
    assert torch.equal(packed(ops, part).dense(), part.dequantize())


@pytest.mark.parametrize("scheme", [*GGUF, QuantScheme(INT4, 32, symmetric=False)], ids=name_of)
def test_one_copy_serves_as_table_and_as_head(make_context, isa, scheme):
    ops = GemmOps(make_context(2, isa))
    part = quantised(scheme, 50, 256)
    w = ops.prepare_weight(WeightSpec(50, 256, torch.float32, scheme, embedding=True))
    w.place(part, 0)
    assert ops.supports("embed", RowSpec(256, torch.float32, weight=w.spec)) is None
    ids, out = torch.tensor([49, 0, 16, 16, 31]), torch.empty(5, 256)
    ops.embed(ids, w, out=out, scale=24.0)
    assert torch.equal(out, w.dense()[ids] * 24.0)
    w.rows(ids, out=out)
    assert torch.equal(out, w.dense()[ids])
    assert torch.equal(product(ops, out, w), product(ops, out, widened(ops, w)))


BITS = {"gguf_q8_0": 8.5, "gguf_q4_0": 4.5, "gguf_q4_1": 5.0, "gguf_q5_0": 8.5, "gguf_q5_1": 9.0, "gguf_q4_k": 4.625,
        "gguf_q5_k": 8.625, "gguf_q6_k": 8.5625}  # fmt: skip


@pytest.mark.parametrize("scheme", GGUF, ids=name_of)
def test_a_packed_block_takes_about_the_bytes_of_the_file(make_context, scheme):
    """Formats of 4 and 8 bits no more than the file and a sixteenth; those of 5 and 6 take the bytes of 8."""
    ops = GemmOps(make_context())
    weight = ops.prepare_weight(WeightSpec(64, 4096, torch.float32, scheme))
    bits = weight.nbytes * 8 / (64 * 4096)
    assert bits == BITS[str(scheme.format)]
    block = scheme.format.block
    if block is not None and block.num_bytes * 8 / block.elements not in (5.5, 6.0, 6.5625):
        assert bits <= block.num_bytes * 8 / block.elements * 17 / 16


def test_own_formats_take_their_bits_and_scales(make_context):
    ops = GemmOps(make_context())

    def size(*scheme, **options):
        return ops.prepare_weight(WeightSpec(32, 1024, torch.float32, QuantScheme(*scheme, **options))).nbytes

    assert size(INT8) == 32 * (1024 + 4)
    assert size(INT4, 128, symmetric=False) == 32 * (512 + 8 * 8)
    assert size(INT4, 32) == 32 * (512 + 32 * 4)


def test_levels_of_scales_multiply_to_the_scales():
    for scheme in GGUF:
        part = quantised(scheme, 4, 512)
        levels, affine = two_level_scales(part), part.affine()
        assert (levels is None) == (not scheme.format.name.endswith("_K"))
        if levels is None:
            continue
        spread = affine.scales_NG.shape[1] // levels.units_NU.shape[1]
        units = levels.units_NU.float().repeat_interleave(spread, 1)
        assert torch.equal(units * levels.scales_NG, affine.scales_NG)
        if levels.minimums_NG is not None:
            minimum_units = levels.minimum_units_NU.float().repeat_interleave(spread, 1)
            assert torch.equal(minimum_units * levels.minimums_NG, affine.offsets_NG)
    assert take_apart("Q8_0", quantised(GGUF[0], 1, 32).codes_NK.numpy()).offsets is None


def test_what_has_no_kernel_is_refused(make_context):
    ops = GemmOps(make_context())
    fp32 = {"x_dtype": torch.float32, "out_dtype": torch.float32}
    refused = [
        QuantScheme(INT4, 12),
        QuantScheme(INT8, 100),
        QuantScheme(QuantFormat.FP8_E4M3FN),
        QuantScheme(QuantFormat.MXFP4, 32),
        QuantScheme(INT8, activation=QuantFormat.FP8_E4M3FN),
    ]
    for scheme in refused:
        answer = ops.supports("gemm", GemmSpec(WeightSpec(64, 240, torch.float32, scheme), **fp32))
        assert isinstance(answer, Unsupported), scheme
    odd = WeightSpec(63, 240, torch.float32, QuantScheme(INT8), gated=True)
    assert isinstance(ops.supports("gemm", GemmSpec(odd, **fp32, gate="silu")), Unsupported)


def test_a_plain_part_of_a_weight_of_codes_is_an_error(make_context):
    w = GemmOps(make_context()).prepare_weight(WeightSpec(32, 64, torch.float32, QuantScheme(INT8)))
    with pytest.raises(ValueError, match="quantise it by the weight's scheme"):
        w.place(random(32, 64), 0)
    with pytest.raises(ValueError, match="does not lie inside"):
        w.place(quantised(QuantScheme(INT8), 8, 64), 30)
