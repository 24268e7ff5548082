"""Drawing tokens on the CPU: the call of the native sampling kernel. Only CpuOps builds SamplingOps."""

from __future__ import annotations

import ctypes

import torch

from octavo.backends.cpu.native import NativeContext
from octavo.core.backend.specs import OpSpec, RowSpec, Unsupported
from octavo.core.base.errors import UnsupportedOp


class SampleArgs(ctypes.Structure):
    """Mirror of SampleArgs in native/sample.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ctx", "logits", "temperature", "top_k", "top_p", "min_p", "uniform")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab_size", "logits_stride")),
    )


class SamplingOps:
    """The sampling op of one engine's context: `sample`."""

    def __init__(self, context: NativeContext) -> None:
        self._context = context  # keeps its threads and scratch memory alive
        self._handle = context.handle
        self._sample = context.kernel("sample", SampleArgs)

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when `op` runs natively at `spec`, else why not."""
        if op != "sample" or not isinstance(spec, RowSpec):
            return Unsupported(f"no native {op}")
        if spec.dtype != torch.float32:
            return Unsupported(f"logits are fp32, not {spec.dtype}")
        return None

    def sample(
        self,
        logits_RV: torch.Tensor,
        temperature_R: torch.Tensor,
        top_k_R: torch.Tensor,
        top_p_R: torch.Tensor,
        min_p_R: torch.Tensor,
        uniform_R: torch.Tensor,
        *,
        out: torch.Tensor,
    ) -> None:
        """out [R] int64: each row's token. A row's token depends on that row alone.

        Numerics: e^x in fp32, sums in fp64 in id order; ties with the last token kept are kept.

        Raises:
            UnsupportedOp: anything but fp32, with int64 top_k and out.
            ValueError: shapes that don't fit.
        """
        rows = logits_RV.shape[0]
        floats = (logits_RV, temperature_R, top_p_R, min_p_R, uniform_R)
        if any(x.dtype != torch.float32 for x in floats) or not top_k_R.dtype == out.dtype == torch.int64:
            raise UnsupportedOp("the CPU sample takes fp32 tensors, and int64 top_k and out")
        if any(x.shape != (rows,) or not x.is_contiguous() for x in (*floats[1:], top_k_R, out)):
            raise ValueError(f"sample of {rows} rows takes contiguous parameters and an out of {rows} elements each")
        self._sample(
            self._handle, logits_RV.data_ptr(), temperature_R.data_ptr(), top_k_R.data_ptr(), top_p_R.data_ptr(),
            min_p_R.data_ptr(), uniform_R.data_ptr(), out.data_ptr(), rows, logits_RV.shape[1], logits_RV.stride(0),
        )  # fmt: skip
