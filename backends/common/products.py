"""The products of both GPU backends: which specs they run, their weights, and which of the backend's kernels runs one.

    gemm    (norm)  x @ w.T  bias  gate  residual  (quantize, argmax)         in brackets: taken apart by the contract
                    └ one kernel ──────────────┘

    x and w of one float type             _gemm_plain     operands go to the tensor cores as they lie
    x and w both int8, or both fp8        _gemm_scaled    the same, with scales; x quantised into the workspace
    x of floats or codes, any other w     _gemm_codes     w widened in registers

A backend's gemm.py subclasses ProductOps with these three launches. Tiles are chosen by the number of tokens; in
deterministic mode by the weight alone, so that a row's sum has one order whatever its batch. No product is split
along K.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from octavo.backends.common.forms import Form
from octavo.backends.common.gpu import Gpu
from octavo.backends.common.kernels.embed import embed as embed_kernel
from octavo.backends.common.packed import GpuWeight, RepackFp8
from octavo.backends.common.tuning import Entry, Key
from octavo.backends.common.workspace import Workspace
from octavo.core.backend import (
    Epilogue,
    GemmSpec,
    GroupedGemmSpec,
    NormPrologue,
    OpSpec,
    PackedWeight,
    QuantFormat,
    QuantScheme,
    RowSpec,
    Unsupported,
    WeightSpec,
)
from octavo.core.base.errors import UnsupportedOp

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NO_EPILOGUE = Epilogue()
_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "float8",
    torch.float8_e4m3fnuz: "float8",
}
"""Never written to."""

INVARIANT_TOKENS = 64
"""As many tokens a deterministic product is tiled for, whatever it has."""

MIN_DOT_GROUP = 32
"""Columns that a product of codes takes at once, at least."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The epilogue that a kernel applies."""

    bias_N: torch.Tensor | None
    gate: str | None
    residual: torch.Tensor | None

    @property
    def residual_stride(self) -> int:
        return 0 if self.residual is None else self.residual.stride(0)


@dataclass(frozen=True, slots=True)
class Activations:
    """x as the tensor cores get it: as it came, or quantised into the workspace.

    Attributes:
        compute: the float type in which a weight of another type is widened.
        scales: [T, G], [T, 1] or [1, 1]; None when x is as it came.
        group: columns that share a scale; 0: all.
        is_native: codes that the chip multiplies with the weight's as they are.
    """

    codes_TK: torch.Tensor
    compute: torch.dtype
    scales: torch.Tensor | None = None
    group: int = 0
    is_native: bool = False

    @property
    def scale_stride(self) -> int:
        """From one row's scales to the next; 0 where the tensor has one."""
        return 0 if self.scales is None or self.scales.shape[0] == 1 < self.codes_TK.shape[0] else self.scales.stride(0)


class Quantize(Protocol):
    """The contract's `quantize`."""

    def __call__(self, x_TK: torch.Tensor, scheme: QuantScheme, *, out: torch.Tensor, scales: torch.Tensor) -> None: ...


def narrowed(entry: Entry, *groups: int) -> dict[str, Any]:
    """An entry's constants, with BLOCK_K no wider than any of the groups that share a scale (0: no group)."""
    block_k = min(entry.tile["BLOCK_K"], *(group for group in groups if group), entry.tile["BLOCK_K"])
    return {**entry.constants, "BLOCK_K": block_k}


def taken(constants: dict[str, Any], name: str, default: int) -> int:
    """What an entry tells the launch and not the kernel, taken out of its constants."""
    return int(constants.pop(name, default))


def is_even(form: Form, columns: int, block_k: int) -> bool:
    """Whether tiles of BLOCK_K columns of a weight's row never pass its end."""
    half = form.half(columns)
    return half % block_k == 0 and half * (2 if form.is_nibbles else 1) == columns


