"""The GGUF container, versions 2 and 3: keys, tensor table and data of one memory-mapped file.

    "GGUF" | version u32 | tensor_count u64 | kv_count u64
    kv_count     x  key string | type u32 | value            string = length u64 + UTF-8 bytes
    tensor_count x  name string | n_dims u32 | dims u64 … (fastest first) | type u32 | offset u64
    padding to `general.alignment` (32) | tensor data, each at a multiple of the alignment

Standard library only, so that keys and shapes can be shown without loading torch. Whatever a file claims is compared
with the bytes that are really there before anything of that size is read or allocated: a hostile or damaged file ends
in a CheckpointError after at most one pass over its header. Arrays (a tokenizer has some 100,000 strings) are only
walked over when the file is opened, and decoded when somebody asks for them.

Only `gguf.py` talks to this. Source: the GGUF specification of the ggml project.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.base.errors import CheckpointError
from octavo.core.load.gguf_types import GGML_TYPES, UNSUPPORTED_TYPE_NAMES, GGMLType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16
MAX_DIMS = 4
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_NAME_CHARS = 1 << 12
MAX_ARRAY_STRINGS = 1 << 22

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
# GGUF value type -> its struct code; strings and arrays are variable.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table.

    Attributes:
        name: the name in the file.
        shape: rows first, as torch counts (the file counts the other way).
        type: how its elements are stored.
        start: first byte, from the start of the file.
        num_bytes: length in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _LazyArray:
    """Where an array lies; `ends` holds each string's end for an array of strings, and is None for numbers."""

    element_type: int
    count: int
    start: int
    ends: array[int] | None


class GGUFMetadata(Mapping[str, Any]):
    """The keys of a GGUF file; arrays are decoded at each access, so ask once and keep the answer."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._values: dict[str, Any] = {}

    def add(self, key: str, value: Any) -> None:
        """Record a key while the file is parsed."""
        if key in self._values:
            raise CheckpointError(f"{self._path}: key {key} appears twice; the file is damaged: download it again")
        self._values[key] = value

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return self._decode(key, value) if isinstance(value, _LazyArray) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def _decode(self, key: str, value: _LazyArray) -> list[Any]:
        if value.ends is None:
            code = _SCALARS[value.element_type]
            return list(struct.unpack_from(f"<{value.count}{code}", self._data, value.start))
        try:
            begins = itertools.chain([value.start], value.ends)  # one more than there are strings
            return [self._data[at + 8 : end].decode() for at, end in zip(begins, value.ends, strict=False)]
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {key} holds a string that is not UTF-8", field=key) from error


class GGUFFile:
    """One GGUF file, parsed and checked; tensor data stay in the file.

    Attributes:
        path: the file.
        version: 2 or 3.
        data: the read-only memory map of the whole file.
        metadata: its keys.
        tensors: name -> TensorInfo, in file order.
        header_bytes: where the tensor data begin.
    """

    def __init__(self, path: Path) -> None:
        """Open and check a file.

        Raises:
            CheckpointError: it can't be read, is no GGUF of version 2 or 3, or contradicts itself.
        """
        self.path = path
        self.data = _map_file(path)
        cursor = _Cursor(path, self.data)
        self.version, tensor_count, key_count = _read_counts(cursor)
        self.metadata = GGUFMetadata(path, self.data)
        for _ in range(key_count):
            key = cursor.name("a key")
            self.metadata.add(key, _read_value(cursor, key))
        alignment = self._alignment()
        rows = [_read_tensor_row(cursor) for _ in range(tensor_count)]
        self.header_bytes = -(-cursor.position // alignment) * alignment
        self.tensors = self._place_tensors(rows, alignment)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        valid = isinstance(alignment, int) and 0 < alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0
        if not valid:
            raise CheckpointError(
                f"{self.path}: general.alignment is {alignment!r}, not a power of two up to {MAX_ALIGNMENT}",
                field="general.alignment",
            )
        return int(alignment)

    def _place_tensors(
        self, rows: list[tuple[str, tuple[int, ...], GGMLType, int]], alignment: int
    ) -> dict[str, TensorInfo]:
        """Turn offsets into places in the file, and refuse those outside it, unaligned or overlapping."""
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in rows:
            if name in tensors:
                raise CheckpointError(f"{self.path}: tensor {name} appears twice; the file is damaged", field=name)
            num_bytes = _tensor_bytes(self.path, name, shape, kind)
            start = self.header_bytes + offset
            if offset % alignment:
                raise CheckpointError(
                    f"{self.path}: tensor {name} is at offset {offset}, not a multiple of {alignment}; "
                    "the file is damaged: download it again",
                    field=name,
                )
            if start + num_bytes > len(self.data):
                raise CheckpointError(
                    f"{self.path}: tensor {name} ends at byte {start + num_bytes} but the file has {len(self.data)}; "
                    "it is truncated: download it again",
                    field=name,
                )
            tensors[name] = TensorInfo(name, shape, kind, start, num_bytes)
        self._check_order(tensors, alignment)
        return tensors

    def _check_order(self, tensors: Mapping[str, TensorInfo], alignment: int) -> None:
        """Refuse tensors that overlap, or leave more than padding between them: a shape, type or offset is wrong."""
        end, before = self.header_bytes, "the header"
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if not end <= tensor.start < end + alignment:
                gap = f"leave {tensor.start - end} bytes between them" if tensor.start > end else "overlap"
                raise CheckpointError(
                    f"{self.path}: {before} and {tensor.name} {gap}; the file is damaged: download it again",
                    field=tensor.name,
                )
            end, before = tensor.start + tensor.num_bytes, tensor.name


class _Cursor:
    """Reads forward through the header; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def take(self, num_bytes: int) -> int:
        """Step over some bytes; return where they begin."""
        start = self.position
        if num_bytes > len(self.data) - start:
            raise self.too_short(start, num_bytes)
        self.position = start + num_bytes
        return start

    def too_short(self, start: int, num_bytes: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path} ends inside its header: {num_bytes} bytes wanted at byte {start} of {len(self.data)}; "
            "it is truncated or damaged: download it again"
        )

    def u32(self) -> int:
        return int(_U32.unpack_from(self.data, self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.data, self.take(8))[0])

    def text(self, what: str) -> str:
        start = self.take(self.u64())
        try:
            return self.data[start : self.position].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} at byte {start} is not UTF-8; the file is damaged") from error

    def name(self, what: str) -> str:
        text = self.text(what)
        if not 0 < len(text) <= MAX_NAME_CHARS or not text.isprintable():
            raise CheckpointError(f"{self.path}: {what} is no name ({text[:40]!r}); the file is damaged")
        return text

    def string_ends(self, count: int) -> array[int]:
        """Step over `count` strings; return where each ends."""
        unpack, data, size = _U64.unpack_from, self.data, len(self.data)
        ends, position = array("q"), self.position
        for _ in range(count):
            if position + 8 > size:
                raise self.too_short(position, 8)
            num_bytes = unpack(data, position)[0]
            position += 8 + num_bytes
            if position > size:
                raise self.too_short(position - num_bytes, num_bytes)
            ends.append(position)
        self.position = position
        return ends


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise CheckpointError(f"{path} is empty; download it again") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def _read_counts(cursor: _Cursor) -> tuple[int, int, int]:
    """Read the fixed part: version, number of tensors, number of keys."""
    path = cursor.path
    if cursor.data[:4] != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file (it does not begin with GGUF); give a .gguf file")
    cursor.take(4)
    version = cursor.u32()
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = "a big-endian file" if swapped in VERSIONS else f"version {version}"
        raise CheckpointError(f"{path} is GGUF {kind}; only little-endian versions 2 and 3 can be read")
    tensor_count, key_count = cursor.u64(), cursor.u64()
    # The least a tensor row takes is 33 bytes, and a key 14.
    left = len(cursor.data) - cursor.position
    for what, count, least, limit in (("tensors", tensor_count, 33, MAX_TENSORS), ("keys", key_count, 14, MAX_KEYS)):
        if count > limit or count * least > left:
            raise CheckpointError(f"{path} claims {count} {what}, more than it can hold; it is damaged")
    return version, tensor_count, key_count


