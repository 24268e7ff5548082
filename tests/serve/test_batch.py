"""`octavo run-batch`: every line has its answer; an interrupt, a bad line or a dead engine cost no other line."""

import asyncio
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.base.errors import ConfigError, EngineDead
from octavo.core.cli.main import main
from octavo.core.serve.batch.lines import URLS, BadLine, Job, answer_line, error_line, fingerprint, read_jobs
from octavo.core.serve.batch.output import BatchOutput
from octavo.core.serve.batch.run import Counts, post, run_batch

CHAINS = [
    "--tokenizer", "smollm2", "--max-model-len", "2048", "--num-threads", "1", "--no-progress", "--num-kv-blocks",
    "500", "--served-model-name", "tiny",
]  # fmt: skip


def line(custom_id, url="/v1/completions", **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tiny", **body}}


def letters(custom_id, **fields):
    """A request that is answered with "DEFGH ok"."""
    return line(custom_id, prompt="ABC", temperature=0, **fields)


def write(path, lines):
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def results(path):
    """The output's lines by custom_id."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert all(set(each) == {"id", "custom_id", "response", "error"} for each in lines)
    assert len({each["id"] for each in lines}) == len(lines)
    return {each["custom_id"]: each for each in lines}


def batch(tmp_path, model, lines, *words):
    """Run the command on some lines; the exit code and the results."""
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    code = main(["run-batch", "-i", str(source), "-o", str(target), str(model), *words])
    return code, results(target)


# -- with a model ---------------------------------------------------------------------------------------


def test_every_line_has_its_own_answer_and_a_bad_one_harms_no_other(tmp_path, chain_model, monkeypatch, capsys):
    monkeypatch.setenv("OCTAVO_API_KEY", "a-key-for-servers")
    lines = [
        letters("good"),
        "",
        "{not json",
        letters("good"),
        line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], temperature=0),
        line("response", "/v1/responses", input="Hi", temperature=0),
        line("wrong", prompt="ABC", temperature=-1),
        line("other model", prompt="ABC") | {"body": {"model": "gpt-4o", "prompt": "ABC"}},
        line("elsewhere", "/v1/load_lora_adapter"),
        line("streams", prompt="ABC", stream=True),
        line("got", prompt="ABC") | {"method": "GET"},
        {"custom_id": "no body", "url": "/v1/completions"},
        {"url": "/v1/completions", "body": {}},
        line("no vectors", "/v1/embeddings", input="x"),
    ]
    code, found = batch(tmp_path, chain_model, lines, *CHAINS)
    assert code == 0
    good = found.pop("chat")["response"]
    assert (good["status_code"], good["body"]["choices"][0]["message"]["content"]) == (200, " Hello!")
    assert good["request_id"]
    assert found.pop("response")["response"]["body"]["output"][-1]["content"][0]["text"] == " Hello!"
    statuses = {name: each["response"]["status_code"] for name, each in found.items() if each["response"]}
    assert statuses == {"wrong": 400, "other model": 404, "no vectors": 400} | (
        {"good": 200} if found["good"]["response"] else {}
    )
    assert "temperature" in found["wrong"]["response"]["body"]["error"]["message"]
    codes = {name: each["error"]["code"] for name, each in found.items() if each["error"] and name != "good"}
    assert codes == {
        "elsewhere": "unknown_url",
        "streams": "invalid_request",
        "got": "invalid_request",
        "no body": "invalid_request",
        None: codes[None],
    }
    texts = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    twice = [each for each in texts if each["custom_id"] == "good"]
    assert sorted(each["error"]["code"] if each["error"] else "" for each in twice) == ["", "duplicate_custom_id"]
    (answered,) = (each["response"] for each in twice if each["response"])
    assert answered["body"]["choices"][0]["text"] == "DEFGH ok"
    assert len(texts) == len(lines) - 1, "each but the empty one"
    told = capsys.readouterr().err
    assert "3 answered, 10 refused or failed" in told
    assert "/v1/completions" not in told, "no line for each request"
    assert not (tmp_path / "out.jsonl.part").exists()


def test_many_lines_with_few_in_flight(tmp_path, chain_model):
    lines = [letters(f"n{number}", max_tokens=1 + number % 4) for number in range(60)]
    code, found = batch(tmp_path, chain_model, lines, *CHAINS, "--max-in-flight", "5")
    assert code == 0
    assert len(found) == 60
    for number in range(60):
        usage = found[f"n{number}"]["response"]["body"]["usage"]
        assert usage["completion_tokens"] == 1 + number % 4


def test_vectors_scores_and_ranks(tmp_path):
    lines = [
        line("e", "/v1/embeddings", input=["a b", "c"]),
        line("s", "/v1/score", text_1="a loaf", text_2=["bread", "shares"]),
        line("r", "/v1/rerank", query="a loaf", documents=["bread", "shares"]),
        letters("no text"),
    ]
    code, found = batch(tmp_path, "minilm", lines, "--num-threads", "1", "--no-progress", "--served-model-name", "tiny")
    assert code == 0
    assert [each["index"] for each in found["e"]["response"]["body"]["data"]] == [0, 1]
    scores = {each["index"]: each["score"] for each in found["s"]["response"]["body"]["data"]}
    ranks = {each["index"]: each["relevance_score"] for each in found["r"]["response"]["body"]["results"]}
    assert scores == pytest.approx(ranks)
    assert found["no text"]["response"]["status_code"] == 400


class Running:
    """The command in a process of its own."""

    def __init__(self, source, target, model, *words):
        self.part = target.with_name(target.name + ".part")
        command = [sys.executable, "-m", "octavo", "run-batch", "-i", source, "-o", target, model, *CHAINS, *words]
        environ = {**os.environ, "PYTHONPATH": "src"}
        self.process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True, env=environ)

    def wait_for_lines(self, count):
        deadline = time.monotonic() + 60
        while not self.part.exists() or self.part.read_bytes().count(b"\n") < count:
            assert time.monotonic() < deadline
            assert self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.01)

    def ended(self):
        _, told = self.process.communicate(timeout=60)
        return self.process.returncode, told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_is_done_when_it_is_stopped_is_kept_and_not_done_again(tmp_path, chain_model, number, capsys):
    lines = [line(f"n{n}", prompt="Loop", max_tokens=200, temperature=0) for n in range(40)]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    target.write_text("the results of last week\n")
    running = Running(source, target, chain_model, "--max-in-flight", "2")
    running.wait_for_lines(4)
    running.process.send_signal(number)
    code, told = running.ended()
    assert target.read_text() == "the results of last week\n", "it is replaced by a whole file only"
    if number != signal.SIGKILL:
        assert code == 130
        assert "go on from them with --resume" in told
    part = Path(running.part)
    kept = {each["custom_id"]: each["id"] for each in map(json.loads, part.read_text().splitlines())}
    assert 4 <= len(kept) < 40

    words = ["run-batch", "-i", str(source), "-o", str(target), str(chain_model), *CHAINS]
    assert main(words) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    found = results(target)
    assert set(found) == {f"n{n}" for n in range(40)}
    assert {name: found[name]["id"] for name in kept} == kept
    assert f"{40 - len(kept)} answered and {len(kept)} before, 0 refused" in capsys.readouterr().err


# -- without one ----------------------------------------------------------------------------------------


def jobs_of(text, limit=10_000, done=()):
    return list(read_jobs(io.BytesIO(text), URLS, limit, done))


def test_a_line_that_is_too_long_is_passed_over_unread():
    long = b'{"custom_id": "' + b"a" * 5000 + b'"}\n'
    good = json.dumps(line("b")).encode() + b"\n"
    found = jobs_of(long + good + long[:-1], limit=1000)
    assert [type(each) for each in found] == [BadLine, Job, BadLine]
    assert [each.line for each in found] == [1, 2, 3]
    assert found[0].code == "line_too_long"


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_any_bytes_are_lines(texts):
    found = jobs_of(b"\n".join(texts), limit=40)
    assert len(found) == sum(bool(each.strip()) or len(each) > 40 for each in b"\n".join(texts).split(b"\n"))
    for each in found:
        if isinstance(each, BadLine):
            assert json.loads(error_line(each))["error"]["code"] == each.code


def test_errors_name_the_line_and_never_echo_it():
    (bad,) = jobs_of(b'{"custom_id": "a", "url": "/v1/secret", "body": {}}\n')
    assert "line 1" in bad.message
    assert "secret" not in bad.message


def test_what_is_done_is_not_asked_again():
    text = b"".join(json.dumps(line(name)).encode() + b"\n" for name in "abc")
    assert [job.custom_id for job in jobs_of(text, done={fingerprint("b")})] == ["a", "c"]


def job(custom_id):
    return Job(1, custom_id, "/v1/completions", b"{}")


def test_a_part_keeps_answers_alone(tmp_path):
    part = tmp_path / "out.part"
    good = [answer_line(job(name), 200, "r", b'{"x": 1}') for name in ("a", "b", "ď")]
    failed = answer_line(job("c"), 503, "r", b"{}")
    part.write_bytes(failed + good[0] + b"not json\n" + good[1] + good[0] + failed + good[2] + good[1][:-9])
    output = BatchOutput(tmp_path / "out", resume=True)
    assert output.done == {fingerprint(name) for name in ("a", "b", "ď")}
    output.write(failed)
    output.finish()
    assert (tmp_path / "out").read_bytes() == b"".join(good) + failed
    assert not part.exists()


def test_a_part_is_written_by_one_process_at_a_time(tmp_path):
    with open(tmp_path / "out.part", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process"):
            BatchOutput(tmp_path / "out", resume=True)


def test_a_part_without_a_line_does_not_stay(tmp_path):
    BatchOutput(tmp_path / "out", resume=False).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["/dev/null", "no-such-directory/out", "."])
def test_an_output_that_can_not_be_written_is_named(tmp_path, place):
    with pytest.raises(ConfigError, match=r"no file|No such file"):
        BatchOutput(tmp_path / place, resume=False)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "out").symlink_to(tmp_path / "real")
    BatchOutput(tmp_path / "out", resume=False).finish()
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "real").read_bytes() == b""


def test_no_more_is_read_than_is_in_flight(tmp_path):
    read, most = 0, 0

    def jobs():
        nonlocal read
        for number in range(50):
            read += 1
            yield job(str(number))

    ended = 0

    async def app(scope, receive, send):
        nonlocal most, ended
        most = max(most, read - ended)
        await asyncio.sleep(0.001)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})
        ended += 1

    output, counts = BatchOutput(tmp_path / "out", resume=False), Counts()
    asyncio.run(run_batch(app, jobs(), output, counts, max_in_flight=7, cause_of_end=lambda: None))
    output.finish()
    assert counts.answered == 50
    assert most == 7


def test_a_dead_engine_ends_the_batch_and_its_refusal_is_no_answer(tmp_path):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    output = BatchOutput(tmp_path / "out", resume=False)
    with pytest.raises(EngineDead, match="out of memory"):
        asyncio.run(
            run_batch(
                app, iter([job("a")]), output, Counts(), max_in_flight=3, cause_of_end=lambda: "out of memory"
            )
        )  # fmt: skip
    output.close()
    assert not (tmp_path / "out.part").exists()


def test_what_the_app_fails_at_is_an_answer():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 500, "headers": [(b"x-request-id", b"r1")]})
        await send({"type": "http.response.body", "body": b'{"error"', "more_body": True})
        await send({"type": "http.response.body", "body": b": 1}"})
        raise RuntimeError("as servers are told")

    assert asyncio.run(post(app, "/v1/completions", b"{}")) == (500, "r1", b'{"error": 1}')


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["-i", "no-such-file", "-o", "out"], "--input-file no-such-file"),
        (["-i", "in", "-o", "./in"], "the same file"),
        (["-o", "out"], "-i"),
        (["-i", "in", "-o", "out", "--max-in-flight", "0"], "--max-in-flight is 0"),
        (["-i", "in", "-o", "out", "--port", "1"], "unknown flag '--port'"),
    ],
)
def test_a_wrong_call_is_one_line(tmp_path, monkeypatch, words, error, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("")
    assert main(["run-batch", "smollm2", *words]) == 2
    assert error in capsys.readouterr().err
