"""How far a run has come, on stderr: one line that is overwritten in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from octavo.conformance.harness.result import BAD, CaseResult

QUIET_S = 20.0
"""Between two lines of a log."""


class ProgressLine:
    """Tell `case` of every case that ends. A context manager: leaves a clean line behind."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._bad = 0
        self._told = time.monotonic()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._clear()

    def case(self, result: CaseResult, done: int, total: int) -> None:
        """Show the case if it is bad, and how far the run is."""
        if result.status in BAD:
            self._bad += 1
            self._clear()
            self._stream.write(f"{result.name}: {result.status}: {result.detail}\n")
        now = time.monotonic()
        text = f"{done}/{total} cases, {self._bad} bad  {result.name}"
        if self._is_terminal:
            self._stream.write(f"\r\x1b[K{text[:100]}")
        elif now - self._told >= QUIET_S:
            self._told = now
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def _clear(self) -> None:
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
