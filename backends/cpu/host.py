"""What this process may use of its host's memory, and the processor's name.

    /proc/self/cgroup ──► the process's groups, v2 ("0::/a/b") and v1 ("5:memory:/a/b")
    /sys/fs/cgroup/a/b, /sys/fs/cgroup/a, /sys/fs/cgroup      the tightest of all levels holds

Inside a container the path may lie outside what is mounted; the mount's root then stands for it. Standard library
only: the probe uses it. Threads and CPU quotas are threads.py's affair.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
_NO_LIMIT = 1 << 62  # cgroup v1 writes nearly 2^63 for "no limit"


def memory(root: Path = ROOT) -> tuple[int, int]:
    """(free, total) bytes: of the machine, or of the tightest control group above this process.

    Page cache that the kernel would drop counts as free.
    """
    info = _meminfo(root)
    total, free = info.get("MemTotal", 0), info.get("MemAvailable", 0)
    if not total:
        total = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _memory_groups(root):
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        if limit is None or limit >= _NO_LIMIT:
            continue
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
        used -= _reclaimable(group / "memory.stat")
        total, free = min(total, limit), min(free, max(0, limit - used))
    return free, total


def cpu_name(root: Path = ROOT) -> str:
    """The processor's own name, or its architecture's where the system does not tell."""
    for line in _text(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_groups(root: Path) -> Iterator[Path]:
    """The control-group folders whose memory limit binds this process, innermost first."""
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = base
        elif "memory" in controllers.split(","):
            mount = base / "memory"
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth])


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    fields = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB":
            fields[name] = int(number) * 1024
    return fields


def _reclaimable(stat: Path) -> int:
    for line in _text(stat).splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    """The file's text; empty when it can't be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
