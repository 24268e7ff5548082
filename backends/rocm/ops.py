"""The kernels of this backend as ops, put together from groups. Each group has a file of its own."""

from __future__ import annotations

from octavo.backends.common.cache import CacheOps
from octavo.backends.common.gpu import Gpu
from octavo.backends.common.lora import LoraOps
from octavo.backends.common.op_groups import OpGroups
from octavo.backends.common.permute import PermuteOps
from octavo.backends.common.quantize import QuantizeOps
from octavo.backends.common.routing import RoutingOps
from octavo.backends.common.rows import RowOps
from octavo.backends.common.sampling import SamplingOps
from octavo.backends.rocm.attention import AttentionOps
from octavo.backends.rocm.gemm import GemmOps
from octavo.backends.rocm.mla import MlaOps
from octavo.backends.rocm.moe import MoeOps


def make_ops(gpu: Gpu) -> OpGroups:
    """The ops of one device."""
    ops = OpGroups("rocm")
    quantizers = QuantizeOps(gpu)
    products = GemmOps(gpu, quantizers.quantize)
    ops.take(quantizers, ops=("quantize",))
    ops.take(products, ops=("gemm", "embed"), besides=("prepare_weight",))
    ops.take(MoeOps(gpu, products), ops=("grouped_gemm",))
    ops.take(RowOps(gpu), ops=("rms_norm", "layer_norm", "rotary", "act_mul", "activation"))
    ops.take(
        CacheOps(gpu),
        ops=("write_kv", "rope_write_kv", "write_mla", "copy_blocks", "gather_blocks", "scatter_blocks"),
    )
    ops.take(AttentionOps(gpu), ops=("paged_attention", "attention", "merge_attention"), besides=("plan",))
    ops.take(MlaOps(gpu), ops=("mla_attention",))
    ops.take(RoutingOps(gpu), ops=("moe_route",))
    ops.take(PermuteOps(gpu), ops=("moe_permute", "moe_combine"))
    ops.take(SamplingOps(gpu), ops=("sample",))
    ops.take(LoraOps(gpu), ops=("lora_gemm",))
    return ops
