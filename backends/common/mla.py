"""Latent attention on a GPU: what is launched for a call. The walk over the latents is each vendor's own kernel.

    mla_attention
      │  tile of queries    BLOCK_M rows = tokens x heads         from tuning, by the usual request
      │  grid               tiles x chunks of heads, num_splits   padded shapes alone: fit for a recording
      ├─ one split ───────► mla_attention                         writes out and lse
      └─ several ─────────► mla_attention ──► workspace ──► merge_splits

All heads share one key, so that tiles are packed as for one KV head, and steps of decode, of drafts and of whole chunks
are the same call with more rows. The workspace is the plan's, as in attention.py, and so are the rules: as many splits
as the chip needs programs; deterministic, one for every SPLIT keys, and tiles whose size a model's heads alone decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from octavo.backends.common.attention import FLOATS, FP8, AttentionPlan
from octavo.backends.common.attention_call import LOG2_E, TileGrid, in_fp32, padded
from octavo.backends.common.gpu import Gpu
from octavo.backends.common.kernels import merge
from octavo.backends.common.launch import Kernel
from octavo.backends.common.tuning import Entry
from octavo.core.backend.kv import AttentionMetadata, KVCache, KVLayout
from octavo.core.backend.ops import StepPlan
from octavo.core.backend.specs import AttentionSpec, OpSpec, Unsupported
from octavo.core.base.errors import UnsupportedOp

MAX_RANK = 512
"""Sums of a row in fp32 are kept in registers; more of them don't fit."""

MAX_ROPE = 128


@dataclass(frozen=True, slots=True)
class _Call:
    """One call's tensors. latents: [N, S, C + R]; queries: of a usual request."""

    q_latent_THC: torch.Tensor
    q_rope_THR: torch.Tensor
    latents: torch.Tensor
    meta: AttentionMetadata
    queries: int
    out: torch.Tensor
    lse: torch.Tensor | None
    softmax_scale: float

    @property
    def num_requests(self) -> int:
        return self.meta.query_start_loc.shape[0] - 1

    @property
    def most_keys(self) -> int:
        """That a request can have, from shapes alone."""
        return self.meta.block_table.shape[1] * self.meta.block_size

    @property
    def is_fp32(self) -> bool:
        return in_fp32(self.q_latent_THC.dtype, self.latents.dtype)

    @property
    def strides(self) -> tuple[int, ...]:
        """As the kernels take them: of the queries' parts, the latents, out, lse and the table."""
        return (
            *self.q_latent_THC.stride()[:2], *self.q_rope_THR.stride()[:2], *self.latents.stride()[:2],
            *self.out.stride()[:2], 0 if self.lse is None else self.lse.stride(0), self.meta.block_table.stride(0),
        )  # fmt: skip


