"""GpuBackend: one device behind a Runtime, as the engine sees it. The backends cuda and rocm are subclasses.

    GpuBackend ──┬── Runtime        streams, memory, recording (runtime.py)
                 ├── Stream         its own; every call makes it the thread's current one
                 ├── StagingRing    pinned memory that inputs go through (staging.py)
                 ├── Gpu ──► ops    groups of kernels; all of them start by way of Gpu.launch
                 └── GraphProgram   steps of few tokens, recorded (graphs.py)

Steps are padded to TOKEN_BUCKETS. Up to RECORDED_TOKENS a step is bound by the time that launches take, and is
recorded; a few dozen sizes bound the recordings. Above, a step is launched kernel by kernel, and buckets are multiples
of a product's row tile: its last tile is computed in full anyway, so that padding costs next to nothing, a full chunk
of a prompt is a bucket itself, and kernels see few distinct sizes to be compiled for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from octavo.backends.common.chip import Chip
from octavo.backends.common.gpu import Gpu
from octavo.backends.common.graphs import Complaints, GraphProgram
from octavo.backends.common.launch import Launch, launch
from octavo.backends.common.op_groups import OpGroups
from octavo.backends.common.options import GpuOptions
from octavo.backends.common.runtime import Runtime
from octavo.backends.common.staging import StagingRing
from octavo.backends.common.tuning import TuningTable
from octavo.core.backend import (
    BackendConfig,
    Capabilities,
    Communicator,
    Event,
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
from octavo.core.base.units import format_bytes

RECORDED_TOKENS = 512
"""The largest step that is recorded."""

TOKEN_BUCKETS = (
    1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, RECORDED_TOKENS, 64),
    *range(RECORDED_TOKENS, 4096, 128), *range(4096, 16384 + 1, 256),
)  # fmt: skip
"""Tokens of a step, padding included."""

DEFAULT_STEP_TOKENS = 8192

KV_MEMORY_FRACTION = 0.9
"""Of what weights and the reserve leave free: a device serves one engine. What stays is for other processes' growth."""

EMULATED_KV_MEMORY_FRACTION = 0.5
"""The interpreter's device is the host, whose memory is for everybody."""

RESERVE_BYTES = 1 << 30
"""Of the device's memory, never offered to the engine: recordings, code, and workspaces of libraries come later."""

WORLD_SIZES = (1, 2, 4, 8)

