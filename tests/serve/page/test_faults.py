"""What the page says when something is wrong, in Chromium: refusals, keys, a server that is gone."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.serve.conftest import Server
from tests.serve.page.chromium import Page
from tests.serve.page.conftest import started
from tests.serve.page.hands import ask, focus, text, wait_end


def test_errors_are_told_in_words_and_the_turn_can_be_tried_again(
    opened: Callable[[Server], Page], talker: Server
) -> None:
    page = opened(talker)
    page.wait("document.querySelector('#model').value === 'tiny'")
    ask(page, "x" * 9000 + " plain")
    wait_end(page)
    told = text(page, ".reply .failure")
    assert "4096" in told
    assert told.endswith(".")
    ask(page, "Say plain")
    wait_end(page, 2)
    assert text(page, ".turn:last-child .reply .words") == "Hello world!", "the turn that failed is not sent again"
    page.run("document.querySelector('.turn:last-child [data-again]').click()")
    wait_end(page, 2)


def test_a_key_is_asked_for_kept_in_the_tab_and_sent(opened: Callable[[Server], Page], locked: Server) -> None:
    page = opened(locked)
    page.wait("document.querySelector('#key-form').checkVisibility()")
    assert focus(page) == "key"
    ask(page, "wrong")
    page.wait("document.querySelector('#key-form label').innerText.includes('does not know')")
    ask(page, "sesame")
    page.wait("document.querySelector('#model').value === 'tiny'")
    page.wait("document.querySelector('#kv-free').innerText !== '–'")
    assert not page.run("document.querySelector('#key-form').checkVisibility()")
    assert page.run("[sessionStorage.getItem('octavo.key'), localStorage.length]") == ["sesame", 0]
    ask(page, "Say plain")
    wait_end(page)
    assert text(page, ".reply .words") == "Hello world!"
    assert not any("sesame" in url for url in page.asked)
    page.call("Page.reload")
    page.wait("document.querySelector('#model')?.value === 'tiny'")
    page.run("document.querySelector('#forget-key').click()")
    page.wait("document.querySelector('#key-form').checkVisibility()")
    assert page.run("sessionStorage.length") == 0


def test_a_server_that_is_gone_is_told_of(opened: Callable[[Server], Page], model: str) -> None:
    running = started(model)
    server = next(running)
    page = opened(server)
    page.wait("document.querySelector('#model').value === 'tiny'")
    list(running)  # ends it
    ask(page, "Say plain")
    wait_end(page)
    assert "can't be reached" in text(page, ".reply .failure")
    page.wait("document.querySelector('#engine-trouble').innerText.includes('reached')")


def test_a_reply_that_breaks_off_is_told_of(opened: Callable[[Server], Page], talker: Server) -> None:
    page = opened(talker)
    page.wait("document.querySelector('#model').value === 'tiny'")
    bodies = {
        "broken": 'data: {"choices": [{"delta": {"content": "half"}}]}\n\n',
        "failed": 'data: {"error": {"message": "the step failed"}}\n\ndata: [DONE]\n\n',
    }
    page.run(
        f"const real = fetch, bodies = {json.dumps(bodies)};"
        " const answer = ({ body }) => new Response(bodies[JSON.parse(body).messages.at(-1).content]);"
        " window.fetch = async (path, options) => options.body ? answer(options) : real(path, options); 0"
    )
    ask(page, "broken")
    wait_end(page)
    assert text(page, ".reply .words") == "half"
    assert "broke off" in text(page, ".reply .failure")
    ask(page, "failed")
    wait_end(page, 2)
    assert text(page, ".turn:last-child .failure") == "The step failed."
