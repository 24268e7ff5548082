"""What the host grants: memory and cores within control groups, from made-up /proc and /sys trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.core.base.host import HostMemory, cpu_quota, host_memory, usable_cores

GIB = 2**30
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0\n"


def tree(root: Path, files: dict[str, str | int]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


CASES: dict[str, tuple[dict[str, str | int], tuple[float, float]]] = {
    "no limits: what is available, not what is free": ({}, (8, 16)),
    "v2 without a limit": ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/memory.max": "max"}, (8, 16)),
    "v2 limit less what is used": (
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/b/memory.max": 4 * GIB,
            "sys/fs/cgroup/a/b/memory.current": GIB,
        },
        (3, 4),
    ),
    "page cache counts as free": (
        {
            "proc/self/cgroup": "0::/a",
            "sys/fs/cgroup/a/memory.max": 4 * GIB,
            "sys/fs/cgroup/a/memory.current": 3 * GIB,
            "sys/fs/cgroup/a/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 7",
        },
        (3, 4),
    ),
    "the tightest ancestor holds": (
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/b/memory.max": 6 * GIB,
            "sys/fs/cgroup/a/b/memory.current": GIB,
            "sys/fs/cgroup/a/memory.max": 5 * GIB,
            "sys/fs/cgroup/a/memory.current": 3 * GIB,
        },
        (2, 5),
    ),
    "inside a container only the mount's root is there": (
        {
            "proc/self/cgroup": "0::/docker/abc",
            "sys/fs/cgroup/memory.max": 2 * GIB,
            "sys/fs/cgroup/memory.current": GIB,
        },
        (1, 2),
    ),
    "v1": (
        {
            "proc/self/cgroup": "7:cpu,cpuacct:/x\n5:memory:/a",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": 4 * GIB,
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": 2 * GIB,
            "sys/fs/cgroup/memory/a/memory.stat": f"cache 1\ntotal_inactive_file {GIB}",
        },
        (3, 4),
    ),
    "v1 without a limit": (
        {"proc/self/cgroup": "5:memory:/a", "sys/fs/cgroup/memory/a/memory.limit_in_bytes": 9223372036854771712},
        (8, 16),
    ),
    "used beyond the limit": (
        {
            "proc/self/cgroup": "0::/a",
            "sys/fs/cgroup/a/memory.max": GIB,
            "sys/fs/cgroup/a/memory.current": 2 * GIB,
        },
        (0, 1),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_memory(tmp_path: Path, case: str) -> None:
    files, (free, total) = CASES[case]
    assert host_memory(tree(tmp_path, files)) == HostMemory(int(free * GIB), int(total * GIB))


def test_memory_of_this_machine_and_of_one_without_proc(tmp_path: Path) -> None:
    for memory in (host_memory(), host_memory(tmp_path)):
        assert 0 < memory.free_bytes <= memory.total_bytes


QUOTAS: dict[str, tuple[dict[str, str | int], float | None]] = {
    "none": ({}, None),
    "v2 without a limit": ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "max 100000"}, None),
    "v2": ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "150000 100000"}, 1.5),
    "the tightest ancestor holds": (
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/cpu.max": "50000 100000",
            "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
        },
        0.5,
    ),
    "v1": (
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/job",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": 200000,
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": 100000,
        },
        2.0,
    ),
    "v1 without a limit": (
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/job",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": -1,
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": 100000,
        },
        None,
    ),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_cpu_quota(tmp_path: Path, case: str) -> None:
    files, quota = QUOTAS[case]
    assert cpu_quota(tree(tmp_path, files)) == quota


@pytest.mark.parametrize(("quota", "cores"), [("1000 100000", 1), ("100000 100000", 1)])
def test_a_quota_cuts_the_cores(tmp_path: Path, quota: str, cores: int) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": quota})
    assert usable_cores(root) == cores


def test_a_generous_quota_leaves_the_affinity(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "99900000 100000"})
    assert 1 <= usable_cores(root) <= (os.cpu_count() or 1)
    assert usable_cores(root) == usable_cores(tmp_path / "nowhere")
