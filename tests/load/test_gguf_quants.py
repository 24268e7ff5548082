"""Every quantised type, bit for bit against the format's own Python package."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch

from octavo.core.backend.block_sizes import BLOCK_SIZES
from octavo.core.base.errors import CheckpointError
from octavo.core.load.gguf_quants import CHUNK_ELEMENTS, dequantize
from octavo.core.load.gguf_types import GGML_TYPES, PACKAGE_TYPES, UNSUPPORTED_TYPE_NAMES, GGMLType

QUANTISED = [kind for kind in GGML_TYPES.values() if kind.block_elements > 1]
# Where the float16 scales and minimums of a block lie.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
EXTREME = np.array(
    [0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 1.0, -1.0, 65504.0, -65504.0, np.inf, -np.inf, np.nan], dtype=np.float16
)


def random_blocks(kind: GGMLType, count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)


def oracle(blocks: np.ndarray, kind: GGMLType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind.name])


def assert_same_bits(found: torch.Tensor, expected: np.ndarray) -> None:
    found_bits, expected_bits = found.numpy().view(np.uint32), np.ascontiguousarray(expected).view(np.uint32)
    both_nan = np.isnan(found.numpy()) & np.isnan(expected)
    assert ((found_bits == expected_bits) | both_nan).all()


def test_every_readable_type_is_in_the_table_and_has_the_formats_sizes() -> None:
    assert set(BLOCK_SIZES) == {kind.name for kind in QUANTISED} - {kind.name for kind in PACKAGE_TYPES.values()}
    for type_id, kind in GGML_TYPES.items():
        oracle_type = gguf.GGMLQuantizationType(type_id)
        assert oracle_type.name == kind.name
        assert gguf.GGML_QUANT_SIZES[oracle_type] == (kind.block_elements, kind.block_bytes)
    for oracle_type in gguf.GGMLQuantizationType:
        named = GGML_TYPES[oracle_type].name if oracle_type in GGML_TYPES else UNSUPPORTED_TYPE_NAMES.get(oracle_type)
        assert named in (oracle_type.name, None)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_random_bytes_give_the_oracles_bits(kind: GGMLType) -> None:
    # Random bytes hold every kind of float16, infinities and NaN included; the count leaves a ragged last chunk.
    blocks = random_blocks(kind, CHUNK_ELEMENTS // kind.block_elements + 77, seed=1)
    out = torch.full((len(blocks), kind.block_elements), 3.0)
    dequantize(blocks, kind, out)
    assert_same_bits(out, oracle(blocks, kind))


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_extreme_scales_give_the_oracles_bits(kind: GGMLType) -> None:
    places = HALVES.get(kind.name, (0,))
    blocks = random_blocks(kind, len(EXTREME) ** 2, seed=2)
    pairs = np.stack(np.meshgrid(EXTREME, EXTREME), axis=-1).reshape(-1, 2)
    for column, at in enumerate(places):
        blocks[:, at : at + 2] = pairs[:, column : column + 1].copy().view(np.uint8)
    out = torch.empty(len(blocks), kind.block_elements)
    dequantize(blocks, kind, out)
    assert_same_bits(out, oracle(blocks, kind))


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_is_the_float32_result_rounded(kind: GGMLType, dtype: torch.dtype) -> None:
    blocks = random_blocks(kind, 2 * CHUNK_ELEMENTS // kind.block_elements + 5, seed=3)
    out = torch.empty(len(blocks), kind.block_elements, dtype=dtype)
    dequantize(blocks, kind, out)
    assert torch.equal(out.nan_to_num(), torch.from_numpy(oracle(blocks, kind)).to(dtype).nan_to_num())


def test_threads_do_not_change_the_result() -> None:
    kind = next(kind for kind in QUANTISED if kind.name == "Q4_K")
    blocks = random_blocks(kind, 9 * CHUNK_ELEMENTS // kind.block_elements + 3, seed=4)
    alone, shared = torch.empty(len(blocks), 256), torch.empty(len(blocks), 256)
    dequantize(blocks, kind, alone)
    with ThreadPoolExecutor(3) as executor:
        dequantize(blocks, kind, shared, executor=executor, num_threads=4)
    assert_same_bits(shared, alone.numpy())


def test_a_type_that_only_the_package_knows_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = PACKAGE_TYPES[20]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install gguf"):
        dequantize(random_blocks(kind, 2, seed=1), kind, torch.empty(2, kind.block_elements))
