"""Who can use the page, in Chromium: by keys alone, by ear, in the dark, on a small screen."""

from __future__ import annotations

import pytest

from tests.serve.page.chromium import SHIFT, Page
from tests.serve.page.hands import ask, focus, text, wait_end


def test_keys_alone_do_everything(page: Page) -> None:
    assert focus(page) == "message"
    page.type("first line")
    page.press("Enter", SHIFT)
    page.type("Say plain")
    assert page.run("document.querySelector('#message').value") == "first line\nSay plain"
    page.press("Enter")
    wait_end(page)
    assert text(page, ".said p") == "first line\nSay plain"
    assert focus(page) == "message"
    seen = []
    for _ in range(30):
        page.press("Tab")
        if page.run("document.activeElement !== document.body"):  # where it goes round
            seen.append(focus(page))
            assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid", seen
    for name in (
        "clear",
        "send",
        "system",
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "seed",
        "stop",
        "Tools",
        "model",
    ):
        assert name in seen, (name, seen)
    assert {"Copy", "Regenerate", "theme"} <= set(seen)
    assert seen.index("clear") < seen.index("send") < seen.index("system") < seen.index("stop")
    page.run("document.querySelector('[data-again]').focus()")
    page.press("Space")
    wait_end(page)
    assert text(page, ".reply .words") == "Hello world!"
    page.run("document.querySelector('#clear').focus()")
    page.press("Enter")
    assert page.run("document.querySelectorAll('.turn').length") == 0
    assert focus(page) == "message"


def test_every_field_has_a_name_and_the_reply_is_read_out(page: Page) -> None:
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    fields = [
        node for node in tree if node.get("role", {}).get("value") in {"textbox", "spinbutton", "combobox", "button"}
    ]
    assert len(fields) > 10
    assert not [node for node in fields if not node.get("name", {}).get("value")]
    names = {node["name"]["value"] for node in fields}
    assert {"Message", "Model", "Temperature", "System prompt", "Send"} <= names
    ask(page, "Say plain")
    wait_end(page)
    assert page.run("document.querySelector('#transcript').getAttribute('aria-live')") == "polite"
    assert text(page, "#status").startswith("Reply finished, 5 tokens")


CONTRASTS = """(() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgb = (colour) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => {
        const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        const [x, y, z] = [r, g, b].map((v) => linear(v / 255));
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const ground = (e) => {
        for (; e; e = e.parentElement) {
            const found = rgb(getComputedStyle(e).backgroundColor);
            if (found[3] === 255) return found;
        }
    };
    const found = [];
    for (const e of document.querySelectorAll("body *")) {
        const hasText = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
        if (!hasText && !e.matches("input, textarea") || !e.checkVisibility() || e.matches("option")) continue;
        const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
        found.push([e.tagName + "." + e.className, (a + 0.05) / (b + 0.05)]);
    }
    return found;
})()"""


def test_dark_and_light(page: Page) -> None:
    """The system's choice is followed until the button makes another, which is kept; text is readable in both."""

    def ground() -> str:
        colour: str = page.run("getComputedStyle(document.body).backgroundColor")
        return colour

    ask(page, "think")
    wait_end(page)
    pressed = "document.querySelector('#theme').getAttribute('aria-pressed')"
    light = ground()
    contrasts = page.run(CONTRASTS)
    page.scheme(dark=True)
    page.wait(f"{pressed} === 'true'")
    dark = ground()
    assert dark != light
    contrasts += page.run(CONTRASTS)
    assert len(contrasts) > 60
    assert [each for each in contrasts if each[1] < 4.5] == []
    page.run("document.querySelector('#theme').click()")
    assert (ground(), page.run(pressed)) == (light, "false")
    page.call("Page.reload")
    page.wait("document.querySelector('#model')?.value === 'tiny'")
    assert ground() == light, "though the system is dark"


@pytest.mark.parametrize("width", [320, 390, 900, 1280])
def test_nothing_is_wider_than_the_screen(page: Page, width: int) -> None:
    page.resize(width, 740)
    ask(page, "Say attack")
    wait_end(page)
    for part in ("chat", "engine", "settings"):
        page.run(f"location.hash = '#{part}'")
        page.wait(f"document.querySelector('#{part}').checkVisibility()")
        assert page.run("document.documentElement.scrollWidth") <= width
        outside = f"[...document.querySelectorAll('#{part} *')].filter(e => !e.matches('.unseen, .who, pre *')"
        # Canvases follow a new width a frame later.
        page.wait(f"{outside} && e.checkVisibility() && e.getBoundingClientRect().right > {width}).length === 0")
