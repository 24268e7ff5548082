"""Who may come in: keys, origins, a full queue, a body too large, HTTPS, and what an orchestrator is told."""

from __future__ import annotations

import dataclasses
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest
from starlette.datastructures import Headers

from octavo.core.base.config import ServeConfig
from octavo.core.base.errors import ConfigError
from octavo.core.serve import keys
from octavo.core.serve.keys import Keys, read_keys
from octavo.core.serve.tls import check_certificate
from tests.fakes.chains import FOREVER
from tests.serve.conftest import Server, error_of

TLS = Path(__file__).parents[1] / "data" / "tls"
"""A certificate for localhost with its key, good for a hundred years and for nothing but these tests."""


@pytest.fixture(scope="module")
def guarded(chain_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys from both places, one request at a time, and little patience."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# the team's\nfrom-file\n\n")
    settings = ServeConfig(
        api_key=("first", "second"),
        api_key_file=str(file),
        cors_origins=("https://a.example",),
        max_body_bytes=4096,
        max_queued_requests=2,
    )
    made = Server(str(chain_model), settings, tokenizer="smollm2", max_num_seqs=1)
    with made:
        yield made


@pytest.mark.parametrize("key", ["first", "second", "from-file"])
def test_each_key_opens_the_door(guarded: Server, key: str) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0)
    assert client.models.list().data[0].id == "tiny"
    assert client.completions.create(model="tiny", prompt="Loop", max_tokens=2, temperature=0).choices[0].text
    assert httpx.get(f"{guarded.url}/v1/models", headers={"x-api-key": key}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "first"},
        {"authorization": "Basic first"},
        {"x-api-key": ""},
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/version", "/docs", "/openapi.json", "/no/such/path"])
def test_without_a_key_nothing_opens_but_the_probes(guarded: Server, headers: dict[str, str], path: str) -> None:
    response = httpx.get(f"{guarded.url}{path}", headers=headers)
    assert error_of(response, 401)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    assert [httpx.get(f"{guarded.url}{probe}", headers=headers).status_code for probe in ("/health", "/ready")] == [
        200
    ] * 2


def test_pages_of_known_origins_may_call(guarded: Server) -> None:
    """9router#3659: browsers ask first, without the key, whether they may send it."""

    def asked(origin: str) -> httpx.Response:
        headers = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        return httpx.options(f"{guarded.url}/v1/completions", headers=headers)

    known, unknown = asked("https://a.example"), asked("https://b.example")
    assert (known.status_code, unknown.status_code) == (200, 400)
    assert known.headers["access-control-allow-origin"] == "https://a.example"
    assert known.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "access-control-allow-origin" not in unknown.headers
    assert "access-control-allow-credentials" not in known.headers
    refused = httpx.get(f"{guarded.url}/v1/models", headers={"origin": "https://a.example"})
    assert "x-request-id" in refused.headers["access-control-expose-headers"]
    assert error_of(refused, 401)
    assert refused.headers["access-control-allow-origin"] == "https://a.example", "the page could not read why"


def test_a_body_too_large(guarded: Server) -> None:
    fields = {"model": "tiny", "prompt": "x" * 5000}
    response = httpx.post(f"{guarded.url}/v1/completions", json=fields, headers={"x-api-key": "first"})
    assert "4096 bytes" in error_of(response, 413)["message"]


def post(server: Server, headers: dict[str, str], body: dict[str, object]) -> None:
    """One short reply, which waits for its turn."""
    httpx.post(
        f"{server.url}/v1/completions", json=body | {"max_tokens": 1, "stream": False}, headers=headers, timeout=30
    )