def _read_value(cursor: _Cursor, key: str) -> Any:
    value_type = cursor.u32()
    if value_type == _STRING:
        return cursor.text(f"the value of {key}")
    if value_type == _ARRAY:
        return _read_array(cursor, key)
    code = _scalar_code(cursor, key, value_type)
    return struct.unpack_from(f"<{code}", cursor.data, cursor.take(struct.calcsize(f"<{code}")))[0]


def _read_array(cursor: _Cursor, key: str) -> _LazyArray:
    element_type, count = cursor.u32(), cursor.u64()
    start = cursor.position
    if element_type == _STRING:
        if count > MAX_ARRAY_STRINGS:
            raise CheckpointError(f"{cursor.path}: {key} claims {count} strings; at most {MAX_ARRAY_STRINGS} are read")
        return _LazyArray(element_type, count, start, cursor.string_ends(count))
    code = _scalar_code(cursor, key, element_type)
    cursor.take(count * struct.calcsize(f"<{code}"))
    return _LazyArray(element_type, count, start, None)


def _scalar_code(cursor: _Cursor, key: str, value_type: int) -> str:
    code = _SCALARS.get(value_type)
    if code is None:
        kind = "an array of arrays" if value_type == _ARRAY else f"of the unknown type {value_type}"
        raise CheckpointError(f"{cursor.path}: {key} is {kind}; the file is damaged or too new", field=key)
    return code


def _read_tensor_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLType, int]:
    """Read name, shape (rows first), type and offset of one tensor."""
    name = cursor.name("a tensor's name")
    num_dims = cursor.u32()
    if not 1 <= num_dims <= MAX_DIMS:
        raise CheckpointError(
            f"{cursor.path}: tensor {name} has {num_dims} dimensions, not 1 to {MAX_DIMS}", field=name
        )
    shape = tuple(reversed([cursor.u64() for _ in range(num_dims)]))
    type_id = cursor.u32()
    offset = cursor.u64()
    kind = GGML_TYPES.get(type_id)
    if kind is None:
        known = UNSUPPORTED_TYPE_NAMES.get(type_id, f"the unknown type {type_id}")
        readable = ", ".join(kind.name for kind in GGML_TYPES.values())
        raise CheckpointError(
            f"{cursor.path}: tensor {name} is stored as {known}, which can't be read; take a file in {readable}",
            field=name,
        )
    return name, shape, kind, offset


def _tensor_bytes(path: Path, name: str, shape: tuple[int, ...], kind: GGMLType) -> int:
    if 0 in shape or shape[-1] % kind.block_elements:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {list(shape)} can't be stored as {kind.name} "
            f"(rows of whole blocks of {kind.block_elements}); the file is damaged",
            field=name,
        )
    blocks = shape[-1] // kind.block_elements
    for dim in shape[:-1]:
        blocks *= dim
    return blocks * kind.block_bytes
