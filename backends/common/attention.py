"""PagedAttention on a GPU: what is launched for a call. The walk over the keys is each vendor's own kernel.

    plan(meta) ──► AttentionPlan        the step's metadata, its usual request, the workspace that splits meet in
    paged_attention, attention
      │  tile of queries    BLOCK_M rows = tokens x heads of one KV head      from tuning, by the usual request
      │  grid               T // tokens + B tiles, times KV heads             padded shapes alone: fit for a recording
      ├─ fills the chip ──► attention_tile                                    one program walks all keys of its tile
      └─ does not       ──► attention_split ──► workspace ──► merge_splits    num_splits programs share them

The workspace is one piece of memory for as long as the device lives. It is large enough for as many programs as a chip
runs at once, which is all that splitting is for; ops of one stream follow each other, so that all may use it.

Deterministic: every call takes the split path with tiles and splits of one size at absolute positions, merged in
ascending order. What a row's bits come from is then its own query and keys, whoever shares its batch, its tile or its
chunk. Where the splits of a step pass the workspace, programs come in slabs, one pair of launches each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.backends.common.attention_call import (
    Keys,
    Rule,
    TileGrid,
    constexprs,
    head_stride,
    in_fp32,
    padded,
)
from octavo.backends.common.gpu import Gpu
from octavo.backends.common.kernels import merge
from octavo.backends.common.launch import Kernel
from octavo.backends.common.tuning import Entry
from octavo.core.backend.kv import AttentionMetadata, KVCache, KVLayout
from octavo.core.backend.ops import StepPlan
from octavo.core.backend.specs import AttentionSpec, OpSpec, RowSpec, Unsupported
from octavo.core.base.errors import UnsupportedOp

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}

MAX_HEAD_DIM = 576
PART_FLOATS = 64 * (256 + 2)
"""Workspace of one program: 64 rows of 256 sums, m and l. Wider heads and taller tiles are cut into fewer splits."""

FIXED_ROOM = 4
"""Times as much where deterministic: all splits of one program must have room, and half a million keys have 1,000."""


FEW_QUERIES = (1, 2, 4)
MANY_QUERIES = 128
"""What `usual_queries` answers: decode, drafts, or whole chunks, for which any table has its tallest tiles."""


@dataclass(slots=True)
class AttentionPlan(StepPlan):
    """A step as this backend's attention sees it.

    A recorded step holds the tiles that were chosen while it was recorded. It is replayed for plans alone that equal
    its own in every field but `meta` (graphs.py), so that steps of one padded shape and of other `queries` have
    recordings of their own: four at the most, which is as many as are kept.

    Attributes:
        workspace: fp32, of the device; what a launch leaves in it, the next one on the stream takes.
        queries: `usual_queries` of the step; 1 where deterministic, since nothing may hang on the batch.
    """

    workspace: torch.Tensor
    queries: int


def usual_queries(meta: AttentionMetadata) -> int:
    """Queries of the requests that a step's tiles should suit, as one of FEW_QUERIES or MANY_QUERIES.

    That is the average, rounded up; or the longest request's where it has half of all tokens: single queries in tall
    tiles still wait for memory, while a chunk in low ones reads its keys once for every few tokens. Padding counts for
    nothing: a prompt alone is padded to as many requests as a step may have.
    """
    average = -(-meta.num_tokens // max(1, meta.num_requests))
    queries = meta.max_query_len if 2 * meta.max_query_len >= meta.num_tokens else average
    return next((few for few in FEW_QUERIES if queries <= few), MANY_QUERIES)


class PagedAttentionOps:
    """`plan`, `paged_attention`, `attention` and `merge_attention` of one device, over a vendor's two kernels."""

    def __init__(self, gpu: Gpu, *, tile: Kernel, split: Kernel, programs_per_unit: int) -> None:
        """programs_per_unit: how many of the vendor's decode programs keep a unit's memory pipes full."""
        self._gpu = gpu
        self._tile, self._split = tile, split
        self._enough_programs = programs_per_unit * gpu.chip.num_units
        room = self._enough_programs * (FIXED_ROOM if gpu.deterministic else 1)
        self._workspace = torch.empty(room * PART_FLOATS, dtype=torch.float32, device=gpu.device)

    # -- the contract -----------------------------------------------------------------------------------------
    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when the group runs `op` at `spec`, else why not."""
        if isinstance(spec, AttentionSpec) and op in ("paged_attention", "attention"):
            return self._refusal(spec)
        if isinstance(spec, RowSpec) and op == "merge_attention":
            return None if spec.dtype in FLOATS else Unsupported(f"parts are fp32, bf16 or fp16, not {spec.dtype}")
        return Unsupported(f"no kernel for {op}")

    def plan(self, meta: AttentionMetadata) -> AttentionPlan:
        """Nothing is computed: kernels find a tile's request from query_start_loc, so that a recording is never stale.

        Raises ValueError for metadata that is not int32 with rows in one piece.
        """
        for x in (meta.query_start_loc, meta.seq_lens, meta.block_table):
            if x.dtype != torch.int32 or x.stride(-1) != 1:
                raise ValueError(f"attention metadata is {x.dtype} with strides {x.stride()}; give contiguous int32")
        return AttentionPlan(meta, self._workspace, 1 if self._gpu.deterministic else usual_queries(meta))

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        kv: KVCache,
        plan: StepPlan,
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        causal: bool = True,
        softmax_scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
        alibi_slopes_H: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Attention of ragged queries over paged KV, as the contract has it.

        Raises UnsupportedOp: dtypes or head sizes that supports() refused, or a cache without torch memory.
        """
        if kv.key_NSKD is None or kv.value_NSKD is None:
            raise UnsupportedOp("attention on a GPU takes a KV cache with torch memory")
        meta = plan.meta
        queries = plan.queries if isinstance(plan, AttentionPlan) else usual_queries(meta)
        keys = Keys(
            kv.key_NSKD, kv.value_NSKD, meta.query_start_loc, meta.seq_lens, meta.block_table, meta.block_size,
            meta.block_table.shape[1] * meta.block_size, queries,
        )  # fmt: skip
        rule = Rule(softmax_scale, causal, window, softcap, sinks_H, alibi_slopes_H, k_scale, v_scale)
        self._attend(q_THD, keys, rule, out, lse)

    def attention(
        self,
        q_THD: torch.Tensor,
        k_SKD: torch.Tensor,
        v_SKD: torch.Tensor,
        query_start_loc: torch.Tensor,
        kv_start_loc: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        causal: bool = True,
        softmax_scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        """Attention of ragged queries over ragged contiguous K and V: the paged kernels without a table.

        Raises:
            UnsupportedOp: dtypes or head sizes that supports() refused.
            ValueError: starts that are not int32 of one length.
        """
        if not query_start_loc.dtype == kv_start_loc.dtype == torch.int32 or len(query_start_loc) != len(kv_start_loc):
            raise ValueError("query_start_loc and kv_start_loc are int32 of one length")
        queries = -(-q_THD.shape[0] // max(1, len(query_start_loc) - 1))
        keys = Keys(k_SKD, v_SKD, query_start_loc, kv_start_loc, None, 0, k_SKD.shape[0], queries)
        rule = Rule(softmax_scale, causal, window, softcap, sinks_H, None, None, None)
        self._attend(q_THD, keys, rule, out, lse)

    def merge_attention(
        self,
        out_a: torch.Tensor,
        lse_a: torch.Tensor,
        out_b: torch.Tensor,
        lse_b: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Combine attention over two disjoint sets of keys; `out` and `lse` may be inputs.

        Raises UnsupportedOp for parts that are not fp32, bf16 or fp16, or log-sum-exps that are not fp32.
        """
        if not {x.dtype for x in (out_a, out_b, out)} <= set(FLOATS) or {lse_a.dtype, lse_b.dtype} != {torch.float32}:
            raise UnsupportedOp(f"merge_attention takes fp32, bf16 or fp16 and fp32 log-sum-exps, not {out_a.dtype}")
        tokens, heads, width = out.shape
        entry = self._gpu.tuning.pick("merge-attention", width=padded(width))
        self._gpu.launch(
            merge.merge_attention, (-(-tokens * heads // entry.tile["ROWS"]),),
            out_a, lse_a, out_b, lse_b, out, lse, tokens * heads, heads,
            *out_a.stride()[:2], lse_a.stride(0), *out_b.stride()[:2], lse_b.stride(0), *out.stride()[:2],
            0 if lse is None else lse.stride(0), D=width, D_PAD=padded(width), **entry.constants,
        )  # fmt: skip

    # -- launches ---------------------------------------------------------------------------------------------
    def _attend(self, q_THD: torch.Tensor, keys: Keys, rule: Rule, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        self._check(q_THD, keys, out)
        if not q_THD.shape[0] or not keys.num_requests:
            return
        entry = self._entry("attention-split", q_THD, keys)
        grid = self._grid(entry, q_THD, keys)
        num_splits = self._num_splits(entry, grid, keys, rule, padded(out.shape[2]))
        if num_splits > 1 or self._gpu.deterministic:
            self._launch_splits(q_THD, keys, rule, out, lse, entry, grid, num_splits)
        else:
            self._launch_tiles(q_THD, keys, rule, out, lse)

    def _launch_tiles(
        self, q_THD: torch.Tensor, keys: Keys, rule: Rule, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        entry = self._entry("attention-tile", q_THD, keys)
        grid = self._grid(entry, q_THD, keys)
        self._gpu.launch(
            self._tile, (grid.tiles * grid.programs,),
            q_THD, keys.k, keys.v, out, lse, keys.query_start_loc, keys.lengths, keys.table,
            rule.sinks_H, rule.alibi_slopes_H, rule.k_scale, rule.v_scale,
            keys.num_requests, grid.tiles, keys.k.shape[-2],
            *q_THD.stride()[:2], *keys.strides, *out.stride()[:2], 0 if lse is None else lse.stride(0),
            0 if keys.table is None else keys.table.stride(0), head_stride(rule.k_scale), head_stride(rule.v_scale),
            *rule.factor_and_cap, rule.window, **constexprs(q_THD, keys, rule, grid), **entry.constants,
        )  # fmt: skip

    def _launch_splits(
        self,
        q_THD: torch.Tensor,
        keys: Keys,
        rule: Rule,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        entry: Entry,
        grid: TileGrid,
        num_splits: int,
    ) -> None:
        """A slab of programs at a time: as many as have room in the workspace; all of them unless deterministic."""
        shape, block_m, kv_heads = constexprs(q_THD, keys, rule, grid), entry.tile["BLOCK_M"], keys.k.shape[-2]
        slots = self._workspace.numel() // (block_m * (shape["DV_PAD"] + 2))
        slab = slots // num_splits
        if not slab:
            raise UnsupportedOp(
                f"deterministic attention over {keys.most_keys} keys takes {num_splits} splits, and the workspace "
                f"holds {slots}; lower max_model_len"
            )
        parts = self._workspace
        stats = self._workspace[slots * block_m * shape["DV_PAD"] :]
        merging = dict(self._gpu.tuning.pick("merge-splits", width=shape["DV_PAD"]).constants)
        merging["WIDTH"] = min(merging["WIDTH"], shape["DV_PAD"])
        for first_program in range(0, grid.tiles * grid.programs, slab):
            programs = min(slab, grid.tiles * grid.programs - first_program)
            self._gpu.launch(
                self._split, (programs, num_splits),
                q_THD, keys.k, keys.v, parts, stats, keys.query_start_loc, keys.lengths, keys.table,
                rule.alibi_slopes_H, rule.k_scale, keys.num_requests, first_program, kv_heads, num_splits,
                *q_THD.stride()[:2], *keys.strides, 0 if keys.table is None else keys.table.stride(0),
                head_stride(rule.k_scale), *rule.factor_and_cap, rule.window, **shape, **entry.constants,
            )  # fmt: skip
            self._gpu.launch(
                merge.merge_splits, (programs, -(-shape["DV_PAD"] // merging["WIDTH"])),
                parts, stats, out, lse, keys.query_start_loc, keys.lengths, rule.sinks_H, rule.v_scale,
                keys.num_requests, first_program, kv_heads, num_splits, *out.stride()[:2],
                0 if lse is None else lse.stride(0), head_stride(rule.v_scale), rule.window, GROUP=shape["GROUP"],
                HEADS=grid.heads, PAGED=keys.table is not None, CAUSAL=rule.causal, DV=shape["DV"],
                DV_PAD=shape["DV_PAD"], BLOCK_M=block_m, SPLIT=entry.tile["SPLIT"], **merging,
            )  # fmt: skip

    def _num_splits(self, entry: Entry, grid: TileGrid, keys: Keys, rule: Rule, dv_pad: int) -> int:
        """Enough for the chip; deterministic: one for every SPLIT keys that a tile may see."""
        split = entry.tile["SPLIT"]
        most_keys = keys.most_keys
        if rule.window is not None and rule.causal:
            most_keys = min(most_keys, rule.window + grid.tokens - 1 + split)  # its first key lies anywhere in a split
        pieces = max(1, -(-most_keys // split))
        if self._gpu.deterministic:
            return pieces
        programs = grid.tiles * grid.programs
        slots = self._workspace.numel() // (entry.tile["BLOCK_M"] * (dv_pad + 2))
        return max(1, min(pieces, self._enough_programs // programs, slots // programs))

    def _entry(self, kernel: str, q_THD: torch.Tensor, keys: Keys) -> Entry:
        """Launch parameters by what fits on the chip (operands, width) and by the rows of a usual request."""
        kv_heads, head_dim = keys.k.shape[-2:]
        rows = q_THD.shape[1] // kv_heads * keys.queries
        return self._gpu.tuning.pick(
            kernel,
            bits=32 if in_fp32(q_THD.dtype, keys.k.dtype) else 16,
            kv_bits=8 * keys.k.element_size(),
            width=max(padded(head_dim), padded(keys.v.shape[-1])),
            mode="fixed" if self._gpu.deterministic else "free",
            rows=0 if self._gpu.deterministic else rows,
        )

    def _grid(self, entry: Entry, q_THD: torch.Tensor, keys: Keys) -> TileGrid:
        return TileGrid.of(
            entry.tile["BLOCK_M"], heads=q_THD.shape[1], kv_heads=keys.k.shape[-2], tokens=q_THD.shape[0],
            requests=keys.num_requests,
        )  # fmt: skip

    # -- refusals ---------------------------------------------------------------------------------------------
    def _refusal(self, spec: AttentionSpec) -> Unsupported | None:
        if spec.layout not in (KVLayout.NHD, KVLayout.HND):
            return Unsupported(f"a key is a row of its block, as in NHD and HND, not {spec.layout}")
        if spec.num_heads % spec.num_kv_heads:
            return Unsupported(f"{spec.num_heads} query heads are no multiple of {spec.num_kv_heads} KV heads")
        return self._refused(spec.q_dtype, spec.kv_dtype, spec.head_dim, spec.v_head_dim)

    def _refused(
        self, q_dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, v_head_dim: int
    ) -> Unsupported | None:
        chip = self._gpu.chip
        if q_dtype not in FLOATS:
            return Unsupported(f"queries are fp32, bf16 or fp16, not {q_dtype}")
        if kv_dtype not in (*FLOATS, FP8[chip.fp8]):
            return Unsupported(f"KV is fp32, bf16, fp16 or {chip.fp8} on {chip.name}, not {kv_dtype}")
        if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= v_head_dim <= MAX_HEAD_DIM):
            return Unsupported(f"head sizes up to {MAX_HEAD_DIM}, not {head_dim} and {v_head_dim}")
        return None

    def _check(self, q_THD: torch.Tensor, keys: Keys, out: torch.Tensor) -> None:
        refused = self._refused(q_THD.dtype, keys.k.dtype, q_THD.shape[2], keys.v.shape[-1])
        if refused is not None:
            raise UnsupportedOp(refused.reason)
        if keys.v.dtype != keys.k.dtype or out.dtype != q_THD.dtype or q_THD.shape[1] % keys.k.shape[-2]:
            raise UnsupportedOp(
                f"attention takes K and V of one dtype, out in q's, and query heads in equal groups; here "
                f"K {keys.k.dtype}, V {keys.v.dtype}, q {q_THD.dtype}, out {out.dtype}, {q_THD.shape[1]} over "
                f"{keys.k.shape[-2]} heads"
            )
