"""What the answers of all endpoints share."""

from __future__ import annotations

import re
from collections.abc import Sequence

CLIENT_CLOSED_REQUEST = 499
"""Status of an answer that nobody reads."""

IGNORED_HEADER = "x-octavo-ignored-fields"
MAX_HEADER_CHARS = 1000


def headers_of(ignored: Sequence[str]) -> dict[str, str]:
    """The header that names the fields of a body which nobody read."""
    if not ignored:
        return {}
    return {IGNORED_HEADER: plain(",".join(ignored))[:MAX_HEADER_CHARS]}


def plain(names: str) -> str:
    """Names as they may stand in a header: letters, digits and little else."""
    return re.sub(r"[^\w.,-]", "?", names, flags=re.ASCII)
