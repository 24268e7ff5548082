"""The tracer's graph: what changes from step to step is found wherever an op takes it; the rest is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import octavo.core.backend as api

EXAMPLE = Path(__file__).parents[2] / "examples" / "octavo-tracer" / "src"
GEMM = api.GemmSpec(api.WeightSpec(4, 3, torch.float32), torch.float32, torch.float32, bias=True, residual=True)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from octavo_tracer.device import TracerBackend

    return TracerBackend(api.BackendConfig())


def buffers(seed: int) -> api.StepBuffers:
    generator = torch.Generator().manual_seed(seed)
    ids, positions = (torch.randint(0, 50, (8,), generator=generator) for _ in range(2))
    return api.StepBuffers(ids, positions, (), torch.arange(8), torch.empty(8, 4))


def test_a_graph_computes_on_the_buffers_that_it_is_run_on(backend: Any) -> None:
    weight = backend.ops.prepare_weight(GEMM.weight)
    weight.place(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), 0)

    def step(b: api.StepBuffers) -> None:
        x = torch.stack([b.token_ids_T, b.positions_T, b.positions_T], dim=1).float()
        residual = b.token_ids_T[:, None].float().expand(8, 4)
        epilogue = api.Epilogue(bias_N=x[0].sum().expand(4), residual=residual)
        backend.ops.gemm(x[b.logit_rows_R], weight, out=b.logits_RV, epilogue=epilogue)

    traced, other = buffers(1), buffers(2)
    traced.logits_RV.fill_(torch.nan)
    program = backend.compile(step, 8, traced)
    assert bool(traced.logits_RV.isnan().all()), "tracing computes nothing"
    for given in (traced, other):
        program.run(given)
        found = given.logits_RV.clone()
        step(given)
        assert torch.equal(found, given.logits_RV)


def test_a_number_that_is_read_on_the_host_can_not_be_traced(backend: Any) -> None:
    with pytest.raises(TypeError, match="a number is read on the host"):
        backend.compile(lambda b: b.token_ids_T.max().item(), 8, buffers(1))


def test_a_wrong_shape_is_found_while_tracing(backend: Any) -> None:
    def step(b: api.StepBuffers) -> None:
        backend.ops.rms_norm(b.logits_RV, torch.ones(4), out=torch.empty(8, 5), eps=0.0)

    with pytest.raises(ValueError, match=r"rms_norm writes out \[8, 4\] and was given \[8, 5\]"):
        backend.compile(step, 8, buffers(1))
