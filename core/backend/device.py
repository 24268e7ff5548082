"""What the engine asks of a device: its facts, its memory, its order of work, and how a step is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from octavo.core.backend.comm import Communicator
from octavo.core.backend.kv import KVCache, KVCacheSpec, KVPool
from octavo.core.backend.ops import Ops, StepPlan


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Facts of the device. What an op can do is answered by `Ops.supports`, never from here.

    Attributes:
        device_name, arch: for people and reports.
        activation_dtype: what models compute in, for each storage dtype of weights.
        default_dtype: storage dtype when the user asks for "auto" and the checkpoint leaves it open.
        kv_dtypes: storage dtypes of the KV cache. "auto" takes what the model computes in, or, where that is not among
            them, the first.
        fp8: flavour of 8-bit floats ("e4m3fn", "e4m3fnuz") or None.
        total_memory_bytes: of the device.
        graphs: whether `compile` records a step.
        dynamic_shapes: True when a step may have any shape; else the runner pads to `token_buckets`.
        token_buckets: allowed numbers of tokens per step, ascending; empty when shapes are dynamic.
        default_max_num_batched_tokens: a step's token budget when the user gives none.
        accumulation: op -> accumulation class ("fp32", "tf32", …), for the conformance bounds; "gemm/float8" is gemm
            where both operands are 8-bit floats, and so for grouped_gemm.
        deterministic: the same call gives the same bits.
        batch_invariant: a row's bits do not depend on the other rows of its batch.
        world_sizes: sizes of the groups that `communicator` can form on this machine's devices, ascending from 1.
        versions: of what lies below the backend, for reports: "driver", "firmware", "runtime", ….
        is_emulated: another device does its work: what is measured here is no claim about the device named.
        kv_memory_fraction: share of the free memory that the KV cache takes where the user gives no size; above 0, no
            more than 1. A device that nobody else uses can give nearly all.
        cache_bytes: of the last cache before the device's memory, all units' together; 0: not told. What is measured
            must not come from there where a model's numbers would not.
    """

    device_name: str
    arch: str
    activation_dtype: Mapping[torch.dtype, torch.dtype]
    default_dtype: torch.dtype
    kv_dtypes: tuple[torch.dtype, ...]
    total_memory_bytes: int
    fp8: str | None = None
    graphs: bool = False
    dynamic_shapes: bool = True
    token_buckets: tuple[int, ...] = ()
    default_max_num_batched_tokens: int = 2048
    accumulation: Mapping[str, str] = field(default_factory=lambda: {"default": "fp32"})
    deterministic: bool = True
    batch_invariant: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    world_sizes: tuple[int, ...] = (1,)
    is_emulated: bool = False
    kv_memory_fraction: float = 0.5
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of device memory that could be had now, and in all (limits of a container included)."""

    free_bytes: int
    total_bytes: int


@dataclass(slots=True)
class StepBuffers:
    """The inputs and outputs of one forward pass, on the device.

    Attributes:
        token_ids_T: int64 [T].
        positions_T: int64 [T].
        plans: one per KV group, in group order.
        logit_rows_R: int64 [R]; the tokens whose logits are wanted.
        logits_RV: fp32 [R, V]; written by the step.
        adapter_T: int32 [T]; the adapter slot of each token, -1 for none. None where the engine serves no adapters and,
            where shapes are dynamic, in a step whose tokens have none.

    Where a device takes only token buckets, T and R are padded; see AttentionMetadata.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    plans: tuple[StepPlan, ...]
    logit_rows_R: torch.Tensor
    logits_RV: torch.Tensor
    adapter_T: torch.Tensor | None = None


StepFunction = Callable[[StepBuffers], None]


class Program(Protocol):
    """A step made ready to run: plain calls, a recorded graph, or a native list of kernel calls."""

    def run(self, buffers: StepBuffers) -> None:
        """Run the step on these buffers. Asynchronous where the device is."""


@dataclass(frozen=True, slots=True)
class PlainProgram:
    """The Program of a backend that records nothing: call the step."""

    step: StepFunction

    def run(self, buffers: StepBuffers) -> None:
        self.step(buffers)


class Event(Protocol):
    """A point in the device's order of work."""

    def wait(self) -> None:
        """Block the host until the device has passed this point."""

    def done(self) -> bool:
        """Whether the device has passed it. Never blocks."""


class DeviceBackend(Protocol):
    """A device. Made by `BackendInfo.factory` once per engine; two instances do not disturb each other.

    Attributes:
        name: the backend's name, its identity everywhere.
        device: where its tensors live; any torch device, PrivateUse1 included.
        capabilities: facts, fixed after construction.
        ops: its operations.
    """

    name: str
    device: torch.device
    capabilities: Capabilities
    ops: Ops

    def memory_info(self) -> MemoryInfo:
        """What is free now. The engine decides from it how many blocks to ask for."""

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised device tensor."""

    def from_host(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """A host tensor's copy on the device, ordered with the device's work; `out` may be longer than x."""

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        """A device tensor's copy on the host, complete when it returns."""

    def allocate_kv_pool(self, num_blocks: int, block_bytes: int) -> KVPool:
        """The bytes of one layer slot. Raises OctavoError when they can't be had."""

    def kv_view(self, pool: KVPool, spec: KVCacheSpec) -> KVCache:
        """One layer's typed view of a pool, in the backend's layout."""

    def compile(self, step: StepFunction, bucket: int | None, buffers: StepBuffers | None) -> Program:
        """Make a step ready: for any shape (None, None), or for a token bucket and the very shapes of `buffers`.

        With buckets it is called when a shape first comes up: once a bucket, once more where steps score prompts.
        """

    def record_event(self) -> Event:
        """An event after all work queued so far."""

    def synchronize(self) -> None:
        """Return when all queued work is done."""

    def export_memory(self, pool: KVPool) -> Any:
        """A handle by which another process or a network card may read the pool; None when there is none."""

    def communicator(self, rank: int, world_size: int, address: str) -> Communicator:
        """This rank's communicator for the group that meets at `address`, "host:port": rank 0 listens there.

        Returns when all ranks are there; a group of one needs no address. Raises BackendUnavailable for a size that is
        not in `Capabilities.world_sizes`, and when the others don't come.
        """

    def close(self) -> None:
        """Give back threads, memory and handles. Idempotent."""
