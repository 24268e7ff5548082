"""Low-rank adapters on a GPU: the launches of kernels/lora.py."""

from __future__ import annotations

import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.kernels import lora as kernels
from octavo.backends.common.rows import FLOATS, power_of_two
from octavo.backends.common.workspace import Workspace
from octavo.core.backend.specs import LoraSpec, OpSpec, Unsupported
from octavo.core.base.errors import UnsupportedOp

MAX_RANK = 256
"""h of a row lies in registers whole."""

MIN_RANK = 16
"""The least depth of a product on matrix units."""


class LoraOps:
    """`lora_gemm` of one device. A row's bits depend on that row and its adapter alone."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._workspace = Workspace(gpu.device)

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when the group runs `op` at `spec`, else why not."""
        if op != "lora_gemm" or not isinstance(spec, LoraSpec):
            return Unsupported(f"no kernel for {op}")
        if spec.x_dtype not in FLOATS:
            return Unsupported(f"rows are fp32, bf16 or fp16, not {spec.x_dtype}")
        if spec.max_rank > MAX_RANK:
            return Unsupported(f"adapters of rank up to {MAX_RANK}, not {spec.max_rank}")
        return None

    def lora_gemm(
        self,
        x_TK: torch.Tensor,
        a_LRK: torch.Tensor,
        b_LNR: torch.Tensor,
        scales_L: torch.Tensor,
        adapter_T: torch.Tensor,
        *,
        out: torch.Tensor,
    ) -> None:
        """out[t] += scales[i] * b[i] @ (a[i] @ x[t]) for i = adapter_T[t]; rows of -1 keep their bits.

        Numerics: a[i] @ x[t] stays in fp32; its sum over K is cut into parts that are added in order.

        Raises UnsupportedOp for ranks and dtypes that supports() refuses, and for adapters of another dtype than x's;
        ValueError for shapes that don't fit.
        """
        (tokens, depth), width = x_TK.shape, out.shape[1]
        slots, max_rank, _ = a_LRK.shape
        if a_LRK.shape[2] != depth or b_LNR.shape != (slots, width, max_rank) or scales_L.shape != (slots,):
            raise ValueError(
                f"lora_gemm of x {list(x_TK.shape)} with a {list(a_LRK.shape)}, b {list(b_LNR.shape)}, scales "
                f"{list(scales_L.shape)} into {list(out.shape)}: shapes don't fit"
            )
        if x_TK.dtype not in FLOATS or max_rank > MAX_RANK:
            raise UnsupportedOp(
                f"lora_gemm takes fp32, bf16 or fp16 up to rank {MAX_RANK}, not {x_TK.dtype}, {max_rank}"
            )
        if any(x.dtype != x_TK.dtype for x in (a_LRK, b_LNR, out)):
            raise UnsupportedOp(f"lora_gemm of {x_TK.dtype} takes adapters and out of the same dtype")
        if not (tokens and slots and max_rank):
            return
        rank = max(power_of_two(max_rank), MIN_RANK)
        shrink = self._gpu.tuning.pick("lora_shrink", dtype=_name(x_TK.dtype), rank=rank)
        expand = self._gpu.tuning.pick("lora_expand", dtype=_name(x_TK.dtype), rank=rank)
        parts = shrink.tile["PARTS"]
        (h,) = self._workspace.take(((parts, tokens, rank), torch.float32))
        self._gpu.launch(
            kernels.lora_shrink, (-(-tokens // shrink.tile["ROWS"]), slots, parts), x_TK, adapter_T, a_LRK, h, tokens,
            depth, max_rank, x_TK.stride(0), *a_LRK.stride()[:2], h.stride(0), ALIGNED=_is_aligned(a_LRK), RANK=rank,
            **shrink.constants,
        )  # fmt: skip
        grid = (-(-tokens // expand.tile["ROWS"]), -(-width // expand.tile["COLS"]), slots)
        self._gpu.launch(
            kernels.lora_expand, grid, h, adapter_T, b_LNR, scales_L, out, tokens, width, max_rank,
            *b_LNR.stride()[:2], out.stride(0), h.stride(0), ALIGNED=_is_aligned(b_LNR) and max_rank % 8 == 0,
            RANK=rank, PARTS=parts, **expand.constants,
        )  # fmt: skip


def _is_aligned(slots: torch.Tensor) -> bool:
    """Whether its rows may be read 16 bytes at a time, if the first one may; that one Triton looks at itself."""
    return all(stride % 8 == 0 for stride in slots.stride()[:2])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
