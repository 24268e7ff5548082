"""What an op writes, told from shapes alone: for each op the shape of every tensor it is given to fill.

    output_shapes("gemm", x_TK, w, epilogue=…)  ─►  {"out": OutputShape((T, N), None)}

The arguments are the op's own, outputs left out or given; tensors may lie on the "meta" device, since nothing but
their shapes and dtypes is read. With it a step can be traced, or a caller's buffers checked, without running anything.
Ops that write only the KV cache, or an input in place, have no outputs. moe_permute's segment_start is as long as the
caller made it, and is not told here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from octavo.core.backend.kv import KVCache
from octavo.core.backend.ops import Epilogue, PackedWeight
from octavo.core.backend.quant import QuantScheme
from octavo.core.backend.specs import Gate

Tensor = torch.Tensor


class OutputShape(NamedTuple):
    """Shape and dtype of an output; dtype None: the caller's choice, within what `supports()` allowed."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


Outputs = dict[str, OutputShape]


def output_shapes(op: str, *args: Any, **kwargs: Any) -> Outputs:
    """The outputs of a call, by parameter name. Raises KeyError for a name that is no op."""
    return META[op](*args, **kwargs)


def _gemm(x_TK: Tensor, w: PackedWeight, *, epilogue: Epilogue | None = None, **_: Any) -> Outputs:
    epilogue = epilogue or Epilogue()
    rows = x_TK.shape[0]
    width = w.spec.out_features // 2 if epilogue.gate else w.spec.out_features
    if epilogue.argmax:
        return {"out": OutputShape((rows,), torch.int64)}
    if epilogue.quantize is None:
        return {"out": OutputShape((rows, width))}
    codes = _codes((rows, width), epilogue.quantize)
    return {"out": codes["out"], "out_scales": codes["scales"]}


def _grouped_gemm(x_TK: Tensor, weights: list[PackedWeight], *_: Any, gate: Gate | None = None, **__: Any) -> Outputs:
    width = weights[0].spec.out_features
    return {"out": OutputShape((x_TK.shape[0], width // 2 if gate else width))}


def _lora_gemm(x_TK: Tensor, a_LRK: Tensor, b_LNR: Tensor, *_: Any, **__: Any) -> Outputs:  # noqa: ARG001 the op's order
    return {"out": OutputShape((x_TK.shape[0], b_LNR.shape[1]))}


def _quantize(x_TK: Tensor, scheme: QuantScheme, **_: Any) -> Outputs:
    rows, width = x_TK.shape
    return _codes((rows, width), scheme)


def _codes(shape: tuple[int, int], scheme: QuantScheme) -> Outputs:
    scales = OutputShape(scheme.scale_shape(*shape), torch.float32)
    return {"out": OutputShape(shape, scheme.format.code_dtype), "scales": scales}


def _embed(ids_T: Tensor, w: PackedWeight, **_: Any) -> Outputs:
    return {"out": OutputShape((ids_T.shape[0], w.spec.in_features))}


def _like_first(x: Tensor, *_: Any, **__: Any) -> Outputs:
    return {"out": OutputShape(tuple(x.shape))}


def _rotary(q_THD: Tensor, k_TKD: Tensor, *_: Any, **__: Any) -> Outputs:
    return {
        "out_q": OutputShape(tuple(q_THD.shape), q_THD.dtype),
        "out_k": OutputShape(tuple(k_TKD.shape), k_TKD.dtype),
    }


def _act_mul(x: Tensor, **_: Any) -> Outputs:
    return {"out": OutputShape((*x.shape[:-1], x.shape[-1] // 2))}


def _rope_write_kv(q_THD: Tensor, *_: Any, **__: Any) -> Outputs:
    return {"out_q": OutputShape(tuple(q_THD.shape), q_THD.dtype)}


def _gather_blocks(kv: KVCache, block_ids: Tensor, **_: Any) -> Outputs:
    spec = kv.spec
    block = (block_ids.shape[0], spec.block_size, spec.num_kv_heads)
    return {
        "out_k": OutputShape((*block, spec.head_dim), spec.dtype),
        "out_v": OutputShape((*block, spec.v_head_dim), spec.dtype),
    }


def _attended(q_THD: Tensor, v_head_dim: int) -> Outputs:
    tokens, heads, _ = q_THD.shape
    return {
        "out": OutputShape((tokens, heads, v_head_dim), q_THD.dtype),
        "lse": OutputShape((tokens, heads), torch.float32),
    }


def _paged_attention(q_THD: Tensor, kv: KVCache, *_: Any, **__: Any) -> Outputs:
    return _attended(q_THD, kv.spec.v_head_dim)


def _attention(q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, *_: Any, **__: Any) -> Outputs:  # noqa: ARG001 the op's order
    return _attended(q_THD, v_SKD.shape[-1])


def _merge_attention(out_a: Tensor, *_: Any, **__: Any) -> Outputs:
    return _attended(out_a, out_a.shape[-1])


def _mla_attention(q_latent_THC: Tensor, *_: Any, **__: Any) -> Outputs:
    return _attended(q_latent_THC, q_latent_THC.shape[-1])


def _moe_route(logits_TE: Tensor, *, top_k: int, **_: Any) -> Outputs:
    shape = (logits_TE.shape[0], top_k)
    return {"out_weights": OutputShape(shape), "out_ids": OutputShape(shape)}


def _moe_permute(ids_TK: Tensor, **_: Any) -> Outputs:
    tokens, top_k = ids_TK.shape
    return {
        "out_rows": OutputShape((tokens * top_k,), torch.int64),
        "out_places": OutputShape((tokens, top_k), torch.int64),
    }


def _moe_combine(y_RM: Tensor, places_TK: Tensor, *_: Any, **__: Any) -> Outputs:
    return {"out": OutputShape((places_TK.shape[0], y_RM.shape[1]), y_RM.dtype)}


def _sample(logits_RV: Tensor, *_: Any, **__: Any) -> Outputs:
    return {"out": OutputShape((logits_RV.shape[0],), torch.int64)}


def _nothing(*_: Any, **__: Any) -> Outputs:
    return {}


META: dict[str, Callable[..., Outputs]] = {
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "lora_gemm": _lora_gemm,
    "quantize": _quantize,
    "embed": _embed,
    "rms_norm": _like_first,
    "layer_norm": _like_first,
    "rotary": _rotary,
    "act_mul": _act_mul,
    "activation": _like_first,
    "write_kv": _nothing,
    "rope_write_kv": _rope_write_kv,
    "copy_blocks": _nothing,
    "gather_blocks": _gather_blocks,
    "scatter_blocks": _nothing,
    "paged_attention": _paged_attention,
    "attention": _attention,
    "merge_attention": _merge_attention,
    "write_mla": _nothing,
    "mla_attention": _mla_attention,
    "moe_route": _moe_route,
    "moe_permute": _moe_permute,
    "moe_combine": _moe_combine,
    "all_reduce_norm": _like_first,
    "sample": _sample,
}
"""Op -> its shape function. Never written to."""