FP8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class GpuBackend:
    """A GPU as a DeviceBackend. See the contract in core/backend/device.py.

    Attributes:
        gpu, make_ops: what the ops were made of; tuning makes them anew under other launch parameters.
    """

    name: str

    def __init__(
        self,
        config: BackendConfig,
        runtime: Runtime,
        chip: Chip,
        tuning: TuningTable,
        make_ops: Callable[[Gpu], Any],
        launch: Launch = launch,
    ) -> None:
        options = config.options or GpuOptions()
        self._runtime = runtime
        self._stream = runtime.new_stream()
        runtime.use(self._stream)
        self._staging: StagingRing | None = StagingRing(runtime, self._stream)
        self._records = options.graphs and runtime.can_record
        self._complaints = Complaints()
        self.device = runtime.device
        self.gpu = Gpu(runtime.device, chip, launch, tuning, config.deterministic)
        self.make_ops = make_ops
        self.ops = cast(Ops, make_ops(self.gpu))
        self.capabilities = _capabilities(runtime, chip, records=self._records, deterministic=config.deterministic)

    # -- memory -----------------------------------------------------------------------------------------------
    def memory_info(self) -> MemoryInfo:
        memory = self._runtime.memory_info()
        reserve = 0 if self._runtime.is_emulated else RESERVE_BYTES
        return MemoryInfo(max(0, memory.free_bytes - reserve), memory.total_bytes)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        self._runtime.use(self._stream)
        return self._runtime.empty(shape, dtype)

    def from_host(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        self._runtime.use(self._stream)
        room = self._runtime.empty(tuple(x.shape), x.dtype) if out is None else out[: x.shape[0]]
        self._ring().send(x, room)
        return room

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        self._runtime.use(self._stream)
        copy = torch.empty(x.shape, dtype=x.dtype)
        copy.copy_(x)  # waits for the stream, as a copy to ordinary memory does
        return copy

    def allocate_kv_pool(self, num_blocks: int, block_bytes: int) -> KVPool:
        """Raises ConfigError when it does not fit the memory that is free now."""
        self._runtime.use(self._stream)
        wanted, free = num_blocks * block_bytes, self.memory_info().free_bytes
        try:
            if wanted > free:
                raise torch.OutOfMemoryError
            storage = self._runtime.empty((wanted,), torch.uint8)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"a KV pool of {format_bytes(wanted)} does not fit {self.capabilities.device_name}: "
                f"{format_bytes(free)} are free; lower num_kv_blocks or kv_cache_memory_bytes",
                field="num_kv_blocks",
            ) from None
        return KVPool(num_blocks, block_bytes, storage)

    def kv_view(self, pool: KVPool, spec: KVCacheSpec) -> KVCache:
        """Token after token: what a step writes lies in one piece, and a token's heads are read together."""
        return torch_kv_view(pool, spec, KVLayout.NHD if spec.v_head_dim else KVLayout.MLA)

    def export_memory(self, pool: KVPool) -> Any:
        return None

    # -- work -------------------------------------------------------------------------------------------------
    def compile(self, step: StepFunction, bucket: int | None, buffers: StepBuffers | None) -> Program:
        if bucket is None or bucket > RECORDED_TOKENS or not self._records:
            return PlainProgram(step)
        return GraphProgram(step, self._runtime, self._stream, self._complaints)

    def record_event(self) -> Event:
        self._runtime.use(self._stream)
        return self._runtime.event(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def communicator(self, rank: int, world_size: int, address: str) -> Communicator:
        """Raises BackendUnavailable for another size, and when the ranks do not meet; ConfigError for a bad address."""
        sizes = self.capabilities.world_sizes
        if world_size not in sizes:
            raise BackendUnavailable(
                f"backend {self.name} forms groups of {', '.join(map(str, sizes))} ranks here and was asked for "
                f"{world_size}; set tensor_parallel_size to one of these",
                field="tensor_parallel_size",
            )
        if world_size == 1:
            return SingleRank()
        from octavo.backends.common.comm import TorchCommunicator, process_group

        self._runtime.use(self._stream)
        group = process_group(self._runtime.transport, rank, world_size, address)
        return TorchCommunicator(group, rank, world_size, capturable=not self._runtime.is_emulated, device=self.device)

    def close(self) -> None:
        if self._staging is None:
            return
        self._stream.synchronize()
        self._staging = None
        self.ops = cast(Ops, OpGroups(self.name))  # the others hold workspaces
        self._runtime.trim()

    def _ring(self) -> StagingRing:
        if self._staging is None:
            raise BackendUnavailable(f"backend {self.name} was closed and is used again; make a new one")
        return self._staging


def _capabilities(runtime: Runtime, chip: Chip, *, records: bool, deterministic: bool) -> Capabilities:
    name = f"{chip.name}, emulated" if runtime.is_emulated else chip.name
    count = max(WORLD_SIZES) if runtime.is_emulated else runtime.device_count()
    return Capabilities(
        device_name=name,
        arch=chip.arch,
        activation_dtype={dtype: dtype for dtype in FLOATS},
        default_dtype=torch.bfloat16,
        kv_dtypes=(*FLOATS, FP8[chip.fp8]),
        total_memory_bytes=runtime.memory_info().total_bytes,
        fp8=chip.fp8,
        graphs=records,
        dynamic_shapes=False,
        token_buckets=TOKEN_BUCKETS,
        default_max_num_batched_tokens=DEFAULT_STEP_TOKENS,
        deterministic=True,
        batch_invariant=deterministic,
        world_sizes=tuple(size for size in WORLD_SIZES if size <= count),
        versions=runtime.versions(),
        is_emulated=runtime.is_emulated,
        cache_bytes=0 if runtime.is_emulated else chip.cache_bytes,
        accumulation=_accumulation("fp32" if runtime.is_emulated else chip.fp8_accumulation),
        kv_memory_fraction=EMULATED_KV_MEMORY_FRACTION if runtime.is_emulated else KV_MEMORY_FRACTION,
    )


def _accumulation(float8: str) -> dict[str, str]:
    """The interpreter adds up in fp32, whatever the chip does."""
    return {"default": "fp32", **dict.fromkeys(("gemm/float8", "grouped_gemm/float8"), float8)}
