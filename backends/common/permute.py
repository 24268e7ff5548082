"""The way to the experts and back on a GPU: the launches of kernels/permute.py, and what each must move."""

from __future__ import annotations

import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.kernels import permute as kernels
from octavo.backends.common.rows import FLOATS
from octavo.backends.common.workspace import Workspace
from octavo.core.backend.specs import OpSpec, RowSpec, Unsupported
from octavo.core.base.errors import UnsupportedOp

ID_DTYPES = (torch.int32, torch.int64)


class PermuteOps:
    """`moe_permute` and `moe_combine` of one device. A combined row's bits depend on its own pairs alone."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._workspace = Workspace(gpu.device)

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when the group runs `op` at `spec`, else why not."""
        if op not in ("moe_permute", "moe_combine") or not isinstance(spec, RowSpec):
            return Unsupported(f"no kernel for {op}")
        if op == "moe_permute":
            return None if spec.dtype in ID_DTYPES else Unsupported(f"ids are int32 or int64, not {spec.dtype}")
        if spec.dtype not in FLOATS:
            return Unsupported(f"rows are fp32, bf16 or fp16, not {spec.dtype}")
        return None if spec.variant in ("", "residual") else Unsupported(f"no moe_combine {spec.variant!r}")

    def moe_permute(
        self,
        ids_TK: torch.Tensor,
        *,
        first_expert: int,
        out_rows: torch.Tensor,
        out_places: torch.Tensor,
        segment_start: torch.Tensor,
    ) -> None:
        """Pairs sorted by expert, stable, those that are elsewhere left out.

        Raises UnsupportedOp for ids of another dtype than supports() takes, ValueError for shapes that don't fit.
        """
        if ids_TK.dtype not in ID_DTYPES:
            raise UnsupportedOp(f"moe_permute takes ids of int32 or int64, not {ids_TK.dtype}")
        pairs, top_k = ids_TK.numel(), ids_TK.shape[1]
        if out_rows.shape != (pairs,) or out_places.shape != ids_TK.shape:
            raise ValueError(
                f"moe_permute of {list(ids_TK.shape)} into rows {list(out_rows.shape)}, places {list(out_places.shape)}"
            )
        experts = segment_start.shape[0] - 1
        entry = self._gpu.tuning.pick("moe_permute")
        tile = entry.tile
        # Without a pair the segments' bounds are still to be written.
        blocks, columns = max(-(-pairs // tile["PAIRS"]), 1), -(-experts // tile["EXPERTS"])
        (counts,) = self._workspace.take(((blocks, columns * tile["EXPERTS"]), torch.int32))
        self._gpu.launch(
            kernels.moe_count, (blocks, columns), ids_TK, counts, pairs, top_k, first_expert, experts,
            ids_TK.stride(0), counts.stride(0), PAIRS=tile["PAIRS"], EXPERTS=tile["EXPERTS"], **entry.options,
        )  # fmt: skip
        self._gpu.launch(
            kernels.moe_place, (blocks,), ids_TK, counts, out_rows, out_places, segment_start, pairs, top_k,
            first_expert, experts, blocks, ids_TK.stride(0), out_places.stride(0), counts.stride(0), **entry.constants,
        )  # fmt: skip

    def moe_combine(
        self,
        y_RM: torch.Tensor,
        places_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        *,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        """out[t] = residual[t] + the weighted sum of rows places[t] of y, in fp32 and in order; out may be residual.

        Raises UnsupportedOp for another dtype than supports() takes, ValueError for shapes that don't fit.
        """
        if y_RM.dtype not in FLOATS:
            raise UnsupportedOp(f"moe_combine takes fp32, bf16 or fp16, not {y_RM.dtype}")
        (tokens, top_k), width = places_TK.shape, y_RM.shape[1]
        shapes = [x.shape for x in (out, residual) if x is not None]
        if weights_TK.shape != places_TK.shape or any(shape != (tokens, width) for shape in shapes):
            raise ValueError(
                f"moe_combine of {list(y_RM.shape)} by places {list(places_TK.shape)}, weights "
                f"{list(weights_TK.shape)} into {list(out.shape)}"
            )
        entry = self._gpu.tuning.pick("moe_combine", width=width)
        grid = (-(-tokens // entry.tile["ROWS"]), -(-width // entry.tile["COLS"]))
        held = out if residual is None else residual
        self._gpu.launch(
            kernels.moe_combine, grid, y_RM, places_TK, weights_TK, held, out, tokens, width, top_k, y_RM.stride(0),
            places_TK.stride(0), weights_TK.stride(0), held.stride(0), out.stride(0),
            HAS_RESIDUAL=residual is not None, **entry.constants,
        )  # fmt: skip
