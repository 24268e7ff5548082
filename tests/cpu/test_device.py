"""The CPU as a device: memory, KV pools and views, life cycle; with and without its native kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from octavo.backends.cpu import device as cpu_device
from octavo.backends.cpu import native, native_build, threads
from octavo.backends.cpu.device import CpuBackend
from octavo.core.backend import (
    BackendConfig,
    BackendRegistry,
    DeviceBackend,
    GemmSpec,
    KVCacheSpec,
    KVLayout,
    MemoryInfo,
    OpSet,
    PlainWeight,
    RowSpec,
    WeightSpec,
)
from octavo.core.base.errors import BackendUnavailable, ConfigError

GIB = 2**30


@pytest.fixture
def backend() -> Iterator[DeviceBackend]:
    registry = BackendRegistry.discover()
    made = registry.create(registry.choose("cpu"), num_threads=2)
    yield made
    made.close()


def test_tensors_go_to_the_device_and_back(backend: DeviceBackend) -> None:
    x, out = torch.arange(3), backend.empty(5, dtype=torch.int64)
    assert out.shape == (5,)
    filled = backend.from_host(x, out=out)
    assert filled.data_ptr() == out.data_ptr()
    assert filled.tolist() == [0, 1, 2]
    copy = backend.from_host(x)
    x += 1
    assert copy.tolist() == [0, 1, 2]
    host = backend.to_host(copy)
    copy += 1
    assert host.tolist() == [0, 1, 2]
    event = backend.record_event()
    event.wait()
    assert event.done()


@pytest.mark.parametrize(("block_size", "layout"), [(2, KVLayout.HND), (16, KVLayout.HDN), (48, KVLayout.HDN)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_kv_view_covers_each_slot_once(
    backend: DeviceBackend, dtype: torch.dtype, block_size: int, layout: KVLayout
) -> None:
    spec = KVCacheSpec(num_kv_heads=3, head_dim=5, v_head_dim=4, dtype=dtype, block_size=block_size)
    pool = backend.allocate_kv_pool(7, spec.block_bytes + 8)
    cache = backend.kv_view(pool, spec)
    assert cache.layout is layout
    assert cache.key_NSKD is not None
    assert cache.value_NSKD is not None
    assert cache.key_NSKD.shape == (7, block_size, 3, 5)
    assert cache.value_NSKD.shape == (7, block_size, 3, 4)
    pool.storage.zero_()
    for view in (cache.key_NSKD, cache.value_NSKD):
        view += 1
    ones = pool.storage.view(dtype)[: 7 * pool.block_bytes // dtype.itemsize]
    assert float(ones.float().max()) == 1  # no element is in two places
    assert float(ones.float().sum()) == 7 * spec.block_bytes / dtype.itemsize
    assert (ones.view(7, -1)[:, spec.block_bytes // dtype.itemsize :] == 0).all()  # padding stays


def test_specs_of_other_shapes_view_the_same_pool(backend: DeviceBackend) -> None:
    pool = backend.allocate_kv_pool(4, 256)
    wide = backend.kv_view(pool, KVCacheSpec(1, 8, 8, torch.float32, 4))
    mla = backend.kv_view(pool, KVCacheSpec(1, 16, 0, torch.float32, 4))
    assert mla.layout is KVLayout.MLA
    assert wide.key_NSKD is not None
    assert mla.key_NSKD is not None
    assert wide.key_NSKD[3].data_ptr() == mla.key_NSKD[3].data_ptr()
    with pytest.raises(ValueError, match="do not fit"):
        backend.kv_view(pool, KVCacheSpec(1, 8, 8, torch.float32, 8))


def test_pools_beyond_free_memory_are_refused_together(backend: DeviceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "memory_info", lambda: MemoryInfo(GIB, GIB))
    first = backend.allocate_kv_pool(600, 2**20)
    with pytest.raises(ConfigError, match=r"1\.17 GiB do not fit: 1\.00 GiB .* lower num_kv_blocks") as error:
        backend.allocate_kv_pool(600, 2**20)  # the first is untouched, so the system still calls it free
    assert error.value.field == "num_kv_blocks"
    del first
    backend.allocate_kv_pool(600, 2**20)  # a pool that is gone no longer counts


def test_memory_info_is_plausible(backend: DeviceBackend) -> None:
    info = backend.memory_info()
    assert 0 < info.free_bytes <= info.total_bytes == backend.capabilities.total_memory_bytes


def test_versions_name_the_kernels_their_compiler_and_instruction_set(backend: DeviceBackend) -> None:
    versions = backend.capabilities.versions
    assert versions["kernels"] == native_build.source_hash()
    assert re.fullmatch(r"(g\+\+|clang) \d+\..*", versions["compiler"])
    assert backend.capabilities.arch.endswith(f" {versions['isa']}")


def test_groups_of_the_declared_sizes_only(backend: DeviceBackend) -> None:
    assert backend.communicator(0, 1, "").world_size == 1
    assert backend.capabilities.world_sizes == (1, 2, 4, 8)
    with pytest.raises(BackendUnavailable, match="forms groups of 1, 2, 4, 8 ranks and was asked for 3") as error:
        backend.communicator(0, 3, "127.0.0.1:1")
    assert error.value.field == "tensor_parallel_size"
    with pytest.raises(ConfigError, match="HOST:PORT"):
        backend.communicator(0, 2, "")


def test_the_ranks_of_a_group_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "host_memory", lambda: MemoryInfo(8 * 2**20, 16 * 2**20))
    backend = CpuBackend(BackendConfig(num_threads=1, rank=1, world_size=4))
    assert backend.memory_info() == MemoryInfo(2 * 2**20, 16 * 2**20)
    with pytest.raises(ConfigError, match="do not fit"):
        backend.allocate_kv_pool(3, 2**20)
    backend.close()


def test_the_ranks_of_a_group_share_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "physical_cores", lambda *_: 8)
    monkeypatch.setattr(threads, "cpu_quota", lambda *_: None)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(cpu_device.native, "load", lambda: None)
    before = torch.get_num_threads()
    for world_size, share in ((1, 8), (2, 4), (16, 1)):
        made = CpuBackend(BackendConfig(rank=world_size - 1, world_size=world_size))
        assert torch.get_num_threads() == share
        made.close()
    assert torch.get_num_threads() == before


def test_close_restores_torchs_threads_and_may_be_called_twice() -> None:
    before = torch.get_num_threads()
    made = CpuBackend(BackendConfig(num_threads=3))
    made.close()
    made.close()
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("first_closed", [0, 1])
def test_the_last_engine_to_close_restores_torchs_threads(first_closed: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engines = [CpuBackend(BackendConfig(num_threads=1)) for _ in range(2)]
        engines.pop(first_closed).close()
        assert torch.get_num_threads() == 1
        engines.pop().close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_thread_count_that_the_user_sets_in_between_stays() -> None:
    before = torch.get_num_threads()
    try:
        engines = [CpuBackend(BackendConfig(num_threads=1)) for _ in range(2)]
        torch.set_num_threads(3)
        for engine in engines:
            engine.close()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_without_native_kernels_everything_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device.native, "load", lambda: None)
    made = CpuBackend(BackendConfig(num_threads=2))
    try:
        assert torch.get_num_threads() == 2
        assert not made.capabilities.batch_invariant
        assert made.capabilities.versions == {"kernels": "none"}
        ops = OpSet(made)
        spec = GemmSpec(WeightSpec(4, 3, torch.float32), torch.float32, torch.float32)
        w, gemm = ops.prepare_weight(spec), ops.bind("gemm", spec)
        assert isinstance(w, PlainWeight)
        w.place(torch.ones(4, 3), 0)
        out = made.empty(2, 4, dtype=torch.float32)
        gemm(torch.ones(2, 3), w, out=out)
        assert torch.equal(out, torch.full((2, 4), 3.0))
        ops.bind("rms_norm", RowSpec(4, torch.float32))
        assert {c.implementation for c in ops.report()} == {"fallback"}
    finally:
        made.close()


def test_with_native_kernels_torch_keeps_to_one_thread(backend: DeviceBackend) -> None:
    if native.load() is None:
        pytest.skip("no native library on this machine")
    assert torch.get_num_threads() == 1
    assert backend.capabilities.batch_invariant
    ops = OpSet(backend, strict=True)
    ops.bind("gemm", GemmSpec(WeightSpec(4, 3, torch.float32), torch.float32, torch.float32))
    ops.verify()
