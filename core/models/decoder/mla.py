"""Multi-head latent attention: the cache holds one latent per token, shared by all heads.

    x ─ (q_a ─ norm ─ q_b | q) ─► q [H, nope + rope]           x ─ kv_a ─► latent [C] ─ norm,  k_rope [R]
                                                                rotary(q_rope, k_rope); (latent, k_rope) into the cache
    absorbed   q_nope[h] · W_UK[h] ─► q_latent [H, C];  mla_attention(q_latent, q_rope) ─► [H, C] · W_UV[h] ─► [H, v]
    plain      latent · W_UK[h], latent · W_UV[h] ─► keys (with k_rope), values;  attention(q, keys, values) ─► [H, v]
    [H, v] ─ o ─► out

W_UK and W_UV are kv_b_proj's two halves of each head. Absorbed, they multiply queries and results, and heads attend
over the cache as it is; plain, they multiply the latents of requests that have no others (mla_runs.py). Products per
head are a grouped product whose segments are the heads.

Source: DeepSeek-AI 2024 (DeepSeek-V2, 2.1). Shape letters: T tokens, H heads on this rank, C kv_lora_rank,
R rope_head_dim, P nope_head_dim, V v_head_dim, M hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from octavo.core.backend.kv import KVCache, KVCacheSpec
from octavo.core.backend.ops import PackedWeight, StepPlan
from octavo.core.backend.quant import QuantizedTensor
from octavo.core.backend.specs import GroupedGemmSpec, RowSpec, WeightSpec
from octavo.core.base.errors import CheckpointError
from octavo.core.layers.cache_specs import attention_spec, cache_spec
from octavo.core.layers.context import LayerContext
from octavo.core.layers.linear import Linear, Part
from octavo.core.layers.norm import RMSNorm
from octavo.core.layers.rope import RotaryTables
from octavo.core.load.stream import WeightTarget
from octavo.core.models.activations import Activations
from octavo.core.models.decoder.config import DecoderConfig, MlaConfig
from octavo.core.models.decoder.mla_plain import PlainForm
from octavo.core.models.decoder.mla_runs import runs_of


class LatentAttention:
    """A layer's attention over latents, whose cache has no scales.

    Args:
        context, config: the model's; config.mla is there.
        index: of the layer.
        tables: rotary tables, shared by the model's layers.
        kv_spec: of the layer's cache.
        residual: the last product adds the residual stream.
    """

    def __init__(
        self,
        context: LayerContext,
        config: DecoderConfig,
        index: int,
        tables: RotaryTables,
        kv_spec: KVCacheSpec,
        *,
        residual: bool,
    ) -> None:
        mla, rope = config.mla, config.ropes[index]
        assert mla is not None
        if rope is None:
            raise CheckpointError("latent attention needs rotary positions", field="rope_theta")
        self._mla, self._context, self._kv_spec = mla, context, kv_spec
        self._kept_heads = context.shard.split(config.num_heads, "num_attention_heads")
        self._heads = self._kept_heads[1] - self._kept_heads[0]
        self._all_heads = config.num_heads
        self._softmax_scale = config.softmax_scale
        self._cos_sin_PR = tables.get(rope)
        self._interleaved = config.interleaved_rope
        self._prefix = f"{config.names.layer.format(index)}.self_attn"
        self._build_inputs(context, config, mla)
        self._o = context.layer(Linear)(
            context,
            [Part(f"{config.names.layer.format(index)}.{config.names.o}", config.hidden_size)],
            config.num_heads * mla.v_head_dim,
            bias=config.out_bias,
            residual=residual,
            columns=(self._kept_heads[0] * mla.v_head_dim, self._kept_heads[1] * mla.v_head_dim),
        )
        self._absorb_k, self._up_k = self._per_head(mla.kv_lora_rank, mla.nope_head_dim)
        self._absorb_v, self._up_v = self._per_head(mla.v_head_dim, mla.kv_lora_rank)
        # Where steps are recorded in fixed shapes nobody is told who is fresh.
        self._plain = PlainForm(context, mla, self._heads) if context.backend.capabilities.dynamic_shapes else None
        row = RowSpec(
            mla.rope_head_dim,
            context.activation_dtype,
            "interleaved" if self._interleaved else "",
            mla.rope_head_dim,
        )
        self._rotary = context.bind(LatentAttention, self, "rotary", row)
        self._claim(context, mla)
        self._kv: KVCache
        self._group: int

    kv_scales = None

    @staticmethod
    def mixed_size(context: LayerContext, config: DecoderConfig) -> int:
        """Columns of step.mixed_TN."""
        assert config.mla is not None
        start, stop = context.shard.split(config.num_heads, "num_attention_heads")
        return (stop - start) * config.mla.v_head_dim

    def mix(self, x_TM: torch.Tensor, step: Activations, positions_T: torch.Tensor, plans: Sequence[StepPlan]) -> None:
        """Write the tokens' latents and fill step.mixed_TN."""
        mla, plan, tokens = self._mla, plans[self._group], len(x_TM)
        q_THD, latent_TC, k_rope_TR = self._inputs(x_TM, step.adapter_T)
        q_nope_THP, q_rope_THR = q_THD.split((mla.nope_head_dim, mla.rope_head_dim), dim=2)
        k_rope_T1R = k_rope_TR[:, None]
        self._rotary(
            q_rope_THR,
            k_rope_T1R,
            positions_T,
            self._cos_sin_PR,
            out_q=q_rope_THR,
            out_k=k_rope_T1R,
            interleaved=self._interleaved,
        )
        self._write(latent_TC, k_rope_TR, self._kv, plan.meta.slot_mapping)
        out_THV = step.mixed_TN.unflatten(1, (self._heads, mla.v_head_dim))
        plain = self._plain if self._keeps_all_bits else None
        if plain is None:
            self._absorbed(q_nope_THP, q_rope_THR, plan, out_THV)
            return
        for run in runs_of(plan, tokens, self._context.opset.plan):
            rows = run.tokens
            if run.plan is not None:
                self._absorbed(q_nope_THP[rows], q_rope_THR[rows], run.plan, out_THV[rows])
            else:
                plain(
                    q_THD[rows], latent_TC[rows], k_rope_TR[rows], run.query_start_loc, out=out_THV[rows],
                    softmax_scale=self._softmax_scale,
                )  # fmt: skip

    def _absorbed(
        self, q_nope_THP: torch.Tensor, q_rope_THR: torch.Tensor, plan: StepPlan, out_THV: torch.Tensor
    ) -> None:
        """Attention over the cache. Rows of the products are sorted by head: head h has rows h * T .. h * T + T - 1."""
        tokens = len(q_nope_THP)
        starts = torch.arange(self._heads + 1, device=out_THV.device, dtype=torch.int32) * tokens
        q_nope = self._q_nope[: self._heads * tokens]
        q_nope.view(self._heads, tokens, -1).copy_(q_nope_THP.transpose(0, 1))
        q_latent = self._q_latent[: self._heads * tokens]
        self._absorb_k(q_nope, self._up_k, starts, out=q_latent)
        mixed = self._mixed[: self._heads * tokens]
        self._attend(
            q_latent.view(self._heads, tokens, -1).transpose(0, 1),
            q_rope_THR,
            self._kv,
            plan,
            out=mixed.view(self._heads, tokens, -1).transpose(0, 1),
            softmax_scale=self._softmax_scale,
        )
        values = self._values[: self._heads * tokens]
        self._absorb_v(mixed, self._up_v, starts, out=values)
        out_THV.copy_(values.view(self._heads, tokens, -1).transpose(0, 1))

    def project(self, step: Activations, *, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """out [T, M] = the branch that ends with step.mixed_TN."""
        self._o(step.mixed_TN, out=out, residual=residual, adapter_T=step.adapter_T)

    def bind_kv(self, cache: KVCache, group: int) -> None:
        """Take the layer's cache and its group's index, and bind the ops for its layout."""
        self._kv, self._group = cache, group
        dtype = self._context.activation_dtype
        # From a cache that rounds, keys of all requests are read, so that how a prompt is cut does not show.
        self._keeps_all_bits = cache.spec.dtype == dtype
        write = cache_spec(cache, dtype)
        attend = attention_spec(cache, self._heads, dtype, v_head_dim=self._mla.kv_lora_rank)
        self._write = self._context.bind(LatentAttention, self, "write_mla", write)
        self._attend = self._context.bind(LatentAttention, self, "mla_attention", attend)

    def targets(self, *, norm_weights_include_one: bool) -> dict[str, WeightTarget]:
        """The checkpoint tensors that fill it."""
        del norm_weights_include_one  # no family has both
        mla = self._mla
        targets = self._o.targets()
        for product in self._products:
            targets |= product.targets()
        for norm in self._norms:
            targets |= norm.targets()
        shape = (self._all_heads * (mla.nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
        return targets | {f"{self._prefix}.kv_b_proj.weight": WeightTarget(shape, self._place_kv_b)}

    def _inputs(
        self, x_TM: torch.Tensor, adapter_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries by head, the normed latent, and the shared rotary key."""
        mla, tokens = self._mla, len(x_TM)
        q_TN, first_TN = self._q_TN[:tokens], self._first_TN[:tokens]
        self._first(x_TM, out=first_TN, adapter_T=adapter_T)
        q_width = first_TN.shape[1] - mla.kv_lora_rank - mla.rope_head_dim
        q_in_TN, latent_TC, k_rope_TR = first_TN.split((q_width, mla.kv_lora_rank, mla.rope_head_dim), dim=1)
        if self._second is not None:
            self._q_norm(q_in_TN, out=q_in_TN)
            self._second(q_in_TN, out=q_TN, adapter_T=adapter_T)
            q_in_TN = q_TN
        self._latent_norm(latent_TC, out=latent_TC)
        return q_in_TN.unflatten(1, (self._heads, -1)), latent_TC, k_rope_TR

    def _build_inputs(self, context: LayerContext, config: DecoderConfig, mla: MlaConfig) -> None:
        head = mla.nope_head_dim + mla.rope_head_dim
        kept = (self._kept_heads[0] * head, self._kept_heads[1] * head)
        latent = Part(f"{self._prefix}.kv_a_proj_with_mqa", mla.kv_lora_rank + mla.rope_head_dim)
        linear, norm = context.layer(Linear), context.layer(RMSNorm)
        self._second = None
        self._latent_norm = norm(context, f"{self._prefix}.kv_a_layernorm", mla.kv_lora_rank, mla.latent_norm_eps)
        self._norms = [self._latent_norm]
        if mla.q_lora_rank is None:
            first = Part(f"{self._prefix}.q_proj", config.num_heads * head, (kept,))
        else:
            first = Part(f"{self._prefix}.q_a_proj", mla.q_lora_rank)
            self._q_norm = norm(context, f"{self._prefix}.q_a_layernorm", mla.q_lora_rank, mla.latent_norm_eps)
            self._norms.append(self._q_norm)
            second = Part(f"{self._prefix}.q_b_proj", config.num_heads * head, (kept,))
            self._second = linear(context, [second], mla.q_lora_rank)
        self._first = linear(context, [first, latent], config.hidden_size, bias=config.qkv_bias)
        self._products = [self._first] if self._second is None else [self._first, self._second]
        self._first_rows = first.kept_rows + latent.rows
        self._q_rows = kept[1] - kept[0]

    def _per_head(self, rows: int, columns: int) -> tuple[Callable[..., Any], list[PackedWeight]]:
        """A product of every head with a weight [rows, columns] of its own."""
        context = self._context
        spec = GroupedGemmSpec(
            weight=WeightSpec(rows, columns, context.dtype),
            num_experts=self._heads,
            x_dtype=context.activation_dtype,
            out_dtype=context.activation_dtype,
        )
        weights = [context.opset.prepare_weight(spec) for _ in range(self._heads)]
        return context.bind(LatentAttention, self, "grouped_gemm", spec), weights

    def _claim(self, context: LayerContext, mla: MlaConfig) -> None:
        def claim(name: str, width: int) -> torch.Tensor:
            return context.workspace.claim(f"mla_{name}", width, dtype=context.activation_dtype)

        def by_head(name: str, width: int) -> torch.Tensor:
            return claim(name, self._heads * width).view(-1, width)

        self._first_TN = claim("first", self._first_rows)
        self._q_TN = claim("q", self._q_rows)
        self._q_nope = by_head("q_nope", mla.nope_head_dim)
        self._q_latent = by_head("q_latent", mla.kv_lora_rank)
        self._mixed = by_head("mixed", mla.kv_lora_rank)
        self._values = by_head("values", mla.v_head_dim)

    def _place_kv_b(self, weight_NC: torch.Tensor | QuantizedTensor) -> None:
        """Each head's key half, transposed, and its value half."""
        name = f"{self._prefix}.kv_b_proj"
        plain_NC = self._context.formats.linear([name]).as_plain().part(name, weight_NC)
        assert isinstance(plain_NC, torch.Tensor)
        mla, first = self._mla, self._kept_heads[0]
        by_head = plain_NC.unflatten(0, (self._all_heads, mla.nope_head_dim + mla.v_head_dim))
        for head in range(self._heads):
            key_PC, value_VC = by_head[first + head].split((mla.nope_head_dim, mla.v_head_dim))
            self._up_k[head].place(key_PC.T.contiguous(), 0)
            self._up_v[head].place(value_VC.contiguous(), 0)
            if self._plain is not None:
                self._plain.place(head, key_PC.contiguous(), value_VC.contiguous())
