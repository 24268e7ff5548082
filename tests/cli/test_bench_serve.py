"""`octavo bench serve`: requests, arrivals, figures, and that what it measures is what the server did."""

import json
import random
import statistics
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.base.errors import ConfigError
from octavo.core.cli.main import main
from octavo.core.cli.serving.figures import percentile, read_slos
from octavo.core.cli.serving.probe import Sample
from octavo.core.cli.serving.requests import Ask, Shape, arrival_seconds, generated, read_asks
from octavo.core.cli.serving.wire import BrokenReply, Chunks
from tests.cli.scripted_server import chat_chunk, events, scripted_server, text_chunk, usage_chunk

FIRST_S, GAP_S = 0.15, 0.05
SHAPE = Shape(input_tokens=20, output_tokens=8, spread=0.5, prefix_tokens=0, num_prefixes=1)


def three_texts():
    """A first text after FIRST_S, two more with GAP_S between; six tokens."""
    first, second, third, usage, done = events(*map(text_chunk, "abc"), usage_chunk(20, 6))
    return [FIRST_S, first, GAP_S, second, GAP_S, third, usage, done]


def bench(server, tmp_path, *words):
    """Run the command; the exit code and the JSON report."""
    path = tmp_path / "report.json"
    code = main(["bench", "serve", "--url", server.url, "--warmup", "0", "--json", str(path), *map(str, words)])
    return code, json.loads(path.read_text())


def test_what_is_measured_is_what_the_server_did(tmp_path, capsys):
    with scripted_server(lambda number, body: (200, three_texts())) as server:
        words = ["--num-prompts", 4, "--max-concurrency", 2, "--slo", "ttft=1000", "--slo", "tpot=1", "--details"]
        code, report = bench(server, tmp_path, *words)
    assert code == 0
    total_ms, gaps_ms, late_ms = 1e3 * (FIRST_S + 2 * GAP_S), 1e3 * 2 * GAP_S, 250
    assert 1e3 * FIRST_S <= report["ttft_ms"]["p50"] < 1e3 * FIRST_S + late_ms
    assert gaps_ms / 4 <= report["itl_ms"]["p50"] < gaps_ms / 2 + late_ms
    assert report["tpot_ms"]["mean"] == pytest.approx(2 * report["itl_ms"]["mean"] / 5, rel=0.01)
    assert total_ms <= report["e2e_ms"]["p50"] < total_ms + late_ms
    assert report["seconds"] >= 2 * total_ms / 1e3
    assert (report["completed"], report["failed"], report["in_tokens"], report["out_tokens"]) == (4, 0, 80, 24)
    assert report["goodput"]["share"] == 0
    assert report["client"]["waited_ms"]["max"] >= total_ms, "two had to wait for a place"
    assert [row["out_tokens"] for row in report["requests"]] == [6] * 4
    shown = capsys.readouterr().out
    assert "4 done" in shown
    assert "0.0% within ttft 1000 ms, tpot 1 ms" in shown


def test_no_more_are_in_flight_than_allowed(tmp_path):
    inside, most, lock = 0, 0, threading.Lock()

    def parts():
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        yield 0.03
        with lock:
            inside -= 1
        yield from events(text_chunk("a"), usage_chunk(1, 1))

    with scripted_server(lambda number, body: (200, parts())) as server:
        code, report = bench(server, tmp_path, "--num-prompts", 12, "--max-concurrency", 3)
    assert code == 0
    assert most == 3
    assert report["completed"] == 12


def test_requests_set_out_when_they_are_due_however_slow_the_server_is(tmp_path):
    came = []

    def answer(number, body):
        came.append(time.perf_counter())
        return 200, [0.5, *events(text_chunk("a"), usage_chunk(1, 1))]

    with scripted_server(answer) as server:
        words = ["--num-prompts", 6, "--request-rate", 20, "--arrivals", "constant"]
        code, report = bench(server, tmp_path, *words)
    assert code == 0
    assert came[-1] - came[0] < 0.45, "all were sent before the first was answered"
    assert statistics.median(later - earlier for earlier, later in pairwise(came)) == pytest.approx(0.05, abs=0.03)
    assert report["load"]["request_rate"] == 20


