"""docs/openai-compatibility.md says what the code does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.compatibility import BODIES, PAGE, WITHOUT_EFFECT, page, rows, sources_of_tests
from tests.serve.conftest import Server

RIGHT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
}


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.serve.compatibility"


@pytest.mark.parametrize("path", BODIES)
def test_what_is_supported_is_tested(path: str) -> None:
    uses = sources_of_tests()
    untested = {name for name, supported, used in rows(path, BODIES[path], uses) if supported == "yes" and not used}
    assert untested == set()


@pytest.mark.parametrize("path", RIGHT)
def test_what_is_refused_is_refused_and_what_has_no_effect_is_taken(server: Server, path: str) -> None:
    right = {"model": "tiny", **RIGHT[path]}
    for name in BODIES[path].UNSUPPORTED:
        response = server.http.post(path, json=right | {name: {"a": 1}})
        assert response.status_code == 400, name
        assert name in response.text
    for name in WITHOUT_EFFECT & set(BODIES[path].model_fields):
        value: Any = {} if "dict" in str(BODIES[path].model_fields[name].annotation) else "auto"
        value = True if "bool" in str(BODIES[path].model_fields[name].annotation) else value
        response = server.http.post(path, json=right | {name: value})
        assert response.status_code == 200, (name, response.text)
        assert "x-octavo-ignored-fields" not in response.headers
