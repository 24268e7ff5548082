"""The page's files over HTTP: headers, the key, and what is in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.core.serve.page import FILES, PATHS
from tests.serve.conftest import Server

FOLDER = Path(__file__).parents[3] / "core" / "serve" / "page"


def test_every_file_is_served_with_a_policy_that_allows_nothing_inline(talker: Server) -> None:
    for path, name in PATHS.items():
        response = talker.http.get(path)
        assert (response.status_code, response.content) == (200, (FOLDER / name).read_bytes()), path
        rules = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
        assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
        assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
        assert rules["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "html": "text/html"}
        assert response.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])


def test_a_file_that_is_known_is_not_sent_again(talker: Server) -> None:
    first = talker.http.get("/page/main.js")
    again = talker.http.get("/page/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert talker.http.get("/page/main.js", headers={"if-none-match": '"other"'}).content == first.content
    assert talker.http.get("/page/chat.js").headers["etag"] != first.headers["etag"]


@pytest.mark.parametrize("path", ["/page", "/page/", "/page/__init__.py", "/page/../../api.py", "/page/%2e%2e/api.py"])
def test_nothing_else_in_the_folder_is_served(talker: Server, path: str) -> None:
    assert talker.http.get(path).status_code == 404


def test_files_need_no_key_and_what_they_ask_for_does(locked: Server) -> None:
    assert {locked.http.get(path).status_code for path in PATHS} == {200}
    assert {locked.http.get(path).status_code for path in ("/engine/state", "/v1/models", "/page/x.js")} == {401}


def test_it_can_be_switched_off(bare: Server) -> None:
    assert {bare.http.get(path).status_code for path in PATHS} == {401}
    assert {bare.http.get(path, headers={"x-api-key": "sesame"}).status_code for path in PATHS} == {404}


def test_the_description_of_the_api_leaves_it_out(talker: Server) -> None:
    assert not set(talker.http.get("/openapi.json").json()["paths"]) & set(PATHS)


def test_the_folder_holds_these_files_and_they_name_each_other() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} == {"__init__.py", *FILES}
    text = {name: (FOLDER / name).read_text() for name in FILES}
    for name, content in text.items():
        assert set(re.findall(r'from "\./([^"]+)"', content)) <= set(FILES), name
        assert set(re.findall(r'(?:src|href)="page/([^"]+)"', content)) <= set(FILES), name
        outside = set(re.findall(r"https?://[^\"' )]+", content)) - {"http://www.w3.org/2000/svg"}
        assert not outside, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", content), name
        assert len(content.splitlines()) < 400, name
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script>", text["index.html"])
