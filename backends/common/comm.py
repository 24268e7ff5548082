"""A Communicator over any process group of torch: bytes go over the wire, sums are made here, in rank order.

    gloo_communicator(…) ──► process_group ──► TorchCommunicator(group, …)     gloo on hosts, NCCL or RCCL on devices

    all_reduce, small    every rank ──x──► every rank;  x₀ + x₁ + … + x₍W₋₁₎                        one exchange
    all_reduce, large    | piece 0 | piece 1 | … |  piece r of every rank ──► rank r;  added;      two, of 2/W the bytes
                         the sums of all pieces ──► every rank

Sums accumulate in fp32 (fp64 for doubles, integers in their own type), always in the order of the ranks, and are
rounded once, to the tensor's type. So all ranks get the same bits, run for run; an element's bits depend neither on the
message's size nor on what else is in it, which a library's own choice of ring or tree does not give; and since the wire
carries bytes, any dtype goes over any transport.

The group is an object, never torch's global one: engines side by side in a process do not disturb each other. Only
backends make communicators; layers see the contract's protocol alone.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any, Protocol

import torch

from octavo.core.base.errors import BackendUnavailable, ConfigError, RankLost

GROUP_TIMEOUT_S = 300.0
"""How long ranks wait for each other: longer than the slowest of them may take to load or to build kernels."""

ONE_SHOT_BYTES = 256 * 1024
"""Up to here one exchange of whole messages beats two of pieces: with gloo, at 2, 4 and 8 ranks on two cores."""


_dist: Any = torch.distributed
"""Untyped: torch's stubs leave most of these names out."""


class Group(Protocol):
    """What is asked of a process group; all that torch makes have it. Each gives a work that can be waited for."""

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, /) -> Any: ...
    def alltoall_base(self, out: torch.Tensor, x: torch.Tensor, out_sizes: list[int], x_sizes: list[int], /) -> Any: ...
    def broadcast(self, tensors: list[torch.Tensor], options: Any, /) -> Any: ...


