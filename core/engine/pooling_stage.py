"""From a step's hidden rows to vectors: what a pooling engine makes of its model's rows.

    rows that count ── to the host ── gathered per request, over its chunks ── the pooler's layers (on the device)
                    ── cut and normalised, or activated ── fp32 bytes, little-endian: what crosses to the front

The stage owns what has been gathered of each live request; a preemption throws that away and the request begins again.
Only the ModelRunner talks to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.core.backend.device import DeviceBackend
from octavo.core.base.pooling import PoolingJob
from octavo.core.engine.batch import StepInputs
from octavo.core.engine.runner import WantedRows
from octavo.core.layers.pool_head import PoolHead
from octavo.core.pool.finish import finished
from octavo.core.pool.gather import GatheredRows
from octavo.core.pool.pooler import Pooler
from octavo.core.sched.output import ModelRunnerOutput, NewRequest

NOT_FINITE = "the model's hidden rows are NaN or infinite"


@dataclass(frozen=True, slots=True)
class GatheredChunk:
    """How many of a step's rows one request asked for, and whether they are its last."""

    request_id: str
    num_rows: int
    ends_text: bool


@dataclass(frozen=True, slots=True)
class _Gathering:
    job: PoolingJob
    rows: GatheredRows


class PoolingStage:
    """An OutputStage that makes vectors.

    Args:
        backend: brings rows to the host.
        pooler: of the model.
        head: the pooler's layers, where it has any.
    """

    def __init__(self, backend: DeviceBackend, pooler: Pooler, head: PoolHead | None) -> None:
        self._backend = backend
        self._pooler = pooler
        self._head = head
        self._gathering: dict[str, _Gathering] = {}

    def add(self, new: NewRequest) -> None:
        """See OutputStage."""
        assert new.pooling is not None
        rows = GatheredRows(self._pooler.kind, new.num_prompt_tokens, new.pooling.first_token)
        self._gathering[new.request_id] = _Gathering(new.pooling, rows)

    def remove(self, request_id: str) -> None:
        """See OutputStage."""
        self._gathering.pop(request_id, None)

    def wanted(self, inputs: StepInputs) -> WantedRows:
        """See OutputStage: request after request, its tokens that count."""
        token_rows: list[int] = []
        chunks: list[GatheredChunk] = []
        starts, lengths = inputs.query_start_loc.tolist(), inputs.seq_lens_B.tolist()
        for request_id, start, length, count, known in zip(
            inputs.request_ids, starts, lengths, inputs.num_scheduled_B.tolist(), inputs.num_known_B.tolist(),
            strict=False,
        ):  # fmt: skip
            first = length - count
            counted = self._gathering[request_id].rows.wanted(first, length)
            token_rows.extend(start + position - first for position in counted)
            chunks.append(GatheredChunk(request_id, len(counted), ends_text=length == known))
        return WantedRows(tuple(token_rows), tuple(chunks))

    def finish(self, work: tuple[GatheredChunk, ...], rows_RV: torch.Tensor) -> ModelRunnerOutput:
        """See OutputStage."""
        if len(rows_RV):
            rows_RV = self._backend.to_host(rows_RV)
        row = 0
        for chunk in work:
            self._gathering[chunk.request_id].rows.add(rows_RV[row : row + chunk.num_rows])
            row += chunk.num_rows
        ended = [chunk.request_id for chunk in work if chunk.ends_text]
        return self._vectors(ended) if ended else ModelRunnerOutput()

    def _vectors(self, request_ids: Sequence[str]) -> ModelRunnerOutput:
        vectors_BN = torch.stack([self._gathering[request_id].rows.vector() for request_id in request_ids])
        if self._head is not None:
            vectors_BN = self._head(vectors_BN)
        pooled, failed = {}, {}
        for request_id, vector_N in zip(request_ids, vectors_BN, strict=True):
            if bool(vector_N.isfinite().all()):
                vector_N = finished(vector_N, self._pooler, self._gathering[request_id].job)
                pooled[request_id] = vector_N.contiguous().numpy().astype("<f4", copy=False).tobytes()
            else:
                failed[request_id] = NOT_FINITE
        return ModelRunnerOutput(pooled=pooled, failed=failed)
