"""Workloads are calls that the contract allows: without any data, their outputs have the shapes that ops write."""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.conformance.harness.host import HostBackend
from octavo.core.backend import (
    KVCache,
    KVCacheSpec,
    KVLayout,
    KVPool,
    PlainWeight,
    QuantFormat,
    QuantizedTensor,
    QuantScheme,
    StepPlan,
    WeightSpec,
    output_shapes,
    torch_kv_view,
)
from octavo.core.backend.ops import OP_NAMES
from octavo.core.backend.reference.ops import ReferenceOps
from octavo.core.backend.workloads import Cost, Tensors, Workload, list_workloads
from octavo.core.backend.workloads.fill import BLOCKS, HALVES, ROWS, fill_cache, filled_weight, random_rows
from octavo.core.backend.workloads.timing import seconds_of

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


SCHEMES = [
    None,
    *(QuantScheme(f) for f in HALVES),
    QuantScheme(QuantFormat.MXFP4, 32),
    QuantScheme(QuantFormat.INT4, 128, symmetric=False),
    QuantScheme(QuantFormat.INT4, 32),
    QuantScheme(QuantFormat.INT8, 0),
    QuantScheme(QuantFormat.INT8, 64, symmetric=False),
    QuantScheme(QuantFormat.FP8_E4M3FN, -1),
    QuantScheme(QuantFormat.FP8_E4M3FNUZ, 128, block_rows=128),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_weight_is_full_of_finite_numbers_of_both_signs(scheme: QuantScheme | None) -> None:
    """More rows than are drawn at once, and a rest; scales that differ and are positive, or the format's own."""
    torch.manual_seed(1)
    spec = WeightSpec(ROWS + 128, 512, torch.bfloat16, scheme)
    weight = filled_weight(ReferenceOps(torch.device("cpu")), spec, torch.device("cpu"))
    assert isinstance(weight, PlainWeight)
    values = weight.dense()
    assert values.isfinite().all()
    assert values.std(dim=1).min() > 1e-4
    assert values.abs().max() < 4
    assert (values > 0).any(dim=1).all()
    assert (values < 0).any(dim=1).all()
    part = random_rows(spec, 128, torch.device("cpu"))
    if isinstance(part, QuantizedTensor) and part.scales.numel():
        assert (part.scales > 0).all()
        assert len(part.codes_NK.view(torch.uint8).unique()) >= 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", list(KVLayout))
def test_a_cache_is_full_of_finite_numbers(layout: KVLayout, dtype: torch.dtype) -> None:
    spec = KVCacheSpec(2, 16, 0 if layout is KVLayout.MLA else 16, dtype, 4)
    pool = KVPool(BLOCKS + 3, spec.block_bytes, torch.full(((BLOCKS + 3) * spec.block_bytes,), 0xFF, dtype=torch.uint8))
    kv = torch_kv_view(pool, spec, layout)
    fill_cache(kv)
    for view in (kv.key_NSKD, kv.value_NSKD):
        assert view is not None
        if view.numel():
            assert view.float().isfinite().all()
            assert view.float().flatten(1).std(dim=1).min() > 0.5


def test_what_a_model_reads_from_memory_is_there_in_as_many_copies_as_pass_through_the_cache() -> None:
    by_name = {workload.name: workload for workload in EVERY}
    weight_bytes = 4096 * 14336
    cache_bytes = 50 * 2**20
    assert by_name["down-m1"].num_copies(cache_bytes) == 2  # 117 MB of 150
    assert by_name["int4-m1"].num_copies(cache_bytes) == 6
    assert by_name["qwen-moe-m4096"].num_copies(cache_bytes) == 1
    assert by_name["sinks-decode"].num_copies(cache_bytes) > 4  # its window is a small part of the cache
    for workload in EVERY:
        assert workload.num_copies(0) == 1
        if workload.from_memory:
            assert workload.num_copies(cache_bytes) * workload.cost.bytes >= 3 * cache_bytes
    assert not by_name["norm-m64"].from_memory  # a step has just written what it reads
    calls = by_name["down-m1"].prepare_all(ShapeOps(), Tensors(META, torch.bfloat16, kv_cache), weight_bytes)
    weights = {id(call.args[1]) for call in calls}
    assert len(weights) == len(calls) == 2


@pytest.mark.parametrize("is_recorded", [False, True])
def test_copies_are_timed_in_turn(is_recorded: bool) -> None:
    backend = HostBackend()
    backend.capabilities = replace(backend.capabilities, graphs=is_recorded)
    made: list[int] = []
    seconds = seconds_of(backend, *(functools.partial(_noted, made, number) for number in range(3)))
    assert 0.8e-3 < seconds < 20e-3
    assert all((after - before) % 3 == 1 for before, after in itertools.pairwise(made))


def _noted(made: list[int], number: int) -> None:
    made.append(number)
    time.sleep(1e-3)


@pytest.mark.parametrize("name", ["norm-m64", "silu-m64", "experts-m64", "vocabulary-m64", "adapters-m64", "down-m1"])
def test_a_workload_runs_on_the_host(name: str) -> None:
    workload = next(w for w in list_workloads(torch.float32, None) if w.name == name)
    call = workload.prepare(ReferenceOps(torch.device("cpu")), Tensors(torch.device("cpu"), torch.float32, kv_cache))
    out = call.keywords.get("out", call.keywords.get("out_weights"))
    before = out.clone()
    call()
    assert not torch.equal(out, before)
    if name == "down-m1":
        assert out.isfinite().all()
        assert out.std() > 0.01
