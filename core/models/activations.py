"""The activation buffers of a decoder step, and the views that its layers take turns with.

    first(T)     every buffer cut to the tokens of the step
    take(rows)   the same, cut to R of its tokens: what the last layer still has to do after its attention

    hidden_TM     the residual stream
    branch_TM     what a branch (attention or feed-forward) reads, and in some families what it gives back
    qkv_TN        one product; q, k and v are views of its columns
    attention_TN  what attention gives, flat; attention_THD is the same by head
    gated_TI      the feed-forward's inner activations

Shape letters: T tokens, R rows whose logits are wanted, M hidden, H query heads, K KV heads, D head dim,
I intermediate, N columns of a product.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from octavo.core.layers.context import LayerContext


@dataclass(frozen=True, slots=True)
class Activations:
    """The buffers of one model, cut to the tokens of a step by `first`, and to some of them by `take`."""

    hidden_TM: torch.Tensor
    branch_TM: torch.Tensor
    qkv_TN: torch.Tensor
    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKD: torch.Tensor
    attention_TN: torch.Tensor
    attention_THD: torch.Tensor
    gated_TI: torch.Tensor
    hidden_rows_RM: torch.Tensor
    attention_rows_RN: torch.Tensor

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
            hidden_rows_RM=workspace.claim("hidden_rows", hidden_size, dtype=dtype),
            attention_rows_RN=workspace.claim("attention_rows", num_heads * head_dim, dtype=dtype),
        )

    def first(self, num_tokens: int) -> Activations:
        """The same buffers, cut to the first `num_tokens` rows."""
        return Activations(*(getattr(self, field.name)[:num_tokens] for field in fields(self)))

    def take(self, rows_R: torch.Tensor) -> Activations:
        """Copies of the residual stream and of attention at R tokens, and buffers of R rows for all else."""
        cut = self.first(rows_R.shape[0])
        torch.index_select(self.hidden_TM, 0, rows_R, out=cut.hidden_rows_RM)
        torch.index_select(self.attention_TN, 0, rows_R, out=cut.attention_rows_RN)
        return replace(cut, hidden_TM=cut.hidden_rows_RM, attention_TN=cut.attention_rows_RN)
