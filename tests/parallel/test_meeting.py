"""Addresses at which groups meet."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from octavo.core.parallel.meeting import meeting_point


def test_no_address_is_given_twice_while_it_is_held() -> None:
    """vllm#40443, #28498, #7196: a port that was bound and closed is taken by another before its use."""
    for _ in range(1000):
        with ExitStack() as held:
            addresses = {held.enter_context(meeting_point()) for _ in range(32)}
            assert len(addresses) == 32


def test_a_rank_can_listen_there_and_nobody_who_asks_for_any_port_gets_it() -> None:
    with meeting_point() as address, socket.socket() as listener, ExitStack() as others:
        host, _, port = address.rpartition(":")
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen()
        for _ in range(200):
            other = others.enter_context(socket.socket())
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind((host, 0))
            assert other.getsockname()[1] != int(port)
