"""Damaged GGUF files, through the door that users take: the same reply, or one error, and nothing left behind."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import Any

import gguf
import pytest

from octavo.core.base.errors import CheckpointError
from octavo.core.load.gguf_file import GGUFFile
from tests.fakes import damage
from tests.load.conftest import LLAMA_KEYS, llama_tensors, write_gguf

PROMPT = [5, 17, 30, 2, 11]
Q8_0 = gguf.GGMLQuantizationType.Q8_0
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(20)),
        *(f"t{i}" for i in range(17)),
    ],
    "tokenizer.ggml.scores": [float(-i) for i in range(40)],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 20 + [1] * 17,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
FLIPS = 150


def write(path: Path, keys: dict[str, Any] | None = None, architecture: str = "llama") -> Path:
    """A llama of one layer, its matrices in Q8_0."""
    packed = {n: (gguf.quantize(t, Q8_0), Q8_0) if t.ndim == 2 else t for n, t in llama_tensors().items()}
    return write_gguf(path, LLAMA_KEYS | TOKENIZER if keys is None else keys, packed, architecture)


def reply(path: Path) -> Any:
    return damage.reply(path, PROMPT)


def outcome(path: Path) -> tuple[Any, str]:
    return damage.outcome(path, PROMPT)


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0


def test_flipped_bytes_of_the_tensor_table(tmp_path: Path) -> None:
    """Names, axes, types and offsets: every change shows, since tensors fill the file without a gap."""
    path = write(tmp_path / "whole.gguf")
    expected, content, file = reply(path), path.read_bytes(), GGUFFile(path)
    first = content.index(b"token_embd.weight") - 8
    last = content.rindex(b"blk.0.ffn_down.weight") - 8  # what comes after the last tensor may be anything
    changed_file, draw, before = tmp_path / "changed.gguf", random.Random(5), open_files()
    assert first < last < file.header_bytes
    for _ in range(FLIPS):
        changed, at = bytearray(content), draw.randrange(first, last)
        changed[at] = draw.choice((changed[at] ^ 1 << draw.randrange(8), draw.randrange(256)))
        changed_file.write_bytes(changed)
        found, message = outcome(changed_file)
        assert found == expected or message, (at - first, content[at], changed[at])
    assert open_files() <= before


def test_flipped_bytes_anywhere(tmp_path: Path) -> None:
    """A value or a weight that became another is another model; it is read or refused, and ends nothing."""
    content, draw, before = write(tmp_path / "whole.gguf").read_bytes(), random.Random(6), open_files()
    header_bytes = GGUFFile(tmp_path / "whole.gguf").header_bytes
    for _ in range(FLIPS):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 4))):
            end = draw.choice((header_bytes, header_bytes, len(content)))
            changed[draw.randrange(end)] = draw.choice((0, 255, draw.randrange(256)))
        (tmp_path / "changed.gguf").write_bytes(changed)
        outcome(tmp_path / "changed.gguf")
    assert open_files() <= before


def test_truncation(tmp_path: Path) -> None:
    content = write(tmp_path / "whole.gguf").read_bytes()
    draw, path = random.Random(7), tmp_path / "cut.gguf"
    padding = -llama_tensors()["blk.0.ffn_down.weight"].size // 32 * 34 % 32
    for length in [0, 3, 8, 24, len(content) - padding - 1, *(draw.randrange(len(content) - 32) for _ in range(40))]:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"truncated|damaged|is empty|not a GGUF"):
            reply(path)


KEYS = LLAMA_KEYS | TOKENIZER
VALUES: tuple[Any, ...] = (0, 10**9, 1.5, float("nan"), -1.0, "x", True, [1], ["a"], [1.5], [True] * 40, ["a"] * 40)


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_another_type_or_missing(tmp_path: Path, key: str) -> None:
    expected = reply(write(tmp_path / "whole.gguf"))
    path = tmp_path / "changed.gguf"
    found, message = outcome(write(path, {name: value for name, value in KEYS.items() if name != key}))
    harmless = key in ("llama.rope.freq_base", "tokenizer.ggml.eos_token_id") or "tokenizer" in key
    assert message or found == expected or harmless
    for value in VALUES:
        if type(value) is not type(KEYS[key]):
            found, message = outcome(write(path, KEYS | {key: value}))
            is_number = isinstance(KEYS[key], float)  # of which integers, and lists of one for all layers, are too
            assert message or found == expected or is_number, (key, value)


@pytest.mark.parametrize("architecture", ["mamba", "qwen2", "phi3", "gemma3", "gpt-oss", "bert", "LLAMA"])
def test_another_family(tmp_path: Path, architecture: str) -> None:
    keys = {key.replace("llama.", f"{architecture}."): value for key, value in KEYS.items()}
    with pytest.raises(CheckpointError):
        reply(write(tmp_path / "other.gguf", keys, architecture))


@pytest.mark.parametrize("number", [0, 1])
def test_one_part_of_two(tmp_path: Path, number: int) -> None:
    keys = KEYS | {"split.no": number, "split.count": 2}
    with pytest.raises(CheckpointError, match="one of 2 parts; join them"):
        reply(write(tmp_path / "model-00001-of-00002.gguf", keys))
