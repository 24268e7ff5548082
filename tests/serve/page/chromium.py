"""Headless Chromium, driven by its DevTools protocol over a pair of pipes: nothing but Chromium itself is needed.

    tests ── Page ── Browser ──pipe──▶ chromium --remote-debugging-pipe     messages are JSON, each ended by a zero byte
                        ▲──────pipe─── answers (by id), events (by session)

A Page is a tab in a profile of its own. It notes down what goes wrong in it and what it asks for.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage", "--mute-audio",
    "--remote-debugging-pipe",
    # Whatever it is that looks for another host finds none.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)  # fmt: skip
ANSWER_SECONDS = 30

KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    "Tab": ("Tab", 9, ""),
    "Space": ("Space", 32, " "),
}
SHIFT = 8


def find_chromium() -> str | None:
    """The program's path; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One Chromium with an empty profile. To be closed."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="octavo-chromium-")
        self._lock = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}
        self._last_id = 0
        self._is_gone = False
        self._start(program)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _start(self, program: str) -> None:
        """Chromium reads its descriptor 3 and writes 4; a process that then becomes it puts the pipes there."""
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out)]
        flags = [*FLAGS, f"--user-data-dir={self._profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        become = "import os, sys; os.dup2({}, 3); os.dup2({}, 4); os.execv(sys.argv[1], sys.argv[1:])".format(*high)
        command = [sys.executable, "-S", "-c", become, program, *flags, "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=high, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)

    def close(self) -> None:
        """End it and remove its profile."""
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._reader.join(10)
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        """What a command answers."""
        with self._lock:
            self._last_id += 1
            number = self._last_id
        message = {"id": number, "method": method, "params": params or {}}
        data = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        with self._lock:
            self._lock.wait_for(lambda: number in self._answers or self._is_gone, ANSWER_SECONDS)
            assert number in self._answers, f"{method}: no answer"
            answer = self._answers.pop(number)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str, *, dark: bool = False, size: tuple[int, int] = (1280, 800), scale: float = 1) -> Page:
        """A tab with a profile of its own, once the page is loaded."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.scheme(dark=dark)
        page.resize(*size, scale)
        page.goto(url)
        return page

    def _read(self) -> None:
        rest = b""
        while data := self._read_some():
            *messages, rest = (rest + data).split(b"\0")
            for message in messages:
                self._take(json.loads(message))
        with self._lock:
            self._is_gone = True
            self._lock.notify_all()

    def _read_some(self) -> bytes:
        try:
            return os.read(self._from, 1 << 16)
        except OSError:
            return b""

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            with self._lock:
                self._answers[message["id"]] = message
                self._lock.notify_all()
        elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
            page.note(message["method"], message["params"])


class Page:
    """One tab. Made by Browser.open.

    Attributes:
        context: its profile's id.
        troubles: exceptions, errors and warnings of the console, breaches of the policy.
        asked: addresses of all requests.
    """

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser, self._session, self.context = browser, session, context
        self.troubles: list[str] = []
        self.asked: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol."""
        return self._browser.call(method, params, self._session)

    def close(self) -> None:
        """Close the tab and forget its profile."""
        self._browser.call("Target.disposeBrowserContext", {"browserContextId": self.context})

    def note(self, method: str, params: dict[str, Any]) -> None:
        """An event came."""
        if method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.troubles.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.troubles.append(str([each.get("value") for each in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.troubles.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def goto(self, url: str) -> None:
        """Load an address, and wait for it and its scripts."""
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def scheme(self, *, dark: bool) -> None:
        """What the system prefers."""
        value = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        """The window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, (script, told["exceptionDetails"])
        return told["result"].get("value")

    def wait(self, script: str, seconds: float = 10.0) -> Any:
        """Wait until an expression is true, and return it."""
        deadline = time.monotonic() + seconds
        while not (value := self._try(script)):
            assert time.monotonic() < deadline, (
                script,
                self.troubles,
                self._try("document.body.innerText.slice(0, 1000)"),
            )
            time.sleep(0.02)
        return value

    def _try(self, script: str) -> Any:
        """The value of an expression; None while there is no page to ask, as between two of them."""
        try:
            return self.run(script)
        except AssertionError:
            return None

    def press(self, name: str, modifiers: int = 0) -> None:
        """Press and release a key."""
        code, number, text = KEYS[name]
        key = {"Space": " "}.get(name, name)
        common = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """What is seen, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
