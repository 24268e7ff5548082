"""Rotary tables: their layout where frequencies depend on a request's length, and who shares one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.core.base.errors import CheckpointError
from octavo.core.layers.alibi import alibi_slopes
from octavo.core.layers.rope import RopeParameters, RotaryTables, cos_sin_table, model_switch_tokens
from octavo.core.layers.rope_scaling import DynamicScaling, LinearScaling, LongRopeScaling

PLAIN = RopeParameters(1000.0, 8)
LONG = RopeParameters(1000.0, 8, LongRopeScaling((1.0, 1.1, 1.2, 1.3), (4.0, 5.0, 6.0, 7.0), 32, 1.25))
DYNAMIC = RopeParameters(1000.0, 8, DynamicScaling(4.0, 32))


class Context:
    """Of a LayerContext, what tables use."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.uploads = 0
        self.backend = self

    def from_host(self, table: torch.Tensor) -> torch.Tensor:
        self.uploads += 1
        return table


def tables(max_model_len: int, switch_tokens: int | None = None) -> tuple[Any, RotaryTables]:
    context: Any = Context(max_model_len)
    return context, RotaryTables(context, switch_tokens)


@pytest.mark.parametrize("parameters", [PLAIN, LONG, DYNAMIC])
def test_a_table_with_a_switch_has_both_parts(parameters):
    table = cos_sin_table(parameters, 100, 32)
    assert table.shape == (132, 8)
    assert torch.equal(table[:32], parameters.cos_sin(32, 32))
    assert torch.equal(table[32:], parameters.cos_sin(100, 100))
    assert torch.equal(table[:32], table[32:64]) == (parameters is PLAIN)


@pytest.mark.parametrize("parameters", [PLAIN, LONG, DYNAMIC])
@pytest.mark.parametrize("max_model_len", [20, 32])
def test_without_longer_requests_there_is_one_part(parameters, max_model_len):
    assert torch.equal(cos_sin_table(parameters, max_model_len, 32), parameters.cos_sin(max_model_len, 32))


def test_the_attention_factor_is_in_both_parts():
    table = cos_sin_table(LONG, 100, 32)
    assert torch.equal(table[[0, 32]], torch.tensor([1.25] * 4 + [0.0] * 4).expand(2, 8))


def test_far_positions_are_exact_to_fp32():
    table = RopeParameters(10_000.0, 64).cos_sin(100_001, 100_001)
    first = torch.tensor(100_000.0, dtype=torch.float64)
    assert abs(table[-1, 0] - first.cos()) < 1e-6
    assert abs(table[-1, 32] - first.sin()) < 1e-6


def test_equal_parameters_share_one_table():
    context, made = tables(64, 32)
    assert made.get(PLAIN) is made.get(RopeParameters(1000.0, 8))
    assert made.get(PLAIN).shape == made.get(LONG).shape == (96, 8)
    assert made.get(RopeParameters(1000.0, 8, LinearScaling(2.0))) is not made.get(PLAIN)
    assert context.uploads == 3


def test_a_model_has_one_switch():
    assert model_switch_tokens([PLAIN, None]) is None
    assert model_switch_tokens([PLAIN, LONG, None, DYNAMIC]) == 32
    other = RopeParameters(1000.0, 8, DynamicScaling(4.0, 64))
    with pytest.raises(CheckpointError, match=r"\[32, 64\]"):
        model_switch_tokens([LONG, other])


@pytest.mark.parametrize("num_heads", [1, 2, 3, 8, 12, 16, 25, 112])
def test_alibi_slopes_equal_hugging_face(num_heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    expected = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    assert torch.allclose(alibi_slopes(num_heads), expected, rtol=1e-6, atol=0)
