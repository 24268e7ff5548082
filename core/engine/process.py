"""The engine process: one engine behind two sockets. `AsyncEngine` starts it: `python -m octavo.core.engine.process`.

    stdin: one line of JSON {"config": …, "folder": …}, then nothing; when it ends the front is gone, and so is the
           process, at once and whatever it was doing
    folder/to  ── messages ──> [ receive, step, send ] ── messages ──> folder/from

Without work the loop sleeps until a message comes. The engine's errors about one request go back as that request's
last output; anything else ends the process, after a Failed that carries the cause.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

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
    """

    def __init__(self, engine: Engine, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._running = True

    def run(self) -> None:
        """Serve until told to stop."""
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
        timeout_ms = None if wait else 0
        while self._running and self._inbox.poll(timeout_ms):
            timeout_ms = 0
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
    folder = Path(start["folder"])
    threading.Thread(target=_end_with_front, args=(folder,), daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox, context.socket(zmq.PUSH) as outbox:
        outbox.connect(f"ipc://{folder}/from")
        inbox.connect(f"ipc://{folder}/to")
        try:
            _serve(EngineConfig(**start["config"]), inbox, outbox)
        except BaseException as error:
            outbox.send(messages.encode(messages.failed_of(error)))
            return 1
        finally:
            inbox.setsockopt(zmq.LINGER, 0)
            outbox.setsockopt(zmq.LINGER, LINGER_MS)
    return 0


def _serve(config: EngineConfig, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
    with open_model(config) as opened:
        engine = Engine.from_checkpoint(config, opened.checkpoint)
    try:
        EngineLoop(engine, inbox, outbox).run()
    finally:
        engine.close()


def _end_with_front(folder: Path) -> None:
    """Wait for the end of stdin, then end this process and what the front could not remove."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
