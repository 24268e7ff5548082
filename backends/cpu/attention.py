"""Attention on the CPU: the calls of the native kernels, and what of a step's metadata they take.

    plan(meta) ──> CpuStepPlan.batch   pointers, counts and strides of one step and KV group, looked up once
    paged_attention(q, kv, plan) ──> octavo_paged_attention   cuts the work itself, from the lengths it finds there
                                                              (native/attention_plan.h), so no plan can be stale

A row's bits depend on its query, its keys and the arguments, not on the batch, the chunking or the threads: tiles of 64
keys and splits of 512 lie at absolute positions. Only CpuOps builds AttentionOps.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from octavo.backends.cpu.native import NativeContext
from octavo.core.backend.kv import AttentionMetadata, KVCache, KVLayout
from octavo.core.backend.ops import StepPlan
from octavo.core.backend.specs import AttentionSpec, OpSpec, RowSpec, Unsupported
from octavo.core.base.errors import UnsupportedOp

MAX_HEAD_DIM = 576
"""kMaxHeadDim in native/attention_plan.h."""

LANES = 16
"""kLanes there: how many keys of an HDN block are scored at once."""

KV_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}
"""OctavoDtype."""

NO_SCALES = (0, 0, 0, 0)
"""Pointer and step, of K and of V."""


class PagedAttentionArgs(ctypes.Structure):
    """Mirror of PagedAttentionArgs in native/attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ctx", "q", "q_tail", "k", "v", "out", "lse", "sinks", "alibi_slopes")),
        *((name, ctypes.c_void_p) for name in ("k_scale", "v_scale")),
        *((name, ctypes.c_void_p) for name in ("query_start", "seq_lens", "block_table", "kv_start")),
        *((name, ctypes.c_int64) for name in ("num_requests", "table_width", "table_stride", "block_size")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "v_head_dim")),
        *(
            (name, ctypes.c_int64)
            for name in ("q_stride_t", "q_stride_h", "tail_dim", "tail_stride_t", "tail_stride_h")
        ),
        *((name, ctypes.c_int64) for name in ("out_stride_t", "out_stride_h")),
        ("lse_stride_t", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("k_stride_n", "k_stride_s", "k_stride_h", "k_stride_d")),
        *((name, ctypes.c_int64) for name in ("v_stride_n", "v_stride_s", "v_stride_h")),
        *((name, ctypes.c_int64) for name in ("k_scale_step", "v_scale_step", "window")),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("kv_dtype", ctypes.c_int32),
        ("causal", ctypes.c_int32),
    )


