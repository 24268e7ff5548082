"""Low-rank adapters on a GPU: the launches of kernels/lora.py, and the table that they find adapters by.

The contract hands over lists of tensors, a kernel needs addresses in device memory. A table of them is made when a
list is seen first and kept: the same adapters, the same table, whatever step it is, so that a step neither allocates
nor copies, and a recorded step finds its table where it was. An entry is told by all that stands in the table, so one
can be of no use but never wrong.
"""

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

Line = tuple[int, int, int, int, int]
"""An adapter in the table: the addresses of A and B, rank, strides of their rows."""


class AdapterTables:
    """Lines of adapters in device memory, each list of them once. It only grows: a recorded step may hold any."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[tuple[Line, ...], torch.Tensor] = {}

    def of(self, lines: tuple[Line, ...]) -> torch.Tensor:
        """[adapters, 5] int64; made when these lines are asked for first."""
        if lines not in self._tables:
            self._tables[lines] = torch.tensor(lines, dtype=torch.int64).to(self._device)
        return self._tables[lines]


class LoraOps:
    """`lora_gemm` of one device. A row's bits depend on that row and its adapter alone."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._tables = AdapterTables(gpu.device)
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

        Raises UnsupportedOp for ranks and dtypes that supports() refuses, and for adapters of another dtype than x's.
        """
        a, b, scales = a_LRK.unbind(0), b_LNR.unbind(0), scales_L
        if not a or not x_TK.shape[0]:
            return
        max_rank = a_LRK.shape[1]
        if x_TK.dtype not in FLOATS or max_rank > MAX_RANK:
            raise UnsupportedOp(
                f"lora_gemm takes fp32, bf16 or fp16 up to rank {MAX_RANK}, not {x_TK.dtype}, {max_rank}"
            )
        if any(part.dtype != x_TK.dtype for part in (*a, *b, out)):
            raise UnsupportedOp(f"lora_gemm of {x_TK.dtype} takes adapters and out of the same dtype")
        (tokens, depth), width = x_TK.shape, out.shape[1]
        lines = tuple(_line(*pair) for pair in zip(a, b, strict=True))
        rank = max(power_of_two(max_rank), MIN_RANK)
        shrink = self._gpu.tuning.pick("lora_shrink", dtype=_name(x_TK.dtype), rank=rank)
        expand = self._gpu.tuning.pick("lora_expand", dtype=_name(x_TK.dtype), rank=rank)
        parts = shrink.tile["PARTS"]
        table = self._tables.of(lines)
        (h,) = self._workspace.take(((parts, tokens, rank), torch.float32))
        aligned = all(_is_aligned(line) for line in lines)
        self._gpu.launch(
            kernels.lora_shrink, (-(-tokens // shrink.tile["ROWS"]), len(a), parts), x_TK, adapter_T, table, h, tokens,
            depth, x_TK.stride(0), h.stride(0), ALIGNED=aligned, RANK=rank, **shrink.constants,
        )  # fmt: skip
        grid = (-(-tokens // expand.tile["ROWS"]), -(-width // expand.tile["COLS"]), len(a))
        self._gpu.launch(
            kernels.lora_expand, grid, h, adapter_T, table, scales, out, tokens, width, out.stride(0), h.stride(0),
            ALIGNED=aligned, RANK=rank, PARTS=parts, **expand.constants,
        )  # fmt: skip


def _line(a_RK: torch.Tensor, b_NR: torch.Tensor) -> Line:
    return a_RK.data_ptr(), b_NR.data_ptr(), a_RK.shape[0], a_RK.stride(0), b_NR.stride(0)


def _is_aligned(line: Line) -> bool:
    """Whether its matrices may be read 16 bytes at a time."""
    return line[0] % 16 == line[1] % 16 == 0 and all(number % 8 == 0 for number in line[2:])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
