"""Faults of ops on rows."""

from __future__ import annotations

from typing import Any

import torch

from octavo.conformance.mutants.base import Mutant, Op


def leave_residual(honest: Op) -> Op:
    """The norm is right, but the sum is never stored: the next layer adds to a stale residual."""

    def rms_norm(x: torch.Tensor, weight_M: torch.Tensor, **kwargs: Any) -> None:
        residual = kwargs.pop("residual", None)
        honest(x, weight_M, residual=None if residual is None else residual.clone(), **kwargs)

    return rms_norm


def ignore_strides(honest: Op) -> Op:
    """Rows are taken to lie one behind the other, whatever the strides say."""

    def rms_norm(x: torch.Tensor, weight_M: torch.Tensor, **kwargs: Any) -> None:
        honest(x if x.is_contiguous() else _as_dense(x), weight_M, **kwargs)

    return rms_norm


def _as_dense(x: torch.Tensor) -> torch.Tensor:
    """What a kernel reads that takes x for contiguous."""
    strides = torch.empty(x.shape, device="meta").stride()
    return x.as_strided(x.shape, strides).clone()


MUTANTS = (
    Mutant(
        "residual-not-written",
        "rms_norm with a residual gives the right norm and does not store the sum",
        "fused norm kernels that write one of two outputs",
        "rms_norm",
        leave_residual,
    ),
    Mutant(
        "norm-strides-ignored",
        "rms_norm reads strided rows as if they were contiguous",
        "kernels that take a pointer and no stride",
        "rms_norm",
        ignore_strides,
    ),
)
