"""Rotary position tables.

    cos_sin [P, R] fp32:   row p = [cos(p f0) .. cos(p f_{R/2-1}) | sin(p f0) .. sin(p f_{R/2-1})]

A table is computed once, in fp32 from first to last as the checkpoints' reference does, so that far positions get the
angles the model was trained with; layers with equal parameters share one table. P letters positions, R the rotated
elements of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from octavo.core.layers.context import LayerContext


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`. Source: Chen et al. 2023 (position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a linear blend of both in between.

    Attributes:
        low_freq_factor, high_freq_factor: wavelengths above original / low are low frequencies, below original /
            high are high ones.
        original_max_position: positions of the first training, in tokens.

    Source: Llama team 2024 (The Llama 3 herd of models).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Everything that decides a table's values.

    Attributes:
        theta: the base of the frequencies.
        rotary_dim: R, elements of a head that are rotated.
        scaling: how the frequencies are changed for longer contexts; None leaves them.
    """

    theta: float
    rotary_dim: int
    scaling: LinearScaling | Llama3Scaling | None = None

    def frequencies(self) -> torch.Tensor:
        """Radians per position, fp32 [R / 2], on the host."""
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        frequencies = 1.0 / (self.theta**exponents)
        if isinstance(self.scaling, LinearScaling):
            return frequencies / self.scaling.factor
        if isinstance(self.scaling, Llama3Scaling):
            return _scale_llama3(frequencies, self.scaling)
        return frequencies


class RotaryTables:
    """The tables of one model, one per distinct set of parameters."""

    def __init__(self, context: LayerContext) -> None:
        self._context = context
        self._tables: dict[RopeParameters, torch.Tensor] = {}

    def get(self, parameters: RopeParameters) -> torch.Tensor:
        """cos_sin [max_model_len, rotary_dim] fp32 on the device; computed when first asked for."""
        table = self._tables.get(parameters)
        if table is None:
            table = self._context.backend.from_host(cos_sin_table(parameters, self._context.max_model_len))
            self._tables[parameters] = table
        return table


def cos_sin_table(parameters: RopeParameters, num_positions: int) -> torch.Tensor:
    """cos_sin [num_positions, rotary_dim] fp32 on the host."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * parameters.frequencies()
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def _scale_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (scaling.original_max_position / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > scaling.original_max_position / low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < scaling.original_max_position / high, frequencies, scaled)
