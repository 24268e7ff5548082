"""Servers for the page, and a browser to see it in. Where no Chromium is installed, what needs it is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from octavo.core.base.config import ServeConfig
from octavo.core.serve.page import FILES
from tests.fakes.scripted_chat import save_scripted_chat
from tests.serve.conftest import Server
from tests.serve.page.chromium import Browser, Page, find_chromium
from tests.serve.page.sayings import SAYINGS


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_scripted_chat(tmp_path_factory.mktemp("page"), SAYINGS))


def started(model: str, settings: ServeConfig | None = None) -> Iterator[Server]:
    made = Server(model, settings, max_num_seqs=4, num_kv_blocks=600, max_model_len=4096)
    made.start()
    try:
        made.wait_ready()
        yield made
        made.wait_idle()
    finally:
        made.stop()


@pytest.fixture(scope="package")
def talker(model: str) -> Iterator[Server]:
    yield from started(model)


@pytest.fixture(scope="package")
def locked(model: str) -> Iterator[Server]:
    yield from started(model, ServeConfig(api_key=("sesame",)))


@pytest.fixture(scope="package")
def bare(model: str) -> Iterator[Server]:
    yield from started(model, ServeConfig(page=False, api_key=("sesame",)))


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium here (Debian: apt install chromium); the page is not tried in a browser")
    browser = Browser(program)
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture
def page(chromium: Browser, talker: Server) -> Iterator[Page]:
    """The page with its models loaded. Afterwards: nothing went wrong in it, and nobody else was asked."""
    made = chromium.open(f"{talker.url}/")
    made.wait("document.querySelector('#model').value === 'tiny'")
    yield made
    assert made.troubles == []
    assert len(made.asked) > len(FILES)
    assert {httpx.URL(url).netloc for url in made.asked} == {httpx.URL(talker.url).netloc}
    made.close()
    talker.wait_idle()


@pytest.fixture
def opened(chromium: Browser) -> Iterator[Callable[[Server], Page]]:
    """Opens pages that meet with faults on purpose, of which the browser's console tells."""
    pages: list[Page] = []

    def open_page(server: Server) -> Page:
        pages.append(chromium.open(f"{server.url}/"))
        return pages[-1]

    yield open_page
    for each in pages:
        each.close()
