"""How a fused op is taken apart when a backend has no fusion of its own.

    gemm      norm | product | bias | gate | residual | quantize or argmax
              each step peels one thing: the norm in front, the last of the epilogue, or the weight's quantisation
    rope_write_kv      rotary, write_kv
    all_reduce_norm    all_reduce of the communicator, rms_norm
    rms_norm+residual, layer_norm+residual    add, the norm
    grouped_gemm       grouped_gemm without the gate, act_mul; or gemm per expert

`decompositions(op, spec)` names the parts, most fused first; OpSet binds them and calls `build`. A part may be taken
apart in its turn. What lies between the parts is plain torch in place (an add), or a Scratch that the built
callable owns: one buffer that grows to the largest step seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from octavo.core.backend.comm import Communicator
from octavo.core.backend.kv import KVCache
from octavo.core.backend.ops import Epilogue, NormPrologue, PackedWeight
from octavo.core.backend.specs import CacheSpec, Gate, GemmSpec, GroupedGemmSpec, OpSpec, RowSpec

OpCall = Callable[..., Any]
Empty = Callable[[int, torch.dtype], torch.Tensor]
"""(elements, dtype) -> an uninitialised flat device tensor."""


class Scratch:
    """A device buffer of one dtype that grows and is reused.

    A recorded step holds the address of the buffer that it was recorded with, so an outgrown one is kept: sizes at
    least double, and all of them together are less than twice the last.
    """

    def __init__(self, empty: Empty, dtype: torch.dtype) -> None:
        self._empty = empty
        self._dtype = dtype
        self._buffers: list[torch.Tensor] = []

    def take(self, *shape: int) -> torch.Tensor:
        """An uninitialised tensor, valid until the next take."""
        count = math.prod(shape)
        if not self._buffers or self._buffers[-1].numel() < count:
            larger = max(count, 2 * self._buffers[-1].numel()) if self._buffers else count
            self._buffers.append(self._empty(larger, self._dtype))
        return self._buffers[-1][:count].view(shape)


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The parts of an op, and how to make one callable of the bound parts."""

    parts: tuple[tuple[str, OpSpec], ...]
    build: Callable[[Sequence[OpCall], Empty], OpCall]


def decompositions(op: str, spec: OpSpec) -> Iterator[Decomposition]:
    """The ways to take `op` apart at `spec`; none for an op that is one piece."""
    if op == "gemm" and isinstance(spec, GemmSpec):
        yield from _peel_gemm(spec)
    elif op == "grouped_gemm" and isinstance(spec, GroupedGemmSpec):
        yield from _part_grouped(spec)
    elif op == "rope_write_kv" and isinstance(spec, CacheSpec):
        rotary = rotary_spec(spec.head_dim, spec.x_dtype, spec.rotary_dim, spec.interleaved)
        write = replace(spec, num_heads=0, rotary_dim=0, interleaved=False)
        yield Decomposition(
            (("rotary", rotary), ("write_kv", write)),
            lambda parts, empty: _RotaryThenWrite(parts, Scratch(empty, spec.x_dtype)),
        )
    elif op == "all_reduce_norm" and isinstance(spec, RowSpec):
        norm = replace(spec, variant="residual")
        yield Decomposition(
            (("rms_norm", norm),), lambda parts, empty: _ReduceThenNorm(parts[0], Scratch(empty, spec.dtype))
        )
    elif op in ("rms_norm", "layer_norm") and isinstance(spec, RowSpec) and spec.variant == "residual":
        yield Decomposition(((op, replace(spec, variant="")),), lambda parts, _: _AddThenNorm(parts[0]))


def rotary_spec(head_dim: int, dtype: torch.dtype, rotary_dim: int, interleaved: bool) -> RowSpec:
    """The spec of `rotary`."""
    return RowSpec(head_dim, dtype, "interleaved" if interleaved else "", rotary_dim)


def _part_grouped(spec: GroupedGemmSpec) -> Iterator[Decomposition]:
    if spec.gate is not None:
        inner = replace(spec, gate=None, weight=replace(spec.weight, gated=False))
        act = RowSpec(spec.weight.out_features, spec.out_dtype, spec.gate)
        yield Decomposition(
            (("grouped_gemm", inner), ("act_mul", act)),
            lambda parts, empty: _GroupedThenGate(parts, spec.weight.out_features, Scratch(empty, spec.out_dtype)),
        )
    part = GemmSpec(spec.weight, spec.x_dtype, spec.out_dtype, gate=spec.gate)
    yield Decomposition((("gemm", part),), lambda parts, _: _GemmPerExpert(parts[0], spec.gate))


