"""Where the ranks of a new group meet: an address that is taken once and handed on, never guessed twice.

    engine ── binds HOST:port, keeps it ──► every rank is told ──► rank 0 binds it again and listens ──► all have met
           └────────────────────────── given up only then ────────────────────────────────────────────┘

A port that was asked for, closed and told to others may be somebody else's before rank 0 gets to it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

HOST = "127.0.0.1"


@contextmanager
def meeting_point() -> Iterator[str]:
    """An address at which a group can meet, given to nobody else as long as this lasts.

    The port stays bound, which keeps others away; nobody listens on it but the rank that binds it again.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HOST, 0))
        yield f"{HOST}:{held.getsockname()[1]}"
