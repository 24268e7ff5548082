"""The activation buffers of a decoder step, and the views that its layers take turns with.

    hidden_TM     the residual stream
    branch_TM     what a branch (attention or feed-forward) reads, and in some families what it gives back
    qkv_TN        one product; q, k and v are views of its columns
    attention_TN  what attention gives, flat; attention_THD is the same by head
    gated_TI      the feed-forward's inner activations

Shape letters: T tokens, M hidden, H query heads, K KV heads, D head dim, I intermediate, N columns of a product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.core.layers.context import LayerContext


@dataclass(frozen=True, slots=True)
class Activations:
    """The buffers of one model, cut to the tokens of a step by `first`."""

    hidden_TM: torch.Tensor
    branch_TM: torch.Tensor
    qkv_TN: torch.Tensor
    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKD: torch.Tensor
    attention_TN: torch.Tensor
    attention_THD: torch.Tensor
    gated_TI: torch.Tensor

    @classmethod
    def claim(
        cls,
        context: LayerContext,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> Activations:
        """Claim the buffers for the largest step."""
        workspace, dtype = context.workspace, context.activation_dtype
        qkv_TN = workspace.claim("qkv", (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
        heads = qkv_TN.unflatten(1, (-1, head_dim))
        q_THD, k_TKD, v_TKD = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        attention_TN = workspace.claim("attention", num_heads * head_dim, dtype=dtype)
        return cls(
            hidden_TM=workspace.claim("hidden", hidden_size, dtype=dtype),
            branch_TM=workspace.claim("branch", hidden_size, dtype=dtype),
            qkv_TN=qkv_TN,
            q_THD=q_THD,
            k_TKD=k_TKD,
            v_TKD=v_TKD,
            attention_TN=attention_TN,
            attention_THD=attention_TN.unflatten(1, (num_heads, head_dim)),
            gated_TI=workspace.claim("gated", intermediate_size, dtype=dtype),
        )

    def first(self, num_tokens: int) -> Activations:
        """The same buffers, cut to the first `num_tokens` rows."""
        return Activations(
            hidden_TM=self.hidden_TM[:num_tokens],
            branch_TM=self.branch_TM[:num_tokens],
            qkv_TN=self.qkv_TN[:num_tokens],
            q_THD=self.q_THD[:num_tokens],
            k_TKD=self.k_TKD[:num_tokens],
            v_TKD=self.v_TKD[:num_tokens],
            attention_TN=self.attention_TN[:num_tokens],
            attention_THD=self.attention_THD[:num_tokens],
            gated_TI=self.gated_TI[:num_tokens],
        )
