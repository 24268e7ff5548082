"""The processor's name. What the process may use of cores and memory is octavo.core.base.host's affair."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's own name, or its architecture's where the system does not tell."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
