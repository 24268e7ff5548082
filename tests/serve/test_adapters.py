"""The model field names an adapter; /v1/models lists them; they come and go by request where the server allows it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from octavo.core.base.config import ServeConfig
from octavo.core.engine.async_engine import AsyncEngine
from octavo.core.serve.answers import IGNORED_HEADER
from octavo.core.serve.api import create_app
from tests.fakes import tiny_models
from tests.lora.packer import Lora, make_lora

PROMPT = tiny_models.random_prompt(199, 6)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_models.make_llama()


@pytest.fixture(scope="module")
def loras(model: torch.nn.Module) -> list[Lora]:
    return [make_lora(model, ["q_proj", "down_proj"], r=3 + i, seed=i) for i in range(2)]


@pytest.fixture(scope="module")
def folder(model: torch.nn.Module, loras: list[Lora], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    tiny_models.save(model, path / "model")
    for index, lora in enumerate(loras):
        lora.save(path / f"a{index}")
    return path


class Client:
    """An app over a started engine, spoken to without a socket."""

    def __init__(self, runner: asyncio.Runner, engine: AsyncEngine, *, allow: bool, strict: bool = False) -> None:
        self._runner = runner
        app = create_app(engine, ["tiny", "alias"], "0", ServeConfig(allow_lora_updates=allow, strict_api=strict))
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test/v1")

    def get(self, path: str) -> httpx.Response:
        return self._runner.run(self._http.get(path))

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self._runner.run(self._http.post(path, json=body))

    def complete(self, model: str) -> httpx.Response:
        return self.post(
            "completions", model=model, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=0, ignore_eos=True
        )


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def engine(folder: Path, runner: asyncio.Runner) -> Iterator[AsyncEngine]:
    made = AsyncEngine(
        str(folder / "model"), num_threads=1, num_kv_blocks=64, progress=False, lora_modules={"a0": str(folder / "a0")}
    )
    runner.run(made.start())
    yield made
    runner.run(made.close())


@pytest.fixture
def client(runner: asyncio.Runner, engine: AsyncEngine) -> Client:
    return Client(runner, engine, allow=True)


def ids_of(response: httpx.Response) -> list[int]:
    """The tokens of a reply without a tokenizer, as their logprobs name them."""
    assert response.status_code == 200, response.text
    tokens = response.json()["choices"][0]["logprobs"]["tokens"]
    return [int(token.removeprefix("token_id:")) for token in tokens]


def test_the_model_field_chooses_and_the_reply_names_what_answered(
    client: Client, model: torch.nn.Module, loras: list[Lora]
) -> None:
    """vllm#7260."""
    for name, answering in (("tiny", model), ("alias", model), ("a0", loras[0].merged(model))):
        reply = client.complete(name)
        assert ids_of(reply) == tiny_models.greedy(answering, PROMPT, 5)
        assert reply.json()["model"] == name
    refused = client.complete("a1")
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"


def test_models_lists_adapters_under_their_parent(client: Client, folder: Path) -> None:
    cards = {card["id"]: card for card in client.get("models").json()["data"]}
    assert set(cards) == {"tiny", "alias", "a0"}
    assert (cards["a0"]["parent"], cards["a0"]["root"]) == ("tiny", str(folder / "a0"))
    assert "parent" not in cards["tiny"]


def test_adapters_come_and_go(client: Client, model: torch.nn.Module, loras: list[Lora], folder: Path) -> None:
    loaded = client.post("load_lora_adapter", lora_name="a1", lora_path=str(folder / "a1"))
    assert loaded.status_code == 200
    assert (loaded.json()["id"], loaded.json()["rank"]) == ("a1", 4)
    assert ids_of(client.complete("a1")) == tiny_models.greedy(loras[1].merged(model), PROMPT, 5)
    assert client.post("unload_lora_adapter", lora_name="a1").status_code == 200
    assert client.complete("a1").status_code == 404
    assert ids_of(client.complete("a0")) == tiny_models.greedy(loras[0].merged(model), PROMPT, 5)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}, "lora"),
        ("load_lora_adapter", {"lora_name": "tiny", "lora_path": "/nowhere"}, "lora_name"),
        ("load_lora_adapter", {"lora_name": "x"}, "lora_path"),
        ("load_lora_adapter", {"lora_name": "", "lora_path": "/nowhere"}, "lora_name"),
        ("unload_lora_adapter", {"lora_name": "nobody"}, "lora_name"),
    ],
)
def test_what_is_wrong_is_a_400(client: Client, path: str, body: dict[str, str], field: str) -> None:
    response = client.post(path, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert client.complete("a0").status_code == 200


def test_without_leave_nobody_changes_adapters(runner: asyncio.Runner, engine: AsyncEngine, folder: Path) -> None:
    client = Client(runner, engine, allow=False)
    for path in ("load_lora_adapter", "unload_lora_adapter"):
        assert client.post(path, lora_name="a1", lora_path=str(folder / "a1")).status_code == 404
    assert client.complete("a0").status_code == 200


@pytest.mark.parametrize("endpoint", ["load_lora_adapter", "unload_lora_adapter"])
def test_a_field_that_nobody_knows_is_refused_by_a_strict_server(
    runner: asyncio.Runner, engine: AsyncEngine, folder: Path, endpoint: str
) -> None:
    body = {"lora_name": "a1", "lora_path": str(folder / "a1")}
    names = {info.name for info in engine.list_adapters()}
    strict = Client(runner, engine, allow=True, strict=True)
    refused = strict.post(endpoint, **body, load_in_place=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "load_in_place")
    assert {info.name for info in engine.list_adapters()} == names


def test_a_field_that_nobody_knows_is_named_in_a_header(client: Client, folder: Path) -> None:
    loaded = client.post("load_lora_adapter", lora_name="a1", lora_path=str(folder / "a1"), load_in_place=True)
    assert (loaded.status_code, loaded.headers[IGNORED_HEADER]) == (200, "load_in_place")
    gone = client.post("unload_lora_adapter", lora_name="a1", lora_int_id=7)
    assert (gone.status_code, gone.headers[IGNORED_HEADER]) == (200, "lora_int_id")


@pytest.mark.parametrize(
    "path", ["/no/SECRET/where", "~SECRET-nobody/a", "../SECRET/../../x", "SECRET\0", "/SECRET" * 500]
)
def test_a_refusal_quotes_neither_name_nor_path(client: Client, path: str) -> None:
    """Nor does a path that can't be one end the engine."""
    refused = client.post("load_lora_adapter", lora_name="SECRET", lora_path=path)
    assert refused.status_code == 400
    assert "SECRET" not in refused.text
    assert "lora" in refused.json()["error"]["message"]
    assert client.complete("a0").status_code == 200


def test_a_name_that_is_not_loaded_is_not_quoted(client: Client) -> None:
    refused = client.post("unload_lora_adapter", lora_name="it's SECRET" + "x" * 200)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
    assert "SECRET" not in refused.text
