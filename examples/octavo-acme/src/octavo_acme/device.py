"""AcmeBackend: the device as Octavo's engine sees it."""

from __future__ import annotations

import os

import torch

import octavo.core.backend as api
from octavo_acme.memory import DEVICE, QUEUE, Event, allocate, launch
from octavo_acme.ops import AcmeOps

TOTAL_BYTES = 8 << 30


class AcmeBackend(api.HostDevice):
    """Memory, copies and order of work are acme's own; what HostDevice does with them (KV pools, views) will do."""

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

    def record_event(self) -> Event:
        return QUEUE.event()

    def synchronize(self) -> None:
        QUEUE.wait()

    def close(self) -> None:
        QUEUE.wait()
