"""Server-sent events, however the bytes are cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from octavo.core.cli.sse import Event, EventReader

STREAM = (
    ": a comment\n\n"
    'data: {"a": 1}\r\n\r\n'
    "event: response.created\nid: 7\nretry: 10\ndata:no space\n\n"
    "data: ď😀\ndata: two\n\n"
    "data: [DONE]\n\n"
    "data: never ended"
).encode()
EVENTS = [
    Event("", '{"a": 1}'),
    Event("response.created", "no space"),
    Event("", "ď😀\ntwo"),
    Event("", "[DONE]"),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_every_cut_gives_the_same_events(cuts):
    reader, found, places = EventReader(), [], [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(places):
        found += reader.feed(STREAM[start:end])
    assert found == EVENTS


def test_an_event_without_data_still_has_its_name():
    assert EventReader().feed(b"event: ping\n\n\n\n") == [Event("ping", "")]


def test_bytes_that_are_not_utf8_end_nothing():
    assert EventReader().feed(b"data: \xff\n\n") == [Event("", "�")]
