"""`octavo chat` and `octavo complete` against a server that answers as it is told."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.core.base.errors import ConfigError
from octavo.core.cli.client import address_of
from octavo.core.cli.main import main
from octavo.core.cli.parser import Parser
from tests.cli.scripted_server import chat_chunk, events, scripted_server, text_chunk, usage_chunk

TLS = Path(__file__).parents[1] / "data" / "tls"


@pytest.fixture
def stdin(monkeypatch):
    def put(text, tty=False):
        stream = io.StringIO(text)
        stream.isatty = lambda: tty
        monkeypatch.setattr("sys.stdin", stream)

    return put


def answered(*parts, status=200, **options):
    """A server that gives every request the same answer."""
    return scripted_server(lambda number, body: (status, list(parts)), **options)


def hello():
    return answered(*events(chat_chunk("Hel"), chat_chunk("lo"), usage_chunk(3, 2)))


def refusal(message, status):
    return answered(json.dumps({"error": {"message": message}}).encode(), status=status)


def test_a_prompt_is_answered_and_only_what_was_given_is_asked_for(capsys):
    with hello() as server:
        words = ["--url", f"{server.url}/v1/", "--system", "Be brief.", "--temperature", "0.5", "--stop", "X"]
        assert main(["chat", "Hi", *words, "--api-key", "k1"]) == 0
    assert capsys.readouterr().out == "Hello\n"
    ((path, key, body),) = server.asked
    assert (path, key) == ("/v1/chat/completions", "Bearer k1")
    assert body == {
        "model": "scripted",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "temperature": 0.5,
        "stop": ["X"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_text_is_continued(capsys):
    with answered(*events(text_chunk(" upon"), text_chunk(" a time"))) as server:
        assert main(["complete", "Once", "--url", server.url, "--model", "other", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == " upon a time\n"
    ((path, _, body),) = server.asked
    assert path == "/v1/completions"
    assert (body["prompt"], body["model"], body["max_tokens"]) == ("Once", "other", 9)


def test_a_pipe_is_the_prompt_and_the_key_may_stand_in_the_variable(stdin, monkeypatch, capsys):
    monkeypatch.setenv("OCTAVO_API_KEY", "k1,k2")
    stdin("from a pipe\n")
    with hello() as server:
        assert main(["chat", "--url", server.url]) == 0
    _, key, body = server.asked[0]
    assert key == "Bearer k1"
    assert body["messages"] == [{"role": "user", "content": "from a pipe\n"}]


def test_an_empty_pipe_is_refused_before_anybody_is_asked(stdin, capsys):
    stdin("")
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 2
    assert "there is no prompt" in capsys.readouterr().err


def test_thoughts_stay_out_of_a_pipe(capsys):
    thoughts = [chat_chunk(None, reasoning="hm"), chat_chunk(None, reasoning_content="m"), chat_chunk("Yes")]
    with answered(*events(*thoughts)) as server:
        assert main(["chat", "Hi", "--url", server.url]) == 0
    assert capsys.readouterr().out == "Yes\n"


def test_a_terminal_does_not_obey_what_the_model_writes(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with answered(*events(chat_chunk("a\x1b]0;owned\x07\tb\nc\r"))) as server:
        assert main(["chat", "Hi", "--url", server.url]) == 0
    assert capsys.readouterr().out == "a]0;owned\tb\nc\n"


def test_a_conversation_remembers_and_obeys_its_commands(stdin, capsys):
    stdin("Hi\n\n/system Be kind.\nAgain\n/reset\n/what\nNew\n/system\n /plain\n", tty=True)
    with hello() as server:
        assert main(["chat", "--url", server.url, "--system", "Be brief."]) == 0
    turns = [[(turn["role"], turn["content"]) for turn in body["messages"]] for _, _, body in server.asked]
    assert turns == [
        [("system", "Be brief."), ("user", "Hi")],
        [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Again")],
        [("system", "Be kind."), ("user", "New")],
        [("user", "New"), ("assistant", "Hello"), ("user", " /plain")],
    ]
    assert "unknown command /what" in capsys.readouterr().err


def test_a_turn_that_fails_is_told_and_forgotten(stdin, capsys):
    def answer(number, body):
        if number == 0:
            return 200, [*events(chat_chunk("half"))[:1], None]
        if number == 1:
            return 429, [b'{"error": {"message": "too many"}}']
        return 200, events(chat_chunk("Hello"))

    stdin("One\nTwo\nThree\n", tty=True)
    with scripted_server(answer) as server:
        assert main(["chat", "--url", server.url]) == 0
    assert [turn["content"] for turn in server.asked[2][2]["messages"]] == ["Three"]
    told = capsys.readouterr().err
    assert "broke off" in told or "closed the connection" in told
    assert "too many (status 429)" in told


def test_nobody_answers(capsys):
    assert main(["chat", "Hi", "--url", "http://127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("octavo: error: nobody answers at http://127.0.0.1:9")
    assert "octavo serve MODEL" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(401, 2, "give --api-key or OCTAVO_API_KEY"), (400, 2, "no such thing (status 400)"), (503, 1, "status 503")],
)
def test_a_refusal_is_quoted(status, code, words, capsys):
    with refusal("no such thing", status) as server:
        assert main(["complete", "Hi", "--url", server.url]) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([b'data: {"error": {"message": "it failed"}}\n\n', b"data: [DONE]\n\n"], "it failed"),
        (events(chat_chunk("x"))[:1], "before the reply was complete"),
        ([*events(chat_chunk("x"))[:1], None], "broke off"),
        ([b"data: [1]\n\n"], "no object"),
        ([b"data: {\n\n"], "not JSON"),
    ],
)
def test_a_reply_that_breaks_off_is_no_reply(parts, words, capsys):
    with answered(*parts) as server:
        assert main(["chat", "Hi", "--url", server.url]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://host:99999", "http://h:x"])
def test_a_wrong_address_is_named(url):
    parser = Parser("octavo chat", None)
    parser.add_argument("--url")
    parser.add_argument("--api-key")
    parser.add_argument("--model")
    with pytest.raises(ConfigError, match="--url is"):
        address_of(parser.parse(["--url", url]), {})


def test_no_client_imports_torch_or_the_engine():
    code = (
        "import sys\n"
        "from octavo.core.cli.main import main\n"
        "calls = ['chat', 'Hi'], ['complete', 'Hi'], ['bench', 'serve', '--num-prompts', '1']\n"
        "code = sum(main([*call, '--url', sys.argv[1]]) for call in calls)\n"
        "sys.exit(code or bool({'torch', 'numpy', 'fastapi', 'octavo.core.engine'} & set(sys.modules)))"
    )
    with hello() as server:
        done = subprocess.run([sys.executable, "-c", code, server.url], timeout=60, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_no_proxy_stands_before_this_machine(monkeypatch, capsys):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with hello() as server:
        assert main(["chat", "Hi", "--url", server.url]) == 0
    assert capsys.readouterr().out == "Hello\n"


def test_a_server_may_stand_under_a_path(capsys):
    with hello() as server:
        assert main(["chat", "Hi", "--url", f"{server.url}/models/a/v1"]) == 0
    assert server.asked[0][0] == "/models/a/v1/chat/completions"


def test_without_its_extra_it_says_which(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "httpx", None)
    assert main(["chat", "Hi"]) == 2
    assert "pip install 'octavo[client]'" in capsys.readouterr().err


def test_https_is_spoken_where_the_certificate_is_trusted(monkeypatch, capsys):
    with answered(*events(chat_chunk("Hello")), certificate=(TLS / "cert.pem", TLS / "key.pem")) as server:
        assert main(["chat", "Hi", "--url", server.url]) == 1
        assert "SSL_CERT_FILE" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "cert.pem"))
        assert main(["chat", "Hi", "--url", server.url]) == 0
        assert main(["bench", "serve", "--url", server.url, "--num-prompts", "3", "--endpoint", "chat"]) == 0
    assert "3 done in" in capsys.readouterr().out