class MergeAttentionArgs(ctypes.Structure):
    """Mirror of MergeAttentionArgs in native/attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ctx", "a", "lse_a", "b", "lse_b", "out", "lse")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("a_stride_t", "a_stride_h", "b_stride_t", "b_stride_h")),
        *((name, ctypes.c_int64) for name in ("out_stride_t", "out_stride_h")),
        *((name, ctypes.c_int64) for name in ("lse_a_stride_t", "lse_b_stride_t", "lse_stride_t")),
    )


@dataclass(slots=True)
class CpuStepPlan(StepPlan):
    """A step as one KV group's kernel calls see it.

    Attributes:
        batch: the fields query_start .. block_size of PagedAttentionArgs; pointers into `meta`'s tensors.
    """

    batch: tuple[int, ...]


class AttentionOps:
    """The attention ops of one engine's context: `plan`, attention over pages, rows and latents, `merge_attention`."""

    def __init__(self, context: NativeContext) -> None:
        self._context = context  # keeps its threads and scratch memory alive
        self._handle = context.handle
        self._paged_attention = context.kernel("paged_attention", PagedAttentionArgs)
        self._merge_attention = context.kernel("merge_attention", MergeAttentionArgs)

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when `op` runs natively at `spec`, else why not."""
        if isinstance(spec, AttentionSpec) and op in ("paged_attention", "attention", "mla_attention"):
            return _supports_attention(spec, latent=op == "mla_attention")
        if isinstance(spec, RowSpec) and op == "merge_attention":
            return None if spec.dtype == torch.float32 else Unsupported("attention outputs are fp32")
        return Unsupported(f"no native {op}")

    def plan(self, meta: AttentionMetadata) -> CpuStepPlan:
        """Look up once what every layer of the group passes on.

        Raises:
            ValueError: metadata that is not contiguous int32.
        """
        table = meta.block_table
        for x in (meta.query_start_loc, meta.seq_lens, table):
            if x.dtype != torch.int32 or x.stride(-1) != 1:
                raise ValueError(f"attention metadata is {x.dtype} with strides {x.stride()}; give contiguous int32")
        batch = (
            meta.query_start_loc.data_ptr(), meta.seq_lens.data_ptr(), table.data_ptr(), 0,
            meta.num_requests, table.shape[1], table.stride(0), meta.block_size,
        )  # fmt: skip
        return CpuStepPlan(meta, batch)

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

        Raises:
            UnsupportedOp: dtypes or scales that supports() refused, or a plan that is not this backend's.
        """
        if not isinstance(plan, CpuStepPlan) or kv.key_NSKD is None or kv.value_NSKD is None:
            raise UnsupportedOp("the CPU attention takes a plan and a KV cache of its own backend")
        scales = (*kv_scale(k_scale, kv.key_NSKD), *kv_scale(v_scale, kv.value_NSKD))
        self._attend(
            q_THD, kv.key_NSKD, kv.value_NSKD, plan.batch, out=out, lse=lse, causal=causal,
            softmax_scale=softmax_scale, window=window, softcap=softcap, sinks_H=sinks_H,
            alibi_slopes_H=alibi_slopes_H, scales=scales,
        )  # fmt: skip

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
        """Absorbed latent attention: one KV head whose keys are latents and rotary keys, and whose values the latents.

        Raises:
            UnsupportedOp: dtypes that supports() refused, or a plan that is not this backend's.
        """
        if not isinstance(plan, CpuStepPlan) or kv.key_NSKD is None:
            raise UnsupportedOp("the CPU attention takes a plan and a KV cache of its own backend")
        values_NSKC = kv.key_NSKD[..., : q_latent_THC.shape[2]]
        self._attend(
            q_latent_THC, kv.key_NSKD, values_NSKC, plan.batch, out=out, lse=lse, softmax_scale=softmax_scale,
            q_tail_THR=q_rope_THR,
        )  # fmt: skip

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
        """Attention of ragged queries over ragged contiguous K and V: the paged kernel over one long block.

        Raises:
            UnsupportedOp: dtypes that supports() refused.
            ValueError: starts that are not contiguous int32 of one length.
        """
        if not query_start_loc.dtype == kv_start_loc.dtype == torch.int32 or len(query_start_loc) != len(kv_start_loc):
            raise ValueError("query_start_loc and kv_start_loc are int32 of one length")
        batch = (
            query_start_loc.data_ptr(), 0, 0, kv_start_loc.data_ptr(), len(query_start_loc) - 1, 0, 0, 1,
        )  # fmt: skip
        self._attend(
            q_THD, k_SKD[None], v_SKD[None], batch, out=out, lse=lse, causal=causal, softmax_scale=softmax_scale,
            window=window, softcap=softcap, sinks_H=sinks_H,
        )  # fmt: skip

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

        Raises:
            UnsupportedOp: anything but fp32.
        """
        if not out_a.dtype == out_b.dtype == out.dtype == lse_a.dtype == lse_b.dtype == torch.float32:
            raise UnsupportedOp("the CPU merge_attention takes fp32")
        tokens, heads, width = out.shape
        self._merge_attention(
            self._handle, out_a.data_ptr(), lse_a.data_ptr(), out_b.data_ptr(), lse_b.data_ptr(), out.data_ptr(),
            0 if lse is None else lse.data_ptr(), tokens, heads, width, *out_a.stride()[:2], *out_b.stride()[:2],
            *out.stride()[:2], lse_a.stride(0), lse_b.stride(0), 0 if lse is None else lse.stride(0),
        )  # fmt: skip

    def _attend(
        self,
        q_THD: torch.Tensor,
        key_NSKD: torch.Tensor,
        value_NSKD: torch.Tensor,
        batch: tuple[int, ...],
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        softmax_scale: float,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
        alibi_slopes_H: torch.Tensor | None = None,
        scales: tuple[int, int, int, int] = NO_SCALES,
        q_tail_THR: torch.Tensor | None = None,
    ) -> None:
        kv_dtype = KV_DTYPE_CODES.get(key_NSKD.dtype)
        if kv_dtype is None or value_NSKD.dtype != key_NSKD.dtype:
            raise UnsupportedOp(f"the CPU attention reads KV in fp32, bf16, fp16, int8 or e4m3fn, not {key_NSKD.dtype}")
        if not q_THD.dtype == out.dtype == torch.float32:
            raise UnsupportedOp(f"the CPU attention computes in fp32; q is {q_THD.dtype}, out is {out.dtype}")
        k_scale, k_scale_step, v_scale, v_scale_step = scales
        self._paged_attention(
            self._handle, q_THD.data_ptr(), _fp32_pointer(q_tail_THR), key_NSKD.data_ptr(), value_NSKD.data_ptr(),
            out.data_ptr(), 0 if lse is None else lse.data_ptr(), _fp32_pointer(sinks_H),
            _fp32_pointer(alibi_slopes_H), k_scale, v_scale, *batch, q_THD.shape[1], key_NSKD.shape[2],
            key_NSKD.shape[3], value_NSKD.shape[3], *q_THD.stride()[:2],
            *((0, 0, 0) if q_tail_THR is None else (q_tail_THR.shape[2], *q_tail_THR.stride()[:2])),
            *out.stride()[:2], 0 if lse is None else lse.stride(0), *key_NSKD.stride(), *value_NSKD.stride()[:3],
            k_scale_step, v_scale_step, window or 0, softmax_scale, softcap or 0.0, kv_dtype, causal,
        )  # fmt: skip


def kv_scale(scale: torch.Tensor | None, cache_NSKD: torch.Tensor) -> tuple[int, int]:
    """Pointer and step of a scale for the heads of a cache: one for all, or one each. (0, 0) without one.

    Raises:
        UnsupportedOp: anything but fp32 of 1 or K contiguous values.
    """
    if scale is None:
        return 0, 0
    count = scale.numel()
    if scale.dtype != torch.float32 or not scale.is_contiguous() or count not in (1, cache_NSKD.shape[2]):
        raise UnsupportedOp(f"the CPU takes KV scales of 1 or {cache_NSKD.shape[2]} contiguous fp32 values")
    return scale.data_ptr(), int(count > 1)


def _fp32_pointer(x: torch.Tensor | None) -> int:
    if x is None:
        return 0
    if x.dtype != torch.float32:
        raise UnsupportedOp(f"the CPU attention takes queries, sinks and slopes in fp32, not {x.dtype}")
    return x.data_ptr()


def _supports_attention(spec: AttentionSpec, *, latent: bool) -> Unsupported | None:
    if spec.q_dtype != torch.float32:
        return Unsupported(f"queries are fp32, not {spec.q_dtype}")
    if spec.kv_dtype not in KV_DTYPE_CODES:
        return Unsupported(f"KV is fp32, bf16, fp16, int8 or e4m3fn, not {spec.kv_dtype}")
    if (spec.layout is KVLayout.MLA) is not latent:
        return Unsupported(f"{'latents' if latent else 'keys and values'} lie otherwise than in {spec.layout.name}")
    if spec.layout is KVLayout.HDN and spec.block_size % LANES:
        return Unsupported(f"keys in lanes need blocks of a multiple of {LANES} tokens, not {spec.block_size}")
    if not 1 <= spec.head_dim <= MAX_HEAD_DIM or not 1 <= spec.v_head_dim <= MAX_HEAD_DIM:
        return Unsupported(f"head sizes up to {MAX_HEAD_DIM}, not {spec.head_dim} and {spec.v_head_dim}")
    if spec.num_heads % spec.num_kv_heads:
        return Unsupported(f"{spec.num_heads} query heads are no multiple of {spec.num_kv_heads} KV heads")
    return None
