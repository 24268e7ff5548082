"""A model on a backend, driven step by step: logits at every position of one sequence, whole or in chunks.

    backend ──► model, weights, KV pools ──► logits(token ids, chunk) [T, V] on the host

Pools are dealt backwards from the highest block, one table per KV group, so that no two groups share a block and no
table is the identity. Steps are padded as the engine pads them where a device takes only a few shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from octavo.conformance.levels.tiny import MAX_LENGTH
from octavo.core.backend import AttentionMetadata, DeviceBackend, OpSet, StepBuffers
from octavo.core.engine.batch import GroupInputs, StepInputs
from octavo.core.engine.buckets import padded_tokens, step_shapes
from octavo.core.layers.kv_groups import group_layers, layer_places, num_pools, pool_block_bytes
from octavo.core.load.checkpoint import Checkpoint
from octavo.core.load.stream import load_weights
from octavo.core.models.registry import build_model

BLOCK_SIZE = 16
_BLOCKS = MAX_LENGTH // BLOCK_SIZE


class Stepper:
    """One tiny model, loaded.

    Args:
        opset: of the backend; the model binds its ops there.
        dtype: how its weights are stored.
        kv_dtype: of its cache.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: DeviceBackend,
        opset: OpSet,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> None:
        self._backend = backend
        self._opset = opset
        buckets = () if backend.capabilities.dynamic_shapes else backend.capabilities.token_buckets
        self._most_tokens = min(buckets[-1], MAX_LENGTH) if buckets else MAX_LENGTH
        self._model = build_model(
            checkpoint.config,
            backend=backend,
            opset=self._opset,
            dtype=dtype,
            kv_dtype=kv_dtype,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=padded_tokens(buckets, self._most_tokens),
            max_model_len=MAX_LENGTH,
        )
        load_weights(checkpoint, self._model.weight_targets(), progress=False)
        self._groups = group_layers(self._model.kv_specs())
        self._num_blocks = 1 + _BLOCKS * len(self._groups)
        block_bytes = pool_block_bytes(self._groups)
        pools = [backend.allocate_kv_pool(self._num_blocks, block_bytes) for _ in range(num_pools(self._groups))]
        places = layer_places(self._groups)
        caches = [backend.kv_view(pools[pool], self._groups[group].spec) for group, pool in places]
        self._model.bind_kv(caches, [group for group, _ in places])
        self._shapes = step_shapes(
            backend.capabilities, max_num_seqs=1, max_model_len=MAX_LENGTH, block_sizes=[BLOCK_SIZE] * len(self._groups)
        )
        self._opset.verify()

    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """fp32 [T, V] at every position, computed in chunks of so many tokens; None: in the fewest steps."""
        step = min(chunk or len(token_ids), self._most_tokens)
        parts = [self._step(token_ids[start : start + step], start).clone() for start in range(0, len(token_ids), step)]
        return torch.cat(parts)

    def _step(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        inputs = self._shapes.pad(self._inputs(token_ids, start))
        num_tokens = len(inputs.token_ids_T)
        num_rows = self._shapes.logit_rows(len(token_ids), num_tokens)
        rows = [*range(len(token_ids)), *[0] * (num_rows - len(token_ids))]
        to_device = self._backend.from_host
        buffers = StepBuffers(
            token_ids_T=to_device(torch.from_numpy(inputs.token_ids_T)),
            positions_T=to_device(torch.from_numpy(inputs.positions_T)),
            plans=tuple(self._opset.plan(self._metadata(inputs, group, len(token_ids))) for group in inputs.groups),
            logit_rows_R=to_device(torch.tensor(rows)),
            logits_RV=self._backend.empty(num_rows, self._model.vocab_size, dtype=torch.float32),
        )
        shape = (None, None) if self._shapes.are_dynamic else (num_tokens, buffers)
        self._backend.compile(self._model.forward, *shape).run(buffers)
        self._backend.synchronize()
        return self._backend.to_host(buffers.logits_RV)[: len(token_ids)]

    def _inputs(self, token_ids: Sequence[int], start: int) -> StepInputs:
        end = start + len(token_ids)
        positions_T = np.arange(start, end)
        groups = []
        for index in range(len(self._groups)):
            table = np.arange(_BLOCKS, dtype=np.int32)[::-1] + np.int32(1 + index * _BLOCKS)
            slots_T = table[positions_T // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions_T % BLOCK_SIZE
            groups.append(GroupInputs(np.ascontiguousarray(table[None, : -(-end // BLOCK_SIZE)]), slots_T))
        return StepInputs(
            request_ids=("0",),
            num_scheduled_B=np.array([len(token_ids)]),
            num_known_B=np.array([end]),
            token_ids_T=np.array(token_ids, dtype=np.int64),
            positions_T=positions_T,
            query_start_loc=np.array([0, len(token_ids)], dtype=np.int32),
            seq_lens_B=np.array([end], dtype=np.int32),
            groups=tuple(groups),
        )

    def _metadata(self, inputs: StepInputs, group: GroupInputs, num_tokens: int) -> AttentionMetadata:
        to_device = self._backend.from_host
        return AttentionMetadata(
            num_requests=1,
            num_tokens=num_tokens,
            max_query_len=num_tokens,
            max_seq_len=int(inputs.seq_lens_B[0]),
            query_start_loc=to_device(torch.from_numpy(inputs.query_start_loc)),
            seq_lens=to_device(torch.from_numpy(inputs.seq_lens_B)),
            block_table=to_device(torch.from_numpy(group.block_table)),
            slot_mapping=to_device(torch.from_numpy(group.slot_mapping)),
            block_size=BLOCK_SIZE,
        )
