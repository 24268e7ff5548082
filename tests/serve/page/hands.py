"""What a person does at the page, and sees there."""

from __future__ import annotations

import json

from tests.serve.page.chromium import Page


def text(page: Page, selector: str) -> str:
    found: str = page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText).join('|')")
    return found


def ask(page: Page, words: str) -> None:
    """Type into what has the focus, and send."""
    page.type(words)
    page.press("Enter")


def wait_end(page: Page, replies: int = 1) -> None:
    page.wait(f"document.querySelectorAll('.reply[aria-busy=false]').length === {replies}")


def focus(page: Page) -> str:
    found: str = page.run(
        "document.activeElement.id || document.activeElement.name || document.activeElement.innerText"
    )
    return found
