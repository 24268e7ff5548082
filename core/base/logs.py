"""What Octavo's processes say on stderr: lines for people, or one JSON object a line for machines.

    text   octavo: the message
    json   {"time": …, "level": …, "logger": …, "message": …, <fields of the record>, "error": …, "traceback": …}

A record's fields are what its caller passed as extra={"fields": {…}}. Logging belongs to the process: programs set it
up once, at their beginning, and tell the processes that they start how (`form_in_use`).
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

FORMS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")


class JsonFormatter(logging.Formatter):
    """One JSON object for each record.

    Args:
        facts: in every line.
    """

    def __init__(self, **facts: Any) -> None:
        super().__init__()
        self._facts = facts

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._facts,
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = chain_of(record.exc_info[1])
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def chain_of(error: BaseException) -> list[str]:
    """An error and what caused it, the cause last."""
    chain: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        chain.append(f"{type(current).__name__}: {current}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain


def log_to_stderr(level: int, form: str = "text", *, rank: int | None = None) -> None:
    """Show what Octavo has to say from this level on, and only warnings of libraries.

    Args:
        form: one of FORMS.
        rank: of a process that is one of several.
    """
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JsonFormatter() if rank is None else JsonFormatter(rank=rank))
    else:
        handler.setFormatter(logging.Formatter(f"octavo: {'' if rank is None else f'rank {rank}: '}%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("octavo").setLevel(level)


def form_in_use() -> str:
    """The form in which this process logs."""
    return "text" if _json_handler() is None else "json"


def announce(message: str, level: int = logging.INFO) -> None:
    """Say what must be said whatever the level: that the server serves, or why it ends.

    Whoever reads stderr may be gone, its disk full; that stops nothing.
    """
    handler = _json_handler()
    if handler is None:
        with suppress(OSError):
            sys.stderr.write(f"octavo: {message}\n")
    else:
        handler.handle(logging.LogRecord("octavo", level, "", 0, message, (), None))


def _json_handler() -> logging.Handler | None:
    handlers = logging.getLogger().handlers
    return next((handler for handler in handlers if isinstance(handler.formatter, JsonFormatter)), None)
