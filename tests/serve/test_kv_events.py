"""A server's KV events, from its engine process through a real socket."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
import zmq

from octavo.core.base.errors import ConfigError
from octavo.core.engine.async_engine import AsyncEngine
from tests.engine.kv_event_reader import Index, Stored, parse_frames, parse_payload
from tests.serve.conftest import Server


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for made in sockets:
            made.bind(("127.0.0.1", 0))
        return [made.getsockname()[1] for made in sockets]
    finally:
        for made in sockets:
            made.close()


def test_a_router_learns_what_a_server_has_cached(chain_model: Path) -> None:
    live, replay = free_ports(2)
    server = Server(
        str(chain_model),
        tokenizer="smollm2",
        kv_events_endpoint=f"tcp://*:{live}",
        kv_events_replay_endpoint=f"tcp://*:{replay}",
        kv_events_topic="kv@pod@tiny",
    )
    prompt = list(range(1, 100))
    with zmq.Context() as context, context.socket(zmq.SUB) as sub, context.socket(zmq.DEALER) as dealer:
        sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
        sub.connect(f"tcp://127.0.0.1:{live}")
        dealer.setsockopt(zmq.LINGER, 0)
        server.start()
        try:
            server.wait_ready()
            for seed in range(3):
                server.complete([seed + 1, *prompt], max_tokens=20)
            server.wait_idle()
            dealer.connect(f"tcp://127.0.0.1:{replay}")
            dealer.send_multipart([b"", bytes(8)])
            index, told = Index(), []
            while True:
                assert dealer.poll(5000)
                _, *frames = dealer.recv_multipart()
                if not frames[2]:
                    break
                topic, seq, payload = parse_frames(frames)
                assert (topic, seq) == ("kv@pod@tiny", len(told))
                told.append(parse_payload(payload))
                for event in told[-1]:
                    index.apply(event)
            assert isinstance(told[0][0], Stored)
            assert told[0][0].tokens == [1, *prompt][:96]
            assert len(index.cached) == server.stats().kv_blocks_cached > 18
            assert sub.poll(5000)  # it heard live messages as well
        finally:
            server.stop()


def test_a_taken_address_is_told_by_the_front(chain_model: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        taken.bind("tcp://*:0")
        port = taken.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]
        engine = AsyncEngine(
            str(chain_model), tokenizer="smollm2", progress=False, kv_events_endpoint=f"tcp://*:{port}"
        )
        with pytest.raises(ConfigError, match="Address already in use"):
            asyncio.run(engine.start())
