"""Sampling on GPUs against the reference: the same token for the same uniform number, whatever the filters."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.sampling import SamplingOps
from octavo.core.backend.reference.ops import ReferenceOps
from octavo.core.backend.specs import RowSpec

PARAMETERS = (
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.6, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.9, 20, 0.8, 0.05),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 0.0, 0.0),
    (0.01, 0, 0.95, 0.0),
    (5.0, 10**6, 0.999, 1.0),
    (1e-30, 3, 0.5, 0.0),
    (1e30, 7, 0.5, 0.0),
)
"""temperature, top_k, top_p, min_p; dealt to the rows in turn."""

ROWS = len(PARAMETERS) + 1


def columns(rows: int = ROWS) -> list[torch.Tensor]:
    dealt = [PARAMETERS[row % len(PARAMETERS)] for row in range(rows)]
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*dealt, strict=True))
    uniform = torch.rand(rows)
    uniform[0] = 0
    return [temperature, top_k, top_p, min_p, uniform]


def logits_of(fill: str, vocabulary: int) -> torch.Tensor:
    shape = (ROWS, vocabulary)
    if fill == "ties":
        return torch.randint(-3, 4, shape) / 2
    if fill == "halves":  # probabilities 1/2, 1/4, … in random places
        return -math.log(2) * torch.stack([torch.randperm(vocabulary) for _ in range(ROWS)]).float()
    x = torch.randn(shape) * (30 if fill == "peaked" else 2)
    if fill == "no-token":
        x[0::3], x[1::3, vocabulary // 2], x[2::3, -1] = -math.inf, math.nan, math.inf
    return x


@pytest.mark.parametrize(
    ("fill", "vocabulary"),
    [
        ("normal", 1), ("normal", 64), ("normal", 4200), ("ties", 64), ("ties", 700), ("halves", 64), ("halves", 700),
        ("peaked", 700), ("no-token", 64),
    ],
)  # fmt: skip
def test_the_references_token(gpu: Gpu, reference: ReferenceOps, fill: str, vocabulary: int) -> None:
    logits = torch.cat((logits_of(fill, vocabulary), torch.zeros(ROWS, 3)), dim=1)[:, :vocabulary]
    out, want = torch.empty(ROWS, dtype=torch.int64), torch.empty(ROWS, dtype=torch.int64)
    parameters = columns()
    SamplingOps(gpu).sample(logits, *parameters, out=out)
    reference.sample(logits, *parameters, out=want)
    assert out.tolist() == want.tolist()


def test_top_k_keeps_what_ties_after_division(gpu: Gpu) -> None:
    """Two gaps that differ, but not once they are divided: both are kept, so that both can be drawn."""
    temperature = torch.tensor(1.9)
    gap = next(g for g in torch.rand(10_000) if g / temperature == torch.nextafter(g, torch.tensor(9.0)) / temperature)
    row = torch.tensor([0.0, -float(gap), -float(torch.nextafter(gap, torch.tensor(9.0))), -50.0])
    logits, uniform = row.expand(40, 4).contiguous(), torch.linspace(0, 0.999, 40)
    out = torch.empty(40, dtype=torch.int64)
    full = [torch.full((40,), x) for x in (1.9, 2, 1.0, 0.0)]
    SamplingOps(gpu).sample(logits, *full, uniform, out=out)
    assert set(out.tolist()) == {0, 1, 2}


def test_the_largest_uniform_number_gives_a_token_that_is_kept(gpu: Gpu) -> None:
    """Far behind, halves no longer add to a running sum; what top-k left out must not be drawn all the same."""
    logits = -math.log(2) * torch.arange(300).float().expand(2, 300).contiguous()
    out = torch.empty(2, dtype=torch.int64)
    uniform = torch.tensor([1 - 2.0**-24, 1 - 2.0**-24])
    parameters = [torch.ones(2), torch.tensor([0, 9]), torch.ones(2), torch.zeros(2), uniform]
    SamplingOps(gpu).sample(logits, *parameters, out=out)
    assert 0 <= int(out[0]) < 300
    assert 0 <= int(out[1]) < 9


def test_a_rows_token_is_the_same_alone(gpu: Gpu) -> None:
    logits, parameters = torch.randn(ROWS, 150), columns()
    together, alone = torch.empty(ROWS, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
    ops = SamplingOps(gpu)
    ops.sample(logits, *parameters, out=together)
    for row in (5, 9):
        ops.sample(logits[row : row + 1], *(x[row : row + 1] for x in parameters), out=alone)
        assert int(alone) == int(together[row])


def test_what_is_not_supported_is_said(gpu: Gpu) -> None:
    ops = SamplingOps(gpu)
    assert ops.supports("sample", RowSpec(262_144, torch.float32)) is None
    assert ops.supports("sample", RowSpec(1000, torch.bfloat16)) is not None
