"""One rank's process: a worker behind a socket. The engine runs `python -m octavo.core.engine.rank_process FD`.

    Begin ──> Worker (with its part of the model) ── Loaded ──>
    Step  ──> take in what was drawn, run the step ── Stepped ──>        … until the engine hangs up

Whatever goes wrong is told in a Failed and ends the process; the engine then ends the others. When the engine is gone
this process ends as well, soon and whatever it does: a rank that waits for a lost one must not outlive them.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from contextlib import suppress

from octavo.core.base.child import ends_with, leave_signals_to_parent, receive, send
from octavo.core.base.errors import OctavoError, UserError
from octavo.core.base.logs import log_to_stderr
from octavo.core.engine import rank_messages as messages
from octavo.core.engine.loading import open_model
from octavo.core.engine.messages import failed_of
from octavo.core.engine.worker import Worker

logger = logging.getLogger(__name__)


def main(fd: int) -> int:
    """Load this rank's part of the model, then run steps until the engine hangs up."""
    leave_signals_to_parent()
    os.set_inheritable(fd, False)  # whoever holds a copy keeps the engine from noticing this process's end
    with socket.socket(fileno=fd) as engine:
        ends_with(engine)
        try:
            _serve(engine)
        except ConnectionError:
            return 0
        except BaseException as error:
            if not isinstance(error, OctavoError):
                logger.exception("this rank failed")
            with suppress(ConnectionError):
                send(engine, messages.encode(failed_of(error)))
            return 1
    return 0


def _serve(engine: socket.socket) -> None:
    """Answer each message. Raises ConnectionError when the engine is gone."""
    begin = messages.decode_to_rank(receive(engine))
    assert isinstance(begin, messages.Begin)
    log_to_stderr(begin.log_level, begin.log_form, rank=begin.place.rank)
    with open_model(begin.config) as checkpoint:
        worker = Worker(begin.config, checkpoint, begin.place)
    send(engine, messages.encode(_loaded(worker)))
    while True:
        send(engine, messages.encode(_answer(worker, messages.decode_to_rank(receive(engine)))))


def _loaded(worker: Worker) -> messages.Loaded:
    return messages.Loaded(
        worker.sizes, worker.vocab_size, worker.kv_groups, worker.num_kv_blocks, dict(worker.first_adapters)
    )


def _answer(worker: Worker, message: messages.ToRank) -> messages.FromRank:
    match message:
        case messages.Step():
            worker.take_drawn(message.drawn)
            return messages.stepped_of(worker.execute(message.scheduled))
        case messages.ReportOps():
            return messages.report_of(worker.op_choices())
        case messages.LoadAdapter():
            return _read_adapter(worker, message.path)
        case messages.ForgetAdapter():
            worker.forget_adapter(message.adapter_id)
            return messages.AdapterForgotten()
        case _:
            raise AssertionError(f"{type(message).__name__} comes once, at first")


def _read_adapter(worker: Worker, path: str) -> messages.AdapterRead:
    """What is wrong with an adapter ends nobody."""
    try:
        return messages.AdapterRead(worker.load_adapter(path), None)
    except UserError as error:
        return messages.AdapterRead(None, failed_of(error))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
