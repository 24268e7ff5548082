"""Products of experts on both GPU backends: checks, where the experts' weights lie, and how many tiles there may be.

    grouped_gemm    rows segment_start[e] .. segment_start[e + 1] of x, times weights[e].T, then the gate: one kernel

    weights 0 … E-1 ──by identity of all of them──► ExpertTables ──► int64 [3, E] on the device
                                                    gone as soon as one of these weights is

segment_start stays on the device. Of the grid the host knows a bound only: each expert with rows has at most one tile
that is cut short, so that there are no more than T // BLOCK_M + min(E, T) of them.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.packed import GpuWeight
from octavo.backends.common.products import Activations, ProductOps, narrowed
from octavo.core.backend import Gate, GroupedGemmSpec, OpSpec, PackedWeight, Unsupported
from octavo.core.base.errors import UnsupportedOp

MAX_EXPERTS = 1024
"""A program holds the bounds of all segments in registers."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Weights of one form, and where they lie.

    Attributes:
        addresses: int64 [3, E] on the device: where each one's codes, scales and offsets begin.
    """

    weights: list[GpuWeight]
    addresses: torch.Tensor

    @property
    def first(self) -> GpuWeight:
        """The one whose tensors a kernel gets."""
        return self.weights[0]

    @property
    def padded(self) -> int:
        """The power of two that E is filled up to."""
        return 1 << (len(self.weights) - 1).bit_length()


class ExpertOps(ABC):
    """`grouped_gemm` of one device."""

    def __init__(self, gpu: Gpu, products: ProductOps) -> None:
        """products: whose weights these are."""
        self._gpu = gpu
        self._products = products
        self._tables = ExpertTables()

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when `op` runs natively at `spec`, else why not."""
        if op != "grouped_gemm" or not isinstance(spec, GroupedGemmSpec):
            return Unsupported(f"no kernel for {op}")
        if not 1 <= spec.num_experts <= MAX_EXPERTS:
            return Unsupported(f"1 to {MAX_EXPERTS} experts, not {spec.num_experts}")
        return self._products.refused(spec)

    def grouped_gemm(
        self,
        x_TK: torch.Tensor,
        weights: list[PackedWeight],
        segment_start: torch.Tensor,
        *,
        out: torch.Tensor,
        gate: Gate | None = None,
    ) -> None:
        """Rows segment_start[e] .. segment_start[e + 1] of x times weights[e].T; segment_start is [E + 1] int32.

        Where this list of weights is new, a table of them is copied to the device.

        Raises:
            UnsupportedOp: what supports() refused.
            ValueError: shapes that don't fit the weights.
        """
        experts = self._laid_out(weights)
        spec = experts.first.spec
        width = spec.out_features // (1 if gate is None else 2)
        fits = x_TK.shape[1:] == (spec.in_features,) and out.shape == (x_TK.shape[0], width)
        if not fits or (gate is not None) != spec.gated or segment_start.shape != (len(weights) + 1,):
            raise ValueError(
                f"grouped_gemm of x {list(x_TK.shape)} with {len(weights)} weights [{spec.out_features}, "
                f"{spec.in_features}], gate {gate}, segment_start {list(segment_start.shape)}, into out "
                f"{list(out.shape)}: shapes don't fit"
            )
        refusal = self._products.refused(GroupedGemmSpec(spec, len(weights), x_TK.dtype, out.dtype, gate))
        if refusal is not None:
            raise UnsupportedOp(refusal.reason)
        if x_TK.shape[0]:
            x = self._products.activations(x_TK, experts.first)
            self._run(x, experts, segment_start, out, gate)

    def _run(
        self, x: Activations, experts: Experts, segment_start: torch.Tensor, out: torch.Tensor, gate: Gate | None
    ) -> None:
        w = experts.first
        rows = -(-x.codes_TK.shape[0] // len(experts.weights))
        kernel, operand = "grouped_codes", x.compute
        run = self._grouped_codes
        if x.is_native:
            kernel, operand, run = "grouped_scaled", x.codes_TK.dtype, self._grouped_scaled
        elif w.form.name == "plain" and w.codes.dtype == x.codes_TK.dtype:
            kernel, run = "grouped_gemm", self._grouped_gemm
        groups = int(x.group or w.form.group)
        entry = self._products.entry(kernel, operand, rows, w.spec.out_features, groups=groups)
        constants = narrowed(entry, x.group, w.form.group if x.is_native else 0)
        run(x, experts, segment_start, out, gate, constants)

    @abstractmethod
    def _grouped_gemm(
        self, x: Activations, experts: Experts, segment_start: torch.Tensor, out: torch.Tensor, gate: Gate | None,
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        """Operands of one float type."""

    @abstractmethod
    def _grouped_scaled(
        self, x: Activations, experts: Experts, segment_start: torch.Tensor, out: torch.Tensor, gate: Gate | None,
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        """Codes on both sides."""

    @abstractmethod
    def _grouped_codes(
        self, x: Activations, experts: Experts, segment_start: torch.Tensor, out: torch.Tensor, gate: Gate | None,
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        """Codes that are widened."""

    def _most_tiles(self, tokens: int, experts: Experts, constants: dict[str, Any]) -> int:
        """No segments of that many rows have more tiles."""
        down: int = tokens // constants["BLOCK_M"] + min(len(experts.weights), tokens)
        across: int = -(-experts.first.spec.out_features // constants["BLOCK_N"])
        return down * across

    def _laid_out(self, weights: list[PackedWeight]) -> Experts:
        """Where a list's weights lie. Raises UnsupportedOp."""
        addresses = self._tables.known(weights)
        own = cast("list[GpuWeight]", weights)  # what is known was checked when it was new
        if addresses is None:
            own = [w for w in weights if isinstance(w, GpuWeight)]
            if not own or len(own) != len(weights) or any(w.spec != own[0].spec for w in own):
                raise UnsupportedOp("grouped_gemm takes weights of one spec that this backend has packed")
            addresses = self._tables.added(own)
        return Experts(own, addresses)


class ExpertTables:
    """The address table of each list of weights that came up, for as long as all of these weights live.

    A list is known by the identity of every one of its weights, in order. Identities are used again once their owner is
    gone, so a table goes with the first of its weights that does; it keeps none of them alive. While they live it stays
    where it is: recorded steps read it there. A weight never moves, so that a table is never out of date.
    """

    def __init__(self) -> None:
        self._by_identity: dict[tuple[int, ...], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._by_identity)

    def known(self, weights: list[PackedWeight]) -> torch.Tensor | None:
        """The table of just these weights in this order."""
        return self._by_identity.get(tuple(map(id, weights)))

    def added(self, weights: list[GpuWeight]) -> torch.Tensor:
        """A new one."""
        key = tuple(map(id, weights))
        self._by_identity[key] = _addresses(weights)
        for weight in {id(w): w for w in weights}.values():
            weakref.finalize(weight, self._by_identity.pop, key, None).atexit = False
        return self._by_identity[key]


def _addresses(weights: list[GpuWeight]) -> torch.Tensor:
    """Where each weight's tensors begin, int64 [3, E]; any address for tensors that a form lacks."""
    rows = [[pick(w).data_ptr() for w in weights] for pick in (_codes, _scales, _minimums)]
    return torch.tensor(rows, dtype=torch.int64).to(weights[0].codes.device)


def _codes(w: GpuWeight) -> torch.Tensor:
    return w.codes


def _scales(w: GpuWeight) -> torch.Tensor:
    return w.codes if w.scales_GN is None else w.scales_GN


def _minimums(w: GpuWeight) -> torch.Tensor:
    return w.codes if w.offsets_GN is None else w.offsets_GN