class ProductOps(ABC):
    """`prepare_weight`, `gemm` and `embed` of one device."""

    def __init__(
        self,
        gpu: Gpu,
        weight_form: Callable[[WeightSpec], Form | Unsupported],
        fp8_formats: tuple[QuantFormat, ...],
        repack_fp8: RepackFp8,
        quantize: Quantize,
    ) -> None:
        self._gpu = gpu
        self._weight_form = weight_form
        self._fp8_formats = fp8_formats
        self._repack_fp8 = repack_fp8
        self._quantize = quantize
        self._workspace = Workspace(gpu.device)

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when `op` runs natively at `spec`, else why not."""
        if isinstance(spec, GemmSpec) and op == "gemm":
            return self._supports_gemm(spec)
        if isinstance(spec, RowSpec) and op == "embed":
            return None if spec.dtype in ACTIVATION_DTYPES else Unsupported(f"embed does not write {spec.dtype}")
        return Unsupported(f"no kernel for {op} of {type(spec).__name__}")

    def prepare_weight(self, spec: WeightSpec) -> GpuWeight:
        """A zeroed packed weight; the loader then places its parts. Raises UnsupportedOp where it has no form."""
        form = self._weight_form(spec)
        if isinstance(form, Unsupported):
            raise UnsupportedOp(form.reason)
        return GpuWeight(spec, form, self._gpu.device, self._repack_fp8, self._read_rows)

    def gemm(
        self,
        x_TK: torch.Tensor,
        w: PackedWeight,
        *,
        out: torch.Tensor,
        prologue: NormPrologue | None = None,
        epilogue: Epilogue | None = None,
    ) -> None:
        """out = epilogue(x @ w.T), accumulated in fp32.

        Raises:
            UnsupportedOp: what supports() refused.
            ValueError: shapes that don't fit the weight.
        """
        weight, tail = self._checked(x_TK, w, out, prologue, epilogue)
        if not x_TK.shape[0]:
            return
        x = self.activations(x_TK, weight)
        if x.is_native:
            self._gemm_scaled(x, weight, out, tail)
        elif weight.form.name != "plain" or x_TK.dtype != weight.codes.dtype:
            self._gemm_codes(x, weight, out, tail)
        else:
            is_aligned = x_TK.stride(0) * x_TK.element_size() % 16 == 0 and x_TK.data_ptr() % 16 == 0
            entry = self.entry("gemm", x_TK.dtype, x_TK.shape[0], weight.spec.out_features, aligned=int(is_aligned))
            constants = dict(entry.constants)
            if taken(constants, "LIBRARY", 0) and not self._gpu.deterministic and _is_bare(weight, out, tail):
                torch.mm(x_TK, weight.codes[:, : weight.spec.in_features].T, out=out)
            else:
                self._gemm_plain(x_TK, weight, out, tail, constants)

    @abstractmethod
    def _gemm_plain(
        self, x_TK: torch.Tensor, w: GpuWeight, out: torch.Tensor, tail: Tail, constants: dict[str, Any]
    ) -> None:
        """Operands of one float type."""

    @abstractmethod
    def _gemm_scaled(self, x: Activations, w: GpuWeight, out: torch.Tensor, tail: Tail) -> None:
        """Codes on both sides."""

    @abstractmethod
    def _gemm_codes(self, x: Activations, w: GpuWeight, out: torch.Tensor, tail: Tail) -> None:
        """Codes that are widened."""

    def embed(self, ids_T: torch.Tensor, w: PackedWeight, *, out: torch.Tensor, scale: float = 1.0) -> None:
        """out[t] = scale * w[ids[t]]; an id outside the weight gives zeros.

        Raises:
            UnsupportedOp: a gated weight, or one of another backend.
            ValueError: shapes or dtypes that don't fit.
        """
        if not isinstance(w, GpuWeight) or w.spec.gated:
            raise UnsupportedOp("embed takes a plain weight that this backend has packed")
        self._read_rows(w, ids_T, out, scale)

    def _read_rows(self, w: GpuWeight, ids_T: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
        tokens, N, K = ids_T.shape[0], w.spec.out_features, w.spec.in_features
        if out.shape != (tokens, K) or out.dtype not in ACTIVATION_DTYPES or ids_T.dtype != torch.int64:
            raise ValueError(
                f"rows of {list(ids_T.shape)} {ids_T.dtype} ids into {list(out.shape)} {out.dtype}; give int64 ids and "
                f"out [{tokens}, {K}] in fp32, bf16 or fp16"
            )
        entry = self._gpu.tuning.pick("embed")
        grid = (-(-tokens // entry.tile["BLOCK_T"]), -(-K // entry.tile["BLOCK_K"]))
        scales, offsets = w.scales_GN, w.offsets_GN
        self._gpu.launch(
            embed_kernel, grid, ids_T.contiguous(), w.codes, scales, offsets, out, tokens, N, K, w.form.half(K),
            w.codes.stride(0), N, out.stride(0), scale, FORM=w.form.name, GROUP=w.form.group, **entry.constants,
        )  # fmt: skip

    def activations(self, x_TK: torch.Tensor, w: GpuWeight) -> Activations:
        """x as the weight's scheme asks for it. Codes live in the workspace until the next product."""
        scheme = None if w.spec.scheme is None else w.spec.scheme.for_activations()
        if scheme is None:
            is_mixed = w.form.name == "plain" and w.codes.dtype != x_TK.dtype
            return Activations(x_TK, torch.float32 if is_mixed else x_TK.dtype)
        if refusal := self._refused_activations(scheme, w.form, w.spec.in_features):
            raise UnsupportedOp(refusal.reason)
        T, K = x_TK.shape
        row = -(-K // 16) * 16
        codes, scales = self._workspace.take(
            ((T, row), scheme.format.code_dtype), (scheme.scale_shape(T, K), torch.float32)
        )
        self._quantize(x_TK, scheme, out=codes[:, :K], scales=scales)
        is_native = self._is_native(scheme.format, w.form)
        return Activations(codes[:, :K], x_TK.dtype, scales, max(scheme.group_size, 0), is_native)

    def entry(self, kernel: str, operand: torch.dtype, tokens: int, width: int, **more: Key) -> Entry:
        """The launch parameters of a product of that many rows, N of `width`."""
        m = INVARIANT_TOKENS if self._gpu.deterministic else 1 << (tokens - 1).bit_length()
        return self._gpu.tuning.pick(kernel, operand=_NAMES[operand], m=m, n=width, **more)

    # -- checks -----------------------------------------------------------------------------------------------
    def _supports_gemm(self, spec: GemmSpec) -> Unsupported | None:
        if spec.norm:
            return Unsupported("the norm before a product is a kernel of its own")
        if spec.quantize is not None or spec.argmax:
            return Unsupported("quantising and argmax are kernels of their own")
        return self.refused(spec)

    def refused(self, spec: GemmSpec | GroupedGemmSpec) -> Unsupported | None:
        """Why x and weight can't be multiplied, whatever stands around the product."""
        form = self._weight_form(spec.weight)
        if isinstance(form, Unsupported):
            return form
        if spec.x_dtype not in ACTIVATION_DTYPES or spec.out_dtype not in ACTIVATION_DTYPES:
            return Unsupported(f"activations are fp32, bf16 or fp16, not {spec.x_dtype} to {spec.out_dtype}")
        if (spec.gate is not None) != spec.weight.gated:
            return Unsupported("a gated weight and a gated epilogue belong together")
        scheme = None if spec.weight.scheme is None else spec.weight.scheme.for_activations()
        return None if scheme is None else self._refused_activations(scheme, form, spec.weight.in_features)

    def _checked(
        self,
        x_TK: torch.Tensor,
        w: PackedWeight,
        out: torch.Tensor,
        prologue: NormPrologue | None,
        given: Epilogue | None,
    ) -> tuple[GpuWeight, Tail]:
        """The weight and the epilogue of a call. Raises UnsupportedOp and ValueError as `gemm` says."""
        epilogue = given or _NO_EPILOGUE
        if not isinstance(w, GpuWeight) or prologue is not None or epilogue.quantize is not None or epilogue.argmax:
            raise UnsupportedOp("gemm takes a weight that this backend has packed, no norm, quantising or argmax")
        bias, gate, residual = epilogue.bias_N, epilogue.gate, epilogue.residual
        width = w.spec.out_features // (1 if gate is None else 2)
        shape = (x_TK.shape[0], width)
        if x_TK.shape[1:] != (w.spec.in_features,) or out.shape != shape or (gate is not None) != w.spec.gated:
            raise ValueError(
                f"gemm of x {list(x_TK.shape)} with a {'gated ' if w.spec.gated else ''}weight [{w.spec.out_features}, "
                f"{w.spec.in_features}] into out {list(out.shape)}, gate {gate}: shapes don't fit"
            )
        if x_TK.dtype not in ACTIVATION_DTYPES or out.dtype not in ACTIVATION_DTYPES:
            raise UnsupportedOp(f"gemm takes fp32, bf16 and fp16, not {x_TK.dtype} to {out.dtype}")
        if residual is not None and residual.shape != out.shape:
            raise ValueError(f"residual is {list(residual.shape)}; give {list(out.shape)}")
        if bias is not None and bias.shape != (w.spec.out_features,):
            raise ValueError(f"bias is {list(bias.shape)}; give {w.spec.out_features} numbers")
        return w, Tail(bias, gate, residual)

    def _is_native(self, codes: QuantFormat, form: Form) -> bool:
        """Whether the chip multiplies codes of activations with those of the weight."""
        is_fp8 = form.name == "fp8" and codes in self._fp8_formats
        return is_fp8 or (form.name == "int8" and codes is QuantFormat.INT8 and not form.has_offsets)

    def _refused_activations(self, scheme: QuantScheme, form: Form, columns: int) -> Unsupported | None:
        """Why activations can't be quantised so. Integers meet a weight of any other form as floats."""
        is_native, group = self._is_native(scheme.format, form), max(scheme.group_size, 0)
        if scheme.format is not QuantFormat.INT8 and not is_native:
            return Unsupported(f"no product of {scheme.format} activations with a weight of {form.name}")
        if group and (group < MIN_DOT_GROUP or group & (group - 1)):
            return Unsupported(f"activations in groups of {group}; powers of two from {MIN_DOT_GROUP} on")
        if group and form.is_nibbles and form.half(columns) % group:
            return Unsupported(f"groups of {group} activations cross the middle of a row of nibbles")
        if is_native and 0 < form.group < MIN_DOT_GROUP:
            return Unsupported(f"a product of codes takes {MIN_DOT_GROUP} columns at once; scales cover {form.group}")
        return None


def _is_bare(w: GpuWeight, out: torch.Tensor, tail: Tail) -> bool:
    """Whether the vendor's library can write the product: nothing fused, one dtype."""
    return tail == Tail(None, None, None) and out.dtype == w.codes.dtype
