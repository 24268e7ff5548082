"""The engine process: one engine behind two sockets. `AsyncEngine` starts it: `python -m octavo.core.engine.process`.

    stdin: one line of JSON {"config": …, "inbox": address, "outbox": address}, then nothing; its end means that the
           front is gone, and the process ends too
    inbox  ── messages ──> [ drain, step, send ] ── messages ──> outbox

Without work the loop sleeps in poll(). The engine's errors about one request go back as that request's last output;
anything else ends the process, after a Failed that carries the cause.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import zmq

from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import InvalidRequest
from octavo.core.base.params import FinishReason
from octavo.core.engine import messages
from octavo.core.engine.engine import Engine
from octavo.core.engine.loading import open_model
from octavo.core.engine.wire import EngineOutput

LINGER_MS = 2000
"""How long a last message may take to leave when the process ends."""


class EngineLoop:
    """Drives an engine by messages.

    Args:
        engine: its only user.
        inbox: a PULL socket.
        outbox: a PUSH socket.
        front: a file descriptor that becomes readable when the front is gone.
    """

    def __init__(self, engine: Engine, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], front: int) -> None:
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._front = front
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        self._poller.register(front, zmq.POLLIN)
        self._running = True

    def run(self) -> None:
        """Serve until told to stop, or until the front is gone."""
        engine = self._engine
        self._send(
            messages.Ready(
                vocab_size=engine.vocab_size,
                max_model_len=engine.sizes.max_model_len,
                num_kv_blocks=engine.num_kv_blocks,
                block_size=engine.sizes.block_size,
                stats=engine.stats(),
            )
        )
        while self._running:
            outputs = self._receive(wait=not engine.has_work())
            if engine.has_work():
                outputs += engine.step()
            if outputs:
                self._send(messages.Outputs(outputs, engine.stats()))

    def _receive(self, *, wait: bool) -> list[EngineOutput]:
        """Handle what has arrived; with `wait`, sleep until something does."""
        outputs: list[EngineOutput] = []
        ready = dict(self._poller.poll(None if wait else 0))
        if self._front in ready:
            self._running = False
        while self._running and self._inbox.poll(0):
            outputs += self._handle(messages.decode_to_engine(self._inbox.recv()))
        return outputs

    def _handle(self, message: messages.ToEngine) -> list[EngineOutput]:
        match message:
            case messages.Submit():
                return self._submit(message)
            case messages.Abort():
                return self._engine.abort(message.choices, message.reason, message.stop_reason)
            case messages.ResetPrefixCache():
                self._engine.reset_prefix_cache()
            case messages.Stop():
                self._running = False
        return []

    def _submit(self, message: messages.Submit) -> list[EngineOutput]:
        try:
            self._engine.add_request(messages.request_of(message))
        except InvalidRequest as error:
            return [
                EngineOutput(
                    request_id=message.request_id,
                    index=0,
                    finish_reason=FinishReason.ERROR,
                    error=str(error),
                    rejected_field=error.field or "",
                )
            ]
        return []

    def _send(self, message: messages.FromEngine) -> None:
        self._outbox.send(messages.encode(message))


def main() -> int:
    """Load the model, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front decides what ends
    start = json.loads(sys.stdin.readline())
    with zmq.Context() as context:
        outbox = context.socket(zmq.PUSH)
        outbox.setsockopt(zmq.LINGER, LINGER_MS)
        outbox.connect(start["outbox"])
        inbox = context.socket(zmq.PULL)
        inbox.connect(start["inbox"])
        try:
            _serve(start["config"], inbox, outbox)
        except BaseException as error:
            outbox.send(messages.encode(messages.failed_of(error)))
            return 1
        finally:
            inbox.close(linger=0)
            outbox.close()
    return 0


def _serve(config_values: Mapping[str, Any], inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
    config = EngineConfig(**config_values)
    with open_model(config) as opened:
        engine = Engine.from_checkpoint(config, opened.checkpoint)
    try:
        EngineLoop(engine, inbox, outbox, sys.stdin.fileno()).run()
    finally:
        engine.close()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # no interpreter teardown: threads of libraries must not delay the front's noticing
