"""ReferenceOps: the whole Ops protocol in plain torch. It supports everything that the contract describes."""

from __future__ import annotations

import torch

from octavo.core.backend.kv import AttentionMetadata
from octavo.core.backend.ops import StepPlan
from octavo.core.backend.reference import attention as _attention
from octavo.core.backend.reference import cache as _cache
from octavo.core.backend.reference import lora as _lora
from octavo.core.backend.reference import mla as _mla
from octavo.core.backend.reference import moe as _moe
from octavo.core.backend.reference import product as _product
from octavo.core.backend.reference import quantize as _quantize
from octavo.core.backend.reference import rows as _rows
from octavo.core.backend.reference.weight import PlainWeight
from octavo.core.backend.reference_sample import sample_reference
from octavo.core.backend.specs import OpSpec, Unsupported, WeightSpec


class ReferenceOps:
    """Plain torch on one device. Stateless; semantics and errors are documented with each function."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        return None

    def plan(self, meta: AttentionMetadata) -> StepPlan:
        return StepPlan(meta)

    def prepare_weight(self, spec: WeightSpec) -> PlainWeight:
        return PlainWeight(spec, self._device)

    gemm = staticmethod(_product.gemm)
    grouped_gemm = staticmethod(_product.grouped_gemm)
    lora_gemm = staticmethod(_lora.lora_gemm)
    quantize = staticmethod(_quantize.quantize)
    embed = staticmethod(_rows.embed)
    rms_norm = staticmethod(_rows.rms_norm)
    layer_norm = staticmethod(_rows.layer_norm)
    rotary = staticmethod(_rows.rotary)
    act_mul = staticmethod(_rows.act_mul)
    activation = staticmethod(_rows.activation)
    write_kv = staticmethod(_cache.write_kv)
    rope_write_kv = staticmethod(_cache.rope_write_kv)
    copy_blocks = staticmethod(_cache.copy_blocks)
    gather_blocks = staticmethod(_cache.gather_blocks)
    scatter_blocks = staticmethod(_cache.scatter_blocks)
    paged_attention = staticmethod(_attention.paged_attention)
    attention = staticmethod(_attention.attention)
    merge_attention = staticmethod(_attention.merge_attention)
    write_mla = staticmethod(_mla.write_mla)
    mla_attention = staticmethod(_mla.mla_attention)
    moe_route = staticmethod(_moe.moe_route)
    moe_permute = staticmethod(_moe.moe_permute)
    moe_combine = staticmethod(_moe.moe_combine)
    all_reduce_norm = staticmethod(_rows.all_reduce_norm)

    def sample(
        self,
        logits_RV: torch.Tensor,
        temperature_R: torch.Tensor,
        top_k_R: torch.Tensor,
        top_p_R: torch.Tensor,
        min_p_R: torch.Tensor,
        uniform_R: torch.Tensor,
        *,
        out: torch.Tensor,
    ) -> None:
        out.copy_(sample_reference(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, uniform_R))
