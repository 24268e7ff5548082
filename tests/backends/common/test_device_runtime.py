"""TorchRuntime against torch.cuda as its documentation has it, by stand-ins: there is no GPU here."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from octavo.backends.common.runtime import TorchRuntime


class Stream:
    """Remembers what it was asked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.calls.append("wait")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


class Graph:
    """Remembers how it was recorded; `capture_end` may fail, as it does after what can't be recorded."""

    made: list[Graph]
    fails = False

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.made.append(self)

    def capture_begin(self, **arguments: Any) -> None:
        self.calls.append(arguments)

    def capture_end(self) -> None:
        self.calls.append("end")
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")


class Cuda:
    """A process with two devices.

    Attributes:
        current: stream of each device; device: the current one.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = 0
        self.current = {i: Stream(torch.device("cuda", i)) for i in range(2)}
        for name, value in {
            "Stream": Stream,
            "CUDAGraph": type("OwnGraph", (Graph,), {"made": []}),
            "graph_pool_handle": lambda: (0, 7),
            "current_stream": lambda device: self.current[device.index],
            "current_device": lambda: self.device,
            "set_stream": self.set_stream,
            "mem_get_info": lambda _: (10, 100),
            "memory_reserved": lambda _: 30,
            "memory_allocated": lambda _: 12,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        self.graphs: Any = torch.cuda.CUDAGraph

    def set_stream(self, stream: Stream) -> None:
        index = stream.device.index
        self.device, self.current[index] = index, stream


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_products_of_the_vendors_library_add_in_fp32(cuda: Cuda) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    try:
        TorchRuntime(0, "cuda")
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before


def test_memory_that_torch_keeps_for_reuse_is_free(cuda: Cuda) -> None:
    memory = TorchRuntime(0, "cuda").memory_info()
    assert (memory.free_bytes, memory.total_bytes) == (10 + 30 - 12, 100)


def test_a_stream_is_made_current_behind_the_one_before_and_only_once(cuda: Cuda) -> None:
    runtime = TorchRuntime(0, "cuda")
    stream: Any = runtime.new_stream()
    for _ in range(3):
        runtime.use(stream)
    assert cuda.current[0] is stream
    assert stream.calls == ["wait"]


def test_engines_on_two_devices_switch_the_current_device(cuda: Cuda) -> None:
    first, second = TorchRuntime(0, "cuda"), TorchRuntime(1, "cuda")
    streams = [first.new_stream(), second.new_stream()]
    first.use(streams[0])
    second.use(streams[1])
    assert cuda.device == 1
    first.use(streams[0])
    assert cuda.device == 0
    assert streams[0].calls == ["wait"]  # type: ignore[attr-defined]


def test_recordings_share_a_pool_and_hold_only_this_thread_to_their_rules(cuda: Cuda) -> None:
    runtime = TorchRuntime(0, "cuda")
    stream, was_collecting = runtime.new_stream(), []
    for _ in range(2):
        runtime.record(stream, lambda: was_collecting.append(gc.isenabled()))
    expected = {"pool": (0, 7), "capture_error_mode": "thread_local"}
    assert [graph.calls for graph in cuda.graphs.made] == [[expected, "end"]] * 2
    assert was_collecting == [False, False]
    assert gc.isenabled()


@pytest.mark.parametrize("end_fails", [False, True])
def test_what_cant_be_recorded_ends_the_recording_and_says_why(cuda: Cuda, end_fails: bool) -> None:
    runtime = TorchRuntime(0, "cuda")
    cuda.graphs.fails = end_fails

    def work() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        runtime.record(runtime.new_stream(), work)
    assert cuda.graphs.made[0].calls[-1] == "end"
    assert gc.isenabled()
