"""Values that must not be read: NaN in one attempt, huge finite numbers in the next.

NaN shows what is multiplied by zero instead of being left out; a huge finite value shows what is masked by a test for
NaN, or by adding a large negative number. Integers get their smallest and largest value.
"""

from __future__ import annotations

import enum

import torch


class Poison(enum.StrEnum):
    NAN = "nan"
    HUGE = "huge"

    def pattern(self, dtype: torch.dtype) -> torch.Tensor:
        """The bytes of one poisoned element, uint8 [itemsize]."""
        if not dtype.is_floating_point:
            info = torch.iinfo(dtype)
            return torch.tensor([info.min if self is Poison.NAN else info.max], dtype=dtype).view(torch.uint8)
        value = float("nan") if self is Poison.NAN else torch.finfo(dtype).max / 2
        return torch.tensor([value], dtype=torch.float32).to(dtype).view(torch.uint8)

    def filled(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous host tensor of poison."""
        x = torch.empty(shape, dtype=dtype)
        if x.numel():
            x.view(-1).view(torch.uint8).view(-1, dtype.itemsize).copy_(self.pattern(dtype))
        return x


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise: equal bytes, or both NaN. Of one shape and dtype."""
    width = a.dtype.itemsize
    bytes_a = a.contiguous().view(-1).view(torch.uint8).view(-1, width)
    bytes_b = b.contiguous().view(-1).view(torch.uint8).view(-1, width)
    same = (bytes_a == bytes_b).all(dim=-1).view(a.shape)
    if a.dtype.is_floating_point:
        same = same | (a.to(torch.float64).isnan() & b.to(torch.float64).isnan())
    return same
