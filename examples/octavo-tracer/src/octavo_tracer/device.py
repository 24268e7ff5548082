"""TracerBackend: takes a few numbers of tokens, and compiles one program for each."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch

import octavo.core.backend as api
from octavo_tracer.graph import Graph, Trace

log = logging.getLogger("octavo.tracer")

TOKEN_BUCKETS = (1, 8, 64, 256)
STEP_OPS = ("gemm", "embed", "rms_norm", "rotary", "act_mul", "write_kv", "rope_write_kv", "paged_attention")
"""The ops of a step. All are the compiler's: another would be run while the step is traced, and not afterwards."""


class TracerOps:
    """Ops that compute, or while a step is traced become nodes of its graph."""

    def __init__(self, device: torch.device) -> None:
        self.graph: Graph | None = None
        self._compute = api.ReferenceOps(device)  # stands for what a compiler makes of a node
        self.prepare_weight = self._compute.prepare_weight
        for op in STEP_OPS:
            setattr(self, op, functools.partial(self._call, op))

    def supports(self, op: str, spec: api.OpSpec) -> api.Unsupported | None:
        return None if op in STEP_OPS else api.Unsupported("it is no part of a step")

    def plan(self, meta: api.AttentionMetadata) -> api.StepPlan:
        return api.StepPlan(meta)

    def _call(self, op: str, *args: Any, **kwargs: Any) -> None:
        function = getattr(self._compute, op)
        if self.graph is None:
            function(*args, **kwargs)
        else:
            self.graph.record(op, function, args, kwargs)


class Passed:
    """An event of a device that does everything at once."""

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


class TracerBackend:
    name = "tracer"

    def __init__(self, config: api.BackendConfig) -> None:
        self.device = torch.device("cpu")
        self.ops = TracerOps(self.device)
        self.capabilities = api.Capabilities(
            device_name="a tracer",
            arch="none",
            activation_dtype={torch.float32: torch.float32},
            default_dtype=torch.float32,
            kv_dtypes=(torch.float32,),
            total_memory_bytes=self.memory_info().total_bytes,
            graphs=True,
            dynamic_shapes=False,
            token_buckets=TOKEN_BUCKETS,
        )

    def compile(self, step: api.StepFunction, bucket: int | None, buffers: api.StepBuffers | None) -> api.Program:
        """Trace the step at the shapes of these buffers, which are those of every step that the program will run."""
        if bucket is None or buffers is None:
            return api.PlainProgram(step)
        graph = self.ops.graph = Graph(buffers)
        try:
            with Trace(graph):
                step(buffers)
        finally:
            self.ops.graph = None
        log.info("compiled a step of %d tokens: %d nodes", bucket, len(graph))
        return graph

    def memory_info(self) -> api.MemoryInfo:
        page = os.sysconf("SC_PAGE_SIZE")
        return api.MemoryInfo(os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def from_host(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return (torch.empty_like(x) if out is None else out[: x.shape[0]]).copy_(x)

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def allocate_kv_pool(self, num_blocks: int, block_bytes: int) -> api.KVPool:
        return api.KVPool(num_blocks, block_bytes, torch.empty(num_blocks * block_bytes, dtype=torch.uint8))

    def kv_view(self, pool: api.KVPool, spec: api.KVCacheSpec) -> api.KVCache:
        return api.torch_kv_view(pool, spec, api.KVLayout.NHD if spec.v_head_dim else api.KVLayout.MLA)

    def record_event(self) -> Passed:
        return Passed()

    def synchronize(self) -> None:
        return

    def export_memory(self, pool: api.KVPool) -> Any:
        return None

    def communicator(self, rank: int, world_size: int, address: str) -> api.Communicator:
        return api.SingleRank()

    def close(self) -> None:
        return
