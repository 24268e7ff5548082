"""The live view of the engine, in Chromium."""

from __future__ import annotations

import time

from tests.serve.conftest import Server
from tests.serve.page.chromium import Page
from tests.serve.page.hands import ask, text


def test_the_cache_is_seen_to_fill(page: Page, talker: Server) -> None:
    def ink() -> str:
        drawn: str = page.run("document.querySelector('#kv').toDataURL()")
        return drawn

    page.wait("document.querySelector('#kv-free').innerText !== '–'")
    assert text(page, "#running") == "0"
    before = ink()
    ask(page, "Say loop")
    page.wait("document.querySelector('#running').innerText === '1'")
    page.wait("Number(document.querySelector('#kv-used').innerText) > 4")
    assert ink() != before
    page.wait("parseFloat(document.querySelector('#tokens-rate').innerText) > 0")
    during = ink()
    page.press("Escape")
    page.wait("document.querySelector('#running').innerText === '0'")
    page.wait("document.querySelector('#kv-used').innerText === '0'")
    assert ink() not in (before, during)
    kv = talker.http.get("/engine/state").json()["kv"]
    assert (text(page, "#kv-cached"), text(page, "#kv-free")) == (str(kv["cached"]), str(kv["total"] - kv["cached"]))
    assert str(kv["total"]) in text(page, "#kv-summary")


def test_each_state_of_a_block_has_a_shape_of_its_own(page: Page) -> None:
    """Without colours: how much of a cell is inked, and whether its middle is."""
    script = """(async () => {
        const { drawBlocks } = await import("/page/blocks.js");
        const shapes = {};
        for (const cell of "fcus") {
            const canvas = document.createElement("canvas");
            document.querySelector("#engine").append(canvas);
            drawBlocks(canvas, cell, { free: "black", cached: "black", used: "black", shared: "black" });
            const { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            shapes[cell] = [];
            for (let y = 0; y < 14; y++)
                for (let x = 0; x < 14; x++) shapes[cell].push(data[(y * width + x) * 4 + 3] > 127);
            canvas.remove();
        }
        return shapes;
    })()"""
    shapes = page.run(script)
    ink = {cell: sum(shape) for cell, shape in shapes.items()}
    assert ink["u"] == 196 > ink["s"] > ink["c"] > ink["f"] > 0
    middle = 7 * 14 + 7
    assert shapes["u"][middle]
    assert not shapes["s"][middle]
    assert not shapes["f"][middle]


def test_it_rests_while_nobody_sees_it(page: Page) -> None:
    page.wait("document.querySelector('#kv-free').innerText !== '–'")
    page.run("Object.defineProperty(document, 'hidden', { value: true, configurable: true }); 0")
    page.run("document.dispatchEvent(new Event('visibilitychange'))")
    time.sleep(0.3)
    asked = page.asked.count(page.asked[0] + "engine/state")
    assert asked > 0
    time.sleep(2.0)
    assert page.asked.count(page.asked[0] + "engine/state") == asked
    page.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait("true")
    time.sleep(0.3)
    assert page.asked.count(page.asked[0] + "engine/state") > asked
