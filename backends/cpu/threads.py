"""How many threads the kernels should use: physical cores this process may run on, within its CPU quota."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path

from octavo.core.base.host import cpu_quota


def default_num_threads(root: Path = Path("/"), *, world_size: int = 1) -> int:
    """Threads for one engine: allowed physical cores, and no more than the cgroup's quota (rounded up), at least 1.

    Args:
        root: where /proc and /sys are found.
        world_size: engines that share them equally: the ranks of a group.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    quota = cpu_quota(root)
    usable = min(physical_cores(allowed, root), math.ceil(quota) if quota else len(allowed))
    return max(1, usable // world_size)


def physical_cores(cpus: Collection[int], root: Path = Path("/")) -> int:
    """How many cores the logical CPUs belong to: hyper-threads share the units that these kernels saturate."""
    cores = set()
    for cpu in cpus:
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)
