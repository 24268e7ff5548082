"""Server-sent events, read from bytes as they come, however they are cut.

    b'data: {"a": 1}\n\ndata: [DO'  ──feed──►  [Event("", '{"a": 1}')]        the rest waits for its end
    b'NE]\n\n'                      ──feed──►  [Event("", "[DONE]")]

Source of the form: the HTML standard, "Server-sent events". Comments, ids and retry times are passed over.
"""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """One event.

    Attributes:
        name: what stands after `event:`; empty where nothing does.
        data: the data lines, joined by line feeds.
    """

    name: str
    data: str


class EventReader:
    """Owns what has come of the event that is not complete yet."""

    def __init__(self) -> None:
        self._unread = b""
        self._name = ""
        self._data: list[str] = []

    def feed(self, part: bytes) -> list[Event]:
        """The events that `part` completes, in order."""
        *lines, self._unread = (self._unread + part).split(b"\n")
        events: list[Event] = []
        for line in lines:
            text = line.removesuffix(b"\r").decode("utf-8", "replace")
            if text:
                self._read_line(text)
            elif self._data or self._name:
                events.append(Event(self._name, "\n".join(self._data)))
                self._name, self._data = "", []
        return events

    def _read_line(self, line: str) -> None:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
