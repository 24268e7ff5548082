"""Quantised weights on the CPU: codes as they are multiplied, never expanded in memory (layout: native/codes.h).

    scheme                       codes                    scales                   added
    Q8_0, Q5_0                   8 bits                   fp16                     -
    Q5_1                         8 bits                   fp16                     fp16
    Q5_K                         8 bits                   6 bits x fp16 unit       6 bits x fp16 unit
    Q6_K                         8 bits                   8 bits x fp16 unit       -
    int8                         8 bits                   fp32                     fp32 with zero points
    Q4_0                         4 bits, -8 .. 7          fp16                     -
    int4, symmetric              4 bits, -8 .. 7          fp32                     -
    Q4_1                         4 bits, 0 .. 15          fp16                     fp16
    Q4_K                         4 bits, 0 .. 15          6 bits x fp16 unit       6 bits x fp16 unit
    int4 with zero points        4 bits, 0 .. 15          fp32                     fp32

    weight = fma(code, scale, added)      in fp32; of GGUF's formats the value that the format defines, bit for bit

A part is repacked in pieces of rows, so that loading needs little more memory than the weight. Only GemmOps builds and
reads a CodesWeight.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from octavo.core.backend.quant import AffineWeight, QuantFormat, QuantizedTensor, QuantScheme, two_level_scales
from octavo.core.backend.specs import Unsupported, WeightSpec

if TYPE_CHECKING:
    from octavo.backends.cpu.gemm import GemmOps

PANEL = 16
"""Output columns side by side in a packed weight; OCTAVO_PANEL."""

RUN = 8
"""Codes along K that are read together."""

PIECE_ELEMENTS = 1 << 20
"""Parts are repacked in pieces of about this size."""

CodeName = Literal["i8", "i4", "u4"]
ScaleType = Literal["f32", "f16", "units"]

CODE_CODES: dict[CodeName, int] = {"i8": 16, "i4": 17, "u4": 18}
"""OctavoCodeFormat. Never written to."""

_SCALE_CODES: dict[ScaleType, int] = {"f32": 0, "f16": 1, "units": 2}
_SCALE_DTYPES: dict[ScaleType, torch.dtype] = {"f32": torch.float32, "f16": torch.float16, "units": torch.int8}

_GGUF: dict[QuantFormat, tuple[CodeName, ScaleType, bool]] = {
    QuantFormat.GGUF_Q8_0: ("i8", "f16", False),
    QuantFormat.GGUF_Q4_0: ("i4", "f16", False),
    QuantFormat.GGUF_Q4_1: ("u4", "f16", True),
    QuantFormat.GGUF_Q5_0: ("i8", "f16", False),
    QuantFormat.GGUF_Q5_1: ("i8", "f16", True),
    QuantFormat.GGUF_Q4_K: ("u4", "units", True),
    QuantFormat.GGUF_Q5_K: ("i8", "units", True),
    QuantFormat.GGUF_Q6_K: ("i8", "units", False),
}
"""Codes, scales, and whether something is added. Never written to."""


@dataclass(frozen=True, slots=True)
class CodeForm:
    """How a weight of some scheme lies; see the table above.

    Attributes:
        group: codes along K that share a scale; K or more: all of a row.
        unit: codes along K that share a unit of the scales; 0: scales are numbers themselves.
    """

    name: CodeName
    scale_type: ScaleType
    has_added: bool
    group: int
    unit: int = 0


def form_of(scheme: QuantScheme, columns: int) -> CodeForm | Unsupported:
    """The form of weights of a scheme and K = columns, or why there is none."""
    if scheme.activation is not None:
        return Unsupported("no native product over quantised activations")
    block = scheme.format.block
    if block is not None:
        name, scale_type, has_added = _GGUF[scheme.format]
        return CodeForm(name, scale_type, has_added, block.group, block.elements if scale_type == "units" else 0)
    if scheme.format not in (QuantFormat.INT8, QuantFormat.INT4):
        return Unsupported(f"{scheme.format} codes are dequantised at load")
    group = scheme.group_size if scheme.group_size > 0 else columns
    if group % RUN and group < columns:
        return Unsupported(f"scales of {group} columns; the kernels take multiples of {RUN}")
    if scheme.format is QuantFormat.INT8:
        return CodeForm("i8", "f32", not scheme.symmetric, group)
    return CodeForm("i4" if scheme.symmetric else "u4", "f32", not scheme.symmetric, group)


class Codes(ctypes.Structure):
    """Mirror of OctavoCodes in native/codes.h."""

    _fields_ = (
        ("struct_bytes", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("added", ctypes.c_void_p),
        ("unit_scales", ctypes.c_void_p),
        ("unit_added", ctypes.c_void_p),
        ("panel_bytes", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("unit", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("units", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("scale_type", ctypes.c_int32),
    )


class PackCodesArgs(ctypes.Structure):
    """Mirror of PackCodesArgs in native/codes.h."""

    _fields_ = (
        ("ctx", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("src", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("src_stride", ctypes.c_int64),
        ("n_offset", ctypes.c_int64),
        ("panel_first", ctypes.c_int64),
        ("panel_step", ctypes.c_int64),
    )


class CodesWeight:
    """A quantised weight [N, K] in panels (PackedWeight of the contract). Rows never placed are zero.

    Attributes:
        spec: what was asked for.
        form: how it lies.
        nbytes: of codes and scales, padding of N included.
        pointer: of the OctavoCodes that describe it.
        dtype_code: OctavoCodeFormat.
    """

    __slots__ = (
        "_added", "_codes", "_described", "_ops", "_scales", "_unit_added", "_unit_scales",
        "dtype_code", "form", "nbytes", "pointer", "spec",
    )  # fmt: skip

    def __init__(self, spec: WeightSpec, form: CodeForm, ops: GemmOps) -> None:
        halves = 2 if spec.gated else 1
        panels, columns = halves * -(-(spec.out_features // halves) // PANEL), spec.in_features
        groups, units = -(-columns // form.group), -(-columns // form.unit) if form.unit else 0
        code_rows = columns if form.name == "i8" else -(-columns // RUN) * RUN // 2
        dtype, zeros = _SCALE_DTYPES[form.scale_type], ops.arena.zeros
        self.spec = spec
        self.form = form
        self.dtype_code = CODE_CODES[form.name]
        self._ops = ops
        self._codes = zeros(panels, code_rows, PANEL, dtype=torch.uint8)
        self._scales = zeros(panels, groups, PANEL, dtype=dtype)
        self._added = zeros(panels, groups, PANEL, dtype=dtype) if form.has_added else None
        self._unit_scales = zeros(panels, units, PANEL, dtype=torch.float16) if units else None
        self._unit_added = zeros(panels, units, PANEL, dtype=torch.float16) if units and form.has_added else None
        held = (self._codes, self._scales, self._added, self._unit_scales, self._unit_added)
        self.nbytes = sum(x.nbytes for x in held if x is not None)
        pointers = [0 if x is None else x.data_ptr() for x in held]
        self._described = Codes(
            ctypes.sizeof(Codes), *pointers, code_rows * PANEL, form.group, form.unit, groups, units,
            self.dtype_code, _SCALE_CODES[form.scale_type],
        )  # fmt: skip
        self.pointer = ctypes.addressof(self._described)

    def place(self, part_NK: torch.Tensor | QuantizedTensor, row_offset: int) -> None:
        """Fill rows row_offset.. from a part of the weight's scheme.

        Raises:
            ValueError: as `WeightSpec.check_part` says; or a plain part, whose codes nobody has chosen.
        """
        self.spec.check_part(part_NK, row_offset)
        if isinstance(part_NK, torch.Tensor):
            raise ValueError(
                f"a plain part {list(part_NK.shape)} of a weight of {self.form.name} codes; quantise it by the "
                "weight's scheme, or ask for a plain weight"
            )
        rows, half = part_NK.shape[0], self.spec.out_features // 2
        step = max(PIECE_ELEMENTS // max(part_NK.shape[1], 1), 1)
        step = -(-step // part_NK.scheme.block_rows) * part_NK.scheme.block_rows
        for start in range(0, rows, step):
            end = min(start + step, rows)
            piece, first = part_NK.rows(start, end), row_offset + start
            if not self.spec.gated:
                self._place(piece, 0, end - start, row=first, panel_first=0, panel_step=1)
                continue
            gate_rows = min(max(half - first, 0), end - start)
            self._place(piece, 0, gate_rows, row=first, panel_first=0, panel_step=2)
            self._place(piece, gate_rows, end - start, row=first + gate_rows - half, panel_first=1, panel_step=2)

    def rows(self, ids_T: torch.Tensor, *, out: torch.Tensor) -> None:
        """out [T, K] fp32 = the weight's rows."""
        self._ops.embed(ids_T, self, out=out)

    def dense(self) -> torch.Tensor:
        """The plain weight [N, K] in fp32. Slow; allocates."""
        out = torch.empty(self.spec.out_features, self.spec.in_features)
        half = self.spec.out_features // 2
        ids = torch.arange(len(out))
        if self.spec.gated:  # packed rows: 16 of gate, 16 of up, in turn
            within = ids % half
            ids = within // PANEL * (2 * PANEL) + within % PANEL + PANEL * (ids // half)
        self._ops.read_rows(ids, self, out)
        return out

    @property
    def packed_rows(self) -> int:
        """N with the padding of its panels."""
        return self._codes.shape[0] * PANEL

    def _place(
        self, piece: QuantizedTensor, start: int, end: int, *, row: int, panel_first: int, panel_step: int
    ) -> None:
        """Rows start .. end - 1 of a piece, from a row of the weight, or of half a gated one, on."""
        if start == end:
            return
        affine, units = piece.affine(), two_level_scales(piece)
        codes, offsets = self._nibbles(affine) if self.form.name == "u4" else (affine.codes_NK, affine.offsets_NG)
        self._ops.pack_codes(codes[start:end], self, row, panel_first=panel_first, panel_step=panel_step)
        rows = torch.arange(row, row + end - start)
        at = (panel_first + rows // PANEL * panel_step, rows % PANEL)
        if units is None:
            _put(self._scales, at, affine.scales_NG[start:end])
            _put(self._added, at, None if offsets is None else -offsets[start:end])
            return
        _put(self._scales, at, units.scales_NG[start:end])
        _put(self._unit_scales, at, units.units_NU[start:end])
        if units.minimums_NG is not None and units.minimum_units_NU is not None:
            _put(self._added, at, units.minimums_NG[start:end])
            _put(self._unit_added, at, -units.minimum_units_NU[start:end])

    @staticmethod
    def _nibbles(affine: AffineWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Codes from 0 on, and offsets. Those of a scheme with zero points may be -8 .. 7: as checkpoints have them."""
        codes, offsets = affine.codes_NK, affine.offsets_NG
        if offsets is None or not bool((codes < 0).any()):
            return codes, offsets
        return codes + 8, offsets + 8 * affine.scales_NG


def _put(grid_PGL: torch.Tensor | None, at: tuple[torch.Tensor, torch.Tensor], values_NG: torch.Tensor | None) -> None:
    """Values of rows into the panels and lanes that they belong to."""
    if grid_PGL is not None and values_NG is not None:
        panels_N, lanes_N = at
        grid_PGL[panels_N, :, lanes_N] = values_NG.to(grid_PGL.dtype)
