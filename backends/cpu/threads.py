"""How many threads the kernels should use: physical cores this process may run on, within its CPU quota."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path


def default_num_threads(root: Path = Path("/")) -> int:
    """Threads for one engine: allowed physical cores, and no more than the cgroup's quota (rounded up), at least 1.

    Args:
        root: where /proc and /sys are found.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    quota = cpu_quota(root)
    return max(1, min(physical_cores(allowed, root), math.ceil(quota) if quota else len(allowed)))


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


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time the process's cgroups grant (v2 or v1), the tightest of all its ancestors; None if unlimited."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += [_v2_quota(folder) for folder in _ancestors(root / "sys/fs/cgroup", path)]
        elif "cpu" in controllers.split(","):
            for mount in ("cpu", "cpu,cpuacct"):
                quotas += [_v1_quota(folder) for folder in _ancestors(root / "sys/fs/cgroup" / mount, path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _ancestors(mount: Path, path: str) -> list[Path]:
    """The cgroup's folder and those above it, up to the mount (which alone exists inside most containers)."""
    parts = [part for part in path.split("/") if part]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _v2_quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _v1_quota(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None if quota <= 0 else quota / period