def test_failures_are_counted_by_their_cause_and_stay_out_of_the_figures(tmp_path, capsys):
    good, half = events(text_chunk("a"), usage_chunk(1, 1)), events(text_chunk("a"))
    answers = [
        (200, [0.2, *good]),
        (429, [b"{}"]),
        (200, [half[0], None]),
        (200, half[:1]),
        (200, [half[0], b'data: {"error": {"message": "x"}}\n\n', b"data: [DONE]\n\n"]),
        (200, [b"data: {\n\n", b"data: [DONE]\n\n"]),
        (200, [b"data: [DONE]\n\n"]),
        (200, [2.0, *good]),
    ]
    with scripted_server(lambda number, body: answers[number]) as server:
        code, report = bench(server, tmp_path, "--num-prompts", 8, "--max-concurrency", 1, "--timeout", 1)
    assert code == 0
    causes = {"status 429": 1, "broken off": 2, "error event": 1, "no JSON": 1, "no token": 1, "timeout": 1}
    assert report["errors"] == causes
    assert (report["completed"], report["failed"]) == (1, 7)
    assert report["ttft_ms"]["mean"] >= 200
    assert "7 failed" in capsys.readouterr().out


def test_nothing_answered_is_a_failure(tmp_path):
    with scripted_server(lambda number, body: (503, [b"{}"])) as server:
        code, report = bench(server, tmp_path, "--num-prompts", 2)
        assert (code, report["errors"], report["ttft_ms"]) == (1, {"status 503": 2}, {})
        assert main(["bench", "serve", "--url", server.url, "--num-prompts", "2"]) == 1, "the warm-up says so"


def test_the_warm_up_is_in_no_figure(tmp_path):
    with scripted_server(lambda number, body: (200, [0.4 if number < 3 else 0, *events(text_chunk("a"))])) as server:
        code, report = bench(server, tmp_path, "--num-prompts", 2, "--warmup", 3)
        prompts = [tuple(body["prompt"]) for _, _, body in server.asked]
    assert code == 0
    assert report["completed"] == 2
    assert report["ttft_ms"]["max"] < 400
    assert len(set(prompts)) == 5, "no cache knows the measured prompts from the warm-up"
    assert "the server sends no usage; tokens are counted as events with text" in report["notes"]


def test_what_came_from_the_servers_cache_is_told(tmp_path):
    usage = {"usage": {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 80}}}
    with scripted_server(lambda number, body: (200, events(text_chunk("a"), usage))) as server:
        _, report = bench(server, tmp_path, "--num-prompts", 2)
    assert report["cached_tokens"] == 160
    assert any("80% of the prompts' tokens were" in note for note in report["notes"])


def test_closing_is_in_no_latency(tmp_path):
    """A connection that stays open after the reply's end."""
    parts = [*events(text_chunk("a"), usage_chunk(1, 1)), 0.4]
    with scripted_server(lambda number, body: (200, parts)) as server:
        _, report = bench(server, tmp_path, "--num-prompts", 2)
    assert report["e2e_ms"]["max"] < 300


def test_chat_sends_texts_and_the_body_is_the_callers(tmp_path):
    thought = {"choices": [{"delta": {"reasoning": "hm"}}]}
    with scripted_server(lambda number, body: (200, events(thought, chat_chunk("a"), usage_chunk(9, 2)))) as server:
        words = ["--endpoint", "chat", "--num-prompts", 1, "--body", '{"top_k": 5, "temperature": 1}']
        code, report = bench(server, tmp_path, *words, "--api-key", "k", "--no-ignore-eos")
    assert code == 0
    ((path, key, body),) = server.asked
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    assert (body["top_k"], body["temperature"], body["max_tokens"]) == (5, 1, 128)
    assert len(body["messages"][0]["content"].split()) == 128
    assert "ignore_eos" not in body
    assert report["out_tokens"] == 2


def test_the_same_seed_asks_the_same_and_another_something_else():
    first, second = (generated(50, SHAPE, "asks 0", as_text=False) for _ in range(2))
    assert first == second
    assert not {tuple(ask.prompt) for ask in first} & {
        tuple(ask.prompt) for ask in generated(50, SHAPE, "asks 1", as_text=False)
    }
    assert {len(ask.prompt) for ask in first} <= set(range(10, 31))
    assert len({len(ask.prompt) for ask in first}) > 5
    assert all(4 <= ask.max_tokens <= 12 for ask in first)


def test_a_group_shares_its_prefix_and_nothing_more():
    shape = SHAPE._replace(prefix_tokens=30, num_prefixes=3, spread=0.0)
    asks = generated(40, shape, "asks 0", as_text=False)
    assert {len(ask.prompt) for ask in asks} == {50}
    assert len({tuple(ask.prompt[:30]) for ask in asks}) == 3
    assert len({tuple(ask.prompt[30:]) for ask in asks}) == 40


