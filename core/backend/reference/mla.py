"""Multi-head latent attention over a cache of compressed latents.

Shape letters: T tokens, H heads, C kv_lora_rank, R qk_rope_head_dim.

    one slot: [ latent c, C elements | rotary key, R elements ]      shared by all heads

Absorbed form: the up-projections of K and V are folded into the query and the output, so a score is
q_latent·c + q_rope·k_rope and the result is a mean of latents. Source: DeepSeek-AI 2024 (DeepSeek-V2).
"""

from __future__ import annotations

import torch

from octavo.core.backend.kv import KVCache
from octavo.core.backend.ops import StepPlan
from octavo.core.backend.reference.attention import TILE_ROWS, Rule, attend, paged_keys, spans
from octavo.core.backend.reference.cache import store, views
from octavo.core.backend.reference.numeric import accumulator, widened


def write_mla(latent_TC: torch.Tensor, k_rope_TR: torch.Tensor, kv: KVCache, slot_mapping_T: torch.Tensor) -> None:
    key_NSKD, _ = views(kv)
    store(key_NSKD, torch.cat((latent_TC, k_rope_TR), dim=-1)[:, None, :], slot_mapping_T, None)


def mla_attention(
    q_latent_THC: torch.Tensor,
    q_rope_THR: torch.Tensor,
    kv: KVCache,
    plan: StepPlan,
    *,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    softmax_scale: float,
) -> None:
    key_NSKD, _ = views(kv)
    rank = q_latent_THC.shape[-1]
    acc = accumulator(q_latent_THC, key_NSKD)
    q_THD = torch.cat((q_latent_THC, q_rope_THR), dim=-1)
    rule = Rule(softmax_scale)
    for b, start, end, length in spans(plan.meta):
        for row in range(start, end, TILE_ROWS):
            tile = slice(row, min(row + TILE_ROWS, end))
            position = length - (end - row)
            _, stop = rule.keys(position, tile, length)
            k_LKD = widened(paged_keys(key_NSKD, plan.meta.block_table[b], 0, stop), acc)
            part, part_lse = attend(q_THD[tile], k_LKD, k_LKD[..., :rank], rule, first_row=position, first_key=0)
            out[tile].copy_(part)
            if lse is not None:
                lse[tile].copy_(part_lse)
