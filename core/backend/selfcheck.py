"""Whether a device is what it declares: asked once, when a backend is made, before anything is loaded.

    methods       DeviceBackend and Ops are whole
    facts         Capabilities hold together
    answers       supports() answers, and twice the same
    memory        every declared dtype makes the way to the device and back, and gives a KV view of its own dtype

A few hundred bytes and well under a millisecond on a host. What a device computes is the conformance suite's affair;
here a plug-in that would fail later, in somebody's request, fails at the door with one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import torch

from octavo.core.backend.device import Capabilities, DeviceBackend, MemoryInfo
from octavo.core.backend.kv import KVCacheSpec, KVLayout, KVPool
from octavo.core.backend.ops import OP_NAMES, Ops
from octavo.core.backend.quant import QuantFormat
from octavo.core.backend.specs import (
    ActivationKind,
    AttentionSpec,
    CacheSpec,
    Gate,
    GemmSpec,
    GroupedGemmSpec,
    LoraSpec,
    OpSpec,
    RowSpec,
    Unsupported,
    WeightSpec,
)
from octavo.core.base.errors import OctavoError

FP8_FLAVOURS = {None: None, "e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
"""Values of Capabilities.fp8, each with the one such dtype that a device of it may declare. Never written to."""

PRODUCTS = ("gemm", "grouped_gemm")

_BLOCKS, _SLOTS, _HEADS, _HEAD_DIM = 2, 16, 2, 8


def device_fault(name: str, backend: DeviceBackend) -> str | None:
    """The first thing that is wrong with a device made as backend `name`, in words; None when all is well.

    Raises nothing for what the device does.
    """
    for faults in (_missing, _facts, _answers, _memory):
        try:
            fault = next(faults(name, backend), None)
        except Exception as error:
            fault = f"its start-up check ended in {type(error).__name__}: {error}"
        if fault is not None:
            return fault
    return None


def _missing(name: str, backend: DeviceBackend) -> Iterator[str]:
    for attribute in ("name", "device", "capabilities", "ops"):
        if not hasattr(backend, attribute):
            yield f"its device has no attribute {attribute}"
    for method, value in vars(DeviceBackend).items():
        if not method.startswith("_") and callable(value) and not _implements(backend, DeviceBackend, method):
            yield f"its device has no method {method}"
    called = backend.name
    if called != name:
        yield f"its device calls itself {called!r}"
    if not isinstance(backend.capabilities, Capabilities):
        yield f"its capabilities are a {type(backend.capabilities).__name__}, not Capabilities"
    own = _own_ops(backend)
    if own and not _implements(backend.ops, Ops, "supports"):
        yield f"its ops bring {own[0]} but no supports(), so that nobody can tell what it takes"
    products = [op for op in PRODUCTS if op in own]
    if products and not _implements(backend.ops, Ops, "prepare_weight"):
        yield f"its ops bring {products[0]} but no prepare_weight(); it must pack the weights that it multiplies"


def _own_ops(backend: DeviceBackend) -> list[str]:
    return [op for op in OP_NAMES if _implements(backend.ops, Ops, op)]


def _implements(thing: object, protocol: type, name: str) -> bool:
    """Whether `thing` has a method of its own: inheriting the protocol's empty body does not count."""
    method = getattr(thing, name, None)
    return callable(method) and getattr(type(thing), name, None) is not getattr(protocol, name)


def _facts(_: str, backend: DeviceBackend) -> Iterator[str]:
    facts = backend.capabilities
    if not facts.kv_dtypes:
        yield "it declares no kv_dtypes"
    if facts.default_dtype not in facts.activation_dtype:
        yield f"it declares default_dtype {facts.default_dtype}, for which activation_dtype has no entry"
    if facts.fp8 not in FP8_FLAVOURS:
        yield f"it declares fp8 {facts.fp8!r}; it must be one of {', '.join(map(str, FP8_FLAVOURS))}"
    for dtype in (*facts.kv_dtypes, *facts.activation_dtype):
        if dtype in FP8_FLAVOURS.values() and dtype != FP8_FLAVOURS[facts.fp8]:
            yield f"it declares {dtype}, and fp8 {facts.fp8!r}, which is another flavour"
    if facts.total_memory_bytes < 1 or facts.default_max_num_batched_tokens < 1:
        limits = f"{facts.total_memory_bytes} and default_max_num_batched_tokens {facts.default_max_num_batched_tokens}"
        yield f"it declares total_memory_bytes {limits}; they must be positive"
    if facts.batch_invariant and not facts.deterministic:
        yield "it declares itself batch_invariant, but not deterministic: then no row's bits are its own"
    buckets = facts.token_buckets
    if facts.dynamic_shapes and buckets:
        yield "it declares token_buckets, but dynamic_shapes as well"
    if not facts.dynamic_shapes and (not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1):
        yield f"it declares no dynamic_shapes, and token_buckets {buckets}; they must be positive and ascending"
    sizes = facts.world_sizes
    if sizes[:1] != (1,) or list(sizes) != sorted(set(sizes)):
        yield f"it declares world_sizes {sizes}; they must ascend from 1"
    yield from _memory_facts(backend)


