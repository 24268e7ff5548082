"""The device layer of GPUs over a device whose work runs late: what it does too early, or not at all, shows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from octavo.backends.common.device import RECORDED_TOKENS, RESERVE_BYTES, TOKEN_BUCKETS
from octavo.backends.common.options import GpuOptions
from octavo.backends.common.staging import LARGEST_BYTES, StagingRing
from octavo.core.backend import BackendConfig, KVCacheSpec, KVLayout, PlainProgram
from octavo.core.backend.selfcheck import device_fault
from octavo.core.base.errors import BackendUnavailable, ConfigError
from tests.fakes.late_backend import LateBackend
from tests.fakes.late_device import LateDevice, LateRuntime


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with LateDevice() as device:
        yield device


def backend_on(device: LateDevice, *, deterministic: bool = False, **options: Any) -> LateBackend:
    return LateBackend(BackendConfig(deterministic=deterministic, options=GpuOptions(**options)), device)


def test_it_is_what_it_declares(device: LateDevice) -> None:
    assert device_fault("late", backend_on(device)) is None


def test_facts_are_those_of_the_chip(device: LateDevice) -> None:
    facts = backend_on(device).capabilities
    assert facts.default_dtype == torch.bfloat16
    assert facts.activation_dtype == {d: d for d in (torch.bfloat16, torch.float16, torch.float32)}
    assert facts.kv_dtypes[0] == torch.bfloat16
    assert torch.float8_e4m3fn in facts.kv_dtypes
    assert (facts.graphs, facts.dynamic_shapes, facts.token_buckets) == (True, False, TOKEN_BUCKETS)
    assert (facts.is_emulated, facts.batch_invariant) == (False, False)
    assert facts.world_sizes == (1,)
    assert facts.kv_memory_fraction == 0.9
    assert facts.accumulation["grouped_gemm/float8"] == "fp22-128"
    assert backend_on(device, deterministic=True).capabilities.batch_invariant
    assert not backend_on(device, graphs=False).capabilities.graphs


def test_buckets_waste_little_where_steps_are_long() -> None:
    """From 64 tokens on, a step is padded by less than a third; from 512 on by less than a row tile in four."""
    for smaller, larger in itertools.pairwise(TOKEN_BUCKETS):
        assert smaller < larger
        if smaller >= RECORDED_TOKENS:
            assert larger - smaller <= max(128, smaller // 16)
        elif smaller >= 64:
            assert larger <= smaller * 4 / 3
    assert {256, 512, 2048, 8192, 16384} <= set(TOKEN_BUCKETS)


def test_options_that_cant_be_are_refused() -> None:
    with pytest.raises(ValueError, match="device is -1; the first one is 0"):
        GpuOptions(device=-1)


# -- memory ---------------------------------------------------------------------------------------------------


def test_the_reserve_is_never_offered(device: LateDevice) -> None:
    backend = backend_on(device)
    before = backend.memory_info()
    assert before.total_bytes == device.memory_bytes
    assert before.free_bytes == device.memory_bytes - device.live_bytes - RESERVE_BYTES
    kept = backend.empty(1 << 20, dtype=torch.uint8)
    assert backend.memory_info().free_bytes == before.free_bytes - kept.nbytes


def test_a_pool_that_does_not_fit_is_refused_with_both_sizes() -> None:
    with LateDevice(memory_bytes=RESERVE_BYTES + (8 << 20)) as device:
        backend = backend_on(device)
        pool = backend.allocate_kv_pool(4, 1 << 20)
        assert pool.storage.nbytes == 4 << 20
        with pytest.raises(ConfigError, match=r"a KV pool of 5 MiB does not fit a late device: 4 MiB are free"):
            backend.allocate_kv_pool(5, 1 << 20)


def test_a_pool_that_the_device_refuses_at_the_last_moment_is_the_same_error(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_on(device)
    monkeypatch.setattr(device, "memory_bytes", device.live_bytes)
    monkeypatch.setattr(LateRuntime, "memory_info", lambda self: LateDevice().memory_info())
    with pytest.raises(ConfigError, match="lower num_kv_blocks or kv_cache_memory_bytes"):
        backend.allocate_kv_pool(1, 1 << 20)


def test_layouts_are_token_after_token(device: LateDevice) -> None:
    backend = backend_on(device)
    spec = KVCacheSpec(2, 8, 8, torch.bfloat16, 16)
    view = backend.kv_view(backend.allocate_kv_pool(3, spec.block_bytes), spec)
    assert view.layout is KVLayout.NHD
    assert view.key_NSKD is not None
    assert view.key_NSKD.stride()[1:] == (16, 8, 1)
    latent = KVCacheSpec(1, 24, 0, torch.bfloat16, 16)
    assert backend.kv_view(backend.allocate_kv_pool(3, latent.block_bytes), latent).layout is KVLayout.MLA


def test_a_closed_backend_gives_all_memory_back_and_says_that_it_is_closed(device: LateDevice) -> None:
    backend = backend_on(device)
    before = device.live_bytes
    pool, x = backend.allocate_kv_pool(4, 1 << 10), backend.from_host(torch.arange(8))
    backend.close()
    backend.close()
    assert torch.equal(x.cpu(), torch.arange(8))  # what was queued was done first
    del pool, x
    assert device.live_bytes == before == 0
    with pytest.raises(BackendUnavailable, match="backend late was closed and is used again"):
        backend.from_host(torch.zeros(1))


# -- copies ---------------------------------------------------------------------------------------------------


def test_copies_to_the_device_run_late_and_see_what_was_sent(device: LateDevice) -> None:
    backend = backend_on(device)
    sent = torch.arange(5)
    room = backend.empty(8, dtype=torch.int64)
    queued = device.current.queued
    arrived = backend.from_host(sent, out=room)
    sent.fill_(-7)  # the sender's memory is free again as soon as from_host returns
    assert device.current.queued == queued + 1
    assert device.current.passed < device.current.queued
    assert backend.to_host(arrived).tolist() == [0, 1, 2, 3, 4]
    assert backend.to_host(room[5:]).tolist() == [-1, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_every_shape_makes_the_way_there_and_back(device: LateDevice, dtype: torch.dtype) -> None:
    backend = backend_on(device)
    for shape in [(), (0,), (1,), (3, 5), (2, 3, 4)]:
        x = torch.randint(0, 2, shape).to(dtype)
        back = backend.to_host(backend.from_host(x))
        assert (back.dtype, back.shape) == (dtype, x.shape)
        assert torch.equal(back.float(), x.float())
    strided = torch.arange(12).view(3, 4).t()
    assert torch.equal(backend.to_host(backend.from_host(strided)), strided)


def test_the_ring_waits_before_it_writes_over_what_was_not_read(device: LateDevice) -> None:
    """Far more than both halves hold, without any other wait: every copy still brings its own numbers."""
    runtime = LateRuntime(device)
    stream = runtime.new_stream()
    runtime.use(stream)
    ring = StagingRing(runtime, stream, half_bytes=1024)
    rooms = [runtime.empty((40,), torch.int64) for _ in range(20)]  # three of 320 bytes fill a half
    for i, room in enumerate(rooms):
        ring.send(torch.full((40,), i), room)
    assert stream.passed < stream.queued  # and it does not wait for more than it must
    assert [room[39].item() for room in rooms] == list(range(20))


def test_a_tensor_larger_than_the_ring_comes_whole(device: LateDevice) -> None:
    runtime = LateRuntime(device)
    stream = runtime.new_stream()
    runtime.use(stream)
    room = runtime.empty((1000,), torch.int64)
    StagingRing(runtime, stream, half_bytes=1024).send(torch.arange(1000), room)
    assert torch.equal(room.cpu(), torch.arange(1000))


def test_a_large_tensor_of_every_step_is_waited_for_no_more(device: LateDevice) -> None:
    """The block tables of two KV groups, of requests that may have 131,072 tokens: 8 MiB each, behind a step's work."""
    backend = backend_on(device)
    rooms = []
    for step in range(5):
        tables = [torch.full((256, 8192), 10 * step + group, dtype=torch.int32) for group in range(2)]
        before = device.current.queued
        rooms.append([backend.from_host(table) for table in tables])
        rooms[-1][0] += 0  # the step's work
        if step:  # the first one is copied straight, and makes the halves grow
            assert device.current.passed < before  # the step before may still run
    found = [[int(backend.to_host(room[-1, -1:])) for room in step] for step in rooms]
    assert found == [[10 * step, 10 * step + 1] for step in range(5)]


