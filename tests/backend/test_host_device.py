"""HostDevice: a backend begins from it, and what it overrides is what the device does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import octavo.core.backend as api

HERE = __name__


class Beginner(api.HostDevice):
    """Nothing but what every backend must bring."""

    name = "beginner"

    def __init__(self, config: api.BackendConfig) -> None:
        self.ops: Any = object()
        self.capabilities = api.Capabilities(
            device_name="the host",
            arch="none",
            activation_dtype={torch.bfloat16: torch.float32, torch.float32: torch.float32},
            default_dtype=torch.float32,
            kv_dtypes=(torch.float32, torch.float16),
            total_memory_bytes=self.memory_info().total_bytes,
        )


class Poisoned(Beginner):
    """Its memory is its own, and everything else follows."""

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((*shape, dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype).view(shape)


def made(factory: str) -> api.DeviceBackend:
    return api.BackendRegistry().create(
        api.BackendInfo(
            name="beginner", api_version=1, distribution="d", probe=f"{HERE}:none", factory=f"{HERE}:{factory}"
        )
    )


def test_it_is_a_whole_device_that_passes_the_start_up_check() -> None:
    backend = made("Beginner")
    x = torch.arange(6).view(3, 2)
    on_device = backend.from_host(x)
    x += 1
    back = backend.to_host(on_device)
    on_device.zero_()
    assert back.tolist() == [[0, 1], [2, 3], [4, 5]]
    room = backend.empty(4, 2, dtype=torch.int64)
    assert backend.from_host(x, out=room).data_ptr() == room.data_ptr()
    assert torch.equal(room[:3], x)
    event = backend.record_event()
    event.wait()
    assert event.done()
    info = backend.memory_info()
    assert 0 < info.free_bytes <= info.total_bytes
    backend.close()


def test_what_it_overrides_the_rest_is_built_on() -> None:
    backend = made("Poisoned")
    spec = api.KVCacheSpec(1, 4, 4, torch.float32, 16)
    kv = backend.kv_view(backend.allocate_kv_pool(2, spec.block_bytes), spec)
    assert kv.key_NSKD is not None
    assert bool(kv.key_NSKD.isnan().all())
    assert backend.kv_view(
        backend.allocate_kv_pool(2, spec.block_bytes), api.KVCacheSpec(1, 8, 0, torch.float32, 16)
    ).layout is (api.KVLayout.MLA)


def test_it_is_alone() -> None:
    backend = made("Beginner")
    assert backend.communicator(0, 1, "").world_size == 1
    with pytest.raises(api.BackendUnavailable, match="beginner runs one rank and was asked for 2; set tensor_par"):
        backend.communicator(0, 2, "localhost:1")
