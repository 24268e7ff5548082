"""Matrix products with what fuses around them.

Shape letters: T tokens, K in_features, N out_features, E experts.
"""

from __future__ import annotations

import torch

from octavo.core.backend.ops import Epilogue, NormPrologue, PackedWeight
from octavo.core.backend.reference.numeric import accumulator, rounded
from octavo.core.backend.reference.quantize import fake_quantized, quantize
from octavo.core.backend.reference.rows import gated, normalized
from octavo.core.backend.specs import Gate


def gemm(
    x_TK: torch.Tensor,
    w: PackedWeight,
    *,
    out: torch.Tensor,
    prologue: NormPrologue | None = None,
    epilogue: Epilogue | None = None,
) -> None:
    if prologue is not None:
        x_TK = normalized(x_TK, prologue.weight_K, prologue.eps)
    finish(product(x_TK, w), epilogue or Epilogue(), out)


def product(x_TK: torch.Tensor, w: PackedWeight) -> torch.Tensor:
    """x @ w.T [T, N] in the accumulator's dtype, over the activations that the weight's scheme asks for."""
    dense_NK = w.dense()
    acc = accumulator(x_TK, dense_NK)
    x_TK = x_TK.to(acc)
    scheme = None if w.spec.scheme is None else w.spec.scheme.for_activations()
    if scheme is not None:
        x_TK = fake_quantized(x_TK, scheme)
    return x_TK @ dense_NK.to(acc).T


def finish(y_TN: torch.Tensor, epilogue: Epilogue, out: torch.Tensor) -> None:
    """Apply an epilogue to a product in the accumulator's dtype and write it, rounding once. Overwrites y."""
    if epilogue.bias_N is not None:
        y_TN = y_TN.add_(epilogue.bias_N)
    if epilogue.gate is not None:
        y_TN = gated(y_TN, epilogue.gate)
    if epilogue.residual is not None:
        y_TN = y_TN.add_(epilogue.residual)
    if epilogue.argmax:
        out.copy_(y_TN.argmax(dim=-1))  # the first, hence the lowest id, of equal maxima
    elif epilogue.quantize is not None:
        if epilogue.out_scales is None:
            raise ValueError("epilogue.out_scales is None; a quantising epilogue writes its scales there")
        quantize(y_TN, epilogue.quantize, out=out, scales=epilogue.out_scales)
    else:
        out.copy_(rounded(y_TN, out.dtype))


def grouped_gemm(
    x_TK: torch.Tensor,
    weights: list[PackedWeight],
    segment_start: torch.Tensor,
    *,
    out: torch.Tensor,
    gate: Gate | None = None,
) -> None:
    bounds = segment_start.tolist()
    epilogue = Epilogue(gate=gate)
    for expert, weight in enumerate(weights):
        rows = slice(bounds[expert], bounds[expert + 1])
        if rows.start < rows.stop:
            finish(product(x_TK[rows], weight), epilogue, out[rows])
