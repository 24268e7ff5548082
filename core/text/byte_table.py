"""Which bytes each token stands for.

    token string --decoder's per-token steps--> bytes        joined bytes --UTF-8, invalid -> U+FFFD--> text
    "Ġthe"          ByteLevel                   b" the"
    "▁the"          Replace, ByteFallback       b" the"
    "<0xE2>"        Replace, ByteFallback       b"\\xe2"
    "##ing"         WordPiece                   b"ing"          "play" is b" play"

Text is made from bytes alone, so a token's share of the text never depends on how tokens arrive. That holds for
decoders that treat every token by itself and then join, which is every decoder named below; others are refused.
One thing is not per token: decoders that take one space off the start of the whole text (`strips_leading_space`).

Where a run of byte tokens is not valid UTF-8, the `tokenizers` library replaces the whole run, valid characters
included; here each maximal invalid part becomes one U+FFFD and the rest stays, so that a cut character spoils nothing
that was already sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from octavo.core.base.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_Step = Callable[[str], str | bytes]


class ByteTable(dict[int, bytes]):
    """Token id -> bytes, filled as ids are asked for; ids outside the vocabulary are empty.

    Attributes:
        strips_leading_space: the text of a whole sequence loses one space at its start.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._steps, self.strips_leading_space = _read_decoder(backend)

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        piece = b"" if token is None else self._spell(token)
        self[token_id] = piece
        return piece

    def _spell(self, token: str) -> bytes:
        value: str | bytes = token
        for step in self._steps:
            if isinstance(value, bytes):
                break
            value = step(value)
        return value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")


@cache
def byte_alphabet() -> dict[str, int]:
    """The 256 characters of byte-level BPE and the bytes they stand for.

    Source: Radford et al. 2019 (GPT-2): printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _read_decoder(backend: tokenizers.Tokenizer) -> tuple[list[_Step], bool]:
    """The per-token steps of a tokenizer's decoder, and whether a leading space of the text is dropped."""
    if backend.decoder is None:  # the library then joins tokens with spaces
        return [lambda token: " " + token], True
    spec = json.loads(backend.decoder.__getstate__())
    steps: list[_Step] = []
    strips, fused = False, False
    for part in spec["decoders"] if spec["type"] == "Sequence" else [spec]:
        kind = part["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and (part["content"], part["start"], part["stop"]) == (" ", 1, 0):
            strips = True
        elif kind == "WordPiece":
            steps.append(_word_piece(part["prefix"]))
            strips = True
        elif kind == "Metaspace":
            steps.append(_replace(part["replacement"], " "))
            strips = part["prepend_scheme"] != "never"
        elif (step := _token_step(kind, part)) is not None and not fused:
            steps.append(step)
        else:
            raise CheckpointError(
                f"the tokenizer's decoder uses {kind} in a way Octavo can't turn into bytes; "
                "use a byte-level or byte-fallback tokenizer",
                field="tokenizer.json",
            )
    return steps, strips


def _token_step(kind: str, part: dict[str, Any]) -> _Step | None:
    """The meaning of one decoder part that works on each token by itself."""
    if kind == "ByteLevel":
        return _byte_level
    if kind == "ByteFallback":
        return _byte_fallback
    if kind == "Replace" and "String" in part["pattern"]:
        return _replace(part["pattern"]["String"], part["content"])
    return None


def _replace(old: str, new: str) -> _Step:
    return lambda token: token.replace(old, new)


def _word_piece(prefix: str) -> _Step:
    """A token that continues a word begins with the prefix; any other begins a word of its own."""
    return lambda token: token.removeprefix(prefix) if token.startswith(prefix) else " " + token


def _byte_level(token: str) -> str | bytes:
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:  # an added token, which is spelled as plain text
        return token


def _byte_fallback(token: str) -> str | bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token