class TorchCommunicator:
    """A group of ranks, one in each process or thread. See the contract in core/backend/comm.py.

    On a device work is ordered with its current stream, and a lost rank shows where the device is waited for; with gloo
    every call returns when its result is there, and raises RankLost.
    """

    def __init__(
        self, group: Group, rank: int, world_size: int, *, capturable: bool, device: torch.device | None = None
    ) -> None:
        """
        Args:
            group: a process group object of `world_size` ranks, for this communicator alone.
            capturable: whether its calls may be recorded into a Program.
            device: where the tensors are; None for the host's.
        """
        self._device = device if device is not None else torch.device("cpu")
        self.rank = rank
        self.world_size = world_size
        self.capturable = capturable
        self._group: Group | None = group

    def all_reduce(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        if not x.numel():
            return
        flat = x.contiguous().view(-1)
        total = self._sum_of_messages(flat) if flat.nbytes <= ONE_SHOT_BYTES else self._sum_by_pieces(flat)
        out.copy_(total.view(x.shape))

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        if not x.numel():
            return
        gathered = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        self._gather(x.contiguous(), gathered)
        if gathered is not out:
            out.copy_(gathered)

    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        if not out.numel():
            return
        parts = torch.empty((self.world_size, out.numel()), dtype=x.dtype, device=x.device)
        self._exchange(x.contiguous(), parts, [out.numel()] * self.world_size)
        out.copy_(_added(parts).view(out.shape))

    def broadcast(self, x: torch.Tensor, *, root: int) -> None:
        if not 0 <= root < self.world_size:
            raise ValueError(f"root is {root}; a group of {self.world_size} has ranks 0 to {self.world_size - 1}")
        if not x.numel():
            return
        dense = x.contiguous()
        options = _dist.BroadcastOptions()
        options.rootRank = root
        self._run("broadcast", lambda group: group.broadcast([_bytes(dense)], options))
        if dense is not x:
            x.copy_(dense)

    def barrier(self) -> None:
        # A transport's own barrier guesses its device, or only queues: a byte of everyone, read here, does neither.
        arrived = torch.empty((self.world_size, 1), dtype=torch.uint8, device=self._device)
        self._gather(torch.ones(1, dtype=torch.uint8, device=self._device), arrived, "barrier")
        arrived.tolist()

    def close(self) -> None:
        self._group = None

    # -- sums -------------------------------------------------------------------------------------------------
    def _sum_of_messages(self, flat: torch.Tensor) -> torch.Tensor:
        parts = torch.empty((self.world_size, flat.numel()), dtype=flat.dtype, device=flat.device)
        self._gather(flat, parts)
        return _added(parts)

    def _sum_by_pieces(self, flat: torch.Tensor) -> torch.Tensor:
        """Piece r is rank r's; the last ones are shorter, or empty, when the ranks don't divide the message."""
        count, world = flat.numel(), self.world_size
        piece = -(-count // world)
        sizes = [min(piece, max(0, count - rank * piece)) for rank in range(world)]
        own = sizes[self.rank]
        parts = torch.empty((world, own), dtype=flat.dtype, device=flat.device)
        self._exchange(flat, parts, sizes)
        total = torch.zeros(piece, dtype=flat.dtype, device=flat.device)
        total[:own] = _added(parts)
        gathered = torch.empty(world * piece, dtype=flat.dtype, device=flat.device)
        self._gather(total, gathered)
        return gathered[:count]

    # -- the wire ---------------------------------------------------------------------------------------------
    def _gather(self, x: torch.Tensor, out: torch.Tensor, what: str = "all_gather") -> None:
        """Every rank's dense x, one after the other, to the dense out."""
        self._run(what, lambda group: group._allgather_base(_bytes(out), _bytes(x)))

    def _exchange(self, x: torch.Tensor, parts: torch.Tensor, sizes: list[int]) -> None:
        """Elements of the dense x, `sizes[r]` to rank r; parts[r] = what rank r has for this one."""
        width = x.element_size()
        send, receive = [size * width for size in sizes], [parts[0].numel() * width] * self.world_size
        self._run("exchange", lambda group: group.alltoall_base(_bytes(parts), _bytes(x), receive, send))

    def _run(self, what: str, start: Callable[[Group], Any]) -> None:
        """Raises RankLost when another rank is gone, or does not take part in time."""
        if self._group is None:
            raise RankLost(f"{what} on rank {self.rank} of {self.world_size}: its communicator was closed")
        try:
            start(self._group).wait()
        except RuntimeError as error:
            raise RankLost(
                f"{what} on rank {self.rank} of {self.world_size}: another rank ended or did not answer in time "
                f"({_reason(error)}); close the group and form it anew"
            ) from error


def gloo_communicator(
    rank: int, world_size: int, address: str, timeout_s: float = GROUP_TIMEOUT_S
) -> TorchCommunicator:
    """The communicator of host tensors. Errors as of `process_group`."""
    group = process_group("gloo", rank, world_size, address, timeout_s)
    return TorchCommunicator(group, rank, world_size, capturable=False)


def process_group(
    transport: str, rank: int, world_size: int, address: str, timeout_s: float = GROUP_TIMEOUT_S
) -> Group:
    """A group that meets at `address` and has met when this returns.

    Args:
        transport: "gloo" for host tensors; "nccl" for the current device's, where torch was built with it.
        address: "host:port" of this machine; rank 0 listens there.
        timeout_s: for meeting, and for each exchange.

    Raises ConfigError for an address or a place in the group that can't be, BackendUnavailable when the ranks don't
    meet or torch lacks the transport.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"the group's address is {address!r}; give HOST:PORT", field="address")
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank}; a group of {world_size} has ranks 0 to {world_size - 1}", field="rank")
    make = {"gloo": _gloo, "nccl": _nccl}[transport]
    limit = datetime.timedelta(seconds=timeout_s)
    try:
        store = _dist.TCPStore(host.strip("[]"), int(port), world_size, rank == 0, limit, wait_for_workers=False)
        group = make(store, rank, world_size, limit, host.strip("[]"))
        _meet(store, rank, world_size, limit)
    except RuntimeError as error:
        raise BackendUnavailable(
            f"rank {rank} could not meet the {world_size} ranks of its group at {address} within {timeout_s:g} s: "
            f"{_reason(error)}",
            field="address",
        ) from error
    return group


def _meet(store: Any, rank: int, world_size: int, limit: datetime.timedelta) -> None:
    """Return when all ranks are there. Rank 0, which holds the store, also waits until all have read that."""
    ranks = range(world_size)
    store.set(f"here/{rank}", b"1")
    store.wait([f"here/{other}" for other in ranks], limit)
    store.set(f"met/{rank}", b"1")
    if rank == 0:
        store.wait([f"met/{other}" for other in ranks], limit)


def _gloo(store: Any, rank: int, world_size: int, limit: datetime.timedelta, host: str) -> Group:
    kind = _dist.ProcessGroupGloo
    options = kind._Options()
    options._timeout = limit
    options._threads = 1  # calls are made one at a time
    options._devices = [kind.create_device(hostname=host)]
    group: Group = kind(store, rank, world_size, options)
    return group


def _nccl(store: Any, rank: int, world_size: int, limit: datetime.timedelta, _: str) -> Group:
    if not _dist.is_nccl_available():
        raise BackendUnavailable(f"torch {torch.__version__} was built without NCCL", field="backend")
    kind = _dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = limit
    group: Group = kind(store, rank, world_size, options)
    return group


def _added(parts: torch.Tensor) -> torch.Tensor:
    """parts[0] + parts[1] + …, in the type that sums accumulate in. Uses parts[0] as room where the types agree."""
    is_float = parts.dtype.is_floating_point and parts.dtype != torch.float64
    total = parts[0].to(torch.float32 if is_float else parts.dtype)
    for part in parts[1:]:
        total.add_(part)
    return total


def _bytes(dense: torch.Tensor) -> torch.Tensor:
    return dense.view(-1).view(torch.uint8)


def _reason(error: Exception) -> str:
    """The library's own words, without its source lines and advice."""
    return re.sub(r"^\[[^\]]*\] ?", "", str(error).strip()).partition("\n")[0].partition(". ")[0]
