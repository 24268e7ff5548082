"""What a quantised tensor means, whatever file it came from. Readers build these; backends pack them.

A scheme fixes the arithmetic: value = (code - zero_point) * scale, with one scale (and zero point) per group of
`group_size` elements along K, per output row, or per tensor. GGUF block formats keep their own bytes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class QuantFormat(enum.StrEnum):
    """How the codes of a weight are stored."""

    INT8 = "int8"
    INT4 = "int4"  # one code per byte here; packing is the backend's affair
    FP8_E4M3FN = "fp8_e4m3fn"
    FP8_E4M3FNUZ = "fp8_e4m3fnuz"


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Format and granularity.

    Attributes:
        format: of the codes.
        group_size: elements along K that share a scale; 0: one scale per row; -1: one per tensor.
        symmetric: no zero points.
        activation: format to which activations are quantised for the product; None keeps them as they are.
    """

    format: QuantFormat
    group_size: int = 0
    symmetric: bool = True
    activation: QuantFormat | None = None


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight [N, K] in quantised form.

    Attributes:
        codes_NK: the codes, one element each.
        scales: fp32 [N, K / group_size], [N, 1] or [1, 1].
        zero_points: the same shape, or None when the scheme is symmetric.
    """

    scheme: QuantScheme
    codes_NK: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        """The plain weight [N, K] in fp32: (code - zero_point) * scale."""
        codes = self.codes_NK.to(torch.float32)
        groups = self.scales.shape[1]
        codes = codes.reshape(codes.shape[0], groups, -1)
        if self.zero_points is not None:
            codes = codes - self.zero_points.to(torch.float32)[..., None]
        return (codes * self.scales[..., None]).flatten(1)