def test_a_full_queue_turns_requests_away_and_takes_them_again(guarded: Server) -> None:
    headers = {"x-api-key": "first"}
    body = {"model": "tiny", "prompt": "Loop", "stream": True, **FOREVER}
    with httpx.Client(base_url=guarded.url, headers=headers, timeout=30) as client, ExitStack() as streams:
        streams.enter_context(client.stream("POST", "/v1/completions", json=body))
        waiting = [threading.Thread(target=post, args=(guarded, headers, body), daemon=True) for _ in range(2)]
        for thread in waiting:
            thread.start()
        guarded.wait(lambda stats: stats.num_running == 1 and guarded.engine.num_waiting == 2)
        refused = client.post("/v1/completions", json={"model": "tiny", "prompt": "Hi", "max_tokens": 1})
        assert error_of(refused, 429)["type"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1
        assert client.get("/v1/models").status_code == 200
    for thread in waiting:
        thread.join()
    guarded.wait_idle(30)
    again = httpx.post(
        f"{guarded.url}/v1/completions", json={"model": "tiny", "prompt": "Hi", "max_tokens": 1}, headers=headers
    )
    assert again.status_code == 200


def test_health_is_red_while_the_engine_stands_still(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/version").json() == {"version": "0"}
    monkeypatch.setattr(type(server.engine), "stalled_seconds", lambda _: 121.0)
    for probe in ("/health", "/ready"):
        assert "121 s" in error_of(server.http.get(probe), 503)["message"]


def test_an_idle_engine_is_no_stalled_one(server: Server) -> None:
    server.wait_idle()
    assert server.engine.stalled_seconds() == 0
    with server.http.stream(
        "POST", "/v1/completions", json={"model": "tiny", "prompt": "Loop", "stream": True, **FOREVER}
    ):
        server.wait(lambda stats: stats.num_running == 1)
        assert server.engine.stalled_seconds() < 5


def test_https(chain_model: Path) -> None:
    import asyncio

    import uvicorn

    from octavo.core.serve.launch import listen, web_server

    settings = ServeConfig(port=0, ssl_certfile=str(TLS / "cert.pem"), ssl_keyfile=str(TLS / "key.pem"))
    check_certificate(settings)

    async def app(scope: dict, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["scheme"].encode()})

    async def ask() -> str:
        with listen(settings) as listener:
            web: uvicorn.Server = web_server(app, settings)
            web.config.lifespan = "off"
            serving = asyncio.create_task(web.serve(sockets=[listener]))
            port = listener.getsockname()[1]
            context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
            async with httpx.AsyncClient(verify=context) as client:
                text = (await client.get(f"https://127.0.0.1:{port}/")).text
            web.should_exit = True
            await serving
        return text

    assert asyncio.run(ask()) == "https"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ssl_certfile": "no/such.pem"}, "ssl_certfile"),
        ({"ssl_certfile": str(TLS / "cert.pem")}, "ssl_certfile"),  # without its key
        ({"ssl_keyfile": str(TLS / "key.pem")}, "ssl_certfile"),
    ],
)
def test_a_certificate_that_cannot_serve_is_refused_at_start(changes: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_certificate(dataclasses.replace(ServeConfig(), **changes))
    assert caught.value.field == field


@pytest.mark.parametrize("content", [None, "", "# only a remark\n"])
def test_a_file_without_keys_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="api_key_file"):
        read_keys(ServeConfig(api_key_file=str(file)))


@pytest.mark.parametrize("key", ["", " ", " padded ", "schl\u00fcssel", "a b", "a\nb"])
def test_a_key_that_no_header_can_bring_is_refused(tmp_path: Path, key: str) -> None:
    """An empty one was a door that stood open."""
    with pytest.raises(ConfigError, match="api_key: key 2") as caught:
        read_keys(ServeConfig(api_key=("good", key)))
    assert "padded" not in str(caught.value)
    file = tmp_path / "keys"
    file.write_text("good\nschl\u00fcssel\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2") as caught:
        read_keys(ServeConfig(api_key_file=str(file)))
    assert "ssel" not in str(caught.value)


def test_a_file_of_keys_as_editors_write_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbffirst\r\n\r\n  second  \r\n# a remark")
    assert read_keys(ServeConfig(api_key_file=str(file))) == ("first", "second")
    file.write_bytes(b"secret\xff")
    with pytest.raises(ConfigError) as caught:
        read_keys(ServeConfig(api_key_file=str(file)))
    assert "secret" not in str(caught.value)


def test_keys_change_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keys, "LOOK_SECONDS", 0.0)
    file = tmp_path / "keys"

    def replace(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(file)

    def opens(key: str) -> bool:
        return known.open_for(Headers({"authorization": f"Bearer {key}"}))

    replace("old")
    known = Keys(ServeConfig(api_key_file=str(file)))
    assert (opens("old"), opens("new")) == (True, False)
    replace("new")
    assert (opens("old"), opens("new")) == (False, True)
    for unusable in ("", "# none\n", "schl\u00fcssel"):
        replace(unusable)
        assert (opens("old"), opens("new")) == (False, True), "what can't be used changes nothing"
    file.unlink()
    assert opens("new")
    assert "schl" not in caplog.text
    replace("newest")
    assert (opens("new"), opens("newest")) == (False, True)
