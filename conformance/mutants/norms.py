"""Faults of LayerNorm, and of activations with and without a pair."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from octavo.conformance.mutants.base import Call, Mutant, Op, Wrap, after, around, before
from octavo.conformance.mutants.rows import residual_kept, rows_dense

LIMIT, STEEPNESS = 7.0, 1.702
TILE = 16
FAR = 64.0
"""Standard deviations from 0."""


@before
def bias_dropped(call: Call) -> None:
    call["bias_M"] = None


@around
def padded_width(honest: Op, call: Call) -> None:
    """The last tile's lanes beyond the row hold zeros, which count in mean and variance."""
    x, width = call["x"], call["x"].shape[-1]
    if width % TILE == 0:
        honest(**call)
        return
    if call["residual"] is not None:
        x = call["residual"].add_(x)
    pad = (0, -width % TILE)
    bias = None if call["bias_M"] is None else F.pad(call["bias_M"], pad)
    wide = torch.empty(*x.shape[:-1], width + pad[1], dtype=x.dtype)
    honest(F.pad(x, pad), F.pad(call["weight_M"], pad), out=wide, eps=call["eps"], bias_M=bias)
    call["out"].copy_(wide[..., :width])


@around
def squares_cancel(honest: Op, call: Call) -> None:
    """The variance is the mean of squares less the square of the mean: of rows far from 0 nothing is left of it."""
    x = call["x"].float()
    honest(**call)
    mean, square = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)
    is_far = mean.abs() > FAR * x.std(-1, correction=0, keepdim=True)
    y = (x - mean) * torch.rsqrt((square - mean.square()).clamp(min=0) + call["eps"]) * call["weight_M"]
    y = y if call["bias_M"] is None else y + call["bias_M"]
    if call["residual"] is None and x.shape[-1] > 1:
        call["out"].copy_(torch.where(is_far, y.to(call["out"].dtype), call["out"]))


@around
def gelu_by_tanh(honest: Op, call: Call) -> None:
    honest(**call | {"kind": "gelu_tanh" if call["kind"] == "gelu" else call["kind"]})


@after
def nan_to_zero(call: Call) -> None:
    """max(x, 0) of a device takes the number where one of the two is none."""
    if call["kind"] == "relu":
        call["out"].nan_to_num_(nan=0.0)


def clamped(*, low: float | None, high: float | None, up: float | None) -> Wrap:
    """The clamped gate with other limits."""

    @around
    def fault(honest: Op, call: Call) -> None:
        if call["gate"] != "swiglu_clamped":
            honest(**call)
            return
        gate, value = call["x"].float().chunk(2, dim=-1)
        gate = gate if low is None and high is None else gate.clamp(low, high)
        value = value if up is None else value.clamp(-up, up)
        call["out"].copy_((value + 1) * gate * torch.sigmoid(STEEPNESS * gate))

    return fault


MUTANTS = (
    Mutant(
        "layer-norm-bias-dropped",
        "the bias is ignored",
        "norm kernels to which the bias was added later",
        "layer_norm",
        bias_dropped,
    ),
    Mutant(
        "layer-norm-residual-never-written",
        "layer_norm with a residual gives the right norm and does not store the sum",
        "fused norm kernels that write one of two outputs",
        "layer_norm",
        residual_kept,
    ),
    Mutant(
        "layer-norm-last-stride",
        "layer_norm reads strided rows as if they were contiguous",
        "kernels that take a pointer and no stride",
        "layer_norm",
        rows_dense,
    ),
    Mutant(
        "layer-norm-padded-width",
        "mean and variance are taken over the width rounded up to 16",
        "norm kernels whose last tile is filled up with zeros",
        "layer_norm",
        padded_width,
    ),
    Mutant(
        "layer-norm-squares-cancel",
        "of rows far from 0 the variance is the mean of squares less the square of the mean",
        "norm kernels that read a row once",
        "layer_norm",
        squares_cancel,
    ),
    Mutant(
        "activation-gelu-by-tanh",
        "gelu is computed by its tanh approximation",
        "libraries in which one name stands for either",
        "activation",
        gelu_by_tanh,
    ),
    Mutant(
        "activation-nan-to-zero",
        "relu makes 0 of NaN",
        "kernels built of a maximum that drops NaN",
        "activation",
        nan_to_zero,
    ),
    Mutant(
        "act-clamp-dropped",
        "the clamped gate has no limits",
        "models run with a plain gate of the same slope",
        "act_mul",
        clamped(low=None, high=None, up=None),
    ),
    Mutant(
        "act-clamp-both-sides",
        "the clamped gate limits the gate from below too",
        "kernels that clamp both halves alike",
        "act_mul",
        clamped(low=-LIMIT, high=LIMIT, up=LIMIT),
    ),
)
