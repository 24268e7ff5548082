"""Acme's own operations: the product and paged attention, and the norm as a layer of its own; the rest falls back.

AcmeWeight   [N / TILE, K, TILE]: a tile holds TILE output features of every input, so that a product streams it
attention    keys in tiles of whole blocks, an online softmax over the tiles (Milakov & Gimelshein 2018)
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import octavo.core.backend as api
from octavo_acme.memory import QUEUE, allocate, launch

TILE = 32  # output features of a weight tile
TILE_KEYS = 128  # keys of an attention tile, rounded to whole blocks
FLOATS = (torch.float32, torch.bfloat16)


class AcmeWeight:
    def __init__(self, spec: api.WeightSpec) -> None:
        self.spec = spec
        self.tiles = allocate(-(-spec.out_features // TILE), spec.in_features, TILE, dtype=spec.dtype)
        self.nbytes = self.tiles.nbytes

    def place(self, part_NK: Any, row_offset: int) -> None:
        QUEUE.wait()  # loading is no place to be clever
        rows = torch.arange(row_offset, row_offset + part_NK.shape[0])
        self.tiles.raw[rows // TILE, :, rows % TILE] = part_NK.to(self.spec.dtype)

    def rows(self, ids_T: Tensor, *, out: Tensor) -> None:
        launch(lambda tiles, ids, out: out.copy_(tiles[ids // TILE, :, ids % TILE]), self.tiles, ids_T, out)

    def dense(self) -> Tensor:
        return self.tiles.permute(0, 2, 1).flatten(0, 1)[: self.spec.out_features].to(torch.float32)


def multiply(x_TK: Tensor, tiles: Tensor, bias_N: Tensor | None, out_TN: Tensor) -> None:
    tiles_TN = torch.matmul(x_TK.float(), tiles.float()).permute(1, 0, 2).flatten(1)[:, : out_TN.shape[1]]
    out_TN.copy_(tiles_TN if bias_N is None else tiles_TN + bias_N)


def attend(q_THD: Tensor, kv: Any, starts: Tensor, lengths: Tensor, tables: Tensor, out: Tensor, rule: Any) -> None:
    """Every request of a step; `starts` has one entry more than there are requests."""
    lse = rule.pop("lse", None)
    for b, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        if start < end:
            outputs = out[start:end], None if lse is None else lse[start:end]
            attend_one(q_THD[start:end].float(), *kv, tables[b].long(), int(lengths[b]), *outputs, **rule)


def attend_one(
    q_QHD: Tensor, key_NSKD: Tensor, value_NSKD: Tensor, ids: Tensor, length: int, out: Tensor, lse: Tensor | None, *,
    softmax_scale: float, causal: bool = True, window: int | None = None, softcap: float | None = None,
    sinks_H: Tensor | None = None, alibi_slopes_H: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    S, num_kv_heads = key_NSKD.shape[1:3]
    rows_Q = torch.arange(length - len(q_QHD), length)[:, None]
    first = 0 if window is None else max(0, length - len(q_QHD) - window + 1)
    q_KGQD = q_QHD.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    top = torch.full((*q_KGQD.shape[:3], 1), -torch.inf)
    total, result = torch.zeros_like(top), torch.zeros(*q_KGQD.shape[:3], value_NSKD.shape[3])
    step = max(1, TILE_KEYS // S)
    for block in range(first // S, -(-length // S), step):
        # What lies before the window or behind the last token may be anything: it is not even read.
        span = slice(max(first - block * S, 0), min(step * S, length - block * S))
        blocks = ids[block : min(block + step, -(-length // S))]
        k_LKD, v_LKD = (x[blocks].flatten(0, 1)[span].float() for x in (key_NSKD, value_NSKD))
        k_LKD = k_LKD if k_scale is None else k_LKD * k_scale.view(-1, 1)
        v_LKD = v_LKD if v_scale is None else v_LKD * v_scale.view(-1, 1)
        keys_L = torch.arange(block * S + span.start, block * S + span.stop)
        scores = torch.einsum("kgqd,lkd->kgql", q_KGQD, k_LKD) * softmax_scale
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        if alibi_slopes_H is not None:
            scores = scores + alibi_slopes_H.float().view(num_kv_heads, -1, 1, 1) * (keys_L - rows_Q)
        seen = keys_L <= rows_Q if causal else torch.ones(len(q_QHD), len(keys_L), dtype=torch.bool)
        seen = seen & (keys_L > rows_Q - window) if window is not None else seen
        scores = scores.masked_fill(~seen, -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = new_top.masked_fill(new_top == -torch.inf, 0.0)
        weights, fade = (scores - base).exp(), (top - base).exp()
        total = total * fade + weights.sum(-1, keepdim=True)
        result = result * fade + torch.einsum("kgql,lkd->kgqd", weights, v_LKD)
        top = new_top
    if sinks_H is not None:
        total = total + (sinks_H.float().view(num_kv_heads, -1, 1, 1) - top).exp()
    empty = top == -torch.inf  # a row that sees no key gives 0 and log-sum-exp -inf, sinks or not
    out.copy_((result / total).masked_fill(empty, 0.0).permute(2, 0, 1, 3).flatten(1, 2))
    if lse is not None:
        lse.copy_((top + total.log()).masked_fill(empty, -torch.inf).squeeze(-1).permute(2, 0, 1).flatten(1))


def normalise(x: Tensor, weight_M: Tensor, out: Tensor, residual: Tensor | None, eps: float) -> None:
    wide = (x if residual is None else residual.add_(x)).float()
    out.copy_(wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight_M)


def override_norm(core: type) -> type:
    """Octavo's RMSNorm -> one that is a queued kernel, where the reference op would wait; it loads as Octavo's does."""

    class AcmeRMSNorm(core):
        def __call__(self, x: Tensor, *, out: Tensor, residual: Tensor | None = None) -> None:
            launch(normalise, x, self.weight_M, out, residual, self.eps)

    return AcmeRMSNorm


class AcmeOps:
    """The ops that acme has; an op that is not here is one that it has not."""

    def supports(self, op: str, spec: api.OpSpec) -> api.Unsupported | None:
        if isinstance(spec, api.GemmSpec):
            # Norms, gates, residuals and the rest are put round the product by Octavo, piece by piece.
            fused = spec.norm or spec.residual or spec.gate or spec.quantize or spec.argmax
            known = {spec.x_dtype, spec.out_dtype, spec.weight.dtype} <= set(FLOATS) and spec.weight.scheme is None
            return None if known and not fused else api.Unsupported("acme multiplies fp32 and bf16, adding a bias")
        if isinstance(spec, api.AttentionSpec) and {spec.q_dtype, spec.kv_dtype} <= set(FLOATS):
            return None
        return api.Unsupported(f"acme has no kernel for {op} of these types")

    def plan(self, meta: api.AttentionMetadata) -> api.StepPlan:
        return api.StepPlan(meta)

    def prepare_weight(self, spec: api.WeightSpec) -> AcmeWeight:
        return AcmeWeight(spec)

    def gemm(
        self,
        x_TK: Tensor,
        w: Any,
        *,
        out: Tensor,
        prologue: api.NormPrologue | None = None,
        epilogue: api.Epilogue | None = None,
    ) -> None:
        epilogue = epilogue or api.Epilogue()
        if prologue is not None or replace(epilogue, bias_N=None) != api.Epilogue():
            raise api.UnsupportedOp("acme's product adds a bias and nothing else")  # as supports() said
        launch(multiply, x_TK, w.tiles, epilogue.bias_N, out)

    def paged_attention(self, q_THD: Tensor, kv: api.KVCache, plan: api.StepPlan, *, out: Tensor, **rule: Any) -> None:
        meta = plan.meta
        starts = meta.query_start_loc[: meta.num_requests + 1]
        launch(attend, q_THD, (kv.key_NSKD, kv.value_NSKD), starts, meta.seq_lens, meta.block_table, out, rule)
