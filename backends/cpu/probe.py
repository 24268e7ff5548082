"""Whether the CPU can be used: always. Imports no torch."""

from __future__ import annotations

from octavo.backends.cpu.host import cpu_name
from octavo.backends.cpu.threads import default_num_threads
from octavo.core.backend import Available, Refusal
from octavo.core.base.host import host_memory
from octavo.core.base.units import format_bytes


def probe() -> Available | Refusal:
    """The processor, and the threads and memory that this process may use."""
    memory = host_memory()
    free, total = format_bytes(memory.free_bytes), format_bytes(memory.total_bytes)
    return Available(f"{cpu_name()}, {default_num_threads()} threads, {free} of {total} memory free")
