"""Drawing tokens on a GPU: the launch of kernels/sampling.py, and what it must move."""

from __future__ import annotations

import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.kernels import sampling as kernels
from octavo.core.backend.specs import OpSpec, RowSpec, Unsupported
from octavo.core.base.errors import UnsupportedOp

MAX_VOCABULARY = 1 << 24
"""Tokens are counted in fp32, which holds every whole number up to here."""


class SamplingOps:
    """`sample` of one device. A row's token depends on that row alone."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when the group runs `op` at `spec`, else why not."""
        if op != "sample" or not isinstance(spec, RowSpec):
            return Unsupported(f"no kernel for {op}")
        if spec.dtype != torch.float32:
            return Unsupported(f"logits are fp32, not {spec.dtype}")
        if spec.width > MAX_VOCABULARY:
            return Unsupported(f"vocabularies up to {MAX_VOCABULARY}, not {spec.width}")
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
        """out [R] int64: each row's token; ties with the last token kept are kept.

        Numerics: e^x and all sums in fp32, in an order that V alone fixes.

        Raises UnsupportedOp for anything but fp32 with int64 top_k and out, ValueError for shapes that don't fit.
        """
        num_rows, width = logits_RV.shape
        floats = (logits_RV, temperature_R, top_p_R, min_p_R, uniform_R)
        if any(x.dtype != torch.float32 for x in floats) or not top_k_R.dtype == out.dtype == torch.int64:
            raise UnsupportedOp("sample takes fp32 tensors, and int64 top_k and out")
        if any(x.shape != (num_rows,) or not x.is_contiguous() for x in (*floats[1:], top_k_R, out)):
            raise ValueError(
                f"sample of {num_rows} rows takes contiguous parameters and out of {num_rows} elements each"
            )
        entry = self._gpu.tuning.pick("sample", vocabulary=width)
        grid = (-(-num_rows // entry.tile["ROWS"]),)
        self._gpu.launch(
            kernels.sample, grid, logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, uniform_R, out, num_rows, width,
            logits_RV.stride(0), **entry.constants,
        )  # fmt: skip
