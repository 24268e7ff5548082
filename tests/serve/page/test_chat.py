"""Talking on the page, in Chromium: streams, stopping, settings, markup, reasoning, calls, copies."""

from __future__ import annotations

import json
import re

from octavo.core.base.params import FinishReason
from tests.serve.conftest import Server
from tests.serve.page.chromium import Browser, Page
from tests.serve.page.hands import ask, text, wait_end
from tests.serve.page.sayings import ATTACK, SAYINGS


def test_a_reply_streams_in(page: Page, talker: Server) -> None:
    ask(page, "Say loop")
    first = len(page.wait("document.querySelector('.reply .words')?.innerText"))
    page.wait(f"document.querySelector('.reply .words').innerText.length > {first + 100}")
    assert page.run("document.querySelector('.reply').getAttribute('aria-busy')") == "true"
    assert talker.stats().num_running == 1
    page.press("Escape")
    wait_end(page)


def test_escape_stops_the_reply_and_ends_its_request(page: Page, talker: Server) -> None:
    before = talker.stats().finished[FinishReason.ABORT]
    ask(page, "Say loop")
    page.wait("document.querySelector('.reply .words')?.innerText.includes('tock')")
    page.press("Escape")
    talker.wait_idle(2.0)
    assert talker.stats().finished[FinishReason.ABORT] == before + 1
    wait_end(page)
    assert "stopped" in text(page, ".reply footer")
    assert "tick" in text(page, ".reply .words"), "what came stays"
    ask(page, "Say plain")
    wait_end(page, 2)
    assert text(page, ".turn:last-child .reply .words") == "Hello world!"


def test_the_whole_conversation_is_sent_with_the_settings(page: Page) -> None:
    page.run(
        "window.sent = []; const real = fetch; window.fetch = (path, options) => {"
        " if (options.body) sent.push(JSON.parse(options.body)); return real(path, options) }; 0"
    )
    values = {"system": "Be brief", "temperature": "0", "top_p": "0.9", "top_k": "7", "max_tokens": "3", "seed": "5"}
    for name, value in values.items():
        page.run(f"document.querySelector('[name={name}]').value = {json.dumps(value)}")
    page.run(r"document.querySelector('[name=stop]').value = 'END\n\\n\\n'; document.querySelector('#message').focus()")
    ask(page, "Say plain")
    wait_end(page)
    assert "cut by the limit of tokens" in text(page, ".reply footer")
    assert re.search(r"\b3 tokens\b", text(page, ".reply footer"))
    page.run("document.querySelector('#params').reset()")
    ask(page, "Say hush")
    wait_end(page, 2)
    first, second = page.run("sent")
    asked = {"role": "user", "content": "Say plain"}
    assert first["messages"] == [{"role": "system", "content": "Be brief"}, asked]
    given = {name: first[name] for name in ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "model")}
    assert given == {
        "temperature": 0, "top_p": 0.9, "top_k": 7, "max_tokens": 3, "seed": 5, "stop": ["END", "\n\n"],
        "model": "tiny",
    }  # fmt: skip
    reply = {"role": "assistant", "content": "Hello world"}
    assert second["messages"] == [asked, reply, {"role": "user", "content": "Say hush"}]
    assert set(second) == {"model", "messages", "stream", "stream_options"}
    assert "the model said nothing" in text(page, ".turn:last-child footer")


def test_what_a_model_writes_stays_text(page: Page) -> None:
    ask(page, f"{ATTACK} Say attack")
    wait_end(page)
    assert page.run("document.title") == "Octavo"
    assert page.run("document.querySelectorAll('#transcript :is(img, script, a, b, i, u)').length") == 0
    assert text(page, ".said p") == f"{ATTACK} Say attack"
    shown = page.run("document.querySelector('.reply .words').textContent")
    assert ATTACK in shown
    assert text(page, ".reply pre code") == "<b>bold</b>"
    assert text(page, ".reply p code") == "<i>"
    assert text(page, ".reply p strong") == "<u>"


def test_reasoning_is_folded_and_calls_are_shown(page: Page) -> None:
    ask(page, "think")
    wait_end(page)
    assert page.run("document.querySelector('.reasoning').open") is False
    assert "Hm, four?" in page.run("document.querySelector('.reasoning').textContent")
    assert "Hm" not in text(page, ".reply .words")
    assert "Four." in text(page, ".reply .words")
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("time", "city")
    ]
    page.run(f"document.querySelector('[name=tools]').value = {json.dumps(json.dumps(tools))}")
    ask(page, "call")
    wait_end(page, 2)
    assert text(page, ".reply .call h4") == "Calls time|Calls city"
    assert json.loads(text(page, ".reply .call pre").split("|")[0]) == {"zone": "CET"}
    page.run("document.querySelector('[name=result-0]').focus()")
    page.type("noon")
    page.run("document.querySelector('[name=result-1]').focus()")
    page.type("plain")
    page.run("document.querySelector('.results button').click()")
    wait_end(page, 3)
    assert text(page, ".turn:last-child .asked pre") == "noon|plain"
    assert text(page, ".turn:last-child .reply .words") == "Hello world!"


def test_copying(page: Page, chromium: Browser, talker: Server) -> None:
    chromium.call("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"], "browserContextId": page.context})
    page.call("Page.bringToFront")
    ask(page, "Say attack")
    wait_end(page)
    for kind, wanted in (("code", "<b>bold</b>"), ("reply", "".join(SAYINGS["attack"]))):
        page.run(f"document.querySelector('[data-copies={kind}]').click()")
        page.wait(f"document.querySelector('[data-copies={kind}]').innerText === 'Copied'")
        assert page.run("navigator.clipboard.readText()") == wanted


def test_a_wrong_setting_is_shown_where_it_stands(page: Page) -> None:
    page.run("document.querySelector('[name=top_p]').value = '3'; document.querySelector('#message').focus()")
    ask(page, "Say plain")
    page.wait("document.activeElement.name === 'top_p'")
    assert text(page, "#status").startswith("Top p: ")
    assert page.run("document.querySelector('#message').value") == "Say plain", "nothing is lost"
    page.run("document.querySelector('[name=top_p]').value = '0.5'; document.querySelector('#send').click()")
    wait_end(page)
    assert text(page, ".reply .words") == "Hello world!"
