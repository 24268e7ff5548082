"""Schemes, scales of blocks, MXFP4, GGUF blocks and their normal form, against formulas written out apart."""

from __future__ import annotations

import itertools

import gguf
import numpy as np
import pytest
import torch

from octavo.core.backend import QuantFormat, QuantizedTensor, QuantScheme, ReferenceOps, WeightSpec

GGUF = [f for f in QuantFormat if f.block is not None]
FP8, INT4, INT8, MXFP4 = QuantFormat.FP8_E4M3FN, QuantFormat.INT4, QuantFormat.INT8, QuantFormat.MXFP4
ops = ReferenceOps(torch.device("cpu"))


def integers(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


def fp8_blocks(rows: int, columns: int, *, block_rows: int = 4, group_size: int = 3) -> QuantizedTensor:
    scheme = QuantScheme(FP8, group_size, block_rows=block_rows)
    scales = torch.exp2(integers(-4, 4, *scheme.scale_shape(rows, columns), seed=1).float())
    return QuantizedTensor(scheme, integers(-16, 16, rows, columns).float().to(FP8.code_dtype), scales)


HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the float16 fields of a block lie; (0,) for the others."""


def gguf_weight(quant_format: QuantFormat, rows: int = 3, blocks: int = 5) -> QuantizedTensor:
    """Random bytes, but no scale is infinite or NaN: the highest bit of its exponent is 0."""
    assert quant_format.block is not None
    packed = integers(0, 255, rows * blocks, quant_format.block.num_bytes).to(torch.uint8)
    for at in HALVES.get(quant_format.name.removeprefix("GGUF_"), (0,)):
        packed[:, at + 1] &= 0xBF
    return QuantizedTensor.of_blocks(quant_format, packed.view(rows, -1))


@pytest.mark.parametrize(("rows", "columns"), [(8, 6), (9, 7), (3, 2), (4, 4), (1, 1)])
def test_a_scale_covers_a_block_and_the_last_block_may_be_cut_short(rows: int, columns: int) -> None:
    part = fp8_blocks(rows, columns)
    assert part.scales.shape == (-(-rows // 4), -(-columns // 3))
    plain = part.dequantize()
    for n, k in itertools.product(range(rows), range(columns)):
        assert float(plain[n, k]) == float(part.codes_NK[n, k].float()) * float(part.scales[n // 4, k // 3])


@pytest.mark.parametrize("group_size", [0, -1, 3, 8])
def test_zero_points_have_the_scales_places(group_size: int) -> None:
    scheme = QuantScheme(INT4, group_size, symmetric=False)
    shape = scheme.scale_shape(4, 8)
    part = QuantizedTensor(
        scheme, integers(0, 15, 4, 8).to(torch.int8), torch.rand(shape), integers(0, 15, *shape, seed=2)
    )
    assert part.zero_points is not None
    plain = part.dequantize()
    for n, k in itertools.product(range(4), range(8)):
        at = (0 if group_size == -1 else n, k // group_size if group_size > 0 else 0)
        assert plain[n, k] == (part.codes_NK[n, k] - part.zero_points[at]).float() * part.scales[at]


def test_the_sixteen_codes_of_mxfp4() -> None:
    scheme = QuantScheme(MXFP4, 32)
    scales = torch.tensor([[2.0**-127, 2.0**10]])
    plain = QuantizedTensor(scheme, torch.arange(16, dtype=torch.uint8).repeat(1, 4), scales).dequantize().double()
    for code in range(16):
        exponent, mantissa = code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
        for start, scale in ((0, 2.0**-127), (48, 2.0**10)):
            assert plain[0, start + code] == (-size if code & 8 else size) * scale
    assert bool(plain[0, 8].signbit())


@pytest.mark.parametrize("quant_format", GGUF)
def test_gguf_blocks_are_decoded_as_the_formats_own_package_does(quant_format: QuantFormat) -> None:
    part = gguf_weight(quant_format)
    kind = gguf.GGMLQuantizationType[quant_format.name.removeprefix("GGUF_")]
    want = torch.from_numpy(gguf.dequantize(part.codes_NK.numpy(), kind))
    assert part.shape == tuple(want.shape)
    assert bool(want.isfinite().all())
    assert bool(want.any())
    assert torch.equal(part.dequantize(), want)


@pytest.mark.parametrize("quant_format", GGUF)
def test_the_normal_form_of_a_gguf_weight_is_the_weight(quant_format: QuantFormat) -> None:
    part = gguf_weight(quant_format, rows=2, blocks=3)
    form = part.affine()
    rows, columns = part.shape
    assert form.codes_NK.dtype in (torch.int8, torch.uint8)
    assert form.codes_NK.shape == (rows, columns)
    assert form.scales_NG.shape == (rows, columns // form.group_size)
    value = form.codes_NK.double() * form.scales_NG.double().repeat_interleave(form.group_size, 1)
    if form.offsets_NG is not None:
        assert form.offsets_NG.shape == form.scales_NG.shape
        value -= form.offsets_NG.double().repeat_interleave(form.group_size, 1)
    assert torch.equal(value.float(), part.dequantize())  # code * scale is exact in fp32, so that it rounds once


def test_a_large_gguf_weight_comes_apart_in_pieces() -> None:
    part = gguf_weight(QuantFormat.GGUF_Q5_K, rows=8, blocks=70)  # 560 blocks, 256 to a piece
    want = gguf.dequantize(part.codes_NK.numpy(), gguf.GGMLQuantizationType.Q5_K)
    assert np.array_equal(part.affine().dense().numpy(), want)


@pytest.mark.parametrize(("group_size", "block_rows"), [(0, 1), (-1, 1), (3, 1), (4, 1), (3, 2), (4, 2)])
def test_the_normal_form_of_zero_points(group_size: int, block_rows: int) -> None:
    scheme = QuantScheme(INT8, group_size, symmetric=False, block_rows=block_rows)
    shape = scheme.scale_shape(5, 8)
    scales, zeros = torch.exp2(-torch.arange(float(shape[0] * shape[1]))).view(shape), integers(-9, 9, *shape)
    part = QuantizedTensor(scheme, integers(-128, 127, 5, 8).to(torch.int8), scales, zeros)
    form = part.affine()
    assert form.scales_NG.shape == (5, -(-8 // form.group_size))
    assert torch.equal(form.dense(), part.dequantize())


def test_floating_point_codes_have_no_normal_form() -> None:
    with pytest.raises(ValueError, match="floating-point codes"):
        fp8_blocks(4, 3).affine()


@pytest.mark.parametrize(
    ("fault", "scheme"),
    [
        ("block_rows", {"format": FP8, "block_rows": 128}),
        ("block_rows", {"format": FP8, "group_size": 32, "block_rows": 0}),
        ("group sizes", {"format": INT8, "group_size": -2}),
        ("group sizes", {"format": INT8, "activation_group_size": -3}),
        ("group_size must be 32", {"format": MXFP4}),
        ("without zero points", {"format": MXFP4, "group_size": 32, "symmetric": False}),
        ("blocks hold", {"format": QuantFormat.GGUF_Q4_K, "group_size": 32}),
        ("can't be quantised to", {"format": INT8, "activation": MXFP4}),
    ],
)
def test_a_scheme_without_meaning_is_refused(fault: str, scheme: dict) -> None:
    with pytest.raises(ValueError, match=fault):
        QuantScheme(**scheme)


def test_parts_that_do_not_fit_their_scheme_are_refused() -> None:
    codes = torch.zeros(4, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"scales are \[4, 1\].*wants \[4, 2\]"):
        QuantizedTensor(QuantScheme(INT8, 4), codes, torch.ones(4, 1))
    with pytest.raises(ValueError, match="zero points belong"):
        QuantizedTensor(QuantScheme(INT8), codes, torch.ones(4, 1), torch.ones(4, 1))
    with pytest.raises(ValueError, match="no whole number of blocks of 34"):
        QuantizedTensor.of_blocks(QuantFormat.GGUF_Q8_0, torch.zeros(2, 35, dtype=torch.uint8))


def test_parts_of_a_weight_begin_where_blocks_of_rows_do() -> None:
    part = fp8_blocks(10, 6)
    spec = WeightSpec(20, 6, torch.float32, part.scheme)
    spec.check_part(part, 8)
    with pytest.raises(ValueError, match="row 10 begins inside a block of 4 rows"):
        ops.prepare_weight(spec).place(part, 10)


def test_blocks_of_a_gated_weight_are_counted_in_each_half() -> None:
    gate, up = fp8_blocks(10, 6), fp8_blocks(10, 6)
    w = ops.prepare_weight(WeightSpec(20, 6, torch.float32, gate.scheme, gated=True))
    w.place(gate, 0)
    w.place(up, 10)
    assert torch.equal(w.dense(), torch.cat((gate.dequantize(), up.dequantize())))
    with pytest.raises(ValueError, match="crosses row 10"):
        w.place(fp8_blocks(20, 6), 0)
    with pytest.raises(ValueError, match="row 12 begins inside"):
        w.place(fp8_blocks(4, 6), 12)
    whole = fp8_blocks(16, 6)
    ops.prepare_weight(WeightSpec(16, 6, torch.float32, whole.scheme, gated=True)).place(whole, 0)


def test_a_part_of_another_scheme_is_refused_and_another_activation_is_none() -> None:
    part = fp8_blocks(4, 6)
    other = QuantScheme(FP8, 3, block_rows=4, activation=FP8, activation_group_size=3)
    WeightSpec(4, 6, torch.float32, other).check_part(part, 0)
    with pytest.raises(ValueError, match="quantised by"):
        WeightSpec(4, 6, torch.float32, QuantScheme(FP8, 3)).check_part(part, 0)


def test_activations_in_groups_with_a_ragged_last_one() -> None:
    scheme = QuantScheme(INT8, activation=INT8, activation_group_size=4).for_activations()
    assert scheme == QuantScheme(INT8, 4)
    x = torch.tensor([[127.0, 1, 2, 3, 0, 0, 0, 0, 2.0, 1.0], [0.5, -63.5, 0, 0, 254, 1, 2, 3, -127, 1]])
    codes, scales = torch.empty(2, 10, dtype=torch.int8), torch.empty(2, 3)
    ops.quantize(x, scheme, out=codes, scales=scales)
    torch.testing.assert_close(scales, torch.tensor([[1, 1, 2 / 127], [0.5, 2, 1]]))
    assert codes.tolist() == [[127, 1, 2, 3, 0, 0, 0, 0, 127, 64], [1, -127, 0, 0, 127, 0, 1, 2, -127, 1]]


SLICED = {
    "int8 rows": QuantScheme(INT8),
    "int8 tensor": QuantScheme(INT8, -1, symmetric=False),
    "int4 groups": QuantScheme(INT4, 4, symmetric=False),
    "fp8 blocks": QuantScheme(FP8, 4, block_rows=3),
    "mxfp4": QuantScheme(MXFP4, 32),
}


def sliceable(scheme: QuantScheme, rows: int, columns: int) -> QuantizedTensor:
    shape = scheme.scale_shape(rows, columns)
    codes = integers(0, 7, rows, columns).to(scheme.format.code_dtype)
    zeros = None if scheme.symmetric else integers(0, 7, *shape, seed=2)
    return QuantizedTensor(scheme, codes, torch.exp2(integers(-4, 4, *shape, seed=1).float()), zeros)


@pytest.mark.parametrize("name", SLICED)
def test_slices_are_those_of_the_plain_weight(name: str) -> None:
    scheme = SLICED[name]
    step_rows, step_columns = scheme.block_rows, max(scheme.group_size, 1)
    part = sliceable(scheme, 10, 70)
    plain = part.dequantize()
    for first in range(0, 10, step_rows):
        for end in range(first, 11):
            assert torch.equal(part.rows(first, end).dequantize(), plain[first:end])
    for first in range(0, 70, step_columns):
        for end in (*range(first, 70, step_columns), 70):
            assert torch.equal(part.columns(first, end).dequantize(), plain[:, first:end])


@pytest.mark.parametrize("quant_format", GGUF)
def test_slices_of_gguf_weights(quant_format: QuantFormat) -> None:
    part = gguf_weight(quant_format)
    assert quant_format.block is not None
    elements = quant_format.block.elements
    plain = part.dequantize()
    assert torch.equal(part.rows(1, 3).dequantize(), plain[1:3])
    assert torch.equal(part.columns(elements, 3 * elements).dequantize(), plain[:, elements : 3 * elements])
    with pytest.raises(ValueError, match="share their scales"):
        part.columns(elements // 2, 3 * elements)


@pytest.mark.parametrize(
    ("name", "what", "first", "end", "message"),
    [
        ("int4 groups", "columns", 2, 8, "share their scales"),
        ("int4 groups", "columns", 4, 10, "share their scales"),
        ("fp8 blocks", "rows", 1, 6, "share their scales"),
        ("mxfp4", "columns", 16, 64, "share their scales"),
        ("int8 rows", "rows", 5, 11, "do not lie inside"),
        ("int8 rows", "columns", 8, 4, "do not lie inside"),
    ],
)
def test_slices_that_have_no_meaning(name: str, what: str, first: int, end: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(sliceable(SLICED[name], 10, 70), what)(first, end)
