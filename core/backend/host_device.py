"""A device that is the host: what a backend begins from, and what one that runs on the host keeps.

    class AcmeBackend(HostDevice):         name, ops and capabilities are the backend's to set, always
        def to_host(self, x): …            each method that it overrides is the device's; the others stay the host's

Everything is done in the order of the calls before they return, so events have passed when they are recorded. What each
method promises is written in DeviceBackend.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo.core.backend.comm import Communicator, SingleRank
from octavo.core.backend.device import Capabilities, Event, MemoryInfo, PlainProgram, Program, StepBuffers, StepFunction
from octavo.core.backend.kv import KVCache, KVCacheSpec, KVLayout, KVPool, torch_kv_view
from octavo.core.backend.ops import Ops
from octavo.core.base.errors import BackendUnavailable
from octavo.core.base.host import host_memory


class HostDevice:
    """A DeviceBackend but for its name, its ops and its capabilities.

    Attributes:
        device: where `empty` and the KV pools are; another torch device works, if its memory is torch's.
    """

    name: str
    capabilities: Capabilities
    ops: Ops
    device = torch.device("cpu")

    def memory_info(self) -> MemoryInfo:
        memory = host_memory()
        return MemoryInfo(memory.free_bytes, memory.total_bytes)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def from_host(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        target = self.empty(*x.shape, dtype=x.dtype) if out is None else out[: x.shape[0]]
        return target.copy_(x)

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype).copy_(x)

    def allocate_kv_pool(self, num_blocks: int, block_bytes: int) -> KVPool:
        return KVPool(num_blocks, block_bytes, self.empty(num_blocks * block_bytes, dtype=torch.uint8))

    def kv_view(self, pool: KVPool, spec: KVCacheSpec) -> KVCache:
        return torch_kv_view(pool, spec, KVLayout.NHD if spec.v_head_dim else KVLayout.MLA)

    def compile(self, step: StepFunction, bucket: int | None, buffers: StepBuffers | None) -> Program:
        return PlainProgram(step)

    def record_event(self) -> Event:
        return _Passed()

    def synchronize(self) -> None:
        return

    def export_memory(self, pool: KVPool) -> Any:
        return None

    def communicator(self, rank: int, world_size: int, address: str) -> Communicator:
        """Raises BackendUnavailable for a group of more than one rank."""
        if world_size != 1:
            raise BackendUnavailable(
                f"backend {self.name} runs one rank and was asked for {world_size}; set tensor_parallel_size to 1",
                field="tensor_parallel_size",
            )
        return SingleRank()

    def close(self) -> None:
        return


class _Passed:
    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True
