"""Cores and memory under container limits, from files made up for the purpose."""

import os

import pytest

from octavo.core.base.host import host_memory, usable_cores

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path):
    """Write files below a made-up root; 1000 MiB of memory, 600 MiB available."""

    def write(files):
        meminfo = f"MemTotal: {1000 * 1024} kB\nMemAvailable: {600 * 1024} kB\nHugePages_Total: 0\n"
        for name, text in {"proc/meminfo": meminfo, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_without_limits_the_machine_is_ours(machine):
    root = machine({})
    memory = host_memory(root)
    assert (memory.free_bytes, memory.total_bytes) == (600 * MIB, 1000 * MIB)
    assert 1 <= usable_cores(root) <= os.cpu_count()


def test_a_v2_limit_counts_reclaimable_cache_as_free(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.max": f"{500 * MIB}\n",
            "sys/fs/cgroup/outer/inner/memory.current": f"{300 * MIB}\n",
            "sys/fs/cgroup/outer/inner/memory.stat": f"anon 1\ninactive_file {100 * MIB}\n",
        }
    )
    memory = host_memory(root)
    assert (memory.free_bytes, memory.total_bytes) == (300 * MIB, 500 * MIB)


def test_the_outer_group_binds_too(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": f"{200 * MIB}\n",
            "sys/fs/cgroup/outer/memory.current": f"{250 * MIB}\n",
        }
    )
    memory = host_memory(root)
    assert (memory.free_bytes, memory.total_bytes) == (0, 200 * MIB)


def test_a_v1_limit(machine):
    root = machine(
        {
            "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{400 * MIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{100 * MIB}\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
        }
    )
    memory = host_memory(root)
    assert (memory.free_bytes, memory.total_bytes) == (300 * MIB, 400 * MIB)
    assert usable_cores(root) == 1


@pytest.mark.parametrize(("quota", "cores"), [("50000 100000", 1), ("100000 100000", 1)])
def test_a_v2_quota_cuts_the_cores(machine, quota, cores):
    root = machine({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota + "\n"})
    assert usable_cores(root) == cores
