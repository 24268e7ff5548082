"""The page at /: plain HTML, CSS and ES modules, as the browser gets them. No build step, and nothing from elsewhere.

    index.html    what there is          base.css, chat.css, engine.css   how it looks
    theme.js      dark or light, before the first paint
    main.js       puts the parts together
      chat.js         composer -> request -> transcript
        conversation.js   what was said            transcript.js, markup.js   how it is shown: text nodes only
        settings.js       sampling parameters      clipboard.js               copying
      engine.js       polls /engine/state
        blocks.js         the KV cache, a cell a block    rates.js            tokens a second
      api.js, events.js   calls with the key, server-sent events

Only routes/page.py reads these files. Who changes them: HEADERS forbid inline scripts and styles, and strings as HTML.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

HOME = "index.html"

MEDIA_TYPES: Mapping[str, str] = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""By the end of a file's name."""

FILES = (
    HOME, "icon.svg", "base.css", "chat.css", "engine.css", "theme.js", "main.js", "chat.js", "conversation.js",
    "transcript.js", "markup.js", "settings.js", "clipboard.js", "engine.js", "blocks.js", "rates.js", "api.js",
    "events.js",
)  # fmt: skip

PATHS: Mapping[str, str] = {("/" if name == HOME else f"/page/{name}"): name for name in FILES}
"""Path -> file. They say nothing of the model, and need no key: the page asks for it and sends it with its calls."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""What the page may do: load its own files, call its own server, and never make HTML or code of a text."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file.

    Attributes:
        content: its bytes.
        media_type: as the header Content-Type has it.
        etag: changes with the content.
    """

    content: bytes
    media_type: str
    etag: str


def read_file(name: str) -> PageFile:
    """One of FILES."""
    content = files(__package__).joinpath(name).read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:32]
    return PageFile(content, MEDIA_TYPES[name.rpartition(".")[2]], f'"{digest}"')