class LatentAttentionOps:
    """`mla_attention` of one device, over a vendor's kernel."""

    def __init__(
        self, gpu: Gpu, *, kernel: Kernel, programs_per_unit: int, constants: Mapping[str, int] | None = None
    ) -> None:
        """
        Args:
            programs_per_unit: how many of the vendor's decode programs keep a unit's memory pipes full.
            constants: constexprs of the vendor's kernel besides those of all.
        """
        self._gpu = gpu
        self._kernel = kernel
        self._constants = dict(constants or {})
        self._enough_programs = programs_per_unit * gpu.chip.num_units

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when the group runs `op` at `spec`, else why not."""
        if op != "mla_attention" or not isinstance(spec, AttentionSpec):
            return Unsupported(f"no kernel for {op}")
        if spec.layout is not KVLayout.MLA or spec.num_kv_heads != 1:
            return Unsupported(
                f"latents are one key for all heads in MLA's layout, not {spec.num_kv_heads} in {spec.layout}"
            )
        if not spec.causal or spec.window is not None or spec.softcap or spec.sinks or spec.alibi:
            return Unsupported("latent attention is causal, without window, softcap, sinks and ALiBi")
        if spec.kv_scale != "none":
            return Unsupported(f"latents have no scale, not one per {spec.kv_scale}")
        return self._refused(spec.q_dtype, spec.kv_dtype, spec.v_head_dim, spec.head_dim - spec.v_head_dim)

    def mla_attention(
        self,
        q_latent_THC: torch.Tensor,
        q_rope_THR: torch.Tensor,
        kv: KVCache,
        plan: StepPlan,
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        softmax_scale: float,
    ) -> None:
        """Absorbed latent attention of ragged queries over paged latents, as the contract has it.

        plan: by this backend's `plan`, whose workspace the splits meet in.
        Raises UnsupportedOp: dtypes or sizes that supports() refused, a cache without torch memory or of other sizes
        than the queries', or a plan of another backend.
        """
        if kv.key_NSKD is None or not isinstance(plan, AttentionPlan):
            raise UnsupportedOp(
                "latent attention on a GPU takes a KV cache with torch memory and its own backend's plan"
            )
        latents = kv.key_NSKD[:, :, 0]
        call = _Call(q_latent_THC, q_rope_THR, latents, plan.meta, plan.queries, out, lse, softmax_scale)
        self._check(call)
        if q_latent_THC.shape[0] and call.num_requests:
            self._attend(call, plan.workspace)

    def _attend(self, call: _Call, workspace: torch.Tensor) -> None:
        """A slab of tiles at a time: as many as have room in the workspace, all of them where it matters."""
        tokens, heads, rank = call.q_latent_THC.shape
        entry = self._entry(call)
        block_m, split, width = entry.tile["BLOCK_M"], entry.tile["SPLIT"], padded(rank)
        grid = TileGrid.of(block_m, heads=heads, kv_heads=1, tokens=tokens, requests=call.num_requests)
        slots = workspace.numel() // (block_m * (width + 2))
        num_splits = max(1, -(-call.most_keys // split))
        if not self._gpu.deterministic:
            programs = grid.tiles * grid.programs
            num_splits = max(1, min(num_splits, self._enough_programs // programs, slots // programs))
            if num_splits == 1:
                self._launch(call, entry, grid, (None, None), 0, grid.tiles, 1)
                return
        parts = (workspace, workspace[slots * block_m * width :])
        slab = slots // (grid.programs * num_splits)
        if not slab:
            raise UnsupportedOp(
                f"mla_attention over {call.most_keys} keys in {num_splits} splits of {grid.programs} programs exceeds "
                f"the workspace of {slots}; lower max_model_len, or run without deterministic"
            )
        for first_tile in range(0, grid.tiles, slab):
            tiles = min(slab, grid.tiles - first_tile)
            self._launch(call, entry, grid, parts, first_tile, tiles, num_splits)
            self._merge(call, entry, grid, parts, first_tile, tiles, num_splits)

    def _launch(
        self,
        call: _Call,
        entry: Entry,
        grid: TileGrid,
        parts: tuple[torch.Tensor | None, torch.Tensor | None],
        first_tile: int,
        tiles: int,
        num_splits: int,
    ) -> None:
        heads, rank = call.q_latent_THC.shape[1:]
        rope, meta = call.q_rope_THR.shape[2], call.meta
        self._gpu.launch(
            self._kernel, (tiles * grid.programs, num_splits),
            call.q_latent_THC, call.q_rope_THR, call.latents, call.out, call.lse, *parts,
            meta.query_start_loc, meta.seq_lens, meta.block_table, call.num_requests, first_tile, num_splits,
            *call.strides, call.softmax_scale * LOG2_E, GROUP=heads, HEADS=grid.heads, BLOCK_SIZE=meta.block_size,
            IN_FP32=call.is_fp32, C=rank, C_PAD=padded(rank), R=rope, R_PAD=padded(rope), **self._constants,
            **entry.constants,
        )  # fmt: skip

    def _merge(
        self,
        call: _Call,
        entry: Entry,
        grid: TileGrid,
        parts: tuple[torch.Tensor, torch.Tensor],
        first_tile: int,
        tiles: int,
        num_splits: int,
    ) -> None:
        heads, rank = call.q_latent_THC.shape[1:]
        width, meta = padded(rank), call.meta
        merging = self._gpu.tuning.pick("merge-splits", width=width)
        self._gpu.launch(
            merge.merge_splits, (tiles * grid.programs, -(-width // merging.tile["WIDTH"])),
            *parts, call.out, call.lse, meta.query_start_loc, meta.seq_lens, None, None,
            call.num_requests, first_tile * grid.programs, 1, num_splits, *call.out.stride()[:2],
            0 if call.lse is None else call.lse.stride(0), 0, None, GROUP=heads, HEADS=grid.heads, PAGED=True,
            CAUSAL=True, DV=rank, DV_PAD=width, BLOCK_M=entry.tile["BLOCK_M"], SPLIT=entry.tile["SPLIT"],
            **merging.constants,
        )  # fmt: skip

    def _entry(self, call: _Call) -> Entry:
        """Launch parameters by what is multiplied, what is stored, and the rows of a usual request.

        Deterministic: by the rows of one token, which is what the plan says then, so that a model has one size of tile.
        """
        return self._gpu.tuning.pick(
            "mla-attention",
            bits=32 if call.is_fp32 else 16,
            kv_bits=8 * call.latents.dtype.itemsize,
            mode="fixed" if self._gpu.deterministic else "free",
            rows=call.q_latent_THC.shape[1] * call.queries,
        )

    # -- refusals ---------------------------------------------------------------------------------------------
    def _refused(self, q_dtype: torch.dtype, kv_dtype: torch.dtype, rank: int, rope: int) -> Unsupported | None:
        chip = self._gpu.chip
        if q_dtype not in FLOATS:
            return Unsupported(f"queries are fp32, bf16 or fp16, not {q_dtype}")
        if kv_dtype not in (*FLOATS, FP8[chip.fp8]):
            return Unsupported(f"latents are fp32, bf16, fp16 or {chip.fp8} on {chip.name}, not {kv_dtype}")
        if not (1 <= rank <= MAX_RANK and 1 <= rope <= MAX_ROPE):
            return Unsupported(f"latents up to {MAX_RANK} with a rotary part up to {MAX_ROPE}, not {rank} and {rope}")
        return None

    def _check(self, call: _Call) -> None:
        q_latent, q_rope, latents = call.q_latent_THC, call.q_rope_THR, call.latents
        rank, rope = q_latent.shape[2], q_rope.shape[2]
        refused = self._refused(q_latent.dtype, latents.dtype, rank, rope)
        if refused is not None:
            raise UnsupportedOp(refused.reason)
        if not q_latent.dtype == q_rope.dtype == call.out.dtype or latents.shape[2] != rank + rope:
            raise UnsupportedOp(
                f"latent attention takes both parts of q and out in one dtype, and latents as wide as q; here "
                f"{q_latent.dtype}, {q_rope.dtype}, out {call.out.dtype}, {latents.shape[2]} for {rank} + {rope}"
            )
