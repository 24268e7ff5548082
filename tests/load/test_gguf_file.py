"""The GGUF container: what it reads, and what it refuses, quickly and in one line."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core.base.errors import CheckpointError
from octavo.core.load.gguf import GGUFCheckpoint
from octavo.core.load.gguf_file import GGUFFile


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def key(name: bytes, value_type: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", value_type) + value


def tensor(name: bytes, dims: list[int], type_id: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def container(
    keys: list[bytes] = (),  # type: ignore[assignment]
    tensors: list[bytes] = (),  # type: ignore[assignment]
    *,
    data_bytes: int = 0,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensor_count, key_count = counts or (len(tensors), len(keys))
    header = b"GGUF" + struct.pack("<IQQ", version, tensor_count, key_count) + b"".join([*keys, *tensors])
    return header + bytes(-len(header) % 32) + bytes(data_bytes)


def refusal(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert "\n" not in message
    assert "hostile.gguf" in message
    return message


def test_keys_and_tensors_are_those_the_formats_own_reader_sees(llama_gguf: Path) -> None:
    file, reader = GGUFFile(llama_gguf), gguf.GGUFReader(llama_gguf)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert dict(file.metadata) == expected
    assert [*file.tensors] == [row.name for row in reader.tensors]
    for row in reader.tensors:
        info = file.tensors[row.name]
        assert info.shape == tuple(reversed(row.shape.tolist()))
        assert (info.start, info.num_bytes) == (row.data_offset, row.n_bytes)


def test_every_value_type_is_read(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    codes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    values = {0: 255, 1: -7, 2: 65535, 3: -9, 4: 1 << 31, 5: -5, 6: 0.5, 7: True, 10: 1 << 63, 11: -(1 << 62), 12: 1e9}
    keys = [key(f"one.{t}".encode(), t, struct.pack(f"<{code}", values[t])) for t, code in codes.items()]
    keys += [
        key(f"many.{t}".encode(), 9, struct.pack(f"<IQ2{code}", t, 2, values[t], values[t]))
        for t, code in codes.items()
    ]
    keys += [key(b"text", 8, string("naïve 😀".encode())), key(b"none", 9, struct.pack("<IQ", 8, 0))]
    keys += [key(b"texts", 9, struct.pack("<IQ", 8, 3) + string(b"") + string("é".encode()) + string(b"xyz"))]
    path.write_bytes(container(keys))
    metadata = GGUFFile(path).metadata
    assert {t: metadata[f"one.{t}"] for t in codes} == values
    assert {t: metadata[f"many.{t}"] for t in codes} == {t: [value, value] for t, value in values.items()}
    assert (metadata["text"], metadata["texts"], metadata["none"]) == ("naïve 😀", ["", "é", "xyz"], [])


def test_version_2_and_another_alignment(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    keys = [key(b"general.alignment", 4, struct.pack("<I", 64))]
    header = container(keys, [tensor(b"a", [4], 0, 0), tensor(b"b", [4], 0, 64)], version=2)
    path.write_bytes(header + bytes(-len(header) % 64) + bytes(80))
    file = GGUFFile(path)
    assert (file.version, file.header_bytes % 64, file.tensors["b"].start - file.tensors["a"].start) == (2, 0, 64)


@pytest.mark.parametrize(
    ("content", "part_of_message"),
    [
        (b"", "is empty"),
        (b"GGML" + bytes(40), "not a GGUF file"),
        (container(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (container(counts=(0, 1 << 60)), "keys, more than it can hold"),
        (container(counts=(1 << 60, 0)), "tensors, more than it can hold"),
        (container([struct.pack("<Q", 1 << 62) + bytes(64)]), "ends inside its header"),
        (container([key(b"k", 8, struct.pack("<Q", 1 << 40))], data_bytes=64), "ends inside its header"),
        (container([key(b"k", 9, struct.pack("<IQ", 8, 1 << 21))], data_bytes=64), "ends inside its header"),
        (container([key(b"k", 9, struct.pack("<IQ", 8, 1 << 60))], data_bytes=64), "strings"),
        (container([key(b"k", 9, struct.pack("<IQ", 12, 1 << 61))], data_bytes=64), "ends inside its header"),
        (container([key(b"k", 9, struct.pack("<IQ", 9, 4))], data_bytes=64), "array of arrays"),
        (container([key(b"k", 77, bytes(8))]), "unknown type 77"),
        (container([key(b"k", 0, b"1"), key(b"k", 0, b"1")], data_bytes=32), "appears twice"),
        (container([key(b"", 0, b"1")], data_bytes=32), "is no name"),
        (container([key(b"a\nb", 0, b"1")], data_bytes=32), "is no name"),
        (container([key(b"\xff\xfe", 0, b"1")], data_bytes=32), "not UTF-8"),
        (container([key(b"general.alignment", 4, struct.pack("<I", 0))]), "general.alignment"),
        (container([key(b"general.alignment", 4, struct.pack("<I", 24))]), "general.alignment"),
        (container(tensors=[tensor(b"t", [1] * 5, 0, 0)], data_bytes=64), "5 dimensions"),
        (container(tensors=[tensor(b"t", [], 0, 0)], data_bytes=64), "0 dimensions"),
        (container(tensors=[tensor(b"t", [8, 0], 0, 0)], data_bytes=64), "can't be stored"),
        (container(tensors=[tensor(b"t", [33], 2, 0)], data_bytes=64), "blocks of 32"),
        (container(tensors=[tensor(b"t", [8], 0, 8)], data_bytes=64), "not a multiple of 32"),
        (container(tensors=[tensor(b"t", [32], 0, 0)], data_bytes=127), "truncated"),
        (container(tensors=[tensor(b"t", [32], 0, 1 << 62)], data_bytes=128), "truncated"),
        (container(tensors=[tensor(b"t", [1 << 62] * 4, 0, 0)], data_bytes=128), "truncated"),
        (container(tensors=[tensor(b"t", [8], 0, 0)] * 2, data_bytes=64), "appears twice"),
        (container(tensors=[tensor(b"t", [16], 0, 0), tensor(b"u", [8], 0, 32)], data_bytes=64), "t and u overlap"),
        (
            container(tensors=[tensor(b"t", [8], 0, 0), tensor(b"u", [8], 0, 96)], data_bytes=128),
            "t and u leave 64 bytes",
        ),
        (container(tensors=[tensor(b"t", [8], 0, 32)], data_bytes=128), "the header and t leave 32 bytes"),
        (container(tensors=[tensor(b"t", [256], 9, 0)], data_bytes=256), "tensor t is stored as Q8_1"),
        (container(tensors=[tensor(b"t", [256], 99, 0)], data_bytes=256), "the unknown type 99"),
    ],
)
def test_hostile_headers_are_refused_by_name(tmp_path: Path, content: bytes, part_of_message: str) -> None:
    assert part_of_message in refusal(tmp_path, content)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(CheckpointError, match="cannot read"):
            GGUFFile(path)


def test_a_string_array_that_is_not_utf8_is_refused_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens.gguf"
    path.write_bytes(container([key(b"tokens", 9, struct.pack("<IQ", 8, 1) + string(b"\xff"))]))
    metadata = GGUFFile(path).metadata
    with pytest.raises(CheckpointError, match="tokens holds a string that is not UTF-8"):
        metadata["tokens"]


def test_truncation_at_every_place_is_refused(llama_gguf: Path) -> None:
    file = GGUFFile(llama_gguf)
    last = max(file.tensors.values(), key=lambda info: info.start)
    # Shorter and shorter: coarse steps through the data, then every length within the header.
    in_data = [last.start + last.num_bytes - 1, *range(last.start, file.header_bytes, -997)]
    for length in [*in_data, *range(file.header_bytes, -1, -1)]:
        os.truncate(llama_gguf, length)
        with pytest.raises(CheckpointError, match=r"truncated|damaged|is empty|not a GGUF"):
            GGUFFile(llama_gguf)


def test_absurd_counts_cost_neither_time_nor_memory(tmp_path: Path) -> None:
    # 4 MB of zeros behind a header that claims as many empty strings, keys and tensors as could just fit.
    filler = 4 << 20
    claims = [
        container([key(b"k", 9, struct.pack("<IQ", 8, 600_000))], data_bytes=filler),
        container(counts=(0, 60_000), data_bytes=filler),
        container(counts=(100_000, 0), data_bytes=filler),
        container([key(b"k", 9, struct.pack("<IQ", 12, 1 << 40))], data_bytes=filler),
    ]
    for claim in claims:
        path = tmp_path / "claim.gguf"
        path.write_bytes(claim)
        tracemalloc.start()
        started = time.perf_counter()
        with pytest.raises(CheckpointError):
            GGUFFile(path)
        seconds = time.perf_counter() - started
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 2 * filler
        assert seconds < 10


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_are_read_or_refused_but_never_crash(
    tmp_path: Path, llama_gguf: Path, data: st.DataObject
) -> None:
    content = bytearray(llama_gguf.read_bytes())
    header_bytes = GGUFFile(llama_gguf).header_bytes
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_bytes - 1))
        content[at] = data.draw(st.sampled_from([0, 1, 2, 7, 8, 9, 32, 127, 128, 254, 255]) | st.integers(0, 255))
    path = tmp_path / "changed.gguf"
    path.write_bytes(content)
    message = ""
    try:
        checkpoint = GGUFCheckpoint(path, num_threads=1)
        dict(checkpoint.metadata)
        for name, read in checkpoint.tensors():
            assert tuple(read.shape) == checkpoint.shape(name)
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message


def test_opening_reads_no_weights(tmp_path: Path, gguf_writer: Callable[..., Path], llama_keys: dict[str, Any]) -> None:
    weights = {
        "token_embd.weight": np.zeros((40, 64), np.float32),
        "blk.0.ffn_up.weight": np.zeros((1000, 6400), np.float32),
    }
    path = gguf_writer(tmp_path / "big.gguf", llama_keys, weights)
    tracemalloc.start()
    GGUFCheckpoint(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
