"""Row kernels of GPUs against the reference: odd sizes, strides, aliases, and bits that don't depend on the batch."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.rows import RowOps
from octavo.core.backend.reference.ops import ReferenceOps
from octavo.core.backend.specs import ActivationKind, Gate, RowSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RTOL = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def close(got: torch.Tensor, want: torch.Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, want, rtol=RTOL[want.dtype], atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 1), (5, 127), (37, 64), (7, 3, 80), (3, 4097), (2, 9001), (0, 64)])
def test_rms_norm(gpu: Gpu, reference: ReferenceOps, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ops = RowOps(gpu)
    x = torch.randn(*shape[:-1], shape[-1] + 5).to(dtype)[..., : shape[-1]]
    weight = torch.randn(shape[-1])
    out, want = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    ops.rms_norm(x, weight, out=out, eps=1e-5)
    reference.rms_norm(x, weight, out=want, eps=1e-5)
    close(out, want)
    # A residual is rounded to its dtype before it is normalised, and is left so; out may be x.
    residual = torch.randn(shape).to(dtype)
    total = residual.clone()
    reference.rms_norm(x, weight, out=want, eps=1e-5, residual=total)
    ops.rms_norm(x, weight, out=x, eps=1e-5, residual=residual)
    close(x, want)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 1), (5, 127), (37, 64), (7, 3, 80), (3, 4097), (2, 9001), (0, 64)])
def test_layer_norm(gpu: Gpu, reference: ReferenceOps, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ops = RowOps(gpu)
    x = (torch.randn(*shape[:-1], shape[-1] + 5) + 3).to(dtype)[..., : shape[-1]]
    weight, bias = torch.randn(shape[-1]), torch.randn(shape[-1])
    out, want = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    for add in (None, bias):
        ops.layer_norm(x, weight, out=out, eps=1e-5, bias_M=add)
        reference.layer_norm(x, weight, out=want, eps=1e-5, bias_M=add)
        close(out, want, atol=1e-5)  # around 0, which is where a row's mean goes
    residual = torch.randn(shape).to(dtype)
    total = residual.clone()
    reference.layer_norm(x, weight, out=want, eps=1e-5, bias_M=bias, residual=total)
    ops.layer_norm(x, weight, out=x, eps=1e-5, bias_M=bias, residual=residual)
    close(x, want, atol=1e-5)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("width", [300, 9001])
def test_layer_norm_of_rows_far_from_zero(gpu: Gpu, width: int) -> None:
    """fp32 of 10^8 and more has nothing left of a difference of 1 after a square."""
    x = 4096 + torch.arange(width, dtype=torch.float32).remainder(2).expand(2, -1)
    out = torch.empty(2, width)
    RowOps(gpu).layer_norm(x, torch.ones(width), out=out, eps=1e-9)
    wide = x.double()
    want = (wide - wide.mean(-1, keepdim=True)) / wide.std(-1, correction=0, keepdim=True)
    torch.testing.assert_close(out.double(), want, rtol=2e-3, atol=0)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("width", [64, 700, 9001])
def test_a_rows_norm_has_the_same_bits_alone(gpu: Gpu, width: int, op: str) -> None:
    norm = getattr(RowOps(gpu), op)
    x, weight = torch.randn(5, width), torch.randn(width)
    together, alone = torch.empty(5, width), torch.empty(1, width)
    norm(x, weight, out=together, eps=1e-5)
    norm(x[3:4], weight, out=alone, eps=1e-5)
    assert torch.equal(together[3:4], alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", get_args(Gate))
@pytest.mark.parametrize(("tokens", "width"), [(5, 17), (2, 2100), (130, 33), (0, 64)])
def test_act_mul(gpu: Gpu, reference: ReferenceOps, tokens: int, width: int, gate: str, dtype: torch.dtype) -> None:
    x = (torch.randn(tokens, 2 * width + 3) * 3).to(dtype)[:, : 2 * width]
    if tokens:
        x[0, 0], x[1, 0], x[1, 1] = -180, 180, 0  # e^180 overflows on the way to a result that does not
    out, want = torch.empty(tokens, width, dtype=dtype), torch.empty(tokens, width, dtype=dtype)
    RowOps(gpu).act_mul(x, out=out, gate=gate)
    reference.act_mul(x, out=want, gate=gate)
    close(out, want, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", get_args(ActivationKind))
@pytest.mark.parametrize(("tokens", "width"), [(5, 1), (2, 2100), (130, 33), (0, 64)])
def test_activation(
    gpu: Gpu, reference: ReferenceOps, tokens: int, width: int, kind: ActivationKind, dtype: torch.dtype
) -> None:
    x = (torch.randn(tokens, width + 3) * 3).to(dtype)[:, :width]
    if tokens:
        x[0, 0], x[1, 0] = -180, math.nan
    want = torch.empty(tokens, width, dtype=dtype)
    reference.activation(x, out=want, kind=kind)
    RowOps(gpu).activation(x, out=x, kind=kind)
    torch.testing.assert_close(x, want, rtol=RTOL[dtype], atol=1e-5, equal_nan=True)


def test_the_clamped_gate_keeps_nan(gpu: Gpu) -> None:
    x, out = torch.tensor([[math.nan, 1.0, 1.0, math.nan]]), torch.empty(1, 2)
    RowOps(gpu).act_mul(x, out=out, gate="swiglu_clamped")
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (128, 2), (112, 112), (256, 64)])
def test_rotary(
    gpu: Gpu, reference: ReferenceOps, head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype
) -> None:
    tokens, heads, kv_heads = 5, 3, 2
    row = torch.randn(tokens, (heads + kv_heads) * head_dim + 7).to(dtype)
    q = row[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    k = row[:, heads * head_dim : (heads + kv_heads) * head_dim].unflatten(1, (kv_heads, head_dim))
    positions, table = torch.tensor([49, 0, 7, 7, 3]), torch.randn(50, rotary_dim)
    want_q, want_k = torch.empty_like(q), torch.empty_like(k)
    reference.rotary(q, k, positions, table, out_q=want_q, out_k=want_k, interleaved=interleaved)
    out_q, out_k = torch.empty_like(q), torch.empty_like(k)
    ops = RowOps(gpu)
    ops.rotary(q, k, positions, table, out_q=out_q, out_k=out_k, interleaved=interleaved)
    close(out_q, want_q)
    close(out_k, want_k)
    ops.rotary(q, k, positions, table, out_q=q, out_k=k, interleaved=interleaved)
    assert torch.equal(q, out_q)
    assert torch.equal(k, out_k)


def test_what_is_not_supported_is_said(gpu: Gpu) -> None:
    ops = RowOps(gpu)
    assert ops.supports("rms_norm", RowSpec(64, torch.float32, "residual")) is None
    for op, spec in (
        ("rms_norm", RowSpec(64, torch.float64)),
        ("act_mul", RowSpec(64, torch.float32, "relu")),
        ("activation", RowSpec(64, torch.float32, "swiglu_clamped")),
        ("layer_norm", RowSpec(64, torch.float64)),
        ("rotary", RowSpec(64, torch.float32, "", 7)),
        ("rotary", RowSpec(64, torch.float32, "", 66)),
    ):
        refusal = ops.supports(op, spec)
        assert refusal is not None
        assert refusal.reason
