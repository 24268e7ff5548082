"""RMSNorm, gated activation and rotary embedding on the CPU: the calls of the native row kernels.

Each row is computed on its own in one order, so its bits don't depend on the batch. Only CpuOps builds ElementwiseOps.
"""

from __future__ import annotations

import ctypes

import torch

from octavo.backends.cpu.native import NativeContext
from octavo.core.backend.specs import Gate, OpSpec, RowSpec, Unsupported
from octavo.core.base.errors import UnsupportedOp

GATE_CODES = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
"""OctavoGate."""

NORM_VARIANTS = ("", "residual")
ROTARY_VARIANTS = ("", "interleaved")


class RmsNormArgs(ctypes.Structure):
    """Mirror of RmsNormArgs in native/elementwise.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ctx", "x", "weight", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_heads", "width", "x_stride_t", "x_stride_h")),
        *((name, ctypes.c_int64) for name in ("residual_stride_t", "residual_stride_h")),
        *((name, ctypes.c_int64) for name in ("out_stride_t", "out_stride_h")),
        ("eps", ctypes.c_float),
    )


class ActMulArgs(ctypes.Structure):
    """Mirror of ActMulArgs in native/elementwise.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ctx", "x", "out")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "width", "x_stride_t", "out_stride_t")),
        ("gate", ctypes.c_int32),
    )


class RotaryArgs(ctypes.Structure):
    """Mirror of RotaryArgs in native/elementwise.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ctx", "q", "k", "out_q", "out_k", "positions", "cos_sin")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "rotary_dim")),
        *((name, ctypes.c_int64) for name in ("num_positions", "q_stride_t", "q_stride_h", "k_stride_t", "k_stride_h")),
        *((name, ctypes.c_int64) for name in ("out_q_stride_t", "out_q_stride_h", "out_k_stride_t", "out_k_stride_h")),
        ("cos_sin_stride", ctypes.c_int64),
        ("interleaved", ctypes.c_int32),
    )


class ElementwiseOps:
    """The row ops of one engine's context: `rms_norm`, `act_mul`, `rotary`."""

    def __init__(self, context: NativeContext) -> None:
        self._context = context  # keeps its threads and scratch memory alive
        self._context = context  # must outlive the calls made here
        self._handle = context.handle
        self._rms_norm = context.kernel("rms_norm", RmsNormArgs)
        self._act_mul = context.kernel("act_mul", ActMulArgs)
        self._rotary = context.kernel("rotary", RotaryArgs)

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when `op` runs natively at `spec`, else why not."""
        variants = {"rms_norm": NORM_VARIANTS, "act_mul": GATE_CODES, "rotary": ROTARY_VARIANTS}.get(op)
        if variants is None or not isinstance(spec, RowSpec):
            return Unsupported(f"no native {op}")
        if spec.dtype != torch.float32:
            return Unsupported(f"rows are fp32, not {spec.dtype}")
        if spec.variant not in variants:
            return Unsupported(f"no {op} {spec.variant!r}")
        if op == "rotary" and (spec.extent > spec.width or spec.extent % 2):
            return Unsupported(f"rotates an even part of a head, not {spec.extent} of {spec.width}")
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

        Raises:
            UnsupportedOp: anything but fp32.
            ValueError: shapes that don't fit.
        """
        if not x.dtype == weight_M.dtype == out.dtype == torch.float32:
            raise UnsupportedOp(f"the CPU rms_norm takes fp32, not {x.dtype} and {weight_M.dtype}")
        if x.shape != out.shape or weight_M.shape != x.shape[-1:]:
            raise ValueError(f"rms_norm of {list(x.shape)} with {list(weight_M.shape)} into {list(out.shape)}")
        residual_fields = (0, 0, 0)
        if residual is not None:
            if residual.dtype != torch.float32 or residual.shape != x.shape:
                raise ValueError(f"residual is {list(residual.shape)} {residual.dtype}; give {list(x.shape)} fp32")
            residual_fields = (residual.data_ptr(), *_row_strides(residual))
        self._rms_norm(
            self._handle, x.data_ptr(), weight_M.data_ptr(), residual_fields[0], out.data_ptr(), x.shape[0],
            x.shape[1] if x.dim() == 3 else 1, x.shape[-1], *_row_strides(x), *residual_fields[1:], *_row_strides(out),
            eps,
        )  # fmt: skip

    def act_mul(self, x: torch.Tensor, *, out: torch.Tensor, gate: Gate) -> None:
        """out [T, I] = act(x[:, :I]) * x[:, I:].

        Raises:
            UnsupportedOp: anything but fp32.
            ValueError: shapes that don't fit.
        """
        if not x.dtype == out.dtype == torch.float32:
            raise UnsupportedOp(f"the CPU act_mul takes fp32, not {x.dtype} into {out.dtype}")
        tokens, width = out.shape
        if x.shape != (tokens, 2 * width):
            raise ValueError(f"act_mul of {list(x.shape)} into {list(out.shape)}")
        self._act_mul(
            self._handle, x.data_ptr(), out.data_ptr(), tokens, width, x.stride(0), out.stride(0), GATE_CODES[gate]
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

        Raises:
            UnsupportedOp: anything but fp32 and int64 positions.
            NativeError: a position outside the table.
        """
        tensors = (q_THD, k_TKD, out_q, out_k, cos_sin_PR)
        if any(x.dtype != torch.float32 for x in tensors) or positions_T.dtype != torch.int64:
            raise UnsupportedOp("the CPU rotary takes fp32 tensors and int64 positions")
        tokens, num_heads, head_dim = q_THD.shape
        self._rotary(
            self._handle, q_THD.data_ptr(), k_TKD.data_ptr(), out_q.data_ptr(), out_k.data_ptr(),
            positions_T.data_ptr(), cos_sin_PR.data_ptr(), tokens, num_heads, k_TKD.shape[1], head_dim,
            cos_sin_PR.shape[1], cos_sin_PR.shape[0], *q_THD.stride()[:2], *k_TKD.stride()[:2], *out_q.stride()[:2],
            *out_k.stride()[:2], cos_sin_PR.stride(0), interleaved,
        )  # fmt: skip


def _row_strides(x: torch.Tensor) -> tuple[int, int]:
    """Strides of axes T and H; 0 for the H that [T, M] lacks."""
    return (x.stride(0), x.stride(1)) if x.dim() == 3 else (x.stride(0), 0)
