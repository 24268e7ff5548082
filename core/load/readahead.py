"""Asks the system to fetch what will be read next from a mapped file, so that the disk works while weights are packed.

    file   ████████▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒░░░░░░░░░░░░
           read     asked for        not yet          WINDOW_BYTES ahead of what is read, a chunk at a time

Without it a mapped file is fetched by page faults, a little at a time and never while its reader computes. Pages that
are there already cost one call per chunk. On a system without `posix_fadvise` nothing happens.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

CHUNK_BYTES = 8 << 20
WINDOW_BYTES = 128 << 20


class ReadAhead:
    """Of one file. It owns a descriptor of its own until `close`."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDONLY) if hasattr(os, "posix_fadvise") else None
        self._asked: set[int] = set()

    def touch(self, start: int, stop: int) -> None:
        """Bytes start .. stop - 1 are being read: ask for them and for what follows."""
        if self._descriptor is None:
            return
        for chunk in range(start // CHUNK_BYTES, (stop + WINDOW_BYTES) // CHUNK_BYTES):
            if chunk not in self._asked:
                self._asked.add(chunk)
                os.posix_fadvise(self._descriptor, chunk * CHUNK_BYTES, CHUNK_BYTES, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Give back the descriptor. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def tensor_offsets(file: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor of a safetensors file lies, in bytes from the file's start; the file was found sound before.

    Source: the safetensors format: eight bytes of header length, a JSON header whose offsets count from its end.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    first = 8 + length
    return {
        name: (first + entry["data_offsets"][0], first + entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__"
    }
