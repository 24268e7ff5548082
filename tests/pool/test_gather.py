"""Pooling of ragged rows, whatever the chunks; cut first, then normalised."""

from __future__ import annotations

import pytest
import torch

from octavo.core.base.pooling import PoolingJob
from octavo.core.pool.finish import activated, finished
from octavo.core.pool.gather import GatheredRows
from octavo.core.pool.pooler import Pooler

ROWS = torch.randn(23, 8, generator=torch.Generator().manual_seed(3)) * 10
EXPECTED = {"mean": ROWS.mean(0), "cls": ROWS[0], "last": ROWS[-1]}
JOB = PoolingJob(needs_every_token=False)


def gathered(kind: str, chunk: int, *, first_token: int = 0, rows: torch.Tensor = ROWS) -> torch.Tensor:
    state = GatheredRows(kind, len(rows), first_token)  # type: ignore[arg-type]
    for start in range(0, len(rows), chunk):
        stop = min(start + chunk, len(rows))
        wanted = state.wanted(start, stop)
        assert set(wanted) <= set(range(start, stop))
        state.add(rows[wanted.start : wanted.stop])
    return state.vector()


@pytest.mark.parametrize("kind", ["mean", "cls", "last"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 22, 23, 40])
def test_each_kind_in_any_chunks(kind: str, chunk: int) -> None:
    torch.testing.assert_close(gathered(kind, chunk), EXPECTED[kind], rtol=1e-6, atol=1e-6)
    assert torch.equal(gathered(kind, chunk), gathered(kind, 23))


@pytest.mark.parametrize("chunk", [1, 5, 23])
def test_a_mean_without_its_prompt(chunk: int) -> None:
    torch.testing.assert_close(gathered("mean", chunk, first_token=9), ROWS[9:].mean(0), rtol=1e-6, atol=1e-6)
    assert torch.equal(gathered("cls", chunk, first_token=9), ROWS[0])


def test_only_what_counts_is_asked_for() -> None:
    assert list(GatheredRows("last", 23).wanted(0, 22)) == []
    assert list(GatheredRows("last", 23).wanted(22, 23)) == [22]
    assert list(GatheredRows("cls", 23).wanted(0, 10)) == [0]
    assert list(GatheredRows("cls", 23).wanted(10, 23)) == []
    assert list(GatheredRows("mean", 23, 20).wanted(0, 10)) == []


def test_cut_first_then_normalised() -> None:
    embed = Pooler(task="embed", kind="mean", width=8)
    job = PoolingJob(needs_every_token=True, dimensions=3, normalize=True)
    vector = finished(ROWS[0], embed, job)
    torch.testing.assert_close(vector, ROWS[0, :3] / ROWS[0, :3].norm())
    assert vector.norm().item() == pytest.approx(1.0, abs=1e-6)
    assert torch.equal(finished(ROWS[0], embed, JOB), ROWS[0])
    zero = finished(torch.zeros(8), embed, PoolingJob(needs_every_token=True, normalize=True))
    assert torch.equal(zero, torch.zeros(8))


def test_activations() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0])
    torch.testing.assert_close(activated(logits, "softmax"), logits.softmax(0))
    torch.testing.assert_close(activated(logits, "sigmoid"), logits.sigmoid())
    assert activated(logits, "none") is logits
    classify = Pooler(task="classify", kind="last", width=3, activation="sigmoid")
    assert torch.equal(finished(logits, classify, JOB), logits)
