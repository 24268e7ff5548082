"""What the host grants: memory within control groups, from made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.backends.cpu.host import cpu_name, memory

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
    assert memory(tree(tmp_path, files)) == (free * GIB, total * GIB)


def test_memory_of_this_machine_and_of_one_without_proc(tmp_path: Path) -> None:
    for free, total in (memory(), memory(tmp_path)):
        assert 0 < free <= total


def test_cpu_name(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/cpuinfo": "processor : 0\nmodel name\t: Fast Chip 9 @ 3GHz\n"})
    assert cpu_name(root) == "Fast Chip 9 @ 3GHz"
    assert cpu_name(tmp_path / "nowhere")
