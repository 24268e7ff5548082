"""A server on a real socket, in a thread of the tests' process so that they can look at its engine."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import httpx
import openai
import pytest
import uvicorn

from octavo.core.base.config import ServeConfig
from octavo.core.base.metrics import SchedulerStats
from octavo.core.engine.async_engine import AsyncEngine
from octavo.core.serve.api import create_app
from octavo.core.serve.launch import listen, web_server
from octavo.core.serve.metrics.watch import Listener
from tests.fakes.chains import save_chains
from tests.fakes.scripted_chat import save_scripted_chat
from tests.serve.processes import Serve
from tests.serve.scripts import SCRIPTS

MAX_MODEL_LEN = 2048
OPTIONS: dict[str, Any] = {"num_threads": 1, "progress": False, "max_model_len": MAX_MODEL_LEN, "num_kv_blocks": 1000}


class Server:
    """A running server. Made and ended by `serving`.

    Attributes:
        url: of the API's root.
        client: OpenAI's own client; http: a plain one.
        engine: only to be looked at from the tests' thread.
        listeners: hear of each request; to be set before the start.
    """

    def __init__(self, model: str, settings: ServeConfig | None = None, **options: Any) -> None:
        self._model, self._options = model, options
        self._settings = settings or ServeConfig()
        self._listener = listen(dataclasses.replace(self._settings, port=0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.engine = AsyncEngine(model, **(OPTIONS | options))
        self.listeners: Sequence[Listener] = ()
        self._web: uvicorn.Server | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self) -> None:
        while self._web is None or not self._web.started:
            assert self._failure is None, self._failure
            time.sleep(0.01)

    def stop(self) -> None:
        self.client.close()
        self.http.close()
        if self._web is not None:
            self._web.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error

    async def _serve(self) -> None:
        async with self.engine as engine:
            app = create_app(engine, ["tiny"], "0", self._settings, self.listeners)
            self._web = web_server(app, self._settings)
            await self._web.serve(sockets=[self._listener])

    # -- what tests ask and say ------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        return self.engine.stats()

    def wait(self, until: Callable[[SchedulerStats], bool], seconds: float = 10.0) -> None:
        """Wait for the engine's figures to become as told."""
        deadline = time.monotonic() + seconds
        while not until(self.stats()):
            assert time.monotonic() < deadline, self.stats()
            time.sleep(0.005)

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Wait until no request and no block is held."""
        self.wait(lambda s: s.num_running == s.num_waiting == s.kv_blocks_used == 0, seconds)

    def complete(self, prompt: Any, **fields: Any) -> Any:
        """A completion by OpenAI's client."""
        return self.client.completions.create(model="tiny", prompt=prompt, **_with_extras(fields))

    def chat(self, content: Any = "Hi", **fields: Any) -> Any:
        """A chat completion by OpenAI's client; content is the user's, or a list of messages."""
        is_conversation = isinstance(content, list) and all("role" in each for each in content)
        messages = content if is_conversation else [{"role": "user", "content": content}]
        return self.client.chat.completions.create(model="tiny", messages=messages, **_with_extras(fields))

    def post(self, path: str, **fields: Any) -> httpx.Response:
        """A request as plain JSON."""
        return self.http.post(f"/v1/{path}", json={"model": "tiny", **fields})

    def refusal(self, path: str = "completions", status: int = 400, **fields: Any) -> dict[str, Any]:
        """The error object of a request that must be refused."""
        return error_of(self.post(path, **fields), status)


OURS = {
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "bad_words", "allowed_token_ids", "skip_special_tokens", "priority", "cache_salt", "add_generation_prompt",
    "chat_template_kwargs", "chat_template", "continue_final_message", "include_reasoning", "documents",
}  # fmt: skip
"""Fields that OpenAI's client takes as extra_body only."""


def _with_extras(fields: dict[str, Any]) -> dict[str, Any]:
    extras = {name: value for name, value in fields.items() if name in OURS}
    return {name: value for name, value in fields.items() if name not in OURS} | {"extra_body": extras}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response, which has OpenAI's shape and is small."""
    assert response.status_code == status, response.text[:500]
    assert len(response.content) < 4096
    ((name, error),) = response.json().items()
    assert name == "error"
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


@pytest.fixture(scope="session")
def chain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the model of tests.fakes.chains; SmolLM2's tokenizer goes with it."""
    return save_chains(tmp_path_factory.mktemp("chains"))


@pytest.fixture(scope="package")
def server(chain_model: Path) -> Iterator[Server]:
    """The chain model with SmolLM2's tokenizer, four requests at once, 4 ms or so a step."""
    made = Server(str(chain_model), tokenizer="smollm2", max_num_seqs=4, max_num_batched_tokens=512)
    with made:
        yield made


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model that thinks and calls tools as tests.serve.scripts lays down."""
    return save_scripted_chat(tmp_path_factory.mktemp("scripted"), SCRIPTS)


@pytest.fixture(scope="package")
def scripted(scripted_model: Path) -> Iterator[Server]:
    """That model, four requests at once."""
    made = Server(str(scripted_model), max_num_seqs=4)
    with made:
        yield made


@pytest.fixture(scope="package")
def caller(scripted_model: Path) -> Iterator[Server]:
    """That model where its thinking is not looked for, so that a reply that must call can't think for ever."""
    made = Server(str(scripted_model), ServeConfig(reasoning_parser="none"))
    with made:
        yield made


@pytest.fixture
def serve(chain_model: Path) -> Iterator[Callable[..., Serve]]:
    """Starts servers, of the chain model unless told otherwise."""
    started: list[Serve] = []
    with ExitStack() as folders:

        def start(*flags: str, model: str | None = None, **how: Any) -> Serve:
            folder = folders.enter_context(tempfile.TemporaryDirectory(prefix="t-"))  # short, for the sockets in it
            started.append(Serve(Path(folder), model or str(chain_model), *flags, **how))
            return started[-1]

        yield start
        for each in started:
            each.end()


@pytest.fixture(autouse=True)
def nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that used the server, no request and no block is left in its engine."""
    yield
    for name in {"server", "scripted", "caller"} & set(request.fixturenames):
        request.getfixturevalue(name).wait_idle()
