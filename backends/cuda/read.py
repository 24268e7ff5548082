"""What NVIDIA's compiler made of a kernel, and what is wrong with it for the chip.

    cubin ──cuobjdump -res-usage──►  registers, spills, shared memory
    PTX ──────────────────────────►  wgmma, mma, TMA copies, asynchronous copies and loads of 16 bytes

Source: NVIDIA's PTX ISA.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

from triton import knobs

from octavo.backends.common.aot.dots import widest_dot
from octavo.backends.common.aot.occupancy import Footprint
from octavo.backends.common.chip import Chip

_INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "tma_copies": r"\bcp\.async\.bulk\.tensor",
    "async_copies_16": r"\bcp\.async\.c[ag]\.shared\.global \[[^\]]+\], \[[^\]]+\], 0x10\b",
    "loads_16": r"\bld\.global(?:\.\w+)*\.(?:v4\.b32|v2\.b64)",
}
WGMMA_ROWS = 64
"""The smallest tile that a warp group multiplies."""


def read(compiled: Any) -> dict[str, float]:
    """Figures of a compiled kernel."""
    usage = _resource_usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return {
        "registers": usage["REG"],
        "spill_bytes": usage["LOCAL"] + usage["STACK"],
        "shared_bytes": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        **{name: len(re.findall(pattern, ptx)) for name, pattern in _INSTRUCTIONS.items()},
    }


def footprint(figures: dict[str, float]) -> Footprint:
    return Footprint(int(figures["warps"]), int(figures["registers"]), int(figures["shared_bytes"]))


def bytes_per_turn(figures: dict[str, float]) -> float:
    """Bytes that one program has on their way: its buffers in shared memory, or what its lanes load in one turn."""
    wide = 16 * 32 * figures["warps"] * figures["loads_16"]
    return max(figures["shared_bytes"], wide)


def faults(compiled: Any, figures: dict[str, float], chip: Chip, *, wide_loads: bool, may_spill: bool) -> list[str]:
    """Why the kernel is unfit for the chip.

    Args:
        wide_loads: whether it must load 16 bytes at a time.
        may_spill: it is not what anybody gets unasked: spills are listed, no fault.
    """
    found = []
    if figures["spill_bytes"] and not may_spill:
        found.append(f"{figures['spill_bytes']:.0f} bytes of registers spill to memory")
    if figures["shared_bytes"] > chip.shared_bytes:
        found.append(f"{figures['shared_bytes']:.0f} bytes of shared memory; the chip has {chip.shared_bytes}")
    dot = widest_dot(compiled.asm["ttir"])
    if dot is not None and dot.is_narrow:
        if dot.rows >= WGMMA_ROWS and figures["warps"] >= 4 and not figures["wgmma"]:
            found.append(f"a product of {dot.rows} rows without wgmma")
        if not figures["wgmma"] and not figures["mma"]:
            found.append("a product of 16- or 8-bit operands without tensor cores")
    if wide_loads and not (figures["loads_16"] or figures["async_copies_16"] or figures["tma_copies"]):
        found.append("no 16-byte loads")
    return found


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", printed)}
