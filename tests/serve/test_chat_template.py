"""A chat template and its variables from the server's own settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.core.base.config import EngineConfig, ServeConfig
from octavo.core.base.errors import CheckpointError, ConfigError
from octavo.core.engine.loading import open_model, read_text_side
from tests.serve.conftest import Server

TEMPLATE = "{% if mode is defined and mode is true %}ABC{% elif mode == 'go' %}Go{% else %}{{ mode }}{% endif %}"
"""Letters where mode is true, and not a text that says so."""


@pytest.fixture(scope="module")
def templated(chain_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a template of its own, whose variable it sets."""
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    settings = ServeConfig(chat_template_kwargs={"mode": "true", "name": "not JSON"})
    made = Server(str(chain_model), settings, tokenizer="smollm2", chat_template=str(path), max_num_seqs=2)
    with made:
        yield made


def test_a_chat_is_rendered_by_the_servers_template_with_its_variables(templated: Server) -> None:
    assert templated.chat(temperature=0).choices[0].message.content == "DEFGH ok"


def test_a_requests_variable_goes_before(templated: Server) -> None:
    reply = templated.chat(temperature=0, chat_template_kwargs={"mode": "go"})
    assert reply.choices[0].message.content.startswith("ď")


def read(chain_model: Path, template: str) -> None:
    config = EngineConfig(model=str(chain_model), tokenizer="smollm2", chat_template=template)
    with open_model(config) as checkpoint:
        read_text_side(config, checkpoint)


def test_a_template_that_is_none_ends_the_start(chain_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name a jinja file"):
        read(chain_model, str(tmp_path / "missing"))
    path = tmp_path / "bad.jinja"
    path.write_text("{% if %}")
    with pytest.raises(CheckpointError, match="not valid jinja"):
        read(chain_model, str(path))
