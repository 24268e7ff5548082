"""Adapters on GPUs against the reference: mixed ranks in one batch, rows without one, and bits of one's own."""

from __future__ import annotations

import pytest
import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.lora import LoraOps
from octavo.core.backend.reference.ops import ReferenceOps
from octavo.core.backend.specs import LoraSpec
from octavo.core.base.errors import UnsupportedOp

Adapters = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def adapters(ranks: tuple[int, ...], depth: int, width: int, dtype: torch.dtype) -> Adapters:
    """Slots of the highest rank, the others padded with zeros; their rows and slots lie apart from each other."""
    highest = max(ranks)
    a = torch.randn(len(ranks), highest, depth + 3).to(dtype)[..., :depth] / depth**0.5
    b = torch.randn(len(ranks), width, highest + 3).to(dtype)[..., :highest]
    for slot, rank in enumerate(ranks):
        a[slot, rank:] = 0
        b[slot, :, rank:] = 0
    return a, b, torch.rand(len(ranks)) + 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "depth", "width", "ranks"),
    [
        (9, 100, 48, (8, 16, 64)),
        (3, 1100, 131, (8,)),
        (67, 48, 33, (128, 0, 16)),
        (1, 64, 48, (200,)),
        (5, 1, 1, (1, 2)),
        (0, 64, 48, (8,)),
    ],
)
def test_rows_get_what_their_adapter_adds(
    gpu: Gpu,
    reference: ReferenceOps,
    tokens: int,
    depth: int,
    width: int,
    ranks: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    x = torch.randn(tokens, depth + 5).to(dtype)[:, :depth]
    a, b, scales = adapters(ranks, depth, width, dtype)
    chosen = torch.arange(tokens, dtype=torch.int32) % (len(ranks) + 1) - 1
    out = torch.randn(tokens, width).to(dtype)
    before, want = out.clone(), out.clone()
    LoraOps(gpu).lora_gemm(x, a, b, scales, chosen, out=out)
    reference.lora_gemm(x, a, b, scales, chosen, out=want)
    rtol = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(out, want, rtol=rtol, atol=2e-5)
    assert torch.equal(out[chosen < 0], before[chosen < 0])


def test_bf16_keeps_what_is_between_the_products(gpu: Gpu) -> None:
    """A x is 1 + 2^-12, which bf16 has not: rounded, B would cancel it to 0."""
    x, a = torch.tensor([[1.0, 2.0**-12]]).bfloat16(), torch.ones(1, 1, 2).bfloat16()
    ops, out = LoraOps(gpu), torch.full((1, 1), -1.0).bfloat16()
    b, chosen = torch.ones(1, 1, 1).bfloat16(), torch.zeros(1, dtype=torch.int32)
    ops.lora_gemm(x, a, b, torch.ones(1), chosen, out=out)
    assert float(out) == 2.0**-12


def test_a_rows_bits_are_its_own(gpu: Gpu) -> None:
    ops, x = LoraOps(gpu), torch.randn(9, 100)
    a, b, scales = adapters((8, 32), 100, 48, torch.float32)
    chosen, together = torch.tensor([0, 1, -1, 1, 0, 0, 1, 1, 0], dtype=torch.int32), torch.zeros(9, 48)
    ops.lora_gemm(x, a, b, scales, chosen, out=together)
    alone = torch.zeros(1, 48)
    ops.lora_gemm(x[6:7], a, b, scales, chosen[6:7], out=alone)
    assert torch.equal(together[6:7], alone)


def test_what_stands_in_a_slot_may_change(gpu: Gpu, reference: ReferenceOps) -> None:
    """Each call sees what is there."""
    ops, x, chosen = LoraOps(gpu), torch.randn(2, 32), torch.tensor([0, 1], dtype=torch.int32)
    a, b, scales = adapters((8, 8), 32, 16, torch.float32)
    for _ in range(2):
        out, want = torch.zeros(2, 16), torch.zeros(2, 16)
        ops.lora_gemm(x, a, b, scales, chosen, out=out)
        reference.lora_gemm(x, a, b, scales, chosen, out=want)
        torch.testing.assert_close(out, want, rtol=2e-5, atol=1e-5)
        a[0].mul_(2)
        b[1].normal_()
        scales[1] = 3.0


def test_what_is_not_supported_is_said(gpu: Gpu) -> None:
    ops = LoraOps(gpu)
    assert ops.supports("lora_gemm", LoraSpec(64, 64, 128, torch.bfloat16)) is None
    assert ops.supports("lora_gemm", LoraSpec(64, 64, 512, torch.bfloat16)) is not None
    assert ops.supports("lora_gemm", LoraSpec(64, 64, 8, torch.float64)) is not None
    a, b, scales = adapters((8,), 32, 16, torch.bfloat16)
    with pytest.raises(UnsupportedOp, match="same dtype"):
        ops.lora_gemm(torch.zeros(1, 32), a, b, scales, torch.zeros(1, dtype=torch.int32), out=torch.zeros(1, 16))
