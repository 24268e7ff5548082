"""AcmeBackend: the device as Octavo's engine sees it."""

from __future__ import annotations

import os
from typing import Any

import torch

import octavo.core.backend as api
from octavo_acme.memory import DEVICE, QUEUE, Event, allocate, launch
from octavo_acme.ops import AcmeOps

TOTAL_BYTES = 8 << 30


class AcmeBackend:
    name = "acme"

    def __init__(self, config: api.BackendConfig) -> None:
        QUEUE.latency_s = config.options.latency_ms / 1000
        self.device = DEVICE
        self.ops = AcmeOps()
        self.capabilities = api.Capabilities(
            device_name="Acme simulator",
            arch="acme1",
            activation_dtype=dict.fromkeys((torch.float32, torch.bfloat16), torch.float32),
            default_dtype=torch.float32,
            kv_dtypes=(torch.float32, torch.bfloat16),
            total_memory_bytes=TOTAL_BYTES,
        )

    def memory_info(self) -> api.MemoryInfo:
        return api.MemoryInfo(min(TOTAL_BYTES, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), TOTAL_BYTES)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate(*shape, dtype=dtype)

    def from_host(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The host may change x at once: what is queued is a copy of it."""
        target = allocate(*x.shape, dtype=x.dtype) if out is None else out[: x.shape[0]]
        launch(lambda target, staged: target.copy_(staged), target, x.clone())
        return target

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        QUEUE.wait()
        return x.cpu().clone()

    def allocate_kv_pool(self, num_blocks: int, block_bytes: int) -> api.KVPool:
        return api.KVPool(num_blocks, block_bytes, allocate(num_blocks * block_bytes, dtype=torch.uint8))

    def kv_view(self, pool: api.KVPool, spec: api.KVCacheSpec) -> api.KVCache:
        return api.torch_kv_view(pool, spec, api.KVLayout.NHD if spec.v_head_dim else api.KVLayout.MLA)

    def compile(self, step: api.StepFunction, bucket: int | None, buffers: api.StepBuffers | None) -> api.Program:
        return api.PlainProgram(step)

    def record_event(self) -> Event:
        return QUEUE.event()

    def synchronize(self) -> None:
        QUEUE.wait()

    def export_memory(self, pool: api.KVPool) -> Any:
        return None

    def communicator(self, rank: int, world_size: int, address: str) -> api.Communicator:
        return api.SingleRank()  # a device of more than one rank brings its own

    def close(self) -> None:
        QUEUE.wait()
