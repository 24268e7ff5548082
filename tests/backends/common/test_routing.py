"""The choice of experts on GPUs against the reference: ids exactly, ties included, and weights to a few ulp."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.routing import RoutingOps
from octavo.core.backend.reference.ops import ReferenceOps
from octavo.core.backend.specs import RowSpec

RULES: tuple[dict[str, Any], ...] = (
    {"top_k": 1},
    {"top_k": 10, "renormalize": False},
    {"top_k": 6, "scoring": "sigmoid", "has_bias": True},
    {"top_k": 8, "scoring": "sigmoid", "has_bias": True, "num_groups": 8, "top_groups": 4, "scale": 2.5},
    {"top_k": 6, "num_groups": 8, "top_groups": 3, "renormalize": False},
    {"top_k": 8, "num_groups": 4, "top_groups": 1},  # 160 / 4 = 40 experts in the one group, enough for 8
)


def both(
    gpu: Gpu, reference: ReferenceOps, logits: torch.Tensor, rule: dict[str, Any]
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """ids and weights of the kernel, and of the reference."""
    rule = dict(rule)
    bias = torch.randn(logits.shape[1]) / 8 if rule.pop("has_bias", False) else None
    results = []
    for ops in (RoutingOps(gpu), reference):
        weights = torch.empty(logits.shape[0], rule["top_k"])
        ids = torch.empty(logits.shape[0], rule["top_k"], dtype=torch.int64)
        ops.moe_route(logits, out_weights=weights, out_ids=ids, bias_E=bias, **rule)
        results.append((ids, weights))
    return results[0], results[1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("experts", [32, 160, 512])
def test_ids_and_weights(gpu: Gpu, reference: ReferenceOps, experts: int, rule: dict[str, Any]) -> None:
    """Logits on a grid: many are equal, and the lowest id must win."""
    logits = (torch.randn(9, experts) * 8).round() / 4
    logits[4, experts // 2] = torch.nan
    got, want = both(gpu, reference, logits, rule)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=2e-6, atol=0, equal_nan=True)
    assert torch.equal(got[0][4], torch.arange(rule["top_k"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_dtypes_and_tokens(gpu: Gpu, reference: ReferenceOps, tokens: int, dtype: torch.dtype) -> None:
    logits = torch.randn(tokens, 67).to(dtype)[:, :60]
    got, want = both(gpu, reference, logits, {"top_k": 4})
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=2e-6, atol=0)


def test_more_choices_than_the_groups_hold(gpu: Gpu, reference: ReferenceOps) -> None:
    """Beyond the eligible experts all are equal, and come in the order of their ids."""
    got, want = both(gpu, reference, torch.randn(5, 32), {"top_k": 10, "num_groups": 8, "top_groups": 2})
    assert torch.equal(got[0], want[0])


def test_what_is_not_supported_is_said(gpu: Gpu) -> None:
    ops = RoutingOps(gpu)
    assert ops.supports("moe_route", RowSpec(512, torch.bfloat16, "sigmoid", 10)) is None
    for spec in (
        RowSpec(2048, torch.float32, "softmax", 8),
        RowSpec(8, torch.float32, "softmax", 9),
        RowSpec(8, torch.float32, "noisy", 2),
    ):
        assert ops.supports("moe_route", spec) is not None