def _memory_facts(backend: DeviceBackend) -> Iterator[str]:
    """What is wrong with what it says of its memory."""
    facts = backend.capabilities
    if not 0 < facts.kv_memory_fraction <= 1:
        yield f"it declares kv_memory_fraction {facts.kv_memory_fraction}; it must lie above 0, and not above 1"
    memory = backend.memory_info()
    if not isinstance(memory, MemoryInfo) or not 0 <= memory.free_bytes <= memory.total_bytes:
        yield f"its memory_info is {memory}; free bytes must lie between 0 and the total"


def _answers(_: str, backend: DeviceBackend) -> Iterator[str]:
    specs = _sample_specs(backend.capabilities)
    for op in _own_ops(backend):
        first, second = (backend.ops.supports(op, specs[op]) for _ in range(2))
        if not isinstance(first, Unsupported | None):
            yield f"its supports({op!r}, …) answers {first!r}; it must answer None or Unsupported(reason)"
        if first != second:
            yield f"its supports({op!r}, …) answers {first}, and asked the same again {second}"


def _sample_specs(facts: Capabilities) -> dict[str, OpSpec]:
    """For each op some call of it; whether the device takes it is its own affair."""
    stored, kv_dtype = facts.default_dtype, facts.kv_dtypes[0]
    dtype = facts.activation_dtype[stored]
    weight = WeightSpec(_SLOTS, _SLOTS, stored)
    cache = CacheSpec(_HEADS, _HEAD_DIM, _HEAD_DIM, dtype, kv_dtype, _SLOTS, KVLayout.NHD)
    attention = AttentionSpec(_HEADS, _HEADS, _HEAD_DIM, _HEAD_DIM, dtype, kv_dtype, _SLOTS, KVLayout.NHD)
    specs: dict[str, OpSpec] = dict.fromkeys(OP_NAMES, RowSpec(_SLOTS, dtype, extent=_HEADS))
    specs |= {op: cache for op in OP_NAMES if op.startswith("write_") or op.endswith(("_kv", "_blocks"))}
    specs |= {op: attention for op in OP_NAMES if op.endswith("attention") and not op.startswith("merge")}
    return specs | {
        "gemm": GemmSpec(weight, dtype, dtype),
        "grouped_gemm": GroupedGemmSpec(weight, _HEADS, dtype, dtype),
        "lora_gemm": LoraSpec(_SLOTS, _SLOTS, _HEADS, dtype),
        "rope_write_kv": CacheSpec(
            _HEADS, _HEAD_DIM, _HEAD_DIM, dtype, kv_dtype, _SLOTS, KVLayout.NHD, num_heads=_HEADS, rotary_dim=_HEAD_DIM
        ),
        "quantize": RowSpec(_SLOTS, dtype, QuantFormat.INT8),
        "act_mul": RowSpec(_SLOTS, dtype, get_args(Gate)[0]),
        "activation": RowSpec(_SLOTS, dtype, get_args(ActivationKind)[0]),
        "moe_route": RowSpec(_SLOTS, dtype, "softmax", _HEADS),
        "moe_permute": RowSpec(_SLOTS, torch.int64, extent=_HEADS),
    }


def _memory(_: str, backend: DeviceBackend) -> Iterator[str]:
    facts = backend.capabilities
    dtypes = {dtype: "activation_dtype" for pair in facts.activation_dtype.items() for dtype in pair}
    for dtype, field in ({torch.int64: "token ids", torch.int32: "block tables"} | dtypes).items():
        yield from _round_trip(backend, dtype, field)
    for dtype in facts.kv_dtypes:
        yield from _kv_view(backend, dtype)


def _round_trip(backend: DeviceBackend, dtype: torch.dtype, field: str) -> Iterator[str]:
    sent = torch.tensor([1, 2, 0, 3]).to(dtype)
    try:
        room = backend.empty(6, dtype=dtype)
        back = backend.to_host(backend.from_host(sent, out=room)[:4])
    except Exception as error:
        yield f"it declares {dtype} ({field}), which its memory does not take: {type(error).__name__}: {error}"
        return
    if room.dtype != dtype or not _same_device(room.device, backend.device):
        yield f"asked for {dtype} on {backend.device}, its memory gives {room.dtype} on {room.device}"
    if back.dtype != dtype or not torch.equal(back.to(torch.float64), sent.to(torch.float64)):
        yield f"it declares {dtype} ({field}), but numbers do not come back from the device as they were sent"


def _same_device(found: torch.device, declared: torch.device) -> bool:
    """A device named without an index is the first of its kind."""
    return (found.type, found.index or 0) == (declared.type, declared.index or 0)


def _kv_view(backend: DeviceBackend, dtype: torch.dtype) -> Iterator[str]:
    spec = KVCacheSpec(_HEADS, _HEAD_DIM, _HEAD_DIM, dtype, _SLOTS)
    try:
        pool: KVPool = backend.allocate_kv_pool(_BLOCKS, spec.block_bytes)
        view = backend.kv_view(pool, spec)
    except OctavoError:
        return  # too little memory is no lie: the engine says how much is needed
    except Exception as error:
        yield f"it declares {dtype} in kv_dtypes, but can't make a cache of it: {type(error).__name__}: {error}"
        return
    shape: tuple[Any, ...] = (_BLOCKS, _SLOTS, _HEADS, _HEAD_DIM)
    for part in (view.key_NSKD, view.value_NSKD):
        if part is not None and (part.dtype != dtype or tuple(part.shape) != shape):
            yield f"its kv_view of {dtype} {list(shape)} is {part.dtype} {list(part.shape)}"
