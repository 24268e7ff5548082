"""CpuBackend: the host's processor and memory as a device. The engine alone talks to it.

    CpuBackend ──┬── NativeContext   its threads and kernels (None without a compiler: the reference runs)
                 ├── CpuOps          the kernels as ops
                 └── KV pools        flat bytes, which the system hands out page by page as blocks are first written

Everything runs in the order of the calls, so events are done as soon as they are recorded and nothing is
asynchronous. While own kernels work, torch keeps to one thread: its pool and theirs would fight for the same cores.
"""

from __future__ import annotations

import platform
import weakref
from typing import Any, cast

import torch

from octavo.backends.cpu import native
from octavo.backends.cpu.attention import LANES
from octavo.backends.cpu.host import cpu_name
from octavo.backends.cpu.ops import CpuOps
from octavo.backends.cpu.program import ReplayingProgram
from octavo.backends.cpu.threads import default_num_threads
from octavo.backends.cpu.torch_threads import TORCH_THREADS
from octavo.core.backend import (
    BackendConfig,
    Capabilities,
    Communicator,
    KVCache,
    KVCacheSpec,
    KVLayout,
    KVPool,
    MemoryInfo,
    Ops,
    PlainProgram,
    Program,
    SingleRank,
    StepBuffers,
    StepFunction,
    torch_kv_view,
)
from octavo.core.base.errors import BackendUnavailable, ConfigError
from octavo.core.base.host import host_memory

GIB = 2**30

WORLD_SIZES = (1, 2, 4, 8)
"""What the conformance suite tries. A rank is a process with threads of its own, so that cores are the real limit."""


class CpuEvent:
    """A point that was passed when it was recorded."""

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


class CpuBackend:
    """The CPU as a DeviceBackend. See the contract in core/backend/device.py."""

    name = "cpu"

    def __init__(self, config: BackendConfig) -> None:
        """Raises ConfigError for an impossible thread count, BackendUnavailable when the kernels don't build."""
        num_threads = config.num_threads or default_num_threads(world_size=config.world_size)
        library = native.load()
        self._context = native.NativeContext(library, num_threads) if library is not None else None
        self._torch_threads = TORCH_THREADS.claim(1 if self._context is not None else num_threads)
        self._live_pools: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self._world_size = config.world_size
        self.device = torch.device("cpu")
        self._cpu_ops = CpuOps(self._context)
        self.ops = cast(Ops, self._cpu_ops)
        self.capabilities = _capabilities(self._context)

    def memory_info(self) -> MemoryInfo:
        """The ranks of a group share the host's memory: each may have its part of what is free."""
        memory = host_memory()
        return MemoryInfo(memory.free_bytes // self._world_size, memory.total_bytes)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def from_host(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            return x.clone()
        out[: x.shape[0]].copy_(x)
        return out[: x.shape[0]]

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def allocate_kv_pool(self, num_blocks: int, block_bytes: int) -> KVPool:
        """Raises ConfigError when it and the pools before it don't fit the memory that is free now."""
        nbytes = num_blocks * block_bytes
        free = self.memory_info().free_bytes
        # The system hands out pages only when they are written: pools that are still empty look free.
        wanted = sum(pool.nbytes for pool in self._live_pools) + nbytes
        if wanted > free:
            raise ConfigError(
                f"KV pools of {wanted / GIB:.2f} GiB do not fit: {free / GIB:.2f} GiB of memory are free; "
                "lower num_kv_blocks or kv_cache_memory_bytes",
                field="num_kv_blocks",
            )
        try:
            storage = torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise ConfigError(
                f"the system refuses {nbytes / GIB:.2f} GiB for a KV pool: {error}; lower num_kv_blocks",
                field="num_kv_blocks",
            ) from error
        self._live_pools.add(storage)
        return KVPool(num_blocks, block_bytes, storage)

    def kv_view(self, pool: KVPool, spec: KVCacheSpec) -> KVCache:
        return torch_kv_view(pool, spec, _kv_layout(spec))

    def compile(self, step: StepFunction, bucket: int | None, buffers: StepBuffers | None) -> Program:
        self._cpu_ops.settle_weights()
        if self._context is None or self._world_size > 1:
            return PlainProgram(step)  # gloo's collectives are no calls of ours
        return ReplayingProgram(step, self._context, self.ops.plan)

    def record_event(self) -> CpuEvent:
        return CpuEvent()

    def synchronize(self) -> None:
        return

    def export_memory(self, pool: KVPool) -> Any:
        return None

    def communicator(self, rank: int, world_size: int, address: str) -> Communicator:
        """Raises BackendUnavailable for another size, and when the ranks do not meet; ConfigError for a bad address."""
        if world_size not in WORLD_SIZES:
            raise BackendUnavailable(
                f"backend cpu forms groups of {', '.join(map(str, WORLD_SIZES))} ranks and was asked for {world_size}; "
                f"set tensor_parallel_size to one of these",
                field="tensor_parallel_size",
            )
        if world_size == 1:
            return SingleRank()
        from octavo.backends.common.comm import gloo_communicator  # torch.distributed: not for the many groups of one

        return gloo_communicator(rank, world_size, address)

    def close(self) -> None:
        if self._context is not None:
            self._context.close()
        self._torch_threads.release()


def _kv_layout(spec: KVCacheSpec) -> KVLayout:
    """One head's part of a block lies in one piece, since a core works on one head; keys in lanes if they fill them."""
    if spec.v_head_dim == 0:
        return KVLayout.MLA
    return KVLayout.HND if spec.block_size % LANES else KVLayout.HDN


def _capabilities(context: native.NativeContext | None) -> Capabilities:
    return Capabilities(
        device_name=cpu_name(),
        arch=f"{platform.machine()} {context.isa if context is not None else 'torch'}",
        # Few CPUs multiply 16-bit floats fast: bf16 is widened in registers, and an fp16 checkpoint kept as fp32.
        activation_dtype=dict.fromkeys((torch.float32, torch.bfloat16), torch.float32),
        default_dtype=torch.float32,
        kv_dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8),
        fp8="e4m3fn",
        total_memory_bytes=host_memory().total_bytes,
        default_max_num_batched_tokens=512,
        batch_invariant=context is not None,
        world_sizes=WORLD_SIZES,
        versions=_versions(context),
    )


def _versions(context: native.NativeContext | None) -> dict[str, str]:
    """What the numbers depend on: the kernels' sources, who compiled them, and for which instruction set."""
    if context is None:
        return {"kernels": "none"}
    library = context.library
    return {"kernels": library.source_hash, "compiler": library.compiler, "isa": context.isa}
