"""Latent attention on CDNA3: the common op over CDNA3's kernel."""

from __future__ import annotations

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.mla import LatentAttentionOps
from octavo.backends.rocm.kernels import mla as kernels

PROGRAMS_PER_UNIT = 2
"""Two decode programs of 32 KB fill a unit's LDS: one multiplies while the other's latents arrive."""


class MlaOps(LatentAttentionOps):
    """`mla_attention` of one AMD device."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(
            gpu,
            kernel=kernels.mla_attention,
            programs_per_unit=PROGRAMS_PER_UNIT,
            constants={"DIES": gpu.chip.num_dies},
        )
