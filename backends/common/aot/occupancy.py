"""How many programs of a kernel fit a unit of the chip at once, and how evenly a launch fills the whole.

Sources: NVIDIA's occupancy calculator (registers are given out per warp in steps of 256, 64 warps and 32 programs a
unit); AMD's CDNA3 instruction set guide (512 vector registers a lane and SIMD in steps of 8, 8 waves a SIMD, 4 SIMDs).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.backends.common.chip import Chip

RESERVED_BYTES = 1024
"""Of Hopper's shared memory, for each program; the 227 KiB that one may use are 228 less this."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one program occupies.

    Attributes:
        warps: of a program.
        registers: 32-bit vector registers of a lane.
        shared_bytes: on-chip memory.
    """

    warps: int
    registers: int
    shared_bytes: int


def programs_per_unit(chip: Chip, footprint: Footprint) -> int:
    """Programs that one unit holds at once; 0 when not even one fits."""
    if chip.warp_size == 32:
        by_shared = (chip.shared_bytes + RESERVED_BYTES) // (footprint.shared_bytes + RESERVED_BYTES)
        registers_per_warp = -(-footprint.registers * 32 // 256) * 256
        by_registers = chip.registers // (max(registers_per_warp, 256) * footprint.warps)
        return min(by_shared, by_registers, 64 // footprint.warps, 32)
    by_shared = chip.shared_bytes // max(footprint.shared_bytes, 1)
    waves_per_simd = min(8, 512 // max(-(-footprint.registers // 8) * 8, 8))
    return min(by_shared, 4 * waves_per_simd // footprint.warps)


def balance(chip: Chip, programs: int) -> float:
    """Share of the chip's units that have work, when programs are dealt out evenly: the last to end decides."""
    return programs / (math.ceil(programs / chip.num_units) * chip.num_units) if programs else 0.0
