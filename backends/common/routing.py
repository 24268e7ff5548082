"""The choice of experts on a GPU: the launch of kernels/routing.py, and what it must move."""

from __future__ import annotations

import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.kernels import routing as kernels
from octavo.backends.common.rows import FLOATS, power_of_two
from octavo.core.backend.specs import OpSpec, RowSpec, Unsupported
from octavo.core.base.errors import UnsupportedOp

MAX_EXPERTS = 1024
"""All scores of a token lie in registers."""

SCORINGS = ("softmax", "sigmoid")


class RoutingOps:
    """`moe_route` of one device. A row's choice depends on that row alone."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when the group runs `op` at `spec`, else why not."""
        if op != "moe_route" or not isinstance(spec, RowSpec):
            return Unsupported(f"no kernel for {op}")
        if spec.dtype not in FLOATS:
            return Unsupported(f"logits are fp32, bf16 or fp16, not {spec.dtype}")
        if spec.variant not in SCORINGS:
            return Unsupported(f"scores by softmax or sigmoid, not {spec.variant!r}")
        if spec.width > MAX_EXPERTS or spec.extent > spec.width:
            return Unsupported(f"chooses among up to {MAX_EXPERTS} experts, not {spec.extent} of {spec.width}")
        return None

    def moe_route(
        self,
        logits_TE: torch.Tensor,
        *,
        top_k: int,
        out_weights: torch.Tensor,
        out_ids: torch.Tensor,
        scoring: str = "softmax",
        renormalize: bool = True,
        bias_E: torch.Tensor | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
    ) -> None:
        """The top_k experts of each row, highest first, ties to the lowest id; a NaN row gets ids 0.. and NaN weights.

        Raises UnsupportedOp for what supports() refuses, ValueError for experts that don't divide into the groups.
        """
        refusal = self.supports("moe_route", RowSpec(logits_TE.shape[1], logits_TE.dtype, scoring, top_k))
        if refusal is not None:
            raise UnsupportedOp(f"moe_route: {refusal.reason}")
        tokens, experts = logits_TE.shape
        if experts % num_groups:
            raise ValueError(f"moe_route of {experts} experts in {num_groups} groups; groups must have equal sizes")
        size = experts // num_groups
        entry = self._gpu.tuning.pick("moe_route", experts=power_of_two(num_groups) * power_of_two(size))
        grid = (-(-tokens // entry.tile["ROWS"]),)
        self._gpu.launch(
            kernels.moe_route, grid, logits_TE, logits_TE if bias_E is None else bias_E, out_weights, out_ids, tokens,
            num_groups, size, top_groups, top_k, scale, logits_TE.stride(0), out_weights.stride(0),
            out_ids.stride(0), IS_SIGMOID=scoring == "sigmoid", HAS_BIAS=bias_E is not None,
            BEST=1 if bias_E is None else min(2, size), RENORMALIZE=renormalize, GROUPS=power_of_two(num_groups),
            SIZE=power_of_two(size), CHOICES=power_of_two(top_k), **entry.constants,
        )  # fmt: skip
