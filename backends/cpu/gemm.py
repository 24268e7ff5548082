"""Products on the CPU: weights packed once at load, and the calls of the native GEMM, pack and embed kernels.

    place(part, row) ──> octavo_pack ──> CpuWeight.data   [panel][k][16 outputs], fp32 or bf16   (layout: native/gemm.h)
                         octavo_pack_codes ──> CodesWeight    quantised: codes and scales           (codes.py)
    gemm(x, w)       ──> octavo_gemm      reads it; bias, gate and residual are applied as the sums leave the registers
    embed / rows     ──> octavo_embed     gathers a row of it, so that a tied embedding is stored once

A call checks shapes and packs its fields into one struct; no tensor is made. Only CpuOps builds GemmOps; only the
methods here look inside a packed weight.
"""

from __future__ import annotations

import ctypes

import torch

from octavo.backends.cpu.codes import PANEL, CodesWeight, PackCodesArgs, form_of
from octavo.backends.cpu.memory import WeightArena
from octavo.backends.cpu.native import NativeContext
from octavo.core.backend.ops import Epilogue, NormPrologue, PackedWeight
from octavo.core.backend.quant import QuantizedTensor
from octavo.core.backend.specs import GemmSpec, OpSpec, RowSpec, Unsupported, WeightSpec
from octavo.core.base.errors import UnsupportedOp

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""OctavoDtype."""

STORED_DTYPES = (torch.float32, torch.bfloat16)

ACTIVATION_CODES = {None: 0, "silu": 1, "gelu_tanh": 2}
"""OctavoActivation."""

_NO_EPILOGUE = Epilogue()


class PackArgs(ctypes.Structure):
    """Mirror of PackArgs in native/gemm.h."""

    _fields_ = (
        ("ctx", ctypes.c_void_p),
        ("src", ctypes.c_void_p),
        ("dst", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("src_stride", ctypes.c_int64),
        ("n_offset", ctypes.c_int64),
        ("panel_first", ctypes.c_int64),
        ("panel_step", ctypes.c_int64),
        ("src_dtype", ctypes.c_int32),
        ("dst_dtype", ctypes.c_int32),
    )


class GemmArgs(ctypes.Structure):
    """Mirror of GemmArgs in native/gemm.h."""

    _fields_ = (
        ("ctx", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("w_dtype", ctypes.c_int32),
        ("activation", ctypes.c_int32),
    )


class EmbedArgs(ctypes.Structure):
    """Mirror of EmbedArgs in native/gemm.h."""

    _fields_ = (
        ("ctx", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("w_dtype", ctypes.c_int32),
    )


class CpuWeight:
    """A weight [N, K] in panels (PackedWeight of the contract). Rows never placed are zero.

    Attributes:
        spec: what was asked for.
        nbytes: bytes of the packed form, padding of N included.
    """

    __slots__ = ("_data", "_ops", "dtype_code", "nbytes", "pointer", "spec")

    def __init__(self, spec: WeightSpec, ops: GemmOps) -> None:
        halves = 2 if spec.gated else 1
        panels = halves * -(-(spec.out_features // halves) // PANEL)
        self._data = ops.arena.zeros(panels, spec.in_features, PANEL, dtype=spec.dtype)
        self._ops = ops
        self.spec = spec
        self.nbytes = self._data.nbytes
        self.pointer = self._data.data_ptr()
        self.dtype_code = DTYPE_CODES[spec.dtype]

    def place(self, part_NK: torch.Tensor | QuantizedTensor, row_offset: int) -> None:
        """Fill rows row_offset.. from a plain (any float dtype) or quantised part, rounded to nearest even.

        Raises:
            ValueError: as `WeightSpec.check_part` says.
        """
        self.spec.check_part(part_NK, row_offset)
        part = part_NK.dequantize() if isinstance(part_NK, QuantizedTensor) else part_NK
        rows = part.shape[0]
        if part.dtype not in DTYPE_CODES:
            part = part.to(torch.float32)
        if part.stride(1) != 1:
            part = part.contiguous()
        if not self.spec.gated:
            self._ops.pack(part, self, row_offset, panel_first=0, panel_step=1)
            return
        half = self.spec.out_features // 2
        gate_rows = min(max(half - row_offset, 0), rows)
        if gate_rows:
            self._ops.pack(part[:gate_rows], self, row_offset, panel_first=0, panel_step=2)
        if gate_rows < rows:
            self._ops.pack(part[gate_rows:], self, row_offset + gate_rows - half, panel_first=1, panel_step=2)

    def rows(self, ids_T: torch.Tensor, *, out: torch.Tensor) -> None:
        """out [T, K] fp32 = the weight's rows."""
        self._ops.embed(ids_T, self, out=out)

    def dense(self) -> torch.Tensor:
        """The plain weight [N, K] in fp32. Slow; allocates."""
        k = self.spec.in_features
        if not self.spec.gated:
            return _unpack(self._data, self.spec.out_features, k)
        half = self.spec.out_features // 2
        return torch.cat([_unpack(self._data[first::2], half, k) for first in (0, 1)])


