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


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by width in bytes, as which bits are compared. Never written to."""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise: equal bytes, or both NaN. Of one shape and dtype."""
    same = as_words(a) == as_words(b)
    if a.dtype.is_floating_point and not bool(same.all()):
        same = same | (a.to(torch.float64).isnan() & b.to(torch.float64).isnan())
    return same


def as_words(x: torch.Tensor) -> torch.Tensor:
    """Each element's bits as a whole number."""
    return x.contiguous().view(WORDS[x.dtype.itemsize])
