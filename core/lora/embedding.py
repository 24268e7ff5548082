"""Adapters of a token embedding: a table of low-rank rows that ids look up, then the way up to the model's width.

    ids_T, adapter_T ──► rows of the slots' tables  h [T, R]  ──► lora_gemm(h, identity, b) ──► out [T, M] +=
                         a_LVR[adapter, id]

Over ranks the table holds this rank's ids; rows of other ids get nothing here, and the embedding's sum adds them up.
"""

from __future__ import annotations

import torch

from octavo.core.backend.device import DeviceBackend
from octavo.core.backend.opset import OpSet
from octavo.core.lora.parts import LoraPart, LoraWeights, PartShape


class EmbeddingAdapters(LoraPart):
    """The slots of a token embedding. Its A is kept as rows by id, [V, R].

    Args:
        shape: of the table; its columns are the ids that this rank holds.
        scale: what the model multiplies embedded rows by; an adapter's share is multiplied too, as merged rows were.
        max_tokens: of a step.
        backend, opset, dtype, num_slots, max_rank: see LoraPart.
    """

    def __init__(
        self,
        shape: PartShape,
        backend: DeviceBackend,
        opset: OpSet,
        *,
        scale: float,
        max_tokens: int,
        dtype: torch.dtype,
        num_slots: int,
        max_rank: int,
    ) -> None:
        super().__init__(shape, backend, opset, dtype=dtype, num_slots=num_slots, max_rank=max_rank)
        self._scale = scale
        self._max_tokens = max_tokens
        self._h_TR: torch.Tensor
        self._table_LVR: torch.Tensor

    @property
    def slot_bytes(self) -> int:
        """Bytes that the slots take once they are there, the rows of a step included."""
        rows = self._num_slots * self.shape.local_inputs + self._max_tokens
        return super().slot_bytes + rows * self._max_rank * self.dtype.itemsize

    def make_ready(self) -> None:
        """See LoraPart."""
        if self.is_ready:
            return
        super().make_ready()
        rank = self._max_rank
        self._backend.from_host(torch.eye(rank, dtype=self.dtype).expand(self._num_slots, -1, -1), out=self._a_LRK)
        self._table_LVR = self._backend.empty(self._num_slots, self.shape.local_inputs, rank, dtype=self.dtype).zero_()
        self._h_TR = self._backend.empty(self._max_tokens, rank, dtype=self.dtype)

    def add_rows(self, ids_T: torch.Tensor, adapter_T: torch.Tensor, *, out: torch.Tensor) -> None:
        """out [T, M] += the adapters' share of the rows of ids; before a sum over ranks."""
        if not self.is_ready:
            return
        (start, stop), num_ids = self.shape.column_range, self.shape.local_inputs
        local_T = ids_T - start
        if num_ids != self.shape.in_features:
            is_elsewhere_T = (ids_T < start) | (ids_T >= stop)
            local_T.masked_fill_(is_elsewhere_T, 0)
            adapter_T = adapter_T.masked_fill(is_elsewhere_T, -1)
        local_T += adapter_T.clamp(min=0) * num_ids
        h_TR = torch.index_select(self._table_LVR.flatten(0, 1), 0, local_T, out=self._h_TR[: len(ids_T)])
        self.add(h_TR, adapter_T, out=out)

    @property
    def _depth(self) -> int:
        return self._max_rank

    def _put(self, index: int, weights: LoraWeights) -> None:
        super()._put(index, LoraWeights(weights.a_RK, weights.b_NR, weights.scale * self._scale))

    def _put_a(self, index: int, a_RK: torch.Tensor) -> None:
        table_VR = torch.zeros(a_RK.shape[1], self._max_rank, dtype=self.dtype)
        table_VR[:, : a_RK.shape[0]] = a_RK.T
        self._backend.from_host(table_VR, out=self._table_LVR[index])

    def _clear(self, index: int) -> None:
        self._table_LVR[index].zero_()
        self._b_LNR[index].zero_()
        self._scales_L[index].zero_()
        self._filled.discard(index)
