"""Writers of quantised layers, from each format's definition, element by element.

They share nothing with the readers: numbers are packed by shifting Python integers and dequantised by the formula of
the format. Each gives the stored tensors of one layer and the weight they mean.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Packed:
    """A layer as a file holds it, and what it means.

    Attributes:
        tensors: by suffix of the layer's name.
        weight: [N, K] fp32, dequantised by the format's formula.
    """

    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor

    def named(self, layer: str) -> dict[str, torch.Tensor]:
        return {f"{layer}.{suffix}": tensor for suffix, tensor in self.tensors.items()}


def draw(seed: int, low: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high + 1, shape)


def draw_scales(seed: int, *shape: int) -> np.ndarray:
    """Positive scales that fp16 holds exactly."""
    return np.random.default_rng(seed).uniform(0.002, 0.02, shape).astype(np.float16).astype(np.float32)


def stream(codes: list[int], bits: int) -> list[int]:
    """Codes one after the other in a little-endian stream of bits, cut into signed 32-bit words."""
    joined = sum(int(code) << (bits * at) for at, code in enumerate(codes))
    words = [(joined >> 32 * at) & 0xFFFFFFFF for at in range(len(codes) * bits // 32)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def padded_words(codes: list[int], bits: int) -> list[int]:
    """32 // bits codes in each word, whatever is left over unused."""
    per_word = 32 // bits
    words = []
    for start in range(0, len(codes), per_word):
        word = sum(int(code) << (bits * at) for at, code in enumerate(codes[start : start + per_word]))
        words.append(word - (1 << 32) if word >> 31 else word)
    return words


