"""What is asked of the system ahead of reading: every byte once, a window ahead, and nothing where it can't be."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

from octavo.core.load import readahead
from octavo.core.load.readahead import CHUNK_BYTES, WINDOW_BYTES, ReadAhead, tensor_offsets


def test_each_chunk_is_asked_for_once_and_a_window_ahead(tmp_path, monkeypatch):
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system has no posix_fadvise")
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _fd, offset, length, _advice: asked.append((offset, length)))
    file = tmp_path / "weights"
    file.write_bytes(b"x")
    ahead = ReadAhead(file)
    ahead.touch(0, 100)
    first = list(asked)
    assert first[0] == (0, CHUNK_BYTES)
    assert sum(length for _, length in first) >= WINDOW_BYTES - CHUNK_BYTES
    ahead.touch(100, 200)
    assert asked == first
    ahead.touch(40 * CHUNK_BYTES, 41 * CHUNK_BYTES)  # another place: the tensors of another layer
    assert len(set(asked)) == len(asked)
    assert (40 * CHUNK_BYTES, CHUNK_BYTES) in asked
    ahead.close()
    ahead.close()


def test_nothing_is_asked_where_the_system_cannot(tmp_path, monkeypatch):
    monkeypatch.delattr(readahead.os, "posix_fadvise", raising=False)
    file = tmp_path / "weights"
    file.write_bytes(b"x")
    ahead = ReadAhead(file)
    ahead.touch(0, 1)
    ahead.close()


def test_offsets_are_where_the_tensors_lie(tmp_path):
    tensors = {"a": torch.arange(7, dtype=torch.float32), "b": torch.arange(6, dtype=torch.bfloat16).view(2, 3)}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    content = file.read_bytes()
    for name, (start, stop) in tensor_offsets(file).items():
        found = torch.frombuffer(bytearray(content[start:stop]), dtype=tensors[name].dtype).view(tensors[name].shape)
        assert torch.equal(found, tensors[name])
