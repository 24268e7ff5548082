"""The KV cache on a GPU: writes of new tokens and moves of whole blocks, the launches of kernels/cache.py.

    write_kv, rope_write_kv, write_mla    token by token, rounded to nearest even, 8-bit floats saturated
    copy_blocks                           pair after pair in order
    gather_blocks, scatter_blocks         to and from canonical NHD buffers

Views may have their slots and heads in any order (NHD, HND, latents); only the last axis is dense.
"""

from __future__ import annotations

import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.kernels import cache as kernels
from octavo.backends.common.rows import FLOATS, MAX_HEAD_DIM, head_tile, power_of_two, refused_rotary
from octavo.core.backend.kv import KVCache, KVLayout
from octavo.core.backend.specs import CacheSpec, OpSpec, Unsupported
from octavo.core.base.errors import UnsupportedOp

FP8_DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
"""By `Chip.fp8`. Never written to."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What moves see, by bytes of an element. Never written to."""

_MOVES = ("copy_blocks", "gather_blocks", "scatter_blocks")


class CacheOps:
    """The KV cache ops of one device."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._kv_dtypes = (*FLOATS, FP8_DTYPES[gpu.chip.fp8])

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when the group runs `op` at `spec`, else why not."""
        if not isinstance(spec, CacheSpec):
            return Unsupported(f"no kernel for {op}")
        if spec.layout is KVLayout.HDN:
            return Unsupported("keys in HDN are for vector units; kernels here take NHD, HND and MLA")
        if max(spec.head_dim, spec.v_head_dim) > MAX_HEAD_DIM:
            return Unsupported(f"heads up to {MAX_HEAD_DIM}, not {spec.head_dim} and {spec.v_head_dim}")
        if op in _MOVES:
            return None
        if spec.x_dtype not in FLOATS:
            return Unsupported(f"keys and values come in fp32, bf16 or fp16, not {spec.x_dtype}")
        if spec.kv_dtype not in self._kv_dtypes:
            return Unsupported(f"KV is fp32, bf16, fp16 or {self._kv_dtypes[-1]}, not {spec.kv_dtype}")
        return refused_rotary(spec.head_dim, spec.rotary_dim) if spec.rotary_dim else None

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

        Raises UnsupportedOp for what supports() refuses.
        """
        key, value = _views(kv)
        self._write(k_TKD, v_TKD, key, value, slot_mapping_T, k_scale, v_scale)

    def write_mla(
        self, latent_TC: torch.Tensor, k_rope_TR: torch.Tensor, kv: KVCache, slot_mapping_T: torch.Tensor
    ) -> None:
        """Store each token's latent [C] and rotary key [R] side by side; -1 writes nothing. Raises as write_kv."""
        latents, _ = _views(kv)
        rank = latent_TC.shape[1]
        k, v = latent_TC.unsqueeze(1), k_rope_TR.unsqueeze(1)
        self._write(k, v, latents[..., :rank], latents[..., rank:], slot_mapping_T, None, None)

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

        Raises UnsupportedOp for what supports() refuses.
        """
        key, value = _views(kv)
        self._check(q_THD, k_TKD, v_TKD, key)
        scales, scale_stride = _scales(k_scale, v_scale, slot_mapping_T)
        q_tokens, q_heads, head_dim = q_THD.shape
        tokens, heads, v_head_dim = slot_mapping_T.shape[0], k_TKD.shape[1], value.shape[3]
        rotary_dim = cos_sin_PR.shape[1]
        entry = self._gpu.tuning.pick("rope_write_kv", head_dim=max(head_dim, v_head_dim))
        rows = entry.tile["ROWS"]
        kv_programs = -(-tokens * heads // rows)
        grid = (-(-q_tokens * q_heads // rows) + kv_programs * (2 if v_head_dim else 1),)
        self._gpu.launch(
            kernels.rope_write_kv, grid, q_THD, k_TKD, v_TKD, out_q, key, value, positions_T, cos_sin_PR,
            slot_mapping_T, *scales, q_tokens, tokens, q_heads, heads, head_dim, v_head_dim, rotary_dim, key.shape[1],
            scale_stride, *q_THD.stride()[:2], *out_q.stride()[:2], *k_TKD.stride()[:2], *v_TKD.stride()[:2],
            *key.stride()[:3], *value.stride()[:3], cos_sin_PR.stride(0), INTERLEAVED=interleaved,
            HAS_SCALE=k_scale is not None, V_COLS=power_of_two(v_head_dim), **head_tile(head_dim, rotary_dim),
            **entry.constants,
        )  # fmt: skip

    def copy_blocks(self, kv: KVCache, source_destination: torch.Tensor) -> None:
        """Copy whole blocks, pair after pair in order; [C, 2] int64."""
        key, value = (_words(x) for x in _views(kv))
        entry = self._gpu.tuning.pick("copy_blocks", element_bytes=key.element_size())
        cols = _columns(key, value)
        num_pairs = source_destination.shape[0]
        grid = (_tiles(key, value, entry.tile["TILE"]) if num_pairs else 0,)
        self._gpu.launch(
            kernels.copy_blocks, grid, key, value, source_destination, num_pairs, *_shape(key, value),
            *key.stride()[:3], *value.stride()[:3], source_destination.stride(0), **cols, **entry.constants,
        )  # fmt: skip

    def gather_blocks(self, kv: KVCache, block_ids: torch.Tensor, *, out_k: torch.Tensor, out_v: torch.Tensor) -> None:
        """Blocks into NHD buffers [n, S, K, D] of the cache's dtype. Raises UnsupportedOp for buffers of another."""
        self._move(kv, block_ids, out_k, out_v, to_buffer=True)

    def scatter_blocks(self, kv: KVCache, block_ids: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """NHD buffers [n, S, K, D] of the cache's dtype into blocks. Raises UnsupportedOp for buffers of another."""
        self._move(kv, block_ids, k, v, to_buffer=False)

    def _write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> None:
        self._check(k, k, v, key)
        scales, scale_stride = _scales(k_scale, v_scale, slots)
        tokens, heads, head_dim, v_head_dim = slots.shape[0], k.shape[1], key.shape[3], value.shape[3]
        entry = self._gpu.tuning.pick("write_kv", head_dim=max(head_dim, v_head_dim))
        grid = (-(-tokens * heads // entry.tile["ROWS"]) * (2 if v_head_dim else 1),)
        self._gpu.launch(
            kernels.write_kv, grid, k, v, key, value, slots, *scales, tokens, heads, head_dim, v_head_dim,
            key.shape[1], scale_stride, *k.stride()[:2], *v.stride()[:2], *key.stride()[:3], *value.stride()[:3],
            HAS_SCALE=k_scale is not None, **_columns(key, value), **entry.constants,
        )  # fmt: skip

    def _move(self, kv: KVCache, ids: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, to_buffer: bool) -> None:
        views = _views(kv)
        if any(x.dtype != view.dtype for x, view in zip((k, v), views, strict=True)):
            raise UnsupportedOp(f"KV blocks move to and from buffers of {views[0].dtype}, not {k.dtype} and {v.dtype}")
        key, value, k, v = (_words(x) for x in (*views, k, v))
        entry = self._gpu.tuning.pick("move_blocks", element_bytes=key.element_size())
        grid = (ids.shape[0], _tiles(key, value, entry.tile["TILE"]))
        self._gpu.launch(
            kernels.move_blocks, grid, key, value, k, v, ids, *_shape(key, value), *key.stride()[:3],
            *value.stride()[:3], *k.stride()[:3], *v.stride()[:3], TO_BUFFER=to_buffer, **_columns(key, value),
            **entry.constants,
        )  # fmt: skip

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key: torch.Tensor) -> None:
        if key.dtype not in self._kv_dtypes or any(x.dtype not in FLOATS for x in (q, k, v)):
            raise UnsupportedOp(
                f"the cache stores fp32, bf16 or fp16 into {self._kv_dtypes}, not {k.dtype} into {key.dtype}"
            )


def _views(kv: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = kv.key_NSKD, kv.value_NSKD
    if key is None or value is None or key.stride(3) != 1:
        raise UnsupportedOp("the kernels take caches whose last axis is dense: NHD, HND or MLA")
    return key, value


def _scales(
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, absent: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
    """Both scales, and their stride from head to head; `absent` stands where there are none, and is never read."""
    if k_scale is None or v_scale is None:
        if k_scale is not v_scale:
            raise UnsupportedOp("K and V have scales both, or neither")
        return (absent, absent), 0
    if k_scale.numel() != v_scale.numel():
        raise UnsupportedOp("K and V have scales of the same kind: one each, or one per head each")
    return (k_scale, v_scale), int(k_scale.numel() > 1)


def _words(x: torch.Tensor) -> torch.Tensor:
    return x.view(_WORDS[x.element_size()])


def _shape(key: torch.Tensor, value: torch.Tensor) -> tuple[int, int, int, int]:
    """S, K, D and D of values."""
    return key.shape[1], key.shape[2], key.shape[3], value.shape[3]


def _columns(key: torch.Tensor, value: torch.Tensor) -> dict[str, int]:
    return {"COLS": power_of_two(key.shape[3]), "V_COLS": power_of_two(value.shape[3])}


def _tiles(key: torch.Tensor, value: torch.Tensor, tile: int) -> int:
    """Tiles of a block: keys', then values'."""
    rows = key.shape[1] * key.shape[2]
    widths = [x.shape[3] for x in (key, value) if x.shape[3]]
    return sum(-(-rows // (tile // power_of_two(width))) for width in widths)
