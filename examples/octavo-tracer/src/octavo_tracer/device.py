"""TracerBackend: takes a few numbers of tokens, and compiles one program for each. Its memory is the host's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import octavo.core.backend as api
from octavo_tracer.graph import Graph

TOKEN_BUCKETS = (1, 8, 64, 256)


class TracerOps:
    """Every op of the contract: it computes, or while a step is traced becomes a node of its graph."""

    def __init__(self, device: torch.device) -> None:
        self.graph: Graph | None = None
        compiled = api.ReferenceOps(device)  # stands for what a compiler makes of a node
        self.plan, self.prepare_weight = compiled.plan, compiled.prepare_weight
        for op in api.OP_NAMES:
            setattr(self, op, functools.partial(self._call, op, getattr(compiled, op)))

    def supports(self, op: str, spec: api.OpSpec) -> api.Unsupported | None:
        return None

    def _call(self, op: str, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self.graph is None:
            function(*args, **kwargs)
        else:
            self.graph.record(op, function, args, kwargs)


class TracerBackend(api.HostDevice):
    name = "tracer"

    def __init__(self, config: api.BackendConfig) -> None:
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
        if buffers is None:
            return api.PlainProgram(step)
        self.ops.graph = Graph(buffers)
        try:
            with self.ops.graph as graph:
                step(buffers)
        finally:
            self.ops.graph = None
        return graph
