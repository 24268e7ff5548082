"""The activation buffers that the layers of a decoder hand on, and the views that they take turns with.

    first(T)     every buffer cut to the tokens of the step
    take(rows)   the same, cut to R of its tokens: what the last layer still has to do after its mixer

    hidden_TM     the residual stream
    branch_TM     what a branch (mixer or feed-forward) reads, and in some orders what it gives back
    mixed_TN      what the mixer gives, flat, before the product that ends its branch
    adapter_T     each token's adapter; None where the engine runs without adapters

What only one module needs it claims itself. Shape letters: T tokens, R rows whose logits are wanted, M hidden,
N columns of a product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from octavo.core.layers.context import LayerContext


@dataclass(frozen=True, slots=True)
class Activations:
    """The buffers of one model, cut to the tokens of a step by `first`, and to some of them by `take`."""

    hidden_TM: torch.Tensor
    branch_TM: torch.Tensor
    mixed_TN: torch.Tensor
    hidden_rows_RM: torch.Tensor
    mixed_rows_RN: torch.Tensor
    adapter_T: torch.Tensor | None = None

    @classmethod
    def claim(cls, context: LayerContext, *, hidden_size: int, mixed_size: int) -> Activations:
        """Claim the buffers for the largest step."""
        workspace, dtype = context.workspace, context.activation_dtype
        return cls(
            hidden_TM=workspace.claim("hidden", hidden_size, dtype=dtype),
            branch_TM=workspace.claim("branch", hidden_size, dtype=dtype),
            mixed_TN=workspace.claim("mixed", mixed_size, dtype=dtype),
            hidden_rows_RM=workspace.claim("hidden_rows", hidden_size, dtype=dtype),
            mixed_rows_RN=workspace.claim("mixed_rows", mixed_size, dtype=dtype),
        )

    def first(self, num_tokens: int, adapter_T: torch.Tensor | None = None) -> Activations:
        """The same buffers, cut to the first `num_tokens` rows."""
        return Activations(
            self.hidden_TM[:num_tokens],
            self.branch_TM[:num_tokens],
            self.mixed_TN[:num_tokens],
            self.hidden_rows_RM[:num_tokens],
            self.mixed_rows_RN[:num_tokens],
            adapter_T,
        )

    def take(self, rows_R: torch.Tensor) -> Activations:
        """Copies of the residual stream and of the mixer's result at R tokens, and buffers of R rows for all else."""
        adapter_R = None if self.adapter_T is None else self.adapter_T.index_select(0, rows_R)
        cut = self.first(rows_R.shape[0], adapter_R)
        torch.index_select(self.hidden_TM, 0, rows_R, out=cut.hidden_rows_RM)
        torch.index_select(self.mixed_TN, 0, rows_R, out=cut.mixed_rows_RN)
        return replace(cut, hidden_TM=cut.hidden_rows_RM, mixed_TN=cut.mixed_rows_RN)
