"""Whether files that an operator may replace while the server runs have changed."""

from __future__ import annotations

import os

Stamp = tuple[int, int, int]


def stamp(path: str | None) -> Stamp | None:
    """What changes when a file does; None for one that is not there, or not named."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
