"""A weight as the GPU kernels read it (PackedWeight of the contract).

    place(part, row) ──► codes [N, row], scales [G, N], offsets [G, N]         forms: forms.py
                         rows in the checkpoint's order; of a gated weight interleaved:

        part          packed row                   nibbles of a row (HALF bytes)
        gate 0        0                            byte j: column j in the low one, column HALF + j in the high one
        gate 1        2                            columns beyond K hold zeros
        up 0          1
        up 1          3

Only the backend's product ops look inside. Everything happens at load; a part is repacked on the weight's device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from octavo.backends.common.forms import Form
from octavo.core.backend import QuantFormat, QuantizedTensor, WeightSpec

RepackFp8 = Callable[[QuantFormat, torch.Tensor], tuple[torch.Tensor, float]]
"""(format, codes) -> codes in the chip's 8-bit float, and the factor that their scales take."""

ReadRows = Callable[["GpuWeight", torch.Tensor, torch.Tensor], None]
"""(weight, ids of packed rows [T] int64, out [T, K]): the rows, widened."""


@dataclass(frozen=True, slots=True)
class _Codes:
    """A part in the form of its weight: codes [n, row elements]; scales and offsets [n, G] or None."""

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None


class GpuWeight:
    """See the picture above.

    Attributes:
        spec: what was asked for.
        form: how it lies.
        codes: [N, form.row_elements(K)].
        scales_GN, offsets_GN: fp32, or None where the form has none.
        nbytes: of all of them.
    """

    def __init__(
        self, spec: WeightSpec, form: Form, device: torch.device, repack_fp8: RepackFp8, read_rows: ReadRows
    ) -> None:
        N, K = spec.out_features, spec.in_features
        self.spec = spec
        self.form = form
        self.codes = torch.zeros(N, form.row_elements(K), dtype=form.dtype, device=device)
        grid = (form.groups(K), N)
        self.scales_GN = torch.zeros(grid, dtype=torch.float32, device=device) if form.has_scales else None
        self.offsets_GN = torch.zeros(grid, dtype=torch.float32, device=device) if form.has_offsets else None
        held = (self.codes, self.scales_GN, self.offsets_GN)
        self.nbytes = sum(x.nbytes for x in held if x is not None)
        self._repack_fp8 = repack_fp8
        self._read_rows = read_rows

    # -- the contract -----------------------------------------------------------------------------------------
    def place(self, part_NK: torch.Tensor | QuantizedTensor, row_offset: int) -> None:
        """Fill rows row_offset.. . Raises ValueError as `WeightSpec.check_part` says, and for a plain part of a
        quantised weight, whose codes nobody has chosen."""
        self.spec.check_part(part_NK, row_offset)
        part = self._packed(part_NK)
        for mine, theirs in self._pieces(row_offset, part_NK.shape[0]):
            self.codes[mine, : part.codes.shape[1]].copy_(part.codes[theirs])
            for grid, values in ((self.scales_GN, part.scales), (self.offsets_GN, part.offsets)):
                if grid is not None and values is not None:
                    grid[: values.shape[1], mine].copy_(values[theirs].T)

    def rows(self, ids_T: torch.Tensor, *, out: torch.Tensor) -> None:
        """out [T, K] = the weight's rows, widened to out's dtype."""
        half = self.spec.out_features // 2
        ids = torch.where(ids_T < half, 2 * ids_T, 2 * (ids_T - half) + 1) if self.spec.gated else ids_T
        self._read_rows(self, ids, out)

    def dense(self) -> torch.Tensor:
        """The plain weight [N, K] in fp32. Slow; allocates."""
        N, K = self.spec.out_features, self.spec.in_features
        out = torch.empty(N, K, dtype=torch.float32, device=self.codes.device)
        self.rows(torch.arange(N, device=out.device), out=out)
        return out

    # -- packing ----------------------------------------------------------------------------------------------
    def _pieces(self, first: int, rows: int) -> Iterator[tuple[slice, slice]]:
        """Where the part's rows go: packed rows, and which of the part's."""
        if not self.spec.gated:
            yield slice(first, first + rows), slice(0, rows)
            return
        half = self.spec.out_features // 2
        for offset in (0, 1):
            start, end = max(first, offset * half), min(first + rows, (offset + 1) * half)
            if start < end:
                begin = 2 * (start - offset * half) + offset
                yield slice(begin, begin + 2 * (end - start) - 1, 2), slice(start - first, end - first)

    def _packed(self, part: torch.Tensor | QuantizedTensor) -> _Codes:
        device = self.codes.device
        if self.spec.scheme is None:
            return _Codes((part.dequantize() if isinstance(part, QuantizedTensor) else part).to(device))
        if isinstance(part, torch.Tensor):
            raise ValueError(
                f"a plain part {list(part.shape)} of a weight of {self.spec.scheme.format} codes; quantise it by the "
                "weight's scheme, or ask for a plain weight"
            )
        if self.form.name == "fp8":
            codes, factor = self._repack_fp8(part.scheme.format, part.codes_NK.to(device))
            return _Codes(codes, _by_row(part, part.scales.to(device)) * factor)
        if self.form.name == "e2m1":
            return _Codes(self._nibbles(part.codes_NK.to(device)), _by_row(part, part.scales.to(device)))
        return self._affine(part)

    def _affine(self, part: QuantizedTensor) -> _Codes:
        weight = part.affine()
        codes = weight.codes_NK.to(self.codes.device)
        scales, offsets = weight.scales_NG.to(codes.device), weight.offsets_NG
        offsets = None if offsets is None else offsets.to(codes.device)
        if self.form.name == "int8":
            return _Codes(codes.to(torch.int8), scales, offsets)
        # Nibbles begin at 0. Codes of a scheme with zero points may be -8 .. 7 or 0 .. 15: as checkpoints have them.
        is_signed = self.form.name == "int4" or bool((codes < 0).any())
        if is_signed and offsets is not None:
            offsets = offsets + 8 * scales
        return _Codes(self._nibbles(codes + 8 if is_signed else codes), scales, offsets)

    def _nibbles(self, codes_NK: torch.Tensor) -> torch.Tensor:
        """Codes 0 .. 15, two to a byte."""
        half = self.form.half(self.spec.in_features)
        padded = torch.nn.functional.pad(codes_NK.to(torch.uint8), (0, 2 * half - codes_NK.shape[1]))
        return padded[:, :half] | padded[:, half:] << 4


def _by_row(part: QuantizedTensor, scales: torch.Tensor) -> torch.Tensor:
    """Scales of blocks as scales of rows, [n, G]."""
    rows = part.shape[0]
    return scales.to(torch.float32).repeat_interleave(part.scheme.block_rows, 0)[:rows].expand(rows, -1)