def test_what_is_too_large_for_pinned_memory_is_always_copied_straight(device: LateDevice) -> None:
    runtime = LateRuntime(device)
    stream = runtime.new_stream()
    runtime.use(stream)
    ring = StagingRing(runtime, stream, half_bytes=1024)
    sent = torch.arange(LARGEST_BYTES // 8 + 1)
    for _ in range(3):
        room = runtime.empty((len(sent),), torch.int64)
        ring.send(sent, room)
        assert stream.passed == stream.queued
        assert int(room[-1].item()) == LARGEST_BYTES // 8


# -- order ----------------------------------------------------------------------------------------------------


def test_events_pass_when_the_work_before_them_is_done(device: LateDevice) -> None:
    backend = backend_on(device)
    x = backend.from_host(torch.zeros(4))
    x += 1
    event = backend.record_event()
    x += 1
    passed = device.current.passed
    assert not event.done()
    event.wait()
    assert event.done()
    assert passed < device.current.passed < device.current.queued
    backend.synchronize()
    assert device.current.passed == device.current.queued


def test_two_backends_have_streams_of_their_own_and_what_passes_between_them_is_in_order(device: LateDevice) -> None:
    """As an engine does: calls of the backend, and torch's ops between them on whatever stream is current."""
    first, second = backend_on(device), backend_on(device)
    x = first.from_host(torch.ones(4))
    stream = device.current
    x *= 3
    y = second.from_host(torch.full((4,), 2.0))
    assert device.current is not stream
    y += x  # behind what the first one queued, though on another stream
    assert second.to_host(y).tolist() == [5.0] * 4
    first.from_host(torch.ones(1))
    assert device.current is stream


def test_what_the_caller_queued_before_is_seen(device: LateDevice) -> None:
    x = device.allocate((4,), torch.float32)
    x.fill_(6.0)  # on the stream that was current before there was a backend
    assert backend_on(device).to_host(x).tolist() == [6.0] * 4


# -- programs and groups --------------------------------------------------------------------------------------


def test_large_steps_and_steps_without_graphs_run_plainly(device: LateDevice) -> None:
    def step(_: Any) -> None:
        return

    buffers: Any = None
    assert not isinstance(backend_on(device).compile(step, RECORDED_TOKENS, buffers), PlainProgram)
    assert isinstance(backend_on(device).compile(step, RECORDED_TOKENS + 1, buffers), PlainProgram)
    assert isinstance(backend_on(device, graphs=False).compile(step, 8, buffers), PlainProgram)
    assert isinstance(backend_on(device).compile(step, None, None), PlainProgram)


def test_a_group_that_the_device_cant_form_is_refused(device: LateDevice) -> None:
    backend = backend_on(device)
    assert backend.communicator(0, 1, "").world_size == 1
    with pytest.raises(BackendUnavailable, match="forms groups of 1 ranks here and was asked for 2"):
        backend.communicator(0, 2, "127.0.0.1:1")
