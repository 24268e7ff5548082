"""Sizes as people write them: "2GiB", "512 MB", "1048576"."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """The number of bytes that a text such as "1.5GiB" names.

    Raises:
        ValueError: the text is no number with one of the units B, KB, MB, GB, TB, KiB, MiB, GiB, TiB.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is no size such as '2GiB'")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(count_bytes: float) -> str:
    """A size for people: three digits and a binary unit, "1.25 GiB"."""
    if abs(count_bytes) < 1024:
        return f"{count_bytes:.0f} B"
    scaled, unit = count_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if abs(scaled) < 1000:
            break
        scaled, unit = scaled / 1024, larger
    return f"{scaled:.3g} {unit}"