def test_poisson_arrivals_have_the_rate_and_the_spread_of_an_exponential():
    arrivals = arrival_seconds(20_000, 50.0, "x", poisson=True)
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.05)
    assert arrivals == arrival_seconds(20_000, 50.0, "x", poisson=True)
    assert arrival_seconds(3, float("inf"), "x", poisson=True) == [0, 0, 0]
    assert arrival_seconds(3, 2.0, "x", poisson=False) == [0, 0.5, 1.0]


FILES = {
    "sharegpt.json": [
        {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That and that."}]},
        {"conversations": [{"from": "human", "value": "Alone"}]},
        {"conversations": []},
    ],
    "ids.json": {"name": "w", "max_seqs": 2, "requests": [{"prompt": [5, 6], "new": 4}]},
    "one.json": {"prompt": "Hi", "max_tokens": 3},
}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("sharegpt.json", Ask("What?", 4)), ("ids.json", Ask([5, 6], 4)), ("one.json", Ask("Hi", 3))],
)
def test_files_of_every_form_are_read(tmp_path, name, wanted):
    path = tmp_path / name
    path.write_text(json.dumps(FILES[name]))
    assert read_asks(str(path), 10, None, "s", as_text=False) == [wanted]
    assert read_asks(str(path), 10, 7, "s", as_text=False) == [wanted._replace(max_tokens=7)]


def test_json_lines_are_drawn_by_the_seed(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{n}", "output_tokens": 2}) + "\n" for n in range(50)))
    drawn = read_asks(str(path), 10, None, "s", as_text=True)
    assert drawn == read_asks(str(path), 10, None, "s", as_text=True)
    assert len({ask.prompt for ask in drawn}) == 10
    assert drawn != read_asks(str(path), 10, None, "t", as_text=True)


@pytest.mark.parametrize("content", ["", "[]", "{", "[1]", '[{"prompt": ""}]', '[{"prompt": "x"}]', '{"prompt": 5}'])
def test_a_wrong_file_is_refused(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--workload"):
        read_asks(str(path), 1, None, "s", as_text=False)


def test_token_ids_can_not_be_chatted(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(FILES["ids.json"]))
    with pytest.raises(ConfigError, match="neither chat nor --text"):
        read_asks(str(path), 1, None, "s", as_text=True)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentiles_are_numpys(values, percent):
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-9)


def test_a_reply_of_one_token_has_no_tpot():
    sample = Sample(begun=1.0, connected=1.0, ended=3.0, texts=[2.0], out_tokens=1)
    assert (sample.ttft, sample.tpot, sample.gaps, sample.e2e) == (1.0, None, [], 2.0)


@given(st.lists(st.binary(min_size=1, max_size=30), max_size=8), st.integers(0, 2**32))
def test_chunked_bodies_come_through_however_they_are_cut(contents, seed):
    body = b"".join(f"{len(content):x};ext=1\r\n".encode() + content + b"\r\n" for content in contents)
    body += b"0\r\n\r\n"
    rng, framing, found = random.Random(seed), Chunks(), b""
    places = sorted(rng.randrange(len(body)) for _ in range(5))
    for start, end in pairwise([0, *places, len(body)]):
        assert not framing.ended or start == end
        found += framing.feed(body[start:end])
    assert framing.ended
    assert found == b"".join(contents)


def test_a_body_that_is_not_chunked_right_is_broken():
    with pytest.raises(BrokenReply):
        Chunks().feed(b"hello\r\n")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--request-rate", "0"], "--request-rate is 0"),
        (["--request-rate", "nan"], "--request-rate is nan"),
        (["--spread", "1.5"], "between 0 and 1"),
        (["--spread", "-0.5"], "between 0 and 1"),
        (["--body", "[]"], "--body"),
        (["--slo", "tft=5"], "did you mean"),
        (["--slo", "ttft=fast"], "NAME=MILLISECONDS"),
        (["--workload", "no-such-file"], "No such file"),
        (["--max-concurrency", "0"], "--max-concurrency is 0"),
    ],
)
def test_a_wrong_flag_is_one_line(words, error, capsys):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", *words]) == 2
    assert error in capsys.readouterr().err


def test_slos_are_read():
    assert read_slos(["ttft=500", "e2e=1e3"]) == {"ttft": 500.0, "e2e": 1000.0}