def _unpack(data: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Panels [P, K, 16] to rows [N, K] in fp32."""
    return data.transpose(1, 2).reshape(-1, k)[:n].to(torch.float32)


class GemmOps:
    """The product ops of one engine's context: `prepare_weight`, `gemm`, `embed` of the contract."""

    def __init__(self, context: NativeContext) -> None:
        self.arena = WeightArena()
        self._context = context  # keeps its threads and scratch memory alive
        self._handle = context.handle
        self._pack = context.kernel("pack", PackArgs)
        self._gemm = context.kernel("gemm", GemmArgs)
        self._embed = context.kernel("embed", EmbedArgs)
        self._pack_codes = context.kernel("pack_codes", PackCodesArgs)

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when gemm or embed runs natively at `spec`, else why not."""
        if isinstance(spec, GemmSpec) and op == "gemm":
            return _supports_gemm(spec)
        if isinstance(spec, RowSpec) and op == "embed":
            return None if spec.dtype == torch.float32 else Unsupported(f"embed writes fp32, not {spec.dtype}")
        return Unsupported(f"no native {op}")

    def prepare_weight(self, spec: WeightSpec) -> CpuWeight | CodesWeight:
        """A zeroed packed weight; the loader then places its parts.

        Raises:
            UnsupportedOp: supports() refused the spec.
        """
        if refusal := _supports_weight(spec):
            raise UnsupportedOp(refusal.reason)
        form = None if spec.scheme is None else form_of(spec.scheme, spec.in_features)
        if form is None:
            return CpuWeight(spec, self)
        assert not isinstance(form, Unsupported), "refused above"
        return CodesWeight(spec, form, self)

    def settle_weights(self) -> None:
        """Loading is done: let the memory of the weights placed so far be put in order."""
        self.arena.settle()

    def pack(self, part_NK: torch.Tensor, w: CpuWeight, row: int, *, panel_first: int, panel_step: int) -> None:
        """Place a plain part (fp32, bf16 or fp16; contiguous rows) at a row of the weight, or of half a gated one."""
        rows, k = part_NK.shape
        self._pack(
            self._handle, part_NK.data_ptr(), w.pointer, rows, k, part_NK.stride(0), row, panel_first, panel_step,
            DTYPE_CODES[part_NK.dtype], w.dtype_code,
        )  # fmt: skip

    def pack_codes(
        self, codes_NK: torch.Tensor, w: CodesWeight, row: int, *, panel_first: int, panel_step: int
    ) -> None:
        """Place codes, a byte each, at a row of the weight, or of half a gated one."""
        codes = codes_NK.contiguous()
        rows, k = codes.shape
        self._pack_codes(self._handle, w.pointer, codes.data_ptr(), rows, k, k, row, panel_first, panel_step)

    def gemm(
        self,
        x_TK: torch.Tensor,
        w: PackedWeight,
        *,
        out: torch.Tensor,
        prologue: NormPrologue | None = None,
        epilogue: Epilogue | None = None,
    ) -> None:
        """out = epilogue(x @ w.T); x and out fp32.

        Raises:
            UnsupportedOp: a prologue, or an epilogue that supports() refused.
            ValueError: shapes or dtypes that don't fit the weight.
        """
        if prologue is not None or not isinstance(w, CpuWeight | CodesWeight):
            raise UnsupportedOp("the CPU gemm takes a weight it has packed, and no prologue")
        bias, gate, residual = _parts(epilogue or _NO_EPILOGUE)
        spec = w.spec
        tokens, k = x_TK.shape
        n = spec.out_features
        width = n if gate is None else n // 2
        if k != spec.in_features or out.shape != (tokens, width) or (gate is not None) != spec.gated:
            raise ValueError(_mismatch(x_TK, w, out, gate))
        if x_TK.dtype != torch.float32 or out.dtype != torch.float32:
            raise ValueError(f"the CPU gemm computes in fp32; x is {x_TK.dtype}, out is {out.dtype}")
        residual_pointer = residual_stride = bias_pointer = 0
        if residual is not None:
            if residual.shape != out.shape or residual.dtype != torch.float32:
                raise ValueError(f"residual is {_describe(residual)}; give {_describe(out)}")
            residual_pointer, residual_stride = residual.data_ptr(), residual.stride(0)
        if bias is not None:
            if bias.shape != (n,) or bias.dtype != torch.float32:
                raise ValueError(f"bias is {_describe(bias)}; give {n} fp32 values")
            bias_pointer = bias.data_ptr()
        self._gemm(
            self._handle, x_TK.data_ptr(), w.pointer, bias_pointer, residual_pointer, out.data_ptr(), tokens, n, k,
            x_TK.stride(0), residual_stride, out.stride(0), w.dtype_code, ACTIVATION_CODES[gate],
        )  # fmt: skip

    def embed(self, ids_T: torch.Tensor, w: PackedWeight, *, out: torch.Tensor, scale: float = 1.0) -> None:
        """out[t] = scale * w[ids[t]]; ids int64, out fp32.

        Raises:
            UnsupportedOp: a gated weight, or one of another backend.
            ValueError: shapes or dtypes that don't fit.
            NativeError: an id outside [0, N).
        """
        if not isinstance(w, CpuWeight | CodesWeight) or w.spec.gated:
            raise UnsupportedOp("the CPU embed takes a plain weight it has packed")
        tokens, k = ids_T.shape[0], w.spec.in_features
        if out.shape != (tokens, k) or out.dtype != torch.float32 or ids_T.dtype != torch.int64:
            raise ValueError(
                f"embed of {_describe(ids_T)} into {_describe(out)}; give int64 ids and out [{tokens}, {k}] fp32"
            )
        self._embed(
            self._handle, ids_T.contiguous().data_ptr(), w.pointer, out.data_ptr(), tokens, w.spec.out_features, k,
            out.stride(0), scale, w.dtype_code,
        )  # fmt: skip

    def read_rows(self, ids_T: torch.Tensor, w: CodesWeight, out: torch.Tensor) -> None:
        """out [T, K] = rows of a weight by their places in its panels, which a gated one interleaves."""
        self._embed(
            self._handle, ids_T.data_ptr(), w.pointer, out.data_ptr(), len(ids_T), w.packed_rows, w.spec.in_features,
            out.stride(0), 1.0, w.dtype_code,
        )  # fmt: skip


def _supports_weight(spec: WeightSpec) -> Unsupported | None:
    if spec.scheme is not None:
        form = form_of(spec.scheme, spec.in_features)
        if isinstance(form, Unsupported):
            return form
    elif spec.dtype not in STORED_DTYPES:
        return Unsupported(f"weights are stored in fp32 or bf16, not {spec.dtype}")
    if spec.gated and (spec.embedding or spec.out_features % 2):
        return Unsupported("a gated weight has two equal halves and is no embedding")
    return None


def _supports_gemm(spec: GemmSpec) -> Unsupported | None:
    if refusal := _supports_weight(spec.weight):
        return refusal
    if spec.x_dtype != torch.float32 or spec.out_dtype != torch.float32:
        return Unsupported("activations are fp32")
    if spec.norm:
        return Unsupported("no fused norm prologue")
    if spec.quantize is not None or spec.argmax:
        return Unsupported("no quantising or argmax epilogue")
    if spec.gate not in ACTIVATION_CODES:
        return Unsupported(f"no fused {spec.gate}")
    if (spec.gate is not None) != spec.weight.gated:
        return Unsupported("a gated weight and a gated epilogue belong together")
    return None


def _parts(epilogue: Epilogue) -> tuple[torch.Tensor | None, str | None, torch.Tensor | None]:
    if epilogue.quantize is not None or epilogue.argmax or epilogue.gate not in ACTIVATION_CODES:
        raise UnsupportedOp(f"the CPU gemm has no epilogue {epilogue}")
    return epilogue.bias_N, epilogue.gate, epilogue.residual


def _describe(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}"


def _mismatch(x: torch.Tensor, w: CpuWeight | CodesWeight, out: torch.Tensor, gate: str | None) -> str:
    return (
        f"gemm of x {_describe(x)} with a {'gated ' if w.spec.gated else ''}weight "
        f"[{w.spec.out_features}, {w.spec.in_features}] into out {_describe(out)}, gate {gate}: shapes don't fit"
    )
