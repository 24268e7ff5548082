"""Rank arithmetic: which part of an axis each of `size` ranks holds. Pure; knows no tensor and no process.

    even      6 heads over 3        |0 1|2 3|4 5|        refused where it does not come out even
    padded    7 rows over 2         |0 1 2 3|4 5 6|      refused only where a rank would hold nothing
    kv heads  4 over 2              |0 1|2 3|            as even
              2 over 4              |0|0|1|1|            each head on size / heads ranks in a row, so that the query
                                                         heads of a rank find their own head there

Ranges are half open, (start, stop). The engine, layers and `octavo plan` all ask here, so that they can't disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.base.errors import ConfigError

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands in the group that shares a model.

    Attributes:
        rank, size: of `size` ranks, the one numbered `rank`; the default is a model that is whole.
        address: where the group meets, "host:port"; a group of one needs none.
    """

    rank: int = 0
    size: int = 1
    address: str = ""


def even_range(total: int, rank: int, size: int, name: str) -> Range:
    """The rank's equal part of `total`.

    Args:
        total: the whole axis.
        rank, size: the place in the group.
        name: the config field that holds `total`, for the error.

    Raises:
        ConfigError: it does not divide.
    """
    if total % size:
        raise _uneven(total, size, name, "divides it")
    part = total // size
    return rank * part, (rank + 1) * part


def padded_range(total: int, rank: int, size: int, name: str) -> Range:
    """The rank's part of `total`: as long as every other, but for the last one's, which may be shorter.

    Raises:
        ConfigError: a rank would hold nothing.
    """
    part = -(-total // size)
    if part * (size - 1) >= total:
        raise _uneven(total, size, name, "leaves no rank without a part of it")
    return rank * part, min((rank + 1) * part, total)


def kv_head_range(heads: int, rank: int, size: int, name: str) -> Range:
    """The KV heads that the rank holds: its equal part, or one that it shares with its neighbours.

    Raises:
        ConfigError: neither number divides the other.
    """
    if heads >= size:
        return even_range(heads, rank, size, name)
    if size % heads:
        raise _uneven(heads, size, name, "divides it, or is a multiple of it")
    head = rank // (size // heads)
    return head, head + 1


def _uneven(total: int, size: int, name: str, rule: str) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_size is {size}, which can't split {name}, {total}; give a number that {rule}",
        field="tensor_parallel_size",
    )
