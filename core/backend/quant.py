"""What a quantised tensor means, whatever file it came from. Readers build these; backends pack them.

A scheme fixes the arithmetic: value = (code - zero_point) * scale, with one scale (and zero point) per block of
block_rows x group_size elements, per output row, or per tensor.

               K ──►                       scales [ceil(N / block_rows), ceil(K / group_size)]
         N   ┌────────┬────────┬───┐
         │   │  s00   │  s01   │s02│       the last block of a row or column may be cut short;
         ▼   ├────────┼────────┼───┤       block_rows 1: each row has scales of its own
             │  s10   │  s11   │s12│       block_rows 128, group_size 128: the fp8 blocks of DeepSeek-V3
             └────────┴────────┴───┘

GGUF's formats keep their own bytes, which hold codes and scales together. `QuantizedTensor.affine` brings every integer
format, GGUF's included, into one normal form, from which a backend repacks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import numpy as np
import torch

from octavo.core.backend.block_sizes import BLOCK_SIZES, BlockSize
from octavo.core.backend.blocks import take_apart, unit_scales

MXFP4_GROUP = 32
"""Elements that share a scale, by the format's definition."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the 16 codes of MXFP4 mean: sign, two bits of exponent (bias 1), one of mantissa.

Source: OCP Microscaling Formats (MX) Specification v1.0, 5.3.3.
"""

_CHUNK_ELEMENTS = 1 << 16
"""Blocks are taken apart in pieces that stay in the second-level cache."""


class QuantFormat(enum.StrEnum):
    """How the codes of a weight are stored."""

    INT8 = "int8"
    INT4 = "int4"  # one code per byte here; packing is the backend's affair
    FP8_E4M3FN = "fp8_e4m3fn"
    FP8_E4M3FNUZ = "fp8_e4m3fnuz"
    MXFP4 = "mxfp4"  # e2m1, one code 0..15 per byte here; scales are powers of two, per 32 elements
    GGUF_Q8_0 = "gguf_q8_0"
    GGUF_Q4_0 = "gguf_q4_0"
    GGUF_Q4_1 = "gguf_q4_1"
    GGUF_Q5_0 = "gguf_q5_0"
    GGUF_Q5_1 = "gguf_q5_1"
    GGUF_Q4_K = "gguf_q4_k"
    GGUF_Q5_K = "gguf_q5_k"
    GGUF_Q6_K = "gguf_q6_k"

    @property
    def code_dtype(self) -> torch.dtype:
        """How codes are held when not packed."""
        return CODE_DTYPE[self]

    @property
    def block(self) -> BlockSize | None:
        """The blocks of a GGUF format; None for the others."""
        return BLOCK_SIZES.get(self.name.removeprefix("GGUF_"))


CODE_DTYPE = {
    QuantFormat.INT8: torch.int8,
    QuantFormat.INT4: torch.int8,
    QuantFormat.FP8_E4M3FN: torch.float8_e4m3fn,
    QuantFormat.FP8_E4M3FNUZ: torch.float8_e4m3fnuz,
    QuantFormat.MXFP4: torch.uint8,
    **{f: torch.uint8 for f in QuantFormat if f.block is not None},
}
"""How each format's codes are held when not packed. Never written to."""

