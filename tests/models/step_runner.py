"""A model driven by hand: block tables, slots and plans as an engine would make them, without one.

Blocks are dealt from a shuffled list, one table per sequence and KV group. Blocks that left a group's window are given
back at once and may serve another sequence, so that a kernel that still reads them is found out.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from octavo.core.backend.comm import SingleRank
from octavo.core.backend.device import Capabilities, MemoryInfo, PlainProgram, StepBuffers
from octavo.core.backend.kv import AttentionMetadata, KVCache, KVCacheSpec, KVLayout, KVPool
from octavo.core.backend.opset import OpSet
from octavo.core.engine.kv_calibration import calibrate
from octavo.core.engine.runner import RunnerMemory
from octavo.core.layers.kv_groups import KVGroup, group_layers, layer_places, num_pools, pool_block_bytes
from octavo.core.load.checkpoint import Checkpoint
from octavo.core.load.stream import load_weights
from octavo.core.lora.slots import AdapterSlots
from octavo.core.models.base import Model
from octavo.core.models.registry import build_model
from octavo.core.parallel.shard import Shard
from octavo.core.quant.formats import PLAIN, WeightFormats


class NoOps:
    """A backend's ops without any: everything runs on the reference."""


class ReferenceBackend:
    """Host memory and the reference ops. New memory holds NaN, so that reading what nobody wrote shows."""

    def __init__(self) -> None:
        self.name = "reference"
        self.device = torch.device("cpu")
        self.ops: Any = NoOps()
        self.capabilities = Capabilities(
            device_name="reference",
            arch="any",
            activation_dtype={torch.float32: torch.float32, torch.bfloat16: torch.float32},
            default_dtype=torch.float32,
            kv_dtypes=(torch.float32, torch.bfloat16),
            total_memory_bytes=1 << 30,
        )

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(1 << 30, 1 << 30)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        fill = float("nan") if dtype.is_floating_point else -(1 << 30)
        return torch.full(shape, fill, dtype=dtype)

    def from_host(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            return x.clone()
        out[: len(x)].copy_(x)
        return out[: len(x)]

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def allocate_kv_pool(self, num_blocks: int, block_bytes: int) -> KVPool:
        # Finite garbage, since masked positions are multiplied by 0.
        noise = torch.randn(num_blocks * block_bytes // 4, generator=torch.Generator().manual_seed(0)) * 100
        return KVPool(num_blocks, block_bytes, noise.view(torch.uint8).view(num_blocks, block_bytes))

    def kv_view(self, pool: KVPool, spec: KVCacheSpec) -> KVCache:
        used = pool.storage[:, : spec.block_bytes].view(spec.dtype)
        heads = used.unflatten(1, (spec.block_size, spec.num_kv_heads, spec.head_dim + spec.v_head_dim))
        key, value = heads.split((spec.head_dim, spec.v_head_dim), dim=-1)
        return KVCache(spec, KVLayout.NHD, pool.num_blocks, key, value)

    def compile(self, step: Any, bucket: int | None, buffers: StepBuffers | None) -> PlainProgram:
        return PlainProgram(step)

    def record_event(self) -> Any:
        raise NotImplementedError

    def synchronize(self) -> None:
        return

    def export_memory(self, pool: KVPool) -> None:
        return None

    def communicator(self, rank: int, world_size: int, address: str) -> SingleRank:
        return SingleRank()

    def close(self) -> None:
        return


class StepRunner:
    """Runs steps of any mixture of sequences.

    Args:
        model: loaded.
        backend, opset: where it was built.
        num_blocks: of the one free list.
        seed: of the shuffle.

    Attributes:
        slot_of: adapter slot of each sequence that has one; None: the model was built without adapters.
        tells_fresh: whether plans say how many sequences have no keys but the step's.
    """

    def __init__(self, model: Model, backend: Any, opset: OpSet, *, num_blocks: int = 400, seed: int = 0) -> None:
        self.groups = group_layers(model.kv_specs())
        self.vocab_size = model.vocab_size
        self._model = model
        self._backend = backend
        self._opset = opset
        pools = [
            backend.allocate_kv_pool(num_blocks, pool_block_bytes(self.groups)) for _ in range(num_pools(self.groups))
        ]
        places = layer_places(self.groups)
        caches = [backend.kv_view(pools[pool], spec) for (_, pool), spec in zip(places, model.kv_specs(), strict=True)]
        model.bind_kv(caches, [group for group, _ in places])
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._tables: dict[str, list[list[int]]] = {}
        self._freed: dict[tuple[str, int], int] = {}
        self._lengths: dict[str, int] = {}
        self._offsets: dict[str, int] = {}
        self.slot_of: dict[str, int] | None = None
        self.tells_fresh = True

    def expect(self, name: str, num_tokens: int) -> None:
        """Say how many tokens a sequence will compute in all, before its first step; it decides its rotary rows."""
        switch = self._model.config.rotary_switch_tokens
        self._offsets[name] = switch if switch is not None and num_tokens > switch else 0

    def step(self, batch: Sequence[tuple[str, Sequence[int]]], *, keep: int | None = None) -> list[torch.Tensor]:
        """Compute the next tokens of each sequence; logits at each of them, or at the last `keep` of each."""
        starts = [self._lengths.get(name, 0) for name, _ in batch]
        token_ids = [token for _, tokens in batch for token in tokens]
        positions = [
            self._offsets.get(name, 0) + start + i
            for start, (name, tokens) in zip(starts, batch, strict=True)
            for i in range(len(tokens))
        ]
        plans = tuple(
            self._opset.plan(self._metadata(index, group, batch, starts)) for index, group in enumerate(self.groups)
        )
        counts = [len(tokens) for _, tokens in batch]
        kept = [count if keep is None else min(count, keep) for count in counts]
        ends = itertools.accumulate(counts)
        rows = [row for end, rows in zip(ends, kept, strict=True) for row in range(end - rows, end)]
        buffers = StepBuffers(
            token_ids_T=self._device_tensor(token_ids, torch.int64),
            positions_T=self._device_tensor(positions, torch.int64),
            plans=plans,
            logit_rows_R=self._device_tensor(rows, torch.int64),
            logits_RV=self._backend.empty(len(rows), self._model.vocab_size, dtype=torch.float32),
            adapter_T=self._adapter_T(batch),
        )
        self._model.forward(buffers)
        for name, tokens in batch:
            self._lengths[name] = self._lengths.get(name, 0) + len(tokens)
        logits = self._backend.to_host(buffers.logits_RV)
        return list(logits.split(kept))

    def prompt(
        self, name: str, token_ids: Sequence[int], chunk: int | None = None, *, keep: int | None = None
    ) -> torch.Tensor:
        """A sequence alone, in chunks; logits at every position, or at the last `keep` of each chunk."""
        chunk = chunk or len(token_ids)
        if name not in self._offsets:
            self.expect(name, len(token_ids))
        parts = [token_ids[start : start + chunk] for start in range(0, len(token_ids), chunk)]
        return torch.cat([self.step([(name, part)], keep=keep)[0] for part in parts])

    def greedy(self, name: str, token_ids: Sequence[int], num_tokens: int, chunk: int | None = None) -> list[int]:
        """A prompt's most likely continuation."""
        self.expect(name, len(token_ids) + num_tokens - 1)
        logits = self.prompt(name, token_ids, chunk)
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < num_tokens:
            tokens.append(int(self.step([(name, tokens[-1:])])[0][-1].argmax()))
        return tokens

    def finish(self, name: str) -> None:
        """Give back a sequence's blocks."""
        for index, table in enumerate(self._tables.pop(name)):
            self._free[:0] = table[self._freed.pop((name, index), 0) :]
        del self._lengths[name]
        self._offsets.pop(name, None)

    def _adapter_T(self, batch: Sequence[tuple[str, Sequence[int]]]) -> torch.Tensor | None:
        if self.slot_of is None:
            return None
        return self._device_tensor([self.slot_of.get(name, -1) for name, tokens in batch for _ in tokens], torch.int32)

    def _metadata(
        self, index: int, group: KVGroup, batch: Sequence[tuple[str, Sequence[int]]], starts: Sequence[int]
    ) -> AttentionMetadata:
        spec = group.spec
        tables, slots, query_start = [], [], [0]
        for (name, tokens), start in zip(batch, starts, strict=True):
            table = self._tables.setdefault(name, [[] for _ in self.groups])[index]
            end = start + len(tokens)
            self._give_back(name, index, spec, start)
            while len(table) * spec.block_size < end:
                table.append(self._free.pop())
            slots += [table[p // spec.block_size] * spec.block_size + p % spec.block_size for p in range(start, end)]
            query_start.append(query_start[-1] + len(tokens))
            tables.append(list(table))
        width = max(len(table) for table in tables)
        seq_lens = [start + len(tokens) for start, (_, tokens) in zip(starts, batch, strict=True)]
        return AttentionMetadata(
            num_requests=len(batch),
            num_tokens=query_start[-1],
            max_query_len=max(len(tokens) for _, tokens in batch),
            max_seq_len=max(seq_lens),
            query_start_loc=self._device_tensor(query_start, torch.int32),
            seq_lens=self._device_tensor(seq_lens, torch.int32),
            block_table=self._device_tensor([table + [0] * (width - len(table)) for table in tables], torch.int32),
            slot_mapping=self._device_tensor(slots, torch.int64),
            block_size=spec.block_size,
            num_fresh=sum(start == 0 and len(tokens) > 1 for start, (_, tokens) in zip(starts, batch, strict=True))
            if self.tells_fresh
            else 0,
        )

    def _give_back(self, name: str, index: int, spec: KVCacheSpec, start: int) -> None:
        """Free the blocks that no query from `start` on can see; their table entries name block 0 from now on."""
        if spec.window is None:
            return
        table, first_visible = self._tables[name][index], max(0, start - spec.window + 1) // spec.block_size
        for block in range(self._freed.get((name, index), 0), min(first_visible, len(table))):
            self._free.insert(0, table[block])
            table[block] = 0
        self._freed[name, index] = max(self._freed.get((name, index), 0), min(first_visible, len(table)))

    def _device_tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = self._backend.from_host(torch.tensor(list(values), dtype=dtype))
        return tensor


def load_model(
    checkpoint: Checkpoint,
    backend: Any,
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 4,
    max_num_batched_tokens: int = 256,
    max_model_len: int = 256,
    has_head: bool = True,
    shard: Shard | None = None,
    expert_parallel: bool = False,
    adapters: Callable[[OpSet], AdapterSlots] | None = None,
    formats: WeightFormats = PLAIN,
    kv_dtype: torch.dtype = torch.float32,
) -> tuple[Model, OpSet]:
    """Build a model from an open checkpoint, load its weights, and calibrate a cache that needs it."""
    opset = OpSet(backend)
    model = build_model(
        checkpoint.config,
        backend=backend,
        opset=opset,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        has_head=has_head,
        shard=shard,
        expert_parallel=expert_parallel,
        adapters=None if adapters is None else adapters(opset),
        formats=formats,
    )
    targets = model.weight_targets(norm_weights_include_one=checkpoint.norm_weights_include_one)
    load_weights(checkpoint, targets, progress=False)
    memory = RunnerMemory.allocate(backend, max_num_batched_tokens, 1, model.vocab_size)
    calibrate(
        model,
        backend,
        opset,
        memory,
        kv_dtype=torch.float32,
        max_step_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    return model, opset


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the spread of what was expected; NaN counts as infinite."""
    error = ((found - expected).abs().max() / expected.std()).item()
    return error if error == error else float("inf")