def _peel_gemm(spec: GemmSpec) -> Iterator[Decomposition]:
    width = spec.weight.out_features // 2 if spec.gate else spec.weight.out_features
    if spec.argmax:
        inner = replace(spec, argmax=False, out_dtype=_logits_dtype(spec))
        yield Decomposition(
            (("gemm", inner),), lambda parts, empty: _GemmThenArgmax(parts[0], width, Scratch(empty, inner.out_dtype))
        )
    elif spec.quantize is not None:
        scheme = spec.quantize
        inner = replace(spec, quantize=None, out_dtype=spec.x_dtype)
        codes = RowSpec(width, inner.out_dtype, scheme.format.value, scheme.group_size)
        yield Decomposition(
            (("gemm", inner), ("quantize", codes)),
            lambda parts, empty: _GemmThenQuantize(parts, width, Scratch(empty, inner.out_dtype)),
        )
    elif spec.residual:
        inner = replace(spec, residual=False)
        yield Decomposition(
            (("gemm", inner),), lambda parts, empty: _GemmThenResidual(parts[0], Scratch(empty, spec.out_dtype))
        )
    elif spec.gate is not None:
        inner = replace(spec, gate=None, weight=replace(spec.weight, gated=False))  # a plain product gives both halves
        act = RowSpec(spec.weight.out_features, spec.out_dtype, spec.gate)
        yield Decomposition(
            (("gemm", inner), ("act_mul", act)),
            lambda parts, empty: _GemmThenGate(parts, spec.weight.out_features, Scratch(empty, spec.out_dtype)),
        )
    elif spec.bias:
        yield Decomposition((("gemm", replace(spec, bias=False)),), lambda parts, _: _GemmThenBias(parts[0]))
    packed = spec.weight.scheme
    if packed is not None and packed.activation is None:
        # Dequantised as it is placed, and kept in the activations' dtype.
        plain = replace(spec.weight, scheme=None, dtype=spec.x_dtype)
        yield Decomposition((("gemm", replace(spec, weight=plain)),), lambda parts, _: parts[0])
    if spec.norm:
        norm = RowSpec(spec.weight.in_features, spec.x_dtype)
        yield Decomposition(
            (("rms_norm", norm), ("gemm", replace(spec, norm=False))),
            lambda parts, empty: _NormThenGemm(parts, Scratch(empty, spec.x_dtype)),
        )


def _logits_dtype(spec: GemmSpec) -> torch.dtype:
    return torch.float64 if spec.x_dtype == torch.float64 else torch.float32


class _NormThenGemm:
    def __init__(self, parts: Sequence[OpCall], normed: Scratch) -> None:
        self._norm, self._gemm = parts
        self._normed = normed

    def __call__(
        self,
        x_TK: torch.Tensor,
        w: PackedWeight,
        *,
        out: torch.Tensor,
        prologue: NormPrologue,
        epilogue: Epilogue | None = None,
    ) -> None:
        normed_TK = self._normed.take(*x_TK.shape)
        self._norm(x_TK, prologue.weight_K, out=normed_TK, eps=prologue.eps)
        self._gemm(normed_TK, w, out=out, epilogue=epilogue)


class _GemmThenArgmax:
    def __init__(self, gemm: OpCall, width: int, logits: Scratch) -> None:
        self._gemm = gemm
        self._width = width
        self._logits = logits

    def __call__(
        self,
        x_TK: torch.Tensor,
        w: PackedWeight,
        *,
        out: torch.Tensor,
        epilogue: Epilogue,
        prologue: NormPrologue | None = None,
    ) -> None:
        logits = self._logits.take(x_TK.shape[0], self._width)
        self._gemm(x_TK, w, out=logits, prologue=prologue, epilogue=replace(epilogue, argmax=False))
        torch.argmax(logits, dim=-1, out=out)


class _GemmThenQuantize:
    def __init__(self, parts: Sequence[OpCall], width: int, result: Scratch) -> None:
        self._gemm, self._quantize = parts
        self._width = width
        self._result = result

    def __call__(
        self,
        x_TK: torch.Tensor,
        w: PackedWeight,
        *,
        out: torch.Tensor,
        epilogue: Epilogue,
        prologue: NormPrologue | None = None,
    ) -> None:
        result = self._result.take(x_TK.shape[0], self._width)
        inner = replace(epilogue, quantize=None, out_scales=None)
        self._gemm(x_TK, w, out=result, prologue=prologue, epilogue=inner)
        self._quantize(result, epilogue.quantize, out=out, scales=epilogue.out_scales)


