"""Honest ops on data that is harder than the grid's: numbers of one sign, and sums that are very long."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from octavo.conformance.case import Case
from octavo.conformance.draw import Draw
from octavo.conformance.grid import gemm
from octavo.conformance.trial import Trial
from octavo.conformance.variants.base import Variant

MEAN = 0.5
LARGE_K = (16384, 65536)


class Shifted(Draw):
    """Normal numbers with MEAN standard deviations added: products no longer cancel, and sums grow with length."""

    def __init__(self, plain: Draw) -> None:
        self.generator, self.facts, self.accumulation = plain.generator, plain.facts, plain.accumulation

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, std: float = 1.0
    ) -> torch.Tensor:
        return super().normal(*shape, dtype=dtype, mean=mean + MEAN * std, std=std)


def shifted(case: Case) -> Case | None:
    """The case with numbers of positive mean; None for cases that draw no normal numbers."""
    return replace(case, build=functools.partial(_build_shifted, case.build)) if "statistical" in case.lanes else None


def _build_shifted(build: Callable[[Draw], Trial], draw: Draw) -> Trial:
    return build(Shifted(draw))


def long_sums() -> list[Case]:
    """Products over K far beyond the grid's."""
    template = next(case for case in gemm.cases() if case.lanes == ("statistical",))
    points = [gemm.Point("statistical", 2, 8, k) for k in LARGE_K]
    return [
        replace(template, name=p.name, spec=p.spec, build=functools.partial(gemm.build_statistical, p)) for p in points
    ]


def left_out(_: Case) -> None:
    """For a variant that runs its own cases alone."""


SHIFTED_OPS = ("gemm", "grouped_gemm", "rms_norm", "paged_attention", "attention", "lora_gemm")

VARIANTS = (
    Variant("data-positive-mean", "numbers of positive mean", SHIFTED_OPS, alter=shifted),
    Variant("data-large-k", "products over very long rows", ("gemm",), alter=left_out, cases=long_sums),
)
