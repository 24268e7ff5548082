"""KV events out of an engine, through real sockets, read as llm-d does."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import ConfigError
from octavo.core.base.params import SamplingParams
from octavo.core.engine.engine import Engine
from octavo.core.engine.kv_events.events import BlockStored, EventRecorder
from octavo.core.engine.kv_events.publisher import Publisher
from octavo.core.engine.wire import EngineRequest
from octavo.core.sched.kv_groups import KVGroupSpec
from octavo.core.sched.prefix import ContentHasher
from octavo.core.sched.request import Request
from tests.engine.kv_event_reader import END_SEQ, Cleared, Index, Removed, Stored, parse_frames, parse_payload, short
from tests.engine.worlds import NullWorld

BLOCK = 4
TOPIC = "kv@pod-1@null"


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


@dataclasses.dataclass
class Subscriber:
    """The two sockets of a reader."""

    sub: Any
    dealer: Any

    def live(self, count: int) -> list[tuple[str, int, bytes]]:
        """The next messages."""
        return [parse_frames(self._receive(self.sub)) for _ in range(count)]

    def nothing_more(self) -> bool:
        return not self.sub.poll(100)

    def replay(self, first: int) -> list[tuple[str, int, bytes]]:
        """Ask again, as llm-d does: a DEALER that sends an empty frame and eight bytes."""
        self.dealer.send_multipart([b"", first.to_bytes(8, "big")])
        given = []
        while True:
            delimiter, *frames = self._receive(self.dealer)
            assert delimiter == b""
            if len(frames) == 3 and not frames[2]:
                assert frames == [b"", END_SEQ, b""]
                return given
            given.append(parse_frames(frames))

    @staticmethod
    def _receive(socket_: Any) -> list[bytes]:
        assert socket_.poll(5000), "nothing came"
        frames: list[bytes] = socket_.recv_multipart()
        return frames


@pytest.fixture
def addresses() -> dict[str, Any]:
    live, replay = free_port(), free_port()
    return {"kv_events_endpoint": f"tcp://*:{live}", "kv_events_replay_endpoint": f"tcp://*:{replay}",
            "kv_events_topic": TOPIC}  # fmt: skip


@contextlib.contextmanager
def subscribed(addresses: dict[str, Any], topic: bytes = b"kv@") -> Iterator[Subscriber]:
    """A subscriber to publishers at these addresses; wait for its place before anything is published."""
    context = zmq.Context()
    sub, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        sub.setsockopt(zmq.SUBSCRIBE, topic)
        sub.connect(addresses["kv_events_endpoint"].replace("*", "127.0.0.1"))
        dealer.connect(addresses["kv_events_replay_endpoint"].replace("*", "127.0.0.1"))
        yield Subscriber(sub, dealer)
    finally:
        context.destroy(linger=0)


def settle(publisher: Publisher, reader: Subscriber) -> int:
    """Publish until the subscriber is heard by the publisher; returns the next seq."""
    deadline = time.monotonic() + 5
    while not reader.sub.poll(20):
        assert time.monotonic() < deadline
        publisher.put(b"hello")
    while reader.sub.poll(100):
        ((_, last, _),) = reader.live(1)
    return last + 1


@pytest.fixture
def engine(null: NullWorld, addresses: dict[str, Any]) -> Iterator[Engine]:
    made = null.engine(block_size=BLOCK, num_kv_blocks=13, max_num_seqs=4, max_model_len=32, **addresses)
    yield made
    made.close()


def run(engine: Engine, request_id: str, prompt: list[int], max_tokens: int = 4, **fields: Any) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.add_request(EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params, **fields))
    while engine.has_work():
        engine.step()


def cached(engine: Engine) -> set[tuple[int, bytes]]:
    pool = engine._blocks._pool
    return {(group, content) for group in range(len(engine._blocks.groups)) for content in pool.index_of(group)}


# ---------------------------------------------------------------------------------------------- an engine's events


def test_a_reader_follows_an_engine(engine: Engine, addresses: dict[str, Any]) -> None:
    with subscribed(addresses) as reader:
        for i in range(6):  # more than the pool holds: the oldest go
            run(engine, f"r{i}", [10 * i + j for j in range(1, 10)])
        engine.reset_prefix_cache()
        run(engine, "last", [1, 2, 3, 4, 5])
        batches = reader.replay(0)
    assert [seq for _, seq, _ in batches] == list(range(len(batches)))
    assert {topic for topic, _, _ in batches} == {TOPIC}
    index, kinds = Index(), set()
    for _, _, payload in batches:
        for event in parse_payload(payload):
            kinds.add(type(event))
            index.apply(event)
    assert kinds == {Stored, Removed, Cleared}
    assert index.cached == cached(engine) != set()


def test_a_prompt_is_one_event_and_its_reply_goes_on_from_it(engine: Engine, addresses: dict[str, Any]) -> None:
    prompt = list(range(1, 10))
    with subscribed(addresses) as reader:
        run(engine, "r", prompt, max_tokens=8)
        events = [event for _, _, payload in reader.replay(0) for event in parse_payload(payload)]
    first, *others = events
    assert isinstance(first, Stored)
    assert (first.tokens, first.block_size, first.parent) == (prompt[:8], BLOCK, None)
    assert (first.lora_id, first.lora_name, first.extra_keys) == (None, None, None)
    assert (first.group, first.kind, first.window) == (0, "full_attention", None)
    parent = first.hashes[-1]
    assert len(others) == 2
    for event in others:
        assert isinstance(event, Stored)
        assert event.parent == parent
        parent = event.hashes[-1]
    assert others[0].tokens[0] == prompt[8]


def test_a_prefix_hit_is_not_told_again(engine: Engine, addresses: dict[str, Any]) -> None:
    with subscribed(addresses) as reader:
        run(engine, "a", list(range(1, 10)), max_tokens=1)
        run(engine, "b", list(range(1, 10)), max_tokens=1)
        assert len(reader.replay(0)) == 1


def test_a_salt_is_among_the_keys_of_the_first_block(engine: Engine, addresses: dict[str, Any]) -> None:
    with subscribed(addresses) as reader:
        run(engine, "a", list(range(1, 10)), max_tokens=1)
        run(engine, "b", list(range(1, 10)), max_tokens=1, cache_salt="s")
        plain, salted = [event for _, _, payload in reader.replay(0) for event in parse_payload(payload)]
    assert isinstance(plain, Stored)
    assert isinstance(salted, Stored)
    assert salted.extra_keys == [["s"], None]
    assert {short(content) for content in plain.hashes}.isdisjoint(short(content) for content in salted.hashes)


def test_groups_with_windows_say_which_they_are(null: NullWorld, addresses: dict[str, Any]) -> None:
    facts = {"windows": [None, 8]}
    engine = null.engine(facts, block_size=BLOCK, num_kv_blocks=64, max_num_seqs=2, max_model_len=64, **addresses)
    try:
        with subscribed(addresses) as reader:
            run(engine, "r", list(range(1, 30)), max_tokens=4)
            events = [event for _, _, payload in reader.replay(0) for event in parse_payload(payload)]
        stored = [event for event in events if isinstance(event, Stored)]
        kinds = {(event.group, event.kind, event.window) for event in stored}
        assert {kind for _, kind, _ in kinds} == {"full_attention", "sliding_window"}
        assert {window for _, kind, window in kinds if kind == "sliding_window"} == {8}
        index = Index()
        for event in events:
            index.apply(event)
        assert index.cached == cached(engine)
    finally:
        engine.close()


def test_an_adapter_is_told_by_name_and_a_rotary_offset_by_key() -> None:
    recorder = EventRecorder({"digest": "french"}.__getitem__)
    request = Request("r", list(range(8)), SamplingParams(), cache_salt="s", adapter_id="digest")
    request.rotary_offset = 4096
    chain = ContentHasher("sha256", "float32").chain(request, BLOCK)
    for index in range(2):
        recorder.stored(KVGroupSpec(0, BLOCK, None, 1), request, index, chain)
    (event,) = recorder.take()
    assert isinstance(event, BlockStored)
    assert event.lora_name == "french"
    assert event.extra_keys == [["s", "rotary_offset=4096"], None]
    # What docs/kv-events.md says of the first hash.
    root = hashlib.sha256(repr(("float32", "digest", "s", 4096)).encode()).digest()
    assert event.block_hashes[0] == hashlib.sha256(root + struct.pack("<4q", 0, 1, 2, 3)).digest()
    assert recorder.take() == []


# ---------------------------------------------------------------------------------------------------- the sockets


def config_of(**fields: Any) -> EngineConfig:
    return EngineConfig(model="m", **fields)


def test_live_messages_and_what_was_missed(addresses: dict[str, Any]) -> None:
    publisher = Publisher(config_of(**addresses))
    try:
        with subscribed(addresses) as reader:
            seq = settle(publisher, reader)
            for i in range(3):
                publisher.put(b"%d" % i)
            assert reader.live(3) == [(TOPIC, seq + i, b"%d" % i) for i in range(3)]
            assert reader.replay(seq + 1) == [(TOPIC, seq + i, b"%d" % i) for i in (1, 2)]
            assert reader.replay(seq + 3) == []
    finally:
        publisher.close()


def test_another_topic_hears_nothing(addresses: dict[str, Any]) -> None:
    publisher = Publisher(config_of(**addresses))
    try:
        with subscribed(addresses) as reader, subscribed(addresses, topic=b"other") as other:
            settle(publisher, reader)
            assert other.nothing_more()
    finally:
        publisher.close()


def test_the_ring_keeps_the_newest(addresses: dict[str, Any]) -> None:
    publisher = Publisher(config_of(kv_events_buffer_steps=5, **addresses))
    try:
        for i in range(12):
            publisher.put(b"%d" % i)
        with subscribed(addresses) as reader:
            assert [seq for _, seq, _ in reader.replay(0)] == [7, 8, 9, 10, 11]
    finally:
        publisher.close()


def test_a_whole_ring_is_given_again_however_slowly_it_is_read(addresses: dict[str, Any]) -> None:
    publisher = Publisher(config_of(**addresses))
    try:
        for i in range(10_500):
            publisher.put(b"%d" % i)
        with subscribed(addresses) as reader:
            reader.dealer.set_hwm(1)
            reader.dealer.send_multipart([b"", bytes(8)])
            time.sleep(0.3)
            seqs = []
            while (frames := reader._receive(reader.dealer))[-1]:
                seqs.append(int.from_bytes(frames[2], "big"))
        assert seqs == list(range(500, 10_500))
    finally:
        publisher.close()


@pytest.mark.parametrize("frames", [[b""], [b"", b"short"], [b"", bytes(9)], [b"x", bytes(8)], [b"", bytes(8), b""]])
def test_what_is_no_request_gets_no_answer_and_does_no_harm(addresses: dict[str, Any], frames: list[bytes]) -> None:
    publisher = Publisher(config_of(**addresses))
    try:
        publisher.put(b"0")
        with subscribed(addresses) as reader:
            reader.dealer.send_multipart(frames)
            assert not reader.dealer.poll(100)
            assert reader.replay(0) == [(TOPIC, 0, b"0")]
    finally:
        publisher.close()


def test_a_subscriber_that_does_not_read_never_makes_the_engine_wait(addresses: dict[str, Any]) -> None:
    publisher = Publisher(config_of(kv_events_hwm=10, kv_events_buffer_steps=100, **addresses))
    try:
        with subscribed(addresses) as reader:
            settle(publisher, reader)
            payload = bytes(100_000)
            slowest = 0.0
            for _ in range(2_000):  # 200 MB, far beyond what sockets hold
                began = time.perf_counter()
                publisher.put(payload)
                slowest = max(slowest, time.perf_counter() - began)
            assert slowest < 1.0
            seqs = []
            while reader.sub.poll(300):
                seqs.append(reader.live(1)[0][1])
            gaps = [b - a for a, b in itertools.pairwise(seqs) if b - a != 1]
            assert gaps or len(seqs) < 2_000  # it lost some, and can tell
            assert seqs == sorted(seqs)
    finally:
        publisher.close()


def test_a_taken_address_is_one_clear_error_before_anything_is_loaded(
    null: NullWorld, addresses: dict[str, Any]
) -> None:
    with contextlib.closing(Publisher(config_of(**addresses))):
        for field in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            other = {"kv_events_endpoint": f"tcp://*:{free_port()}"} | {field: addresses[field]}
            with pytest.raises(ConfigError, match=rf"{field}: cannot use tcp://\*:\d+ \(Address already in use\)"):
                null.engine(**other)
    assert null.backends == []


@pytest.mark.parametrize("address", ["nonsense", "tcp://*", "inproc:"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Publisher(config_of(kv_events_endpoint=address))
    assert caught.value.field == "kv_events_endpoint"


def test_addresses_are_free_again_afterwards(null: NullWorld, addresses: dict[str, Any]) -> None:
    for _ in range(2):
        null.engine(**addresses).close()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"kv_events_replay_endpoint": "tcp://*:1"}, "kv_events_replay_endpoint"),
        ({"kv_events_endpoint": "tcp://*:1", "enable_prefix_caching": False}, "kv_events_endpoint"),
        ({"kv_events_buffer_steps": 0}, "kv_events_buffer_steps"),
    ],
)
def test_settings_that_can_not_be(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(**fields).validate()
    assert caught.value.field == field


def test_without_an_address_there_is_no_observer(null: NullWorld) -> None:
    engine = null.engine()
    assert engine._blocks._observer is None
    engine.close()


def test_it_connects_to_a_host_that_is_named() -> None:
    port = free_port()
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        sub.bind(f"tcp://127.0.0.1:{port}")
        publisher = Publisher(config_of(kv_events_endpoint=f"tcp://127.0.0.1:{port}"))
        try:
            deadline = time.monotonic() + 5
            while not sub.poll(20):
                assert time.monotonic() < deadline
                publisher.put(b"hello")
            assert sub.recv_multipart()[2] == b"hello"
        finally:
            publisher.close()
