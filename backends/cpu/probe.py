"""Whether the CPU can be used: always. Imports no torch."""

from __future__ import annotations

from octavo.backends.cpu.host import cpu_name, memory
from octavo.backends.cpu.threads import default_num_threads
from octavo.core.backend import Available, Refusal


def probe() -> Available | Refusal:
    """The processor, and the threads and memory that this process may use."""
    free, total = memory()
    return Available(
        f"{cpu_name()}, {default_num_threads()} threads, {free / 2**30:.1f} of {total / 2**30:.1f} GiB memory free"
    )
