"""Latent attention in its plain form: keys and values of every head, made of this step's latents.

    latent ─ W_UK ─► k_nope [H, P] ┐
    k_rope, the same for all heads ┴─► keys [H, P + R]      latent ─ W_UV ─► values [H, V]
    attention(q, keys, values), each request over its own rows

Shape letters: T tokens, H heads on this rank, C kv_lora_rank, P nope_head_dim, R rope_head_dim, D = P + R,
V v_head_dim, N columns of a product.
"""

from __future__ import annotations

import torch

from octavo.core.backend.kv import KVLayout
from octavo.core.backend.specs import AttentionSpec, GemmSpec, WeightSpec
from octavo.core.layers.context import LayerContext
from octavo.core.models.decoder.config import MlaConfig


class PlainForm:
    """The two products of a layer and its attention over what they give.

    Args:
        context: the model's.
        mla: sizes.
        heads: of this rank.
    """

    def __init__(self, context: LayerContext, mla: MlaConfig, heads: int) -> None:
        self._heads, self._nope_dim, self._v_dim = heads, mla.nope_head_dim, mla.v_head_dim
        dtype, rank = context.activation_dtype, mla.kv_lora_rank
        product = {part: GemmSpec(WeightSpec(heads * width, rank, context.dtype), dtype, dtype)
                   for part, width in (("keys", self._nope_dim), ("values", self._v_dim))}  # fmt: skip
        self._keys, self._values = (context.opset.prepare_weight(spec) for spec in product.values())
        self._make_keys, self._make_values = (context.opset.bind("gemm", spec) for spec in product.values())
        head_dim = self._nope_dim + mla.rope_head_dim
        self._attend = context.opset.bind(
            "attention",
            AttentionSpec(
                num_heads=heads,
                num_kv_heads=heads,
                head_dim=head_dim,
                v_head_dim=self._v_dim,
                q_dtype=dtype,
                kv_dtype=dtype,
                block_size=1,  # keys and values lie in one piece
                layout=KVLayout.NHD,
            ),
        )

        def claim(name: str, width: int) -> torch.Tensor:
            return context.workspace.claim(f"mla_{name}", heads * width, dtype=dtype)

        self._nope_TN = claim("k_nope", self._nope_dim)
        self._k_TN, self._v_TN = claim("k", head_dim), claim("v", self._v_dim)

    def place(self, head: int, key_PC: torch.Tensor, value_VC: torch.Tensor) -> None:
        """Take in one head's halves of kv_b_proj."""
        self._keys.place(key_PC, head * self._nope_dim)
        self._values.place(value_VC, head * self._v_dim)

    def __call__(
        self,
        q_THD: torch.Tensor,
        latent_TC: torch.Tensor,
        k_rope_TR: torch.Tensor,
        start_loc: torch.Tensor,
        *,
        out: torch.Tensor,
        softmax_scale: float,
    ) -> None:
        """out [T, H, V] = causal attention of requests whose keys are their own rows, from start_loc [B + 1] on."""
        tokens = len(q_THD)
        nope_TN, v_TN = self._nope_TN[:tokens], self._v_TN[:tokens]
        self._make_keys(latent_TC, self._keys, out=nope_TN)
        self._make_values(latent_TC, self._values, out=v_TN)
        k_THD = self._k_TN[:tokens].unflatten(1, (self._heads, -1))
        k_THD[..., : self._nope_dim].copy_(nope_TN.unflatten(1, (self._heads, -1)))
        k_THD[..., self._nope_dim :].copy_(k_rope_TR[:, None])
        self._attend(
            q_THD,
            k_THD,
            v_TN.unflatten(1, (self._heads, -1)),
            start_loc,
            start_loc,
            out=out,
            softmax_scale=softmax_scale,
        )
