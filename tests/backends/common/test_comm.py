"""A group of ranks over gloo: ranks are threads here, each with a group of its own, as engines in one process have."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TypeVar

import pytest
import torch

from octavo.backends.common import comm as common
from octavo.backends.common.comm import ONE_SHOT_BYTES, TorchCommunicator, gloo_communicator
from octavo.core.base.errors import BackendUnavailable, ConfigError, OctavoError, RankLost

T = TypeVar("T")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32)


@pytest.fixture
def address() -> Iterator[str]:
    """A port that nobody else is given: it stays bound, but nobody listens on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def on_ranks(world: int, address: str, run: Callable[[TorchCommunicator], T], timeout_s: float = 20.0) -> list[T]:
    """What `run` returns on each rank."""

    def rank(number: int) -> T:
        comm = gloo_communicator(number, world, address, timeout_s)
        try:
            return run(comm)
        finally:
            comm.close()

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(rank, range(world)))


def message(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + count)
    return torch.randn(count, generator=generator).mul(50).to(dtype)


def in_rank_order(messages: list[torch.Tensor]) -> torch.Tensor:
    """The sum as the communicator documents it."""
    dtype = messages[0].dtype
    total = messages[0].to(torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype)
    for x in messages[1:]:
        total = total + x
    return total.to(dtype)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_sums_are_those_in_rank_order_on_every_rank_at_every_size(world: int, address: str) -> None:
    """Either side of the change of algorithm, and lengths that the ranks don't divide."""
    counts = [1, world - 1, 1000] + ([ONE_SHOT_BYTES // 4 + around for around in (0, 1)] if world < 8 else [])

    def run(comm: TorchCommunicator) -> list[torch.Tensor]:
        sums = []
        for dtype in DTYPES:
            for count in counts:
                x, out = message(comm.rank, count, dtype), torch.empty(count, dtype=dtype)
                comm.all_reduce(x, out=out)
                comm.all_reduce(x, out=x)
                sums += [out, x]
        return sums

    want = [in_rank_order([message(r, n, d) for r in range(world)]) for d in DTYPES for n in counts for _ in (0, 1)]
    for sums in on_ranks(world, address, run):
        assert all(torch.equal(got, expected) for got, expected in zip(sums, want, strict=True))


def test_an_element_s_bits_do_not_depend_on_the_message_s_size(address: str) -> None:
    count = ONE_SHOT_BYTES // 2 + 5

    def run(comm: TorchCommunicator) -> bool:
        x = message(comm.rank, count, torch.bfloat16)
        whole, part = torch.empty_like(x), torch.empty(70, dtype=x.dtype)
        comm.all_reduce(x, out=whole)
        comm.all_reduce(x[-70:], out=part)
        return torch.equal(whole[-70:], part)

    assert all(on_ranks(3, address, run))


def test_gather_scatter_and_broadcast_know_who_is_who(address: str) -> None:
    world = 3
    xs = [message(r, 12, torch.bfloat16).view(3, 4) for r in range(world)]

    def run(comm: TorchCommunicator) -> None:
        x = xs[comm.rank]
        gathered = torch.empty(world, 3, 4, dtype=x.dtype)
        comm.all_gather(x, out=gathered)
        assert torch.equal(gathered, torch.stack(xs))
        slices, own = torch.stack([x.roll(i) for i in range(world)]), torch.empty_like(x)
        comm.reduce_scatter(slices, out=own)
        assert torch.equal(own, in_rank_order([y.roll(comm.rank) for y in xs]))
        for root in range(world):
            sent = x.clone()
            comm.broadcast(sent, root=root)
            assert torch.equal(sent, xs[root])
        with pytest.raises(ValueError, match="ranks 0 to 2"):
            comm.broadcast(x, root=world)

    on_ranks(world, address, run)


def test_rows_may_lie_apart_and_what_lies_between_is_left_alone(address: str) -> None:
    def run(comm: TorchCommunicator) -> None:
        room = torch.full((4, 10), -1.0)
        x, out = room[:, :7], torch.full((2, 4, 9), -1.0)[:, :, :7]
        x.copy_(torch.arange(28.0).view(4, 7) + comm.rank)
        comm.all_gather(x, out=out)
        assert torch.equal(out[1] - out[0], torch.ones(4, 7))
        comm.all_reduce(x, out=x)
        comm.reduce_scatter(out, out=x)
        comm.broadcast(x, root=1)
        assert torch.equal(x, 2 * (torch.arange(28.0).view(4, 7) + 1))
        assert bool((room[:, 7:] == -1).all())

    on_ranks(2, address, run)


def test_messages_without_elements_need_no_exchange(address: str) -> None:
    def run(comm: TorchCommunicator) -> None:
        x = torch.empty(0, 8)
        comm.all_reduce(x, out=x)
        comm.all_gather(x, out=torch.empty(2, 0, 8))
        comm.reduce_scatter(torch.empty(2, 0, 8), out=x)
        comm.broadcast(x, root=1)

    on_ranks(2, address, run)


def test_a_barrier_waits_for_the_last(address: str) -> None:
    def run(comm: TorchCommunicator) -> tuple[float, float]:
        time.sleep(0.2 * comm.rank)
        arrived = time.monotonic()
        comm.barrier()
        return arrived, time.monotonic()

    times = on_ranks(3, address, run)
    assert min(left for _, left in times) >= max(arrived for arrived, _ in times)


def test_two_groups_in_one_process_do_not_disturb_each_other(address: str) -> None:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        other = f"127.0.0.1:{held.getsockname()[1]}"

        def sums(comm: TorchCommunicator, unit: float) -> float:
            x = torch.full((5,), unit)
            for _ in range(20):
                comm.all_reduce(x, out=x)
                x /= comm.world_size
            return float(x.sum())

        with ThreadPoolExecutor(2) as engines:
            first = engines.submit(on_ranks, 2, address, lambda comm: sums(comm, 1.0))
            second = engines.submit(on_ranks, 3, other, lambda comm: sums(comm, 3.0))
            assert first.result() == [5.0] * 2
            assert second.result() == pytest.approx([15.0] * 3)
    assert not torch.distributed.is_initialized()


def test_a_rank_that_leaves_ends_the_others_wait_at_once(address: str) -> None:
    def run(comm: TorchCommunicator) -> str:
        if comm.rank == 1:
            return ""  # and closes
        started = time.monotonic()
        with pytest.raises(RankLost, match=r"all_gather on rank \d of 3: another rank ended") as error:
            comm.all_reduce(torch.ones(4), out=torch.empty(4))
        assert time.monotonic() - started < 5
        return str(error.value)

    assert on_ranks(3, address, run)[1] == ""


def dies(connection: Connection, address: str) -> None:
    """Rank 1 of a group of two, in a process of its own."""
    comm = gloo_communicator(1, 2, address, 20.0)
    comm.barrier()
    connection.send(os.getpid())
    comm.barrier()


def test_a_rank_that_is_killed_ends_the_others_wait(address: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=dies, args=(theirs, address))
    process.start()
    comm = gloo_communicator(0, 2, address, 60.0)
    comm.barrier()
    os.kill(ours.recv(), signal.SIGKILL)
    with pytest.raises(RankLost, match="another rank ended"):
        comm.all_reduce(torch.ones(4), out=torch.empty(4))
    comm.close()
    process.join()


def test_a_rank_that_hangs_ends_the_others_wait_after_the_timeout(address: str) -> None:
    def run(comm: TorchCommunicator) -> None:
        if comm.rank == 1:
            time.sleep(2.0)
            return
        with pytest.raises(RankLost, match="did not answer in time"):
            comm.barrier()

    started = time.monotonic()
    on_ranks(2, address, run, timeout_s=0.8)
    assert time.monotonic() - started < 10


def test_who_comes_alone_is_told_so(address: str) -> None:
    for rank in (0, 1):
        with pytest.raises(BackendUnavailable, match=rf"rank {rank} could not meet the 2 ranks .* at {address}"):
            gloo_communicator(rank, 2, address, 0.3)


@pytest.mark.parametrize(("rank", "where"), [(0, "nowhere"), (0, ":80"), (0, "host:port"), (2, "127.0.0.1:80")])
def test_an_impossible_place_is_refused(rank: int, where: str) -> None:
    with pytest.raises(ConfigError):
        gloo_communicator(rank, 2, where, 0.3)


def test_a_closed_group_says_so_and_may_be_closed_twice(address: str) -> None:
    def run(comm: TorchCommunicator) -> None:
        comm.close()
        comm.close()
        with pytest.raises(OctavoError, match="was closed"):
            comm.barrier()

    on_ranks(2, address, run)


def test_a_torch_without_the_transport_is_named(address: str) -> None:
    if torch.distributed.is_nccl_available():
        pytest.skip("this torch has NCCL")
    with pytest.raises(BackendUnavailable, match="built without NCCL"):
        common.process_group("nccl", 0, 1, address, 5.0)
