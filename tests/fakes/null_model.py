"""The Null model: the next token is a function of the last token and its position, and of nothing else.

    logits[r] = 0 everywhere, 10 at next_token(token, position)

With monkeypatch.setitem(FAMILIES, NULL_ARCHITECTURE, Family("null", NullConfig.read, NullModel)) the engine builds
it from a config.json with {"architectures": ["NullForCausalLM"]}; it has no weights. Each step it checks what the
runner hands to a model: every request's positions are consecutive and end at its KV length, and every token's slot is
the one that its block table gives, or -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.core.backend import AttentionMetadata, KVCache, KVCacheSpec, StepBuffers
from octavo.core.models.base import ModelConfig

NULL_ARCHITECTURE = "NullForCausalLM"
PEAK = 10.0


def next_token(token: int, position: int, vocab_size: int) -> int:
    """What follows `token` at `position`."""
    return (token * 31 + position * 17 + 7) % vocab_size


def continuation(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The greedy tokens that the model generates after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens) - 1, vocab_size))
    return tokens[len(prompt) :]


@dataclass(frozen=True, slots=True)
class NullConfig:
    """Facts of a null model. windows: one per layer, None for full attention."""

    vocab_size: int = 97
    max_position: int = 4096
    hidden_size: int = 8
    windows: tuple[int | None, ...] = (None, None)
    rotary_switch_tokens: int | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> NullConfig:
        known = {k: v for k, v in config.items() if k in ("vocab_size", "max_position", "hidden_size")}
        windows = config.get("windows", (None, None))
        return cls(**known, windows=tuple(windows))

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    def kv_specs(self, kv_dtype: torch.dtype, block_size: int, shard: object = None) -> tuple[KVCacheSpec, ...]:
        return tuple(KVCacheSpec(1, 4, 4, kv_dtype, block_size, window) for window in self.windows)


class NullModel:
    """A Model (core/models/base.py) without weights."""

    workspace_bytes = 0

    def __init__(
        self,
        config: NullConfig | None = None,
        context: object = None,
        kv_dtype: torch.dtype = torch.float32,
        block_size: int = 16,
    ) -> None:
        self.config: ModelConfig = config or NullConfig()
        self.vocab_size = self.config.vocab_size
        self.max_position = self.config.max_position
        self._kv_specs = self.config.kv_specs(kv_dtype, block_size)

    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        return self._kv_specs

    def kv_scales(self) -> tuple[None, ...]:
        """None: a cache is never read."""
        return ()

    def weight_targets(self, *, norm_weights_include_one: bool = False) -> dict[str, Any]:
        return {}

    def bind_kv(self, caches: Sequence[KVCache], group_of_layer: Sequence[int]) -> None:
        assert len(caches) == len(group_of_layer) == len(self._kv_specs)

    def forward(self, buffers: StepBuffers) -> None:
        for plan in buffers.plans:
            check_metadata(plan.meta, buffers.positions_T)
        rows_R = buffers.logit_rows_R
        next_R = (buffers.token_ids_T[rows_R] * 31 + buffers.positions_T[rows_R] * 17 + 7) % self.vocab_size
        buffers.logits_RV.zero_().scatter_(1, next_R[:, None], PEAK)


def check_metadata(meta: AttentionMetadata, positions_T: torch.Tensor) -> None:
    """Positions, lengths, block table and slots of a step agree with each other; what pads it writes nothing."""
    starts = meta.query_start_loc.tolist()
    assert starts[0] == 0
    assert starts[meta.num_requests] == meta.num_tokens <= len(meta.slot_mapping) == len(positions_T)
    assert bool((meta.slot_mapping[meta.num_tokens :] == -1).all())
    assert set(starts[meta.num_requests :]) == {meta.num_tokens}
    assert len(meta.seq_lens) == len(meta.block_table) == len(starts) - 1
    assert not bool(meta.seq_lens[meta.num_requests :].any())
    written: set[int] = set()
    for b in range(meta.num_requests):
        rows = slice(starts[b], starts[b + 1])
        length = int(meta.seq_lens[b])
        positions = torch.arange(length - (rows.stop - rows.start), length)
        assert torch.equal(positions_T[rows], positions), f"request {b}: positions do not end at its KV length {length}"
        blocks = meta.block_table[b, positions // meta.block_size].to(torch.int64)
        slots = blocks * meta.block_size + positions % meta.block_size
        given = meta.slot_mapping[rows]
        assert torch.equal(given, torch.where(given < 0, given, slots)), f"request {b}: slots are not its block table's"
        kept = [slot for slot in given.tolist() if slot >= 0]
        assert written.isdisjoint(kept), f"request {b}: writes a slot that another request writes"
        written.update(kept)
