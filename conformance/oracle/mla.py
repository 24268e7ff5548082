"""Multi-head latent attention, absorbed, in float64: attention with one KV head [latent | rotary] and V = latent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.conformance.oracle.attention import Attended, Rule, attend


def mla_attend(
    q_latent_THC: torch.Tensor,
    q_rope_THR: torch.Tensor,
    latents: Sequence[torch.Tensor],
    query_lens: Sequence[int],
    softmax_scale: float,
) -> Attended:
    """latents[b] [L, C + R]: what the cache holds of request b."""
    rank = q_latent_THC.shape[-1]
    q_THD = torch.cat((q_latent_THC.double(), q_rope_THR.double()), dim=-1)
    keys = [x[:, None, :] for x in latents]
    return attend(q_THD, keys, [k[..., :rank] for k in keys], query_lens, Rule(softmax_scale))
