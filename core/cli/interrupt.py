"""Ctrl-C while a command imports what it needs: the process ends at once, quietly.

Imports take seconds, and some make something else of KeyboardInterrupt: an extension module that another one imports
drops it, or fails with an ImportError that says nothing of it. Before they are done there is nothing to close.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""The exit code."""


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Round imports alone: Ctrl-C ends the process without a word.

    Nothing changes where somebody else sees to Ctrl-C, or ignores it, nor outside the main thread, which alone may say.
    """
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
