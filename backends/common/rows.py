"""Norms, rotary embedding and activations on a GPU: the launches of kernels/rows.py, and what each must move."""

from __future__ import annotations

from typing import get_args

import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.kernels import rows as kernels
from octavo.core.backend.specs import ActivationKind, Gate, OpSpec, RowSpec, Unsupported
from octavo.core.base.errors import UnsupportedOp

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of rows."""

_VARIANTS: dict[str, tuple[str, ...]] = {
    "rms_norm": ("", "residual"),
    "layer_norm": ("", "residual"),
    "rotary": ("", "interleaved"),
    "act_mul": get_args(Gate),
    "activation": get_args(ActivationKind),
}
MAX_HEAD_DIM = 1024
"""A head lies in registers whole."""


class RowOps:
    """`rms_norm`, `layer_norm`, `rotary`, `act_mul` and `activation` of one device. A row's bits depend on it alone."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when the group runs `op` at `spec`, else why not."""
        if op not in _VARIANTS or not isinstance(spec, RowSpec):
            return Unsupported(f"no kernel for {op}")
        if spec.dtype not in FLOATS:
            return Unsupported(f"rows are fp32, bf16 or fp16, not {spec.dtype}")
        if spec.variant not in _VARIANTS[op]:
            return Unsupported(f"no {op} {spec.variant!r}")
        if op == "rotary":
            return refused_rotary(spec.width, spec.extent)
        return None

    def rms_norm(
        self,
        x: torch.Tensor,
        weight_M: torch.Tensor,
        *,
        out: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> None:
        """residual += x, if there is one; out = its (else x's) norm times weight. [T, M] or [T, H, M]; out may be x.

        Raises UnsupportedOp for another dtype than supports() takes, ValueError for shapes that don't fit.
        """
        _check_norm("rms_norm", x, weight_M, out, residual)
        heads, width = x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
        num_rows = x.shape[0] * heads
        entry = self._gpu.tuning.pick("rms_norm", width=width)
        held = x if residual is None else residual
        self._gpu.launch(
            kernels.rms_norm, (-(-num_rows // entry.tile["ROWS"]),), x, held, weight_M, out, num_rows, heads, width,
            eps, *_row_strides(x), *_row_strides(held), *_row_strides(out), HAS_RESIDUAL=residual is not None,
            IS_WHOLE=width <= entry.tile["COLS"], **entry.constants,
        )  # fmt: skip

    def layer_norm(
        self,
        x: torch.Tensor,
        weight_M: torch.Tensor,
        *,
        out: torch.Tensor,
        eps: float,
        bias_M: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        """residual += x, if there is one; out = its (else x's) norm times weight, plus bias. Shapes as for rms_norm.

        Raises UnsupportedOp for another dtype than supports() takes, ValueError for shapes that don't fit.
        """
        _check_norm("layer_norm", x, weight_M, out, residual)
        if bias_M is not None and bias_M.shape != weight_M.shape:
            raise ValueError(f"layer_norm with a bias of {list(bias_M.shape)}; give {list(weight_M.shape)}")
        heads, width = x.shape[1] if x.dim() == 3 else 1, x.shape[-1]
        num_rows = x.shape[0] * heads
        entry = self._gpu.tuning.pick("rms_norm", width=width)  # the same bytes on the same way
        held = x if residual is None else residual
        self._gpu.launch(
            kernels.layer_norm, (-(-num_rows // entry.tile["ROWS"]),), x, held, weight_M,
            weight_M if bias_M is None else bias_M, out, num_rows, heads, width, eps, *_row_strides(x),
            *_row_strides(held), *_row_strides(out), HAS_BIAS=bias_M is not None, HAS_RESIDUAL=residual is not None,
            IS_WHOLE=width <= entry.tile["COLS"], **entry.constants,
        )  # fmt: skip

    def act_mul(self, x: torch.Tensor, *, out: torch.Tensor, gate: Gate) -> None:
        """out [T, I] = the pair of x[:, :I] and x[:, I:] made one.

        Raises UnsupportedOp for another dtype than supports() takes, ValueError for shapes that don't fit.
        """
        if x.dtype not in FLOATS or gate not in _VARIANTS["act_mul"]:
            raise UnsupportedOp(f"act_mul takes fp32, bf16 or fp16 and {_VARIANTS['act_mul']}, not {x.dtype}, {gate}")
        tokens, width = out.shape
        if x.shape != (tokens, 2 * width):
            raise ValueError(f"act_mul of {list(x.shape)} into {list(out.shape)}")
        entry = self._gpu.tuning.pick("act_mul", width=width)
        grid = (-(-tokens // entry.tile["ROWS"]), -(-width // entry.tile["COLS"]))
        self._gpu.launch(
            kernels.act_mul, grid, x, out, tokens, width, x.stride(0), out.stride(0), GATE=gate, **entry.constants
        )

    def activation(self, x: torch.Tensor, *, out: torch.Tensor, kind: ActivationKind) -> None:
        """out [T, I] = act(x); out may be x.

        Raises UnsupportedOp for another dtype than supports() takes, ValueError for shapes that don't fit.
        """
        if x.dtype not in FLOATS or kind not in _VARIANTS["activation"]:
            raise UnsupportedOp(
                f"activation takes fp32, bf16 or fp16 and {_VARIANTS['activation']}, not {x.dtype}, {kind}"
            )
        tokens, width = out.shape
        if x.shape != out.shape:
            raise ValueError(f"activation of {list(x.shape)} into {list(out.shape)}")
        entry = self._gpu.tuning.pick("act_mul", width=width)  # a stream as that one is
        grid = (-(-tokens // entry.tile["ROWS"]), -(-width // entry.tile["COLS"]))
        self._gpu.launch(
            kernels.activate, grid, x, out, tokens, width, x.stride(0), out.stride(0), KIND=kind, **entry.constants
        )

    def rotary(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
        *,
        out_q: torch.Tensor,
        out_k: torch.Tensor,
        interleaved: bool = False,
    ) -> None:
        """Rotary embedding of the first R elements of each head; outputs may be their inputs.

        Raises UnsupportedOp for what supports() refuses, ValueError for shapes that don't fit.
        """
        tokens, q_heads, head_dim = q_THD.shape
        rotary_dim = cos_sin_PR.shape[1]
        refusal = refused_rotary(head_dim, rotary_dim)
        if refusal is not None or q_THD.dtype not in FLOATS:
            raise UnsupportedOp(refusal.reason if refusal else f"rotary takes fp32, bf16 or fp16, not {q_THD.dtype}")
        if k_TKD.shape[0] != tokens or k_TKD.shape[2] != head_dim:
            raise ValueError(f"rotary of q {list(q_THD.shape)} and k {list(k_TKD.shape)}")
        k_heads = k_TKD.shape[1]
        entry = self._gpu.tuning.pick("rotary", head_dim=head_dim)
        rows = entry.tile["ROWS"]
        grid = (-(-tokens * q_heads // rows) - (-tokens * k_heads // rows),)
        self._gpu.launch(
            kernels.rotary, grid, q_THD, k_TKD, out_q, out_k, positions_T, cos_sin_PR, tokens, q_heads, k_heads,
            head_dim, rotary_dim, *q_THD.stride()[:2], *k_TKD.stride()[:2], *out_q.stride()[:2], *out_k.stride()[:2],
            cos_sin_PR.stride(0), INTERLEAVED=interleaved, **head_tile(head_dim, rotary_dim), **entry.constants,
        )  # fmt: skip


def _check_norm(
    op: str, x: torch.Tensor, weight_M: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None
) -> None:
    """Raise UnsupportedOp and ValueError as the norms say."""
    if x.dtype not in FLOATS:
        raise UnsupportedOp(f"{op} takes fp32, bf16 or fp16, not {x.dtype}")
    if x.shape != out.shape or weight_M.shape != x.shape[-1:] or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"{op} of {list(x.shape)} with {list(weight_M.shape)} into {list(out.shape)}")


def refused_rotary(head_dim: int, rotary_dim: int) -> Unsupported | None:
    """Why heads can't be turned so; None when they can."""
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim <= MAX_HEAD_DIM:
        return Unsupported(f"rotates an even part of heads up to {MAX_HEAD_DIM}, not {rotary_dim} of {head_dim}")
    return None


def head_tile(head_dim: int, rotary_dim: int) -> dict[str, int]:
    """Constants that a head's shape fixes: pairs and what lies behind, up to powers of two; REST 0: nothing does."""
    rest = head_dim - rotary_dim
    return {"PAIRS": power_of_two(rotary_dim // 2), "REST": power_of_two(rest) if rest else 0}


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below count."""
    return 1 << (count - 1).bit_length() if count > 1 else 1


def _row_strides(x: torch.Tensor) -> tuple[int, int]:
    """Strides of axes T and H; 0 for the H that [T, M] lacks."""
    return (x.stride(0), x.stride(1)) if x.dim() == 3 else (x.stride(0), 0)
