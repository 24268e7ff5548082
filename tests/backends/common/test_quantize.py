"""Quantisers of GPUs against the reference: codes and scales bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.quantize import LARGEST_CODE, QuantizeOps
from octavo.core.backend.quant import QuantFormat, QuantScheme
from octavo.core.backend.reference.ops import ReferenceOps
from octavo.core.backend.specs import RowSpec
from octavo.core.base.errors import UnsupportedOp


def formats(gpu: Gpu) -> tuple[QuantFormat, ...]:
    fnuz = (QuantFormat.FP8_E4M3FNUZ,) if gpu.chip.fp8 == "e4m3fnuz" else ()
    return (QuantFormat.INT8, QuantFormat.INT4, QuantFormat.FP8_E4M3FN, *fnuz)


def both(
    gpu: Gpu, reference: ReferenceOps, x: torch.Tensor, scheme: QuantScheme
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Codes and scales of the kernel, and of the reference, as fp32."""
    results = []
    for ops in (QuantizeOps(gpu), reference):
        out = torch.empty(x.shape, dtype=scheme.format.code_dtype)
        scales = torch.empty(scheme.scale_shape(*x.shape))
        ops.quantize(x, scheme, out=out, scales=scales)
        results.append([out.float(), scales])
    return results[0], results[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [0, -1, 32, 50, 160])
def test_codes_and_scales(gpu: Gpu, reference: ReferenceOps, group_size: int, dtype: torch.dtype) -> None:
    """A row of zeros has scale 1; the last group of a row is cut short; rows are apart."""
    for quant_format in formats(gpu):
        x = (torch.randn(7, 260) * torch.exp2(torch.randn(7, 1) * 3)).to(dtype)[:, :257]
        x[2] = 0
        got, want = both(gpu, reference, x, QuantScheme(quant_format, group_size))
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (2, 9000)])
@pytest.mark.parametrize("group_size", [0, -1])
def test_sizes(gpu: Gpu, reference: ReferenceOps, shape: tuple[int, int], group_size: int) -> None:
    if not math.prod(shape) and group_size == -1:
        return  # a maximum of nothing
    for quant_format in formats(gpu):
        got, want = both(gpu, reference, torch.randn(shape), QuantScheme(quant_format, group_size))
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("group_size", [0, 16, -1])
def test_ties_go_to_even_and_what_is_not_a_number_shows(gpu: Gpu, reference: ReferenceOps, group_size: int) -> None:
    for quant_format in formats(gpu):
        top = LARGEST_CODE[quant_format]
        x = (torch.arange(64) / 2 % 7).repeat(3, 1)
        x[:, ::16] = top
        got, want = both(gpu, reference, x, QuantScheme(quant_format, group_size))
        assert torch.equal(got[0], want[0])
        x[1, 5], x[2, 20] = torch.nan, torch.inf
        got, want = both(gpu, reference, x, QuantScheme(quant_format, group_size))
        torch.testing.assert_close(got[1], want[1], rtol=0, atol=0, equal_nan=True)
        if got[0].isnan().any():  # integers have no code for NaN
            torch.testing.assert_close(got[0], want[0], rtol=0, atol=0, equal_nan=True)


def test_what_is_not_supported_is_said(gpu: Gpu) -> None:
    """CDNA3 multiplies bits of e4m3fn at half their value, so it may quantise to them; Hopper has no use for fnuz."""
    ops, x, fnuz = QuantizeOps(gpu), torch.zeros(2, 4), QuantFormat.FP8_E4M3FNUZ
    assert ops.supports("quantize", RowSpec(64, torch.bfloat16, "int8", 32)) is None
    assert ops.supports("quantize", RowSpec(64, torch.float64, "int8")) is not None
    refused = [QuantScheme(QuantFormat.INT8, symmetric=False), QuantScheme(QuantFormat.INT8, 32, block_rows=32)]
    assert ops.supports("quantize", RowSpec(64, torch.float32, "fp8_e4m3fn")) is None
    if gpu.chip.fp8 == "e4m3fn":
        assert ops.supports("quantize", RowSpec(64, torch.float32, str(fnuz))) is not None
        refused.append(QuantScheme(fnuz))
    for scheme in refused:
        with pytest.raises(UnsupportedOp, match="activations"):
            ops.quantize(x, scheme, out=x, scales=x)
