"""What this process may use of the machine it runs on: cores and memory, the limits of its container included.

    affinity mask ┐                       /proc/meminfo MemAvailable ┐
                  ├─ min ─► usable cores                             ├─ min ─► free bytes
    cgroup quota  ┘                       cgroup limit − in use      ┘

Linux's files are read where they exist (cgroup v2 and v1); elsewhere the interpreter's own answers stand in.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 says "no limit" by a number near 2**63


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of memory this process could have now, and at most."""

    free_bytes: int
    total_bytes: int


def usable_cores(root: Path = _ROOT) -> int:
    """How many logical cores this process may keep busy: its affinity, cut to its quota rounded up, at least 1.

    Args:
        root: where /proc and /sys are found; the tests bring their own.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return cores if quota is None else min(cores, max(1, math.ceil(quota)))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Cores' worth of time that the tightest of this process's groups grants; None where none limits it.

    Args:
        root: where /proc and /sys are found; the tests bring their own.
    """
    quotas = []
    for folder in _cgroup_folders(root, ""):
        words = _words(folder / "cpu.max")
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
    for folder in _cgroup_folders(root, "cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def host_memory(root: Path = _ROOT) -> HostMemory:
    """Free and total memory, cut to the container's limit.

    Args:
        root: where /proc and /sys are found; the tests bring their own.
    """
    info = _meminfo(root)
    free_bytes, total_bytes = info.get("MemAvailable", 0), info.get("MemTotal", 0)
    if not total_bytes:
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free_bytes = total_bytes // 2
    for controller, limit_name, used_name, cache_key in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _cgroup_folders(root, controller):
            limit = _number(folder / limit_name)
            if limit is None or limit >= _UNLIMITED_BYTES:
                continue
            # Page cache that the kernel would give back counts as free.
            used = (_number(folder / used_name) or 0) - _stat(folder / "memory.stat").get(cache_key, 0)
            total_bytes = min(total_bytes, limit)
            free_bytes = min(free_bytes, max(0, limit - used))
    return HostMemory(free_bytes=free_bytes, total_bytes=total_bytes)


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The folders of the groups that bind this process, outermost first.

    Args:
        controller: a controller of cgroup v1, or "" for v2's one tree.
    """
    own = "/"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = path
    folders = [root / "sys/fs/cgroup" / controller]
    for part in Path(own.lstrip("/")).parts:
        folders.append(folders[-1] / part)
    return folders


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    rows = (line.split() for line in _lines(root / "proc/meminfo"))
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def _stat(path: Path) -> dict[str, int]:
    return {row[0]: int(row[1]) for line in _lines(path) if len(row := line.split()) == 2 and row[1].isdigit()}


def _number(path: Path) -> int | None:
    """The one integer in a file; None where there is no such file or it says "max"."""
    words = _words(path)
    try:
        return int(words[0]) if words else None
    except ValueError:
        return None


def _words(path: Path) -> list[str]:
    lines = _lines(path)
    return lines[0].split() if lines else []


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
