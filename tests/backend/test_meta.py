"""The shape functions against what the reference really accepts and fills."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from octavo.core.backend import (
    OP_NAMES,
    Epilogue,
    KVCacheSpec,
    KVLayout,
    Ops,
    QuantFormat,
    QuantScheme,
    ReferenceOps,
    SingleRank,
    StepPlan,
    WeightSpec,
    output_shapes,
)
from octavo.core.backend.meta import META
from tests.backend.ragged import make_cache, make_ragged

ops = ReferenceOps(torch.device("cpu"))
UNWRITTEN = -64.0
KV = KVCacheSpec(2, 8, 6, torch.float32, 4)


def weight(**kw: Any) -> Any:
    w = ops.prepare_weight(WeightSpec(12, 8, torch.float32, **kw))
    w.place(torch.rand(12, 8), 0)
    return w


def paged(v_head_dim: int) -> tuple[Any, StepPlan]:
    layout = KVLayout.HND if v_head_dim else KVLayout.MLA
    spec = KVCacheSpec(2 if v_head_dim else 1, 8, v_head_dim, torch.float32, 4)
    batch = make_ragged([2, 3], [5, 3], spec, layout, generator=torch.Generator().manual_seed(0))
    return batch.kv, StepPlan(batch.meta)


def cases() -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]:
    x, q, k, v = torch.rand(5, 8), torch.rand(5, 4, 8), torch.rand(5, 2, 8), torch.rand(5, 2, 6)
    ids, slots, cos_sin = torch.arange(5), torch.arange(5), torch.rand(9, 8)
    start = torch.tensor([0, 2, 5], dtype=torch.int32)
    int8 = QuantScheme(QuantFormat.INT8, 4)
    ones, lse = torch.ones(5), torch.rand(5, 4)
    cache = make_cache(3, KV, KVLayout.HND, fill=0)
    blocks = torch.tensor([2, 0])
    mla_kv, mla_plan = paged(0)
    kv, plan = paged(6)
    lora = (torch.rand(1, 2, 8), torch.rand(1, 7, 2), torch.ones(1), torch.zeros(5, dtype=torch.int32))
    chosen = torch.tensor([[0, 4], [2, 3], [3, 2], [5, 2], [4, 2]])
    places = torch.tensor([[0, -1], [1, 2], [-1, -1], [3, 0], [4, 4]])
    permute = {"first_expert": 2, "segment_start": torch.zeros(4, dtype=torch.int32)}
    norm = {"eps": 1e-6}
    return {
        "gemm": ("gemm", (x, weight()), {}),
        "gemm gated": ("gemm", (x, weight(gated=True)), {"epilogue": Epilogue(gate="silu")}),
        "gemm argmax": ("gemm", (x, weight()), {"epilogue": Epilogue(argmax=True)}),
        "grouped_gemm": ("grouped_gemm", (x, [weight(), weight()], start), {}),
        "lora_gemm": ("lora_gemm", (x, *lora), {}),
        "quantize": ("quantize", (x, int8), {}),
        "quantize rows": ("quantize", (x, QuantScheme(QuantFormat.FP8_E4M3FN)), {}),
        "quantize ragged": ("quantize", (x, QuantScheme(QuantFormat.INT8, 3)), {}),
        "quantize tensor": ("quantize", (x, QuantScheme(QuantFormat.INT8, -1)), {}),
        "embed": ("embed", (ids, weight()), {}),
        "rms_norm": ("rms_norm", (q, torch.ones(8)), norm),
        "layer_norm": ("layer_norm", (q, torch.ones(8)), {**norm, "bias_M": torch.ones(8)}),
        "rotary": ("rotary", (q, k, ids, cos_sin), {}),
        "act_mul": ("act_mul", (x,), {"gate": "gelu"}),
        "activation": ("activation", (x,), {"kind": "relu"}),
        "write_kv": ("write_kv", (k, v, cache, slots), {}),
        "rope_write_kv": ("rope_write_kv", (q, k, v, ids, cos_sin, cache, slots), {}),
        "copy_blocks": ("copy_blocks", (cache, torch.tensor([[0, 1]])), {}),
        "gather_blocks": ("gather_blocks", (cache, blocks), {}),
        "scatter_blocks": ("scatter_blocks", (cache, blocks, torch.rand(2, 4, 2, 8), torch.rand(2, 4, 2, 6)), {}),
        "paged_attention": ("paged_attention", (q, kv, plan), {"softmax_scale": 1.0}),
        "attention": ("attention", (q, k, v, start, start), {"softmax_scale": 1.0}),
        "merge_attention": ("merge_attention", (q, lse, q, lse), {}),
        "write_mla": ("write_mla", (torch.rand(5, 6), torch.rand(5, 2), mla_kv, slots), {}),
        "mla_attention": ("mla_attention", (q[..., :6], q[..., 6:], mla_kv, mla_plan), {"softmax_scale": 1.0}),
        "moe_route": ("moe_route", (x,), {"top_k": 3}),
        "moe_permute": ("moe_permute", (chosen,), permute),
        "moe_combine": ("moe_combine", (x, places, torch.rand(5, 2)), {}),
        "all_reduce_norm": ("all_reduce_norm", (x, SingleRank(), torch.ones(8)), {**norm, "residual": x.clone()}),
        "sample": ("sample", (x, ones, torch.zeros(5, dtype=torch.int64), ones, 0 * ones, 0.5 * ones), {}),
    }


CASES = cases()


def test_every_op_has_a_shape_function_and_a_case() -> None:
    assert set(META) == set(OP_NAMES) == {op for op, _, _ in CASES.values()}


@pytest.mark.parametrize("case", CASES)
def test_the_reference_fills_outputs_of_these_shapes(case: str) -> None:
    op, args, kwargs = CASES[case]
    default = torch.int32 if op == "moe_route" else torch.float32
    outputs = {
        name: torch.full(shape, UNWRITTEN).to(dtype or default)
        for name, (shape, dtype) in output_shapes(op, *args, **kwargs).items()
    }
    given = inspect.signature(getattr(ops, op)).bind_partial(*args, **kwargs).arguments
    parameters = inspect.signature(getattr(Ops, op)).parameters
    assert set(outputs) == {n for n in parameters if (n.startswith("out") or n in ("lse", "scales")) and n not in given}
    if op == "moe_route":
        outputs["out_weights"] = outputs["out_weights"].float()
    getattr(ops, op)(*args, **kwargs, **outputs)
    for name, tensor in outputs.items():
        assert (tensor.float() != UNWRITTEN).all(), f"{name} was not written"


def test_a_quantising_gemm_has_codes_and_scales() -> None:
    scheme = QuantScheme(QuantFormat.INT8, 4)
    shapes = output_shapes("gemm", torch.rand(5, 8), weight(), epilogue=Epilogue(quantize=scheme))
    assert shapes == {"out": ((5, 12), torch.int8), "out_scales": ((5, 3), torch.float32)}


def test_nothing_but_shapes_is_read() -> None:
    x = torch.empty(5, 8, device="meta")
    assert output_shapes("gemm", x, weight())["out"].shape == (5, 12)
    assert output_shapes("rms_norm", x, torch.empty(8, device="meta"), eps=0.0)["out"].shape == (5, 8)
