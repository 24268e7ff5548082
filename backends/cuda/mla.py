"""Latent attention on Hopper: the common op over Hopper's kernel."""

from __future__ import annotations

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.mla import LatentAttentionOps
from octavo.backends.cuda.kernels import mla as kernels

PROGRAMS_PER_UNIT = 2
"""Two decode programs of 91 KB fill a unit's shared memory: one multiplies while the other's latents arrive."""


class MlaOps(LatentAttentionOps):
    """`mla_attention` of one NVIDIA device."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu, kernel=kernels.mla_attention, programs_per_unit=PROGRAMS_PER_UNIT)
