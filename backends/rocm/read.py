"""What AMD's compiler made of a kernel, and what is wrong with it for the chip.

    notes of the assembly ──►  vector and accumulation registers, spills, LDS
    its instructions ───────►  MFMA, loads of 16 bytes, loads that go straight to LDS
    Triton's form before ───►  tensors of experts that are reached by distances of 32 bits

Source: AMD's CDNA3 instruction set guide.
"""

from __future__ import annotations

import re
from typing import Any

from octavo.backends.common.aot.dots import widest_dot
from octavo.backends.common.aot.occupancy import Footprint
from octavo.backends.common.chip import Chip

_INSTRUCTIONS = {
    "mfma": r"\bv_mfma_",
    "loads_16": r"\b(?:global|buffer)_load_dwordx4\b",
    "lds_direct": r"\b(?:global|buffer)_load_\w+ .*\blds\b",
}
_NOTES = {
    "vgprs": "vgpr_count",  # accumulation registers included
    "sgpr_spills": "sgpr_spill_count",
    "vgpr_spills": "vgpr_spill_count",
}


def read(compiled: Any) -> dict[str, float]:
    """Figures of a compiled kernel."""
    assembly = compiled.asm["amdgcn"]
    notes = {name: _note(assembly, note) for name, note in _NOTES.items()}
    return {
        "registers": notes["vgprs"],
        "spill_bytes": 4 * notes["vgpr_spills"],
        "scalar_spills": notes["sgpr_spills"],
        "shared_bytes": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        **{name: len(re.findall(pattern, assembly)) for name, pattern in _INSTRUCTIONS.items()},
    }


def footprint(figures: dict[str, float]) -> Footprint:
    return Footprint(int(figures["warps"]), int(figures["registers"]), int(figures["shared_bytes"]))


def bytes_per_turn(figures: dict[str, float]) -> float:
    """Bytes that one program has on their way: loads go through registers, so what its lanes load in one turn."""
    return 16 * 64 * figures["warps"] * max(figures["loads_16"], 1)


def faults(compiled: Any, figures: dict[str, float], chip: Chip, *, wide_loads: bool, may_spill: bool) -> list[str]:
    """Why the kernel is unfit for the chip. Scalar registers that spill go to vector lanes: listed, no fault.

    Args:
        wide_loads: whether it must load 16 bytes at a time.
        may_spill: it is not what anybody gets unasked: spills are listed, no fault.
    """
    found = []
    if figures["spill_bytes"] and not may_spill:
        found.append(f"{figures['spill_bytes']:.0f} bytes of vector registers a lane spill to memory")
    if figures["shared_bytes"] > chip.shared_bytes:
        found.append(f"{figures['shared_bytes']:.0f} bytes of LDS; the chip has {chip.shared_bytes}")
    dot = widest_dot(compiled.asm["ttir"])
    if dot is not None and dot.is_narrow and not figures["mfma"]:
        found.append("a product of 16- or 8-bit operands without MFMA")
    if wide_loads and not (figures["loads_16"] or figures["lds_direct"]):
        found.append("no 16-byte loads")
    found += [
        f"{name} is read as if all experts lay within 2 GiB of the first" for name in _near(compiled.asm["ttgir"])
    ]
    return found


def _near(ttgir: str) -> list[str]:
    """Tensors of a first expert, given beside a table of all addresses, that buffer instructions read or write.

    Those count in 32 bits from the tensor's beginning, and another expert's may lie anywhere (kernels/experts.py). The
    table of `scales` is `scale_addresses`.
    """
    tables = re.findall(r"%(\w+)_addresses: !tt\.ptr", ttgir)
    names = [name for table in tables for name in (table, f"{table}s")]
    return [name for name in names if re.search(rf"\bbuffer_\w+ .*%{name}\[", ttgir)]


def _note(assembly: str, name: str) -> int:
    match = re.search(rf"\.{name}:\s+(\d+)", assembly)
    if match is None:
        raise ValueError(f"the assembly has no .{name}")
    return int(match[1])
