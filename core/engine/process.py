"""The engine process: one engine behind two sockets. Its front runs `python -m octavo.core.engine.process FOLDER`.

    stdin: a Start, then nothing but a FAREWELL; when it ends the front is gone, and so is the process, at once and
           whatever it does; without a farewell the front died, and this process says so, since nobody else can
    folder/to  ── messages ──> [ receive, step, send ] ── messages ──> folder/from      Connected first of all

Without work the loop sleeps until a message comes. What is wrong with one request goes back as a Refused, with an
adapter as the answer to its call; anything else ends the process, after a Failed that carries the cause. Signals that a
terminal or a service manager sends to the whole group are left to the front, which ends this process when its replies
are done.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import zmq

from octavo.core.base.child import leave_signals_to_parent
from octavo.core.base.errors import InvalidRequest, OctavoError, UserError
from octavo.core.base.logs import announce, log_to_stderr
from octavo.core.engine import messages
from octavo.core.engine.wire import EngineOutput

if TYPE_CHECKING:
    from octavo.core.backend.opset import OpChoice
    from octavo.core.engine.engine import Engine

LINGER_MS = 2000
"""How long a last message may take to leave when the process ends."""

FRONT_DIED = "error: what started this engine ended without closing it; it was killed, crashed or ran out of memory"

FALLBACKS_SECONDS = 5.0
"""How often the calls of fallbacks are told: where a model is split, its ranks must be asked for them."""

logger = logging.getLogger(__name__)


class EngineLoop:
    """Drives an engine by messages.

    Args:
        engine: its only user.
        inbox: a PULL socket.
        outbox: a PUSH socket without a limit, so that sending never waits.
    """

    def __init__(self, engine: Engine, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._running = True
        self._fallbacks_due = 0.0
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        for fileno in engine.watched():
            self._poller.register(fileno, zmq.POLLIN)

    def run(self) -> None:
        """Serve until told to stop."""
        engine = self._engine
        adapters = engine.adapters.list()
        self._send(messages.Ready(engine.vocab_size, engine.sizes.max_model_len, engine.stats(), adapters))
        while self._running:
            outputs = self._receive(wait=not engine.has_work())
            if engine.has_work():
                outputs += engine.step()
            self._send(messages.Outputs(outputs, engine.stats(), engine.take_step(), self._fallback_calls()))

    def _receive(self, *, wait: bool) -> list[EngineOutput]:
        """Handle what has arrived; with `wait`, sleep until something does."""
        outputs: list[EngineOutput] = []
        timeout_ms = None if wait else 0
        while self._running and self._arrives(timeout_ms):
            timeout_ms = 0
            outputs += self._handle(messages.decode_to_engine(self._inbox.recv()))
        return outputs

    def _arrives(self, timeout_ms: int | None) -> bool:
        """Whether a message is there, or comes in time. Raises what has ended the engine meanwhile."""
        ready = dict(self._poller.poll(timeout_ms))
        if any(fileno in ready for fileno in self._engine.watched()):
            self._engine.check()
        return self._inbox in ready

    def _handle(self, message: messages.ToEngine) -> list[EngineOutput]:
        match message:
            case messages.Submit():
                self._submit(message)
            case messages.Abort():
                return self._engine.abort(message.choices, message.reason, message.stop_reason)
            case messages.ResetPrefixCache():
                self._engine.reset_prefix_cache()
            case messages.LoadAdapter() | messages.UnloadAdapter():
                self._change_adapters(message)
            case messages.ReadState():
                self._send(messages.StateRead(self._engine.stats(), self._engine.draw_kv()))
            case messages.Stop():
                self._running = False
        return []

    def _submit(self, message: messages.Submit) -> None:
        try:
            self._engine.add_request(messages.request_of(message))
        except InvalidRequest as error:
            self._send(messages.refused_of(message.request_id, error))

    def _fallback_calls(self) -> dict[str, int] | None:
        """When it is time to tell them; else None."""
        now = time.monotonic()
        if now < self._fallbacks_due:
            return None
        self._fallbacks_due = now + FALLBACKS_SECONDS
        return fallback_calls(self._engine.op_choices())

    def _change_adapters(self, message: messages.LoadAdapter | messages.UnloadAdapter) -> None:
        adapters, refused = self._engine.adapters, None
        try:
            if isinstance(message, messages.LoadAdapter):
                adapters.load(message.name, message.path)
            else:
                adapters.unload(message.name)
        except UserError as error:
            refused = messages.failed_of(error)
        self._send(messages.AdaptersChanged(message.call, adapters.list(), refused))

    def _send(self, message: messages.FromEngine) -> None:
        self._outbox.send(messages.encode(message))


def fallback_calls(choices: Iterable[OpChoice]) -> dict[str, int]:
    """Op -> calls so far of its fallbacks; ops without one are left out."""
    calls: dict[str, int] = {}
    for choice in choices:
        if choice.implementation == "fallback":
            calls[choice.op] = calls.get(choice.op, 0) + choice.calls
    return calls


def main(folder: Path) -> int:
    """Load the model, then serve.

    Args:
        folder: where the sockets are.
    """
    leave_signals_to_parent()
    line = _read_line()
    if line == messages.FAREWELL or not line.endswith(b"\n"):  # the front is gone already
        _end(folder, line)
    start = messages.decode_start(line)
    threading.Thread(target=_end_with_front, args=(folder,), daemon=True).start()
    log_to_stderr(start.log_level, start.log_form)
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox, context.socket(zmq.PUSH) as outbox:
        for socket in (inbox, outbox):
            socket.set_hwm(0)  # bounded by the requests that are open
            socket.setsockopt(zmq.LINGER, LINGER_MS)
        # In this order, so that a message from here proves that both are connected: the front then removes the folder.
        inbox.connect(f"ipc://{folder}/to")
        outbox.connect(f"ipc://{folder}/from")
        outbox.send(messages.encode(messages.Connected()))
        try:
            _serve(start, inbox, outbox)
        except BaseException as error:
            if not isinstance(error, OctavoError):
                logger.exception("the engine process failed")
            outbox.send(messages.encode(messages.failed_of(error)))
            return 1
    return 0


def _serve(start: messages.Start, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
    from octavo.core.engine.engine import Engine  # imports torch: only now, when the front is being watched
    from octavo.core.engine.loading import open_model

    with open_model(start.config) as checkpoint:
        engine = Engine.from_checkpoint(start.config, checkpoint)
    try:
        EngineLoop(engine, inbox, outbox).run()
    finally:
        engine.close()


def _read_line() -> bytes:
    """A line of stdin, without what follows. (sys.stdin would take more, and its lock would hang the process's end.)"""
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(sys.stdin.fileno(), 1)):
        line += byte
    return bytes(line)


def _end_with_front(folder: Path) -> None:
    """Wait for the end of stdin, then end this process and what the front could not remove."""
    said = b""
    while piece := os.read(sys.stdin.fileno(), 4096):
        said += piece
    _end(folder, said)


def _end(folder: Path, said: bytes) -> NoReturn:
    shutil.rmtree(folder, ignore_errors=True)
    if said != messages.FAREWELL:
        with suppress(OSError, ValueError):
            announce(FRONT_DIED, logging.ERROR)
            sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