def int32(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def awq(seed: int, rows: int, columns: int, group: int) -> Packed:
    codes, zeros = draw(seed, 0, 15, rows, columns), draw(seed + 1, 0, 15, rows, columns // group)
    scales = draw_scales(seed + 2, rows, columns // group)

    def interleaved(by_column: np.ndarray) -> list[int]:
        return stream([by_column[start + at] for start in range(0, rows, 8) for at in AWQ_ORDER], 4)

    weight = torch.zeros(rows, columns)
    for n in range(rows):
        for k in range(columns):
            code, zero, scale = codes[n, k], zeros[n, k // group], scales[n, k // group]
            weight[n, k] = float(np.float32(code - zero) * np.float32(scale))
    return Packed(
        {
            "qweight": int32([interleaved(codes[:, k]) for k in range(columns)]),
            "qzeros": int32([interleaved(zeros[:, g]) for g in range(columns // group)]),
            "scales": torch.from_numpy(scales.T.copy()).half(),
        },
        weight,
    )


def gptq(
    seed: int,
    rows: int,
    columns: int,
    group: int,
    *,
    bits: int = 4,
    version: int = 1,
    symmetric: bool = False,
    groups_K: np.ndarray | None = None,
) -> Packed:
    """groups_K: the group of each column, for act-order; the g_idx tensor is always written."""
    top = (1 << bits) - 1
    num_groups = -(-columns // group)
    codes, scales = draw(seed, 0, top, rows, columns), draw_scales(seed + 2, rows, num_groups) / np.float32(top / 15)
    scales = scales.astype(np.float16).astype(np.float32)
    zeros = draw(seed + 1, 0, top, rows, num_groups)
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    group_of = np.arange(columns) // group if groups_K is None else groups_K
    weight = torch.zeros(rows, columns)
    for n in range(rows):
        for k in range(columns):
            weight[n, k] = float(np.float32(codes[n, k] - zeros[n, group_of[k]]) * np.float32(scales[n, group_of[k]]))
    stored_zeros = (zeros - 1) & top if version == 1 else zeros
    qweight = [stream(list(codes[n]), bits) for n in range(rows)]
    return Packed(
        {
            "qweight": int32(qweight).T.contiguous(),
            "qzeros": int32([stream(list(stored_zeros[:, g]), bits) for g in range(num_groups)]),
            "scales": torch.from_numpy(scales.T.copy()).half(),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        },
        weight,
    )


def shuffled_groups(columns: int, group: int, seed: int) -> np.ndarray:
    """Act-order: every group has its number of columns, anywhere."""
    return np.random.default_rng(seed).permutation(np.arange(columns) // group)


def compressed_int(
    seed: int, rows: int, columns: int, group: int, *, bits: int, symmetric: bool, packed: bool,
    groups_K: np.ndarray | None = None,
) -> Packed:  # fmt: skip
    """Integers of compressed-tensors; group 0: a scale per row."""
    half = 1 << (bits - 1)
    group_of = np.arange(columns) // (group or columns) if groups_K is None else groups_K
    num_groups = int(group_of.max()) + 1
    codes = draw(seed, -half, half - 1, rows, columns)
    zeros = draw(seed + 1, -half, half - 1, rows, num_groups) * (0 if symmetric else 1)
    scales = draw_scales(seed + 2, rows, num_groups) / np.float32(half / 8)
    weight = torch.zeros(rows, columns)
    for n in range(rows):
        for k in range(columns):
            weight[n, k] = float(np.float32(codes[n, k] - zeros[n, group_of[k]]) * np.float32(scales[n, group_of[k]]))
    tensors = {"weight_scale": torch.from_numpy(scales)}
    if not packed:
        tensors["weight"] = torch.from_numpy(codes).to(torch.int8)
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy(zeros).to(torch.int8)
        return Packed(tensors, weight)
    tensors["weight_packed"] = int32([padded_words([c + half for c in row], bits) for row in codes])
    tensors["weight_shape"] = torch.tensor([rows, columns])
    if not symmetric:
        by_group = [padded_words([z + half for z in zeros[:, g]], bits) for g in range(num_groups)]
        tensors["weight_zero_point"] = int32(by_group).T.contiguous()
    if groups_K is not None:
        tensors["weight_g_idx"] = torch.from_numpy(groups_K.astype(np.int32))
    return Packed(tensors, weight)


def fp8_codes(seed: int, rows: int, columns: int) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(0, 30, (rows, columns)).astype(np.float32)
    return torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8(
    seed: int, rows: int, columns: int, *, blocks: tuple[int, int] | None, scale_name: str, grid: tuple[int, ...]
) -> Packed:
    """fp8 codes; blocks None: one scale, or one per row, as `grid` (the stored shape) has room for."""
    codes = fp8_codes(seed, rows, columns)
    scales = (
        torch.from_numpy(draw_scales(seed + 2, *grid)) if grid else torch.tensor(float(draw_scales(seed + 2, 1)[0]))
    )
    weight = torch.zeros(rows, columns)
    flat = scales.reshape(-1)
    for n in range(rows):
        for k in range(columns):
            if blocks is not None:
                scale = scales[n // blocks[0], k // blocks[1]]
            else:
                scale = flat[n if len(flat) > 1 else 0]
            weight[n, k] = codes[n, k].float() * scale
    return Packed({"weight": codes, scale_name: scales}, weight)


NF4 = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
NF4 += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]


def llm_int8(seed: int, rows: int, columns: int) -> Packed:
    codes, scb = draw(seed, -127, 127, rows, columns), draw_scales(seed + 2, rows) * np.float32(30)
    weight = torch.zeros(rows, columns)
    for n in range(rows):
        for k in range(columns):
            weight[n, k] = float(np.float32(codes[n, k]) * (np.float32(scb[n]) / np.float32(127)))
    return Packed(
        {
            "weight": torch.from_numpy(codes).to(torch.int8),
            "SCB": torch.from_numpy(scb.astype(np.float32)),
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        },
        weight,
    )


def four_bit(
    seed: int, rows: int, columns: int, *, kind: str = "nf4", block: int = 64, nested: int | None = None
) -> Packed:
    """bitsandbytes' 4-bit codes over the flat weight; nested: the block of the second quantisation."""
    table = np.array(NF4, np.float32)
    count = rows * columns
    codes = draw(seed, 0, 15, count)
    blocks = -(-count // block)
    state: dict[str, object] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [rows, columns]}
    tensors: dict[str, torch.Tensor] = {}
    if nested is None:
        absmax = draw_scales(seed + 2, blocks) * np.float32(32)
        tensors["weight.absmax"] = torch.from_numpy(absmax)
    else:
        small = draw(seed + 3, 0, 255, blocks)
        nested_table = np.linspace(-1, 1, 256, dtype=np.float32)
        nested_absmax = draw_scales(seed + 4, -(-blocks // nested)) * np.float32(16)
        offset = 0.5
        absmax = np.array(
            [nested_table[small[b]] * nested_absmax[b // nested] + np.float32(offset) for b in range(blocks)],
            np.float32,
        )
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset}
        tensors["weight.absmax"] = torch.from_numpy(small.astype(np.uint8))
        tensors["weight.nested_absmax"] = torch.from_numpy(nested_absmax)
        tensors["weight.nested_quant_map"] = torch.from_numpy(nested_table)
    padded = [*codes, 0] if count % 2 else list(codes)
    data = [int(padded[i]) << 4 | int(padded[i + 1]) for i in range(0, len(padded), 2)]
    tensors["weight"] = torch.tensor(data, dtype=torch.uint8).view(-1, 1)
    tensors["weight.quant_map"] = torch.from_numpy(table)
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    values = [table[codes[i]] * absmax[i // block] for i in range(count)]
    return Packed(tensors, torch.tensor(np.array(values, np.float32)).view(rows, columns))


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def mxfp4(seed: int, experts: int, rows: int, groups: int, *, exponents_of: tuple[int, int] = (118, 130)) -> Packed:
    """Stacked experts; the suffixes are "blocks" and "scales", the weight is [E, N, K]."""
    codes = draw(seed, 0, 15, experts, rows, groups, 32)
    exponents = draw(seed + 1, *exponents_of, experts, rows, groups)
    weight = torch.zeros(experts, rows, groups * 32)
    blocks = torch.zeros(experts, rows, groups, 16, dtype=torch.uint8)
    for e, n, g in np.ndindex(experts, rows, groups):
        for i in range(16):
            blocks[e, n, g, i] = int(codes[e, n, g, 2 * i]) | int(codes[e, n, g, 2 * i + 1]) << 4
        for i in range(32):
            code = int(codes[e, n, g, i])
            value = E2M1[code & 7] * (-1 if code & 8 else 1)
            weight[e, n, g * 32 + i] = value * 2.0 ** (int(exponents[e, n, g]) - 127)
    return Packed({"blocks": blocks, "scales": torch.from_numpy(exponents.astype(np.uint8))}, weight)
