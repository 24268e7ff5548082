"""The time a launch would take if the chip's limits were all there is, and the share of it to be expected.

    at the limit        max(bytes / bandwidth, operations / rate of their operands)      Williams et al. 2009 (roofline)
    share of memory     bytes on their way / (bandwidth x latency), at most 1            Little's law
                        and no more than the units that have work can draw
    share of units      units that have work, when programs are dealt out evenly

A resident program has as many bytes on their way as its pipeline stages hold, or, without a pipeline, as its lanes load
in one turn of the loop. These are predictions made before any device was seen; the first measurement is to be laid
beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.backends.common.aot.occupancy import balance
from octavo.backends.common.chip import Chip
from octavo.core.backend.workloads import Cost

LATENCY_S = 0.8e-6
"""From a load to its data, under load; the same order on HBM2e and HBM3."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one launch, on one chip.

    Attributes:
        limit_us: the roofline's time, in microseconds.
        bound: "memory", or the operand that is multiplied.
        share: of the limit that is expected, 0 to 1.
    """

    limit_us: float
    bound: str
    share: float


def predict(chip: Chip, cost: Cost, *, programs: int, bytes_in_flight: float) -> Prediction:
    """The roofline of a launch.

    Args:
        programs: of the launch.
        bytes_in_flight: of all resident programs together.
    """
    memory_s = cost.bytes / chip.bandwidth_bytes_per_s
    compute_s = {operand: flops / chip.flops[operand] for operand, flops in cost.flops.items()}
    bound, limit_s = max({"memory": memory_s, **compute_s}.items(), key=lambda item: item[1])
    by_latency = bytes_in_flight / (chip.bandwidth_bytes_per_s * LATENCY_S)
    by_units = min(programs, chip.num_units) * chip.unit_bytes_per_s / chip.bandwidth_bytes_per_s
    share = min(1.0, by_latency, by_units) if bound == "memory" else balance(chip, programs)
    return Prediction(limit_s * 1e6, bound, share)
