"""The KV cache on the CPU: writes of new tokens, with or without their rotary embedding, and moves of whole blocks.

    write_kv, rope_write_kv ──────────────────> octavo_write_kv      token by token, rounded to nearest even
    copy_blocks, gather_blocks, scatter_blocks ──> octavo_move_blocks   slot by slot, moves in order

A call whose slots, positions or block ids lie outside is refused as a whole, before a byte is written. Only CpuOps
builds CacheOps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from octavo.backends.cpu.attention import KV_DTYPE_CODES, MAX_HEAD_DIM, kv_scale
from octavo.backends.cpu.native import NativeContext
from octavo.core.backend.kv import KVCache, KVLayout
from octavo.core.backend.specs import CacheSpec, OpSpec, Unsupported
from octavo.core.base.errors import UnsupportedOp

COPY, GATHER, SCATTER = 0, 1, 2
"""OctavoBlockMove."""


class WriteKvArgs(ctypes.Structure):
    """Mirror of WriteKvArgs in native/elementwise.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ctx", "k", "v", "key", "value", "slots")),
        *((name, ctypes.c_void_p) for name in ("k_scale", "v_scale")),
        *((name, ctypes.c_void_p) for name in ("q", "out_q", "positions", "cos_sin")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_kv_heads", "head_dim", "v_head_dim")),
        *((name, ctypes.c_int64) for name in ("num_blocks", "block_size")),
        *((name, ctypes.c_int64) for name in ("k_stride_t", "k_stride_h", "v_stride_t", "v_stride_h")),
        *((name, ctypes.c_int64) for name in ("key_stride_n", "key_stride_s", "key_stride_h", "key_stride_d")),
        *((name, ctypes.c_int64) for name in ("value_stride_n", "value_stride_s", "value_stride_h")),
        *((name, ctypes.c_int64) for name in ("k_scale_step", "v_scale_step")),
        *((name, ctypes.c_int64) for name in ("num_heads", "rotary_dim", "num_positions")),
        *((name, ctypes.c_int64) for name in ("q_stride_t", "q_stride_h", "out_q_stride_t", "out_q_stride_h")),
        ("cos_sin_stride", ctypes.c_int64),
        ("kv_dtype", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
    )


class MoveBlocksArgs(ctypes.Structure):
    """Mirror of MoveBlocksArgs in native/elementwise.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ctx", "key", "value", "key_buffer", "value_buffer", "ids")),
        *((name, ctypes.c_int64) for name in ("num_moves", "num_blocks", "block_size", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "v_head_dim", "element_bytes")),
        *((name, ctypes.c_int64) for name in ("key_stride_n", "key_stride_s", "key_stride_h", "key_stride_d")),
        *((name, ctypes.c_int64) for name in ("value_stride_n", "value_stride_s", "value_stride_h")),
        ("move", ctypes.c_int32),
    )


_NO_ROTARY = (0,) * 8


class CacheOps:
    """The KV cache ops of one engine's context."""

    def __init__(self, context: NativeContext) -> None:
        self._context = context  # keeps its threads and scratch memory alive
        self._handle = context.handle
        self._write_kv = context.kernel("write_kv", WriteKvArgs)
        self._move_blocks = context.kernel("move_blocks", MoveBlocksArgs)

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when `op` runs natively at `spec`, else why not."""
        if not isinstance(spec, CacheSpec):
            return Unsupported(f"no native {op}")
        if op.endswith("_blocks"):
            return None
        if (spec.layout is KVLayout.MLA) is not (op == "write_mla"):
            return Unsupported(f"no native {op} in layout {spec.layout.name}")
        return _supports_write(spec)

    def write_kv(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv: KVCache,
        slot_mapping_T: torch.Tensor,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Store each token's K and V at its slot; -1 writes nothing. k and v may have more rows than there are slots.

        Raises:
            UnsupportedOp: dtypes or scales that supports() refused.
            NativeError: a slot outside the cache.
        """
        self._write(
            k_TKD, v_TKD, _views(kv), slot_mapping_T, k_scale, v_scale, (0, 0, 0, 0), _NO_ROTARY, interleaved=False
        )

    def rope_write_kv(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
        kv: KVCache,
        slot_mapping_T: torch.Tensor,
        *,
        out_q: torch.Tensor,
        interleaved: bool = False,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Rotary embedding of q into out_q (which may be q) and of k on its way to the cache; k stays as it was.

        Raises:
            UnsupportedOp: dtypes or scales that supports() refused.
            NativeError: a slot outside the cache or a position outside the table.
        """
        if not q_THD.dtype == out_q.dtype == cos_sin_PR.dtype == torch.float32 or positions_T.dtype != torch.int64:
            raise UnsupportedOp("the CPU rope_write_kv takes fp32 q and table, and int64 positions")
        pointers = (q_THD.data_ptr(), out_q.data_ptr(), positions_T.data_ptr(), cos_sin_PR.data_ptr())
        numbers = (
            q_THD.shape[1], cos_sin_PR.shape[1], cos_sin_PR.shape[0], *q_THD.stride()[:2], *out_q.stride()[:2],
            cos_sin_PR.stride(0),
        )  # fmt: skip
        self._write(
            k_TKD, v_TKD, _views(kv), slot_mapping_T, k_scale, v_scale, pointers, numbers, interleaved=interleaved
        )

    def write_mla(
        self, latent_TC: torch.Tensor, k_rope_TR: torch.Tensor, kv: KVCache, slot_mapping_T: torch.Tensor
    ) -> None:
        """Store each token's latent and rotary key side by side: a key and a value of one head that share a slot.

        Raises:
            UnsupportedOp: dtypes that supports() refused.
            NativeError: a slot outside the cache.
        """
        if kv.key_NSKD is None or kv.layout is not KVLayout.MLA:
            raise UnsupportedOp("the CPU write_mla takes a cache of latents")
        views = kv.key_NSKD.split((latent_TC.shape[1], k_rope_TR.shape[1]), dim=3)
        self._write(
            latent_TC[:, None], k_rope_TR[:, None], views, slot_mapping_T, None, None, (0, 0, 0, 0), _NO_ROTARY,
            interleaved=False,
        )  # fmt: skip

    def copy_blocks(self, kv: KVCache, source_destination: torch.Tensor) -> None:
        """Copy whole blocks, pair after pair in order; [C, 2] int64.

        Raises:
            NativeError: an id outside the cache.
        """
        self._move(kv, source_destination, None, None, COPY)

    def gather_blocks(self, kv: KVCache, block_ids: torch.Tensor, *, out_k: torch.Tensor, out_v: torch.Tensor) -> None:
        """Blocks into contiguous NHD buffers [n, S, K, D] of the cache's dtype.

        Raises:
            UnsupportedOp: buffers of another dtype, or not contiguous.
            NativeError: an id outside the cache.
        """
        self._move(kv, block_ids, out_k, out_v, GATHER)

    def scatter_blocks(self, kv: KVCache, block_ids: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Contiguous NHD buffers [n, S, K, D] of the cache's dtype into blocks.

        Raises:
            UnsupportedOp: buffers of another dtype, or not contiguous.
            NativeError: an id outside the cache.
        """
        self._move(kv, block_ids, k, v, SCATTER)

    def _write(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        views: Sequence[torch.Tensor],
        slots_T: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        rotary_pointers: tuple[int, int, int, int],
        rotary_numbers: tuple[int, ...],
        *,
        interleaved: bool,
    ) -> None:
        key, value = views
        kv_dtype = KV_DTYPE_CODES.get(key.dtype)
        if kv_dtype is None or not k_TKD.dtype == v_TKD.dtype == torch.float32 or slots_T.dtype != torch.int64:
            raise UnsupportedOp(
                "the CPU cache stores fp32 into fp32, bf16, fp16, int8 or e4m3fn at int64 slots, not "
                f"{k_TKD.dtype} into {key.dtype}"
            )
        num_blocks, block_size, num_kv_heads, head_dim = key.shape
        k_scale_pointer, k_scale_step = kv_scale(k_scale, key)
        v_scale_pointer, v_scale_step = kv_scale(v_scale, value)
        self._write_kv(
            self._handle, k_TKD.data_ptr(), v_TKD.data_ptr(), key.data_ptr(), value.data_ptr(), slots_T.data_ptr(),
            k_scale_pointer, v_scale_pointer, *rotary_pointers, slots_T.shape[0], num_kv_heads, head_dim,
            value.shape[3], num_blocks, block_size,
            *k_TKD.stride()[:2], *v_TKD.stride()[:2], *key.stride(), *value.stride()[:3],
            k_scale_step, v_scale_step, *rotary_numbers, kv_dtype, interleaved,
        )  # fmt: skip

    def _move(self, kv: KVCache, ids: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, move: int) -> None:
        key, value = _views(kv)
        for buffer, cache in ((k, key), (v, value)):
            if buffer is not None and (buffer.dtype != cache.dtype or not buffer.is_contiguous()):
                raise UnsupportedOp(f"KV blocks move to and from contiguous buffers of {cache.dtype}")
        ids = ids.to(torch.int64).contiguous()
        num_blocks, block_size, num_kv_heads, head_dim = key.shape
        self._move_blocks(
            self._handle, key.data_ptr(), value.data_ptr(), 0 if k is None else k.data_ptr(),
            0 if v is None else v.data_ptr(), ids.data_ptr(), ids.shape[0], num_blocks, block_size, num_kv_heads,
            head_dim, value.shape[3], key.element_size(), *key.stride(), *value.stride()[:3], move,
        )  # fmt: skip


def _views(kv: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    if kv.key_NSKD is None or kv.value_NSKD is None:
        raise UnsupportedOp("the CPU cache ops take a cache of their own backend")
    return kv.key_NSKD, kv.value_NSKD


def _supports_write(spec: CacheSpec) -> Unsupported | None:
    if spec.x_dtype != torch.float32:
        return Unsupported(f"keys and values come in fp32, not {spec.x_dtype}")
    if spec.kv_dtype not in KV_DTYPE_CODES:
        return Unsupported(f"KV is fp32, bf16, fp16, int8 or e4m3fn, not {spec.kv_dtype}")
    if spec.rotary_dim and (spec.head_dim > MAX_HEAD_DIM or spec.rotary_dim > spec.head_dim or spec.rotary_dim % 2):
        return Unsupported(
            f"rotates an even part of heads up to {MAX_HEAD_DIM}, not {spec.rotary_dim} of {spec.head_dim}"
        )
    return None