ACTIVATION_FORMATS = (QuantFormat.INT8, QuantFormat.INT4, QuantFormat.FP8_E4M3FN, QuantFormat.FP8_E4M3FNUZ)
"""What activations can be quantised to."""


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Format and granularity. Raises ValueError for what has no meaning.

    Attributes:
        format: of the codes. MXFP4 has group_size 32; a GGUF format fixes everything but the activation.
        group_size: elements along K that share a scale; 0: one scale per row; -1: one per tensor, which is each part
            that is placed (fused q, k and v have three). K need be no multiple of it: the last group is then shorter.
        symmetric: no zero points.
        activation: format to which activations are quantised for the product; None keeps them as they are.
        block_rows: rows of the weight that share a scale; above 1 only with a positive group_size.
        activation_group_size: as group_size, for the activations: per token (0), or per group along K.
    """

    format: QuantFormat
    group_size: int = 0
    symmetric: bool = True
    activation: QuantFormat | None = None
    block_rows: int = 1
    activation_group_size: int = 0

    def __post_init__(self) -> None:
        if fault := self._fault():
            raise ValueError(f"quantisation scheme {self.format}: {fault}")

    def _fault(self) -> str:
        if self.group_size < -1 or self.activation_group_size < -1:
            return f"group sizes {self.group_size}, {self.activation_group_size} must be positive, 0 (row), -1 (tensor)"
        if self.block_rows < 1 or (self.block_rows > 1 and self.group_size <= 0):
            return f"block_rows {self.block_rows} must be 1, or larger with a positive group_size"
        if self.activation is not None and self.activation not in ACTIVATION_FORMATS:
            return f"activations can't be quantised to {self.activation}; use one of {', '.join(ACTIVATION_FORMATS)}"
        if self.format is QuantFormat.MXFP4 and (self.group_size, self.symmetric) != (MXFP4_GROUP, True):
            return f"group_size must be {MXFP4_GROUP}, without zero points"
        if self.format.block is not None and (self.group_size, self.block_rows, self.symmetric) != (0, 1, True):
            return "its blocks hold scales and minimums; leave group_size, block_rows and symmetric as they are"
        return ""

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the scales, and zero points, of codes [rows, columns]; [rows, 0] for a GGUF format."""
        if self.format.block is not None:
            return rows, 0
        if self.group_size == -1:
            return 1, 1
        return -(-rows // self.block_rows), -(-columns // self.group_size) if self.group_size else 1

    def stores_like(self, other: QuantScheme) -> bool:
        """Whether weights of both are stored alike, whatever becomes of the activations."""
        mine, theirs = (replace(s, activation=None, activation_group_size=0) for s in (self, other))
        return mine == theirs

    def for_activations(self) -> QuantScheme | None:
        """The scheme by which the product's activations are quantised, as `quantize` takes it; None: they aren't."""
        return None if self.activation is None else QuantScheme(self.activation, self.activation_group_size)


@dataclass(frozen=True, slots=True)
class AffineWeight:
    """A weight [N, K] as integers: value = code * scale - offset, in fp32, in this order. One form for all formats.

    Attributes:
        codes_NK: int8 or uint8.
        scales_NG: fp32 [N, ceil(K / group_size)].
        offsets_NG: the same shape; None when all are 0.
        group_size: elements along K that share a scale; positive, K where a row has one scale.
    """

    codes_NK: torch.Tensor
    scales_NG: torch.Tensor
    offsets_NG: torch.Tensor | None
    group_size: int

    def dense(self) -> torch.Tensor:
        """The plain weight [N, K] in fp32."""
        rows, columns = self.codes_NK.shape
        values = self.codes_NK.to(torch.float32).mul_(_spread(self.scales_NG, (rows, columns), 1, self.group_size))
        if self.offsets_NG is not None:
            values.sub_(_spread(self.offsets_NG, (rows, columns), 1, self.group_size))
        return values


@dataclass(frozen=True, slots=True)
class TwoLevelScales:
    """Scales of a weight [N, K] of GGUF's K types as stored: scale = unit * scale number, offset alike.

    Attributes:
        units_NU: fp16 [N, K / 256].
        scales_NG: int8 [N, K / group].
        minimum_units_NU, minimums_NG: of the offsets; None for a type without.
    """

    units_NU: torch.Tensor
    scales_NG: torch.Tensor
    minimum_units_NU: torch.Tensor | None
    minimums_NG: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight [N, K], or some rows of it, in quantised form. Raises ValueError for shapes that do not fit the scheme.

    Attributes:
        codes_NK: the codes, one element each, in `format.code_dtype`; of a GGUF format the blocks' bytes
            [N, row bytes], uint8 (see `of_blocks`).
        scales: fp32, of the scheme's `scale_shape`; blocks are counted from the first row of this tensor.
        zero_points: the same shape, whole numbers of any dtype; None when the scheme is symmetric.
    """

    scheme: QuantScheme
    codes_NK: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None = None

    def __post_init__(self) -> None:
        block = self.scheme.format.block
        if block is not None and self.codes_NK.shape[1] % block.num_bytes:
            raise ValueError(
                f"{self.scheme.format}: a row of {self.codes_NK.shape[1]} bytes is no whole number of blocks of "
                f"{block.num_bytes}"
            )
        want = self.scheme.scale_shape(*self.shape)
        for name, grid in (("scales", self.scales), ("zero_points", self.zero_points)):
            if grid is not None and tuple(grid.shape) != want:
                raise ValueError(
                    f"{self.scheme.format} weight {list(self.shape)}: {name} are {list(grid.shape)}; its scheme "
                    f"(block_rows {self.scheme.block_rows}, group_size {self.scheme.group_size}) wants {list(want)}"
                )
        if self.scheme.symmetric != (self.zero_points is None):
            raise ValueError(f"{self.scheme.format} weight: zero points belong to a scheme with symmetric=False")

    @classmethod
    def of_blocks(cls, quant_format: QuantFormat, blocks_NB: torch.Tensor) -> QuantizedTensor:
        """A GGUF weight from its blocks' bytes [N, row bytes]."""
        scales = torch.empty(blocks_NB.shape[0], 0, dtype=torch.float32, device=blocks_NB.device)
        return cls(QuantScheme(quant_format), blocks_NB, scales)

    @property
    def shape(self) -> tuple[int, int]:
        """N and K of the weight."""
        rows, columns = self.codes_NK.shape
        block = self.scheme.format.block
        return rows, columns if block is None else columns // block.num_bytes * block.elements

    def rows(self, first: int, end: int) -> QuantizedTensor:
        """Rows first .. end - 1 as a weight of its own, for a rank or an expert; views of this one's tensors.

        Raises ValueError unless they lie inside the weight and begin where a block of rows that share scales does.
        """
        block_rows = self.scheme.block_rows
        self._check_slice("rows", first, end, self.shape[0], (first,), block_rows)
        grid = slice(None) if self.scheme.group_size == -1 else slice(first // block_rows, -(-end // block_rows))
        zeros = None if self.zero_points is None else self.zero_points[grid]
        return replace(self, codes_NK=self.codes_NK[first:end], scales=self.scales[grid], zero_points=zeros)

    def columns(self, first: int, end: int) -> QuantizedTensor:
        """Columns first .. end - 1 as a weight of its own; see `rows`.

        Raises ValueError unless they lie inside the weight, and both ends where a group of columns that share a scale
        begins; the last column ends one, too.
        """
        block, group = self.scheme.format.block, self.scheme.group_size
        step = max(group, 1) if block is None else block.elements
        inner_ends = (first, end) if end < self.shape[1] else (first,)
        self._check_slice("columns", first, end, self.shape[1], inner_ends, step)
        if block is not None:
            packed = self.codes_NK[:, first // step * block.num_bytes : end // step * block.num_bytes]
            return replace(self, codes_NK=packed)
        grid = slice(first // step, -(-end // step)) if group > 0 else slice(None)
        zeros = None if self.zero_points is None else self.zero_points[:, grid]
        return replace(self, codes_NK=self.codes_NK[:, first:end], scales=self.scales[:, grid], zero_points=zeros)

    def _check_slice(self, what: str, first: int, end: int, limit: int, cuts: tuple[int, ...], step: int) -> None:
        if not 0 <= first <= end <= limit:
            raise ValueError(f"{what} {first} .. {end} do not lie inside a weight {list(self.shape)}")
        if any(cut % step for cut in cuts):
            raise ValueError(
                f"{what} {first} .. {end} cut a block of {step} {what} that share their scales; cut at multiples of it"
            )

    def dequantize(self) -> torch.Tensor:
        """The plain weight [N, K] in fp32: (code - zero_point) * scale; of a GGUF format, what the format defines."""
        if self.scheme.format.block is not None:
            return self.affine().dense()
        if self.scheme.format is QuantFormat.MXFP4:
            table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=self.codes_NK.device)
            values = table[self.codes_NK.to(torch.int64)]
        else:
            values = self.codes_NK.to(torch.float32)
        if self.zero_points is not None:
            values = values - self._spread(self.zero_points.to(torch.float32))
        return values * self._spread(self.scales)

    def affine(self) -> AffineWeight:
        """The weight in the integers' normal form.

        For GGUF's formats `dense()` of it has the format's own bits. A zero point becomes offset = zero_point * scale,
        rounded to fp32: the value is then within an ulp of that product, and exact where that product is. Raises
        ValueError for floating-point codes, which are no integers.
        """
        scheme = self.scheme
        if scheme.format.block is not None:
            return _affine_of_blocks(self.codes_NK, scheme.format.name.removeprefix("GGUF_"), scheme.format.block)
        if scheme.format not in (QuantFormat.INT8, QuantFormat.INT4):
            raise ValueError(f"{scheme.format} has floating-point codes; only integer formats have an affine form")
        rows, columns = self.shape
        group_size = scheme.group_size if scheme.group_size > 0 else columns
        scales = self.scales.repeat_interleave(scheme.block_rows, 0)[:rows].expand(rows, -1).contiguous()
        if self.zero_points is None:
            return AffineWeight(self.codes_NK, scales, None, group_size)
        zeros = self.zero_points.to(torch.float32).repeat_interleave(scheme.block_rows, 0)[:rows]
        return AffineWeight(self.codes_NK, scales, zeros * scales, group_size)

    def _spread(self, grid: torch.Tensor) -> torch.Tensor:
        return _spread(grid, self.shape, self.scheme.block_rows, self.scheme.group_size)


def two_level_scales(weight: QuantizedTensor) -> TwoLevelScales | None:
    """The levels whose products are the scales of `weight.affine()`; None for a format with one level. On the host."""
    block = weight.scheme.format.block
    if block is None:
        return None
    blocks = weight.codes_NK.cpu().contiguous().view(-1, block.num_bytes).numpy()
    levels = unit_scales(weight.scheme.format.name.removeprefix("GGUF_"), blocks)
    if levels is None:
        return None
    rows = weight.shape[0]

    def whole(numbers: np.ndarray | None) -> torch.Tensor | None:
        return None if numbers is None else torch.from_numpy(numbers.copy()).view(rows, -1)

    units, scales = (torch.from_numpy(x.copy()).view(rows, -1) for x in (levels.units, levels.scales))
    return TwoLevelScales(units, scales, whole(levels.minimum_units), whole(levels.minimums))


def _spread(grid: torch.Tensor, shape: tuple[int, int], block_rows: int, group_size: int) -> torch.Tensor:
    """A value per block as one per element, [N, K]; blocks at the end are cut short."""
    rows, columns = shape
    if block_rows > 1:
        grid = grid.repeat_interleave(block_rows, 0)[:rows]
    if group_size > 0:
        grid = grid.repeat_interleave(group_size, 1)[:, :columns]
    return grid.expand(rows, columns)


def _affine_of_blocks(blocks_NB: torch.Tensor, name: str, block: BlockSize) -> AffineWeight:
    """GGUF blocks in the normal form, on the device they lie on; taken apart on the host."""
    packed = blocks_NB.cpu().contiguous().view(-1, block.num_bytes).numpy()
    step = _CHUNK_ELEMENTS // block.elements
    with np.errstate(all="ignore"):
        pieces = [take_apart(name, packed[start : start + step]) for start in range(0, max(len(packed), 1), step)]
    rows, device = blocks_NB.shape[0], blocks_NB.device

    def whole(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).view(rows, -1).to(device)

    offsets = None if pieces[0].offsets is None else whole([p.offsets for p in pieces if p.offsets is not None])
    return AffineWeight(whole([p.codes for p in pieces]), whole([p.scales for p in pieces]), offsets, block.group)
