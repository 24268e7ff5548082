"""The Null backend: a device that computes nothing, so that scheduler and engine run without a model or kernels.

    NullBackend   counts what is allocated and not yet released; its memory is whatever a test says
    NullOps       has every op of the contract; each does nothing, except `sample`, which is the reference's
    null_model.py writes logits from token ids and positions alone, so that a test can predict every token

Register it with `registry.register(null_backend, "octavo-null")`; `--backend-option memory_bytes=…` sets its memory.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch

from octavo.core.backend import (
    API_VERSION,
    OP_NAMES,
    AttentionMetadata,
    Available,
    BackendConfig,
    BackendInfo,
    BackendRegistry,
    Capabilities,
    Communicator,
    KVCache,
    KVCacheSpec,
    KVLayout,
    KVPool,
    MemoryInfo,
    Ops,
    OpSpec,
    PlainProgram,
    Program,
    ReferenceOps,
    SingleRank,
    StepBuffers,
    StepFunction,
    StepPlan,
    Unsupported,
    WeightSpec,
    hookimpl,
)
from octavo.core.base.errors import OctavoError


@dataclass(frozen=True, slots=True)
class NullOptions:
    """memory_bytes: of the pretended device; token_buckets: "4,16", or "" for any shape."""

    memory_bytes: int = 1 << 30
    token_buckets: str = ""


class NullWeight:
    """Occupies nothing and accepts anything."""

    def __init__(self, spec: WeightSpec) -> None:
        self.spec = spec
        self.nbytes = 0

    def place(self, part_NK: Any, row_offset: int) -> None:
        return

    def rows(self, ids_T: torch.Tensor, *, out: torch.Tensor) -> None:
        out.zero_()

    def dense(self) -> torch.Tensor:
        return torch.zeros(self.spec.out_features, self.spec.in_features)


class NullOps:
    """Every op, doing nothing."""

    def __init__(self) -> None:
        for name in OP_NAMES:
            setattr(self, name, _nothing)
        self.sample = ReferenceOps(torch.device("cpu")).sample

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        return None

    def plan(self, meta: AttentionMetadata) -> StepPlan:
        return StepPlan(meta)

    def prepare_weight(self, spec: WeightSpec) -> NullWeight:
        return NullWeight(spec)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return


class NullEvent:
    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


class NullBackend:
    """A DeviceBackend on host tensors.

    Attributes:
        memory_bytes: settable; what memory_info reports as total, less what is alive as free.
        live_bytes: bytes of tensors and pools made by this backend and not yet collected.
        closed: whether close() was called; anything asked for afterwards is an error.
    """

    name = "null"

    def __init__(self, config: BackendConfig | None = None) -> None:
        options = config.options if config is not None and config.options is not None else NullOptions()
        self.memory_bytes = options.memory_bytes
        self.device = torch.device("cpu")
        self.ops = cast(Ops, NullOps())
        self.capabilities = Capabilities(
            device_name="null",
            arch="none",
            activation_dtype={torch.float32: torch.float32},
            default_dtype=torch.float32,
            kv_dtypes=(torch.float32,),
            total_memory_bytes=options.memory_bytes,
            dynamic_shapes=not options.token_buckets,
            token_buckets=tuple(int(bucket) for bucket in options.token_buckets.split(",") if bucket),
            default_max_num_batched_tokens=512,
            batch_invariant=True,
        )
        self.live_bytes = 0
        self.closed = False

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(max(0, self.memory_bytes - self.live_bytes), self.memory_bytes)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return self._counted(torch.empty(shape, dtype=dtype))

    def from_host(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            return self._counted(x.clone())
        out[: x.shape[0]].copy_(x)
        return out[: x.shape[0]]

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def allocate_kv_pool(self, num_blocks: int, block_bytes: int) -> KVPool:
        """Takes pretended memory only. Raises OctavoError when there is not enough of it."""
        nbytes = num_blocks * block_bytes
        free = self.memory_info().free_bytes
        if nbytes > free:
            raise OctavoError(f"a KV pool of {nbytes} bytes does not fit {free} free ones; lower num_kv_blocks")
        pool = KVPool(num_blocks, block_bytes, storage=_Storage())
        self._count(pool.storage, nbytes)
        return pool

    def kv_view(self, pool: KVPool, spec: KVCacheSpec) -> KVCache:
        return KVCache(spec, KVLayout.NHD, pool.num_blocks, None, None, pool.storage)

    def compile(self, step: StepFunction, bucket: int | None, buffers: StepBuffers | None) -> Program:
        return PlainProgram(step)

    def record_event(self) -> NullEvent:
        return NullEvent()

    def synchronize(self) -> None:
        return

    def export_memory(self, pool: KVPool) -> Any:
        return None

    def communicator(self, rank: int, world_size: int, address: str) -> Communicator:
        return SingleRank()

    def close(self) -> None:
        self.closed = True

    def _counted(self, x: torch.Tensor) -> torch.Tensor:
        self._count(x, x.nbytes)
        return x

    def _count(self, owner: object, nbytes: int) -> None:
        if self.closed:
            raise OctavoError("the null backend is closed and was asked for memory")
        self.live_bytes += nbytes
        weakref.finalize(owner, self._release, nbytes)

    def _release(self, nbytes: int) -> None:
        self.live_bytes -= nbytes


class _Storage:
    """Stands for a pool's bytes."""


def probe() -> Available:
    return Available("computes nothing")


@hookimpl
def register_backends(registry: BackendRegistry) -> None:
    registry.add(
        BackendInfo(
            name="null",
            api_version=API_VERSION,
            distribution="octavo-null",
            probe=f"{__name__}:probe",
            factory=f"{__name__}:NullBackend",
            priority=-1,
            options=f"{__name__}:NullOptions",
        )
    )