class _GemmThenResidual:
    """`out` may be the residual itself, so the product goes to a scratch."""

    def __init__(self, gemm: OpCall, result: Scratch) -> None:
        self._gemm = gemm
        self._result = result

    def __call__(
        self,
        x_TK: torch.Tensor,
        w: PackedWeight,
        *,
        out: torch.Tensor,
        epilogue: Epilogue,
        prologue: NormPrologue | None = None,
    ) -> None:
        result = self._result.take(*out.shape)
        self._gemm(x_TK, w, out=result, prologue=prologue, epilogue=replace(epilogue, residual=None))
        torch.add(result, cast(torch.Tensor, epilogue.residual), out=out)


class _GemmThenGate:
    def __init__(self, parts: Sequence[OpCall], width: int, pair: Scratch) -> None:
        self._gemm, self._act_mul = parts
        self._width = width
        self._pair = pair

    def __call__(
        self,
        x_TK: torch.Tensor,
        w: PackedWeight,
        *,
        out: torch.Tensor,
        epilogue: Epilogue,
        prologue: NormPrologue | None = None,
    ) -> None:
        pair = self._pair.take(x_TK.shape[0], self._width)
        self._gemm(x_TK, w, out=pair, prologue=prologue, epilogue=replace(epilogue, gate=None))
        self._act_mul(pair, out=out, gate=epilogue.gate)


class _GemmThenBias:
    def __init__(self, gemm: OpCall) -> None:
        self._gemm = gemm

    def __call__(
        self,
        x_TK: torch.Tensor,
        w: PackedWeight,
        *,
        out: torch.Tensor,
        epilogue: Epilogue,
        prologue: NormPrologue | None = None,
    ) -> None:
        self._gemm(x_TK, w, out=out, prologue=prologue, epilogue=replace(epilogue, bias_N=None))
        out.add_(cast(torch.Tensor, epilogue.bias_N))


class _GroupedThenGate:
    """The gate goes over all rows, those of no segment too: what they hold is nobody's."""

    def __init__(self, parts: Sequence[OpCall], width: int, pair: Scratch) -> None:
        self._grouped, self._act_mul = parts
        self._width = width
        self._pair = pair

    def __call__(
        self,
        x_TK: torch.Tensor,
        weights: list[PackedWeight],
        segment_start: torch.Tensor,
        *,
        out: torch.Tensor,
        gate: Gate,
    ) -> None:
        pair = self._pair.take(x_TK.shape[0], self._width)
        self._grouped(x_TK, weights, segment_start, out=pair)
        self._act_mul(pair, out=out, gate=gate)


class _GemmPerExpert:
    """Reads the segments on the host, which waits for the device."""

    def __init__(self, gemm: OpCall, gate: Gate | None) -> None:
        self._gemm = gemm
        self._epilogue = Epilogue(gate=gate)

    def __call__(
        self,
        x_TK: torch.Tensor,
        weights: list[PackedWeight],
        segment_start: torch.Tensor,
        *,
        out: torch.Tensor,
        gate: Gate | None = None,
    ) -> None:
        bounds = segment_start.tolist()
        for expert, weight in enumerate(weights):
            rows = slice(bounds[expert], bounds[expert + 1])
            if rows.start < rows.stop:
                self._gemm(x_TK[rows], weight, out=out[rows], epilogue=self._epilogue)


class _RotaryThenWrite:
    def __init__(self, parts: Sequence[OpCall], turned: Scratch) -> None:
        self._rotary, self._write = parts
        self._turned = turned

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
        kv: KVCache,
        slot_mapping_T: torch.Tensor,
        *,
        out_q: torch.Tensor,
        interleaved: bool = False,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        turned = self._turned.take(*k_TKD.shape)
        self._rotary(q_THD, k_TKD, positions_T, cos_sin_PR, out_q=out_q, out_k=turned, interleaved=interleaved)
        self._write(turned, v_TKD, kv, slot_mapping_T, k_scale=k_scale, v_scale=v_scale)


class _ReduceThenNorm:
    def __init__(self, norm: OpCall, total: Scratch) -> None:
        self._norm = norm
        self._total = total

    def __call__(
        self,
        x_TM: torch.Tensor,
        comm: Communicator,
        weight_M: torch.Tensor,
        *,
        out: torch.Tensor,
        residual: torch.Tensor,
        eps: float,
    ) -> None:
        total = self._total.take(*x_TM.shape)
        comm.all_reduce(x_TM, out=total)
        self._norm(total, weight_M, out=out, eps=eps, residual=residual)


class _AddThenNorm:
    def __init__(self, norm: OpCall) -> None:
        self._norm = norm

    def __call__(
        self,
        x: torch.Tensor,
        weight_M: torch.Tensor,
        *,
        out: torch.Tensor,
        eps: float,
        residual: torch.Tensor,
        **bias: torch.Tensor | None,
    ) -> None:
        """bias: layer_norm's bias_M, where it is given."""
        residual.add_(x)
        self._norm(residual, weight_M, out=out, eps=eps, **bias)
