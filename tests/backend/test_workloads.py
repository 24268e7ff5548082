"""Workloads are calls that the contract allows: without any data, their outputs have the shapes that ops write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.core.backend import (
    KVCache,
    KVCacheSpec,
    KVLayout,
    KVPool,
    PlainWeight,
    StepPlan,
    WeightSpec,
    output_shapes,
    torch_kv_view,
)
from octavo.core.backend.ops import OP_NAMES
from octavo.core.backend.reference.ops import ReferenceOps
from octavo.core.backend.workloads import Cost, Tensors, Workload, list_workloads

META = torch.device("meta")
EVERY = list(list_workloads(torch.bfloat16, torch.float8_e4m3fn))


class ShapeOps:
    """Takes every call and compares its outputs with what the op's shape function tells."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def plan(self, meta: Any) -> StepPlan:
        assert meta.query_start_loc.shape == (meta.num_requests + 1,)
        assert meta.block_table.shape[1] * meta.block_size >= meta.max_seq_len
        return StepPlan(meta)

    def prepare_weight(self, spec: WeightSpec) -> PlainWeight:
        return PlainWeight(spec, META)

    def __getattr__(self, op: str) -> Any:
        assert op in OP_NAMES

        def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append(op)
            for name, want in output_shapes(op, *args, **kwargs).items():
                given = kwargs.get(name)
                if given is not None:
                    assert tuple(given.shape) == want.shape, f"{op}: {name}"
                    assert want.dtype in (None, given.dtype), f"{op}: {name}"

        return call


def kv_cache(spec: KVCacheSpec, num_blocks: int) -> KVCache:
    storage = torch.empty(num_blocks * spec.block_bytes, dtype=torch.uint8, device=META)
    layout = KVLayout.NHD if spec.v_head_dim else KVLayout.MLA
    return torch_kv_view(KVPool(num_blocks, spec.block_bytes, storage), spec, layout)


def test_names_are_unique_per_op() -> None:
    names = [(workload.op, workload.name) for workload in EVERY]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("workload", EVERY, ids=lambda w: f"{w.op}-{w.name}")
def test_a_workload_writes_what_its_op_writes(workload: Workload) -> None:
    ops = ShapeOps()
    call = workload.prepare(ops, Tensors(META, torch.bfloat16, kv_cache))
    call()
    call()
    assert ops.calls == [workload.op] * 2
    assert workload.cost.bytes > 0


def test_a_device_without_8_bit_floats_has_the_others() -> None:
    names = {workload.name for workload in list_workloads(torch.float32, None)}
    assert names == {workload.name for workload in EVERY if "fp8" not in workload.name}


def test_costs_follow_from_the_shapes() -> None:
    by_name = {workload.name: workload for workload in EVERY}
    # A decode step reads every key and value once (64 requests x 4,096 tokens x 8 heads x 128), and q, and writes out.
    assert by_name["llama8b-decode"].cost.bytes == 64 * 4096 * 8 * 128 * 2 * 2 + 2 * 64 * 32 * 128 * 2
    assert by_name["llama8b-decode"].cost.flops == {"bfloat16": 4.0 * 64 * 4096 * 32 * 128}
    assert by_name["down-m16"].cost.flops == {"bfloat16": 2.0 * 16 * 4096 * 14336}
    # A window bounds what a query sees.
    assert by_name["sinks-decode"].cost.flops == {"bfloat16": 4.0 * 64 * 128 * 64 * 64}


def test_costs_add_up_by_operand() -> None:
    total = Cost(1, {"bfloat16": 2}) + Cost(3, {"int8": 4, "bfloat16": 1})
    assert total == Cost(4, {"bfloat16": 3, "int8": 4})


@pytest.mark.parametrize("name", ["norm-m64", "silu-m64", "experts-m64", "vocabulary-m64", "adapters-m64", "down-m1"])
def test_a_workload_runs_on_the_host(name: str) -> None:
    workload = next(w for w in list_workloads(torch.float32, None) if w.name == name)
    call = workload.prepare(ReferenceOps(torch.device("cpu")), Tensors(torch.device("cpu"), torch.float32, kv_cache))
    out = call.keywords.get("out", call.keywords.get("out_weights"))
    before = out.clone()
    call()
    assert not torch.equal(out, before)
