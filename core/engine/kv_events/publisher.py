"""Payloads out of the engine process: published as they come, and given again to those who missed some.

    engine's thread ── put ──> ring of (seq, payload) ── publisher's thread ──┬── PUB     [topic, seq, payload]
                                   the newest `buffer_steps`                  └── ROUTER  <- ["", first seq]
                                                                                          -> ["", topic, seq, payload] …
                                                                                             ["", "", -1, ""]
The ring is the only buffer, so memory is bounded. Putting appends and wakes, and waits for nobody: a subscriber that is
slow or gone loses batches at its own queue (hwm), and a thread that is held up for a whole ring loses its oldest.
Both show as a gap in seq (8 bytes, big-endian, from 0), and what is still in the ring can be had again.

Frames are those of vLLM's publisher, replies with their topic as in vllm-project/vllm#45177.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import ConfigError

if TYPE_CHECKING:
    import zmq

END_SEQ = b"\xff" * 8
"""-1: the end of what is given again."""

WAKE = "inproc://wake"

logger = logging.getLogger(__name__)


class Publisher:
    """Two sockets and the thread that alone uses them from the start on.

    Args:
        config: its kv_events_* fields; kv_events_endpoint is set.

    Raises:
        ConfigError: pyzmq is missing, or an address is taken or can't be used.
    """

    def __init__(self, config: EngineConfig) -> None:
        try:
            import zmq
        except ImportError as error:
            raise ConfigError(
                "KV events need pyzmq; pip install 'octavo[serve]'", field="kv_events_endpoint"
            ) from error
        self._zmq = zmq
        self._topic = config.kv_events_topic.encode()
        self._lock = threading.Lock()
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=config.kv_events_buffer_steps)
        self._next_seq = 0
        self._num_sent = 0
        self._is_rung = False
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._pub = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._bell, self._ear = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        try:
            self._open(config)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, config: EngineConfig) -> None:
        assert config.kv_events_endpoint is not None
        self._pub.set_hwm(config.kv_events_hwm)
        # One whole replay fits each peer; who asks for more without reading loses it.
        self._replay.set_hwm(config.kv_events_buffer_steps + 1)
        self._ear.bind(WAKE)
        self._bell.connect(WAKE)
        _attach(self._pub, config.kv_events_endpoint, "kv_events_endpoint", may_connect=True)
        if config.kv_events_replay_endpoint is not None:
            _attach(self._replay, config.kv_events_replay_endpoint, "kv_events_replay_endpoint", may_connect=False)

    def put(self, payload: bytes) -> None:
        """Publish the next payload; never waits."""
        with self._lock:
            self._ring.append((self._next_seq, payload))
            self._next_seq += 1
        self._wake()

    def close(self) -> None:
        """Publish what is left, then close the sockets. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        self._thread.join()
        self._context.destroy(linger=0)

    def _wake(self) -> None:
        """Have the thread look once more; a bell that was rung and not yet heard need not be rung again."""
        with self._lock:
            was_rung, self._is_rung = self._is_rung, True
        if not was_rung:
            with suppress(self._zmq.Again):  # the thread has ended, and said why
                self._bell.send(b"", self._zmq.NOBLOCK)

    # ------------------------------------------------------------------------------ in the publisher's thread

    def _run(self) -> None:
        poller = self._zmq.Poller()
        for socket in (self._ear, self._replay):
            poller.register(socket, self._zmq.POLLIN)
        try:
            while not self._closing.is_set():
                ready = dict(poller.poll())
                if self._ear in ready:
                    self._ear.recv()
                    self._send_new()
                if self._replay in ready:
                    self._give_again(self._replay.recv_multipart())
        except Exception:
            logger.exception("KV events are published no more")
        finally:
            for socket in (self._ear, self._pub, self._replay):
                socket.close(linger=0)

    def _send_new(self) -> None:
        """Send what came since the last time, as far as the ring still has it."""
        with self._lock:
            self._is_rung = False
            num_new = min(len(self._ring), self._next_seq - self._num_sent)
            new = list(islice(reversed(self._ring), num_new))
            self._num_sent = self._next_seq
        for seq, payload in reversed(new):
            self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))

    def _give_again(self, request: list[bytes]) -> None:
        """Answer a request for all batches from a seq on; what is no such request is passed over."""
        if len(request) != 3 or request[1] or len(request[2]) != 8:
            return
        peer, first = request[0], int.from_bytes(request[2], "big")
        with self._lock:
            kept = [item for item in self._ring if item[0] >= first]
        for seq, payload in kept:
            self._replay.send_multipart((peer, b"", self._topic, seq.to_bytes(8, "big"), payload))
        self._replay.send_multipart((peer, b"", b"", END_SEQ, b""))


def _attach(socket: zmq.Socket[bytes], address: str, field: str, *, may_connect: bool) -> None:
    """Bind a socket; or, as vLLM does, connect it where the address names another's socket.

    Raises:
        ConfigError: the address is taken or can't be used.
    """
    import zmq

    binds = not may_connect or "*" in address or "::" in address or not address.startswith("tcp://")
    try:
        if binds:
            socket.bind(address)
        else:
            socket.connect(address)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"{field}: cannot use {address} ({zmq.strerror(error.errno or 0)}); give a free address such as tcp://*:5557",
            field=field,
        ) from error
