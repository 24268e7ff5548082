"""A weight kept as it came: one tensor [N, K], rows in the checkpoint's order."""

from __future__ import annotations

import torch

from octavo.core.backend.quant import QuantizedTensor
from octavo.core.backend.specs import WeightSpec


class PlainWeight:
    """The reference's PackedWeight. A quantised weight is kept dequantised, in fp32.

    Attributes:
        data_NK: the weight; spec.dtype, or fp32 when spec.scheme is set.
        nbytes: its bytes.
    """

    def __init__(self, spec: WeightSpec, device: torch.device) -> None:
        dtype = torch.float32 if spec.scheme is not None else spec.dtype
        self.spec = spec
        self.data_NK = torch.zeros(spec.out_features, spec.in_features, dtype=dtype, device=device)
        self.nbytes = self.data_NK.nbytes

    def place(self, part_NK: torch.Tensor | QuantizedTensor, row_offset: int) -> None:
        """Copy rows in. Raises ValueError as `WeightSpec.check_part` says."""
        self.spec.check_part(part_NK, row_offset)
        plain = part_NK.dequantize() if isinstance(part_NK, QuantizedTensor) else part_NK
        self.data_NK[row_offset : row_offset + plain.shape[0]].copy_(plain)

    def rows(self, ids_T: torch.Tensor, *, out: torch.Tensor) -> None:
        out.copy_(self.data_NK[ids_T])

    def dense(self) -> torch.Tensor:
        """The weight in fp32; the very tensor when it is kept in fp32 (or fp64)."""
        return self.data_NK if self.data_NK.dtype == torch.float64 else self.data_NK.to(torch.float32)
