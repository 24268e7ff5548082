"""`octavo chat` and `octavo complete` at a real terminal, against a real server."""

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

SECONDS = 30.0


class Terminal:
    """A command that believes someone sits before it. Use it as a context manager."""

    def __init__(self, *words):
        self._master, slave = pty.openpty()
        environ = {**os.environ, "PYTHONPATH": "src", "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo", *words], stdin=slave, stdout=slave, stderr=slave, env=environ,
            start_new_session=True, preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def type(self, text):
        os.write(self._master, text.encode())

    def wait_for(self, pattern):
        """Wait until what came since the last such wait matches, and take it."""
        deadline = time.monotonic() + SECONDS
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.seen[:500]!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                self.seen += self._read()
        self.seen = self.seen[match.end() :]

    def end(self):
        """The exit code, once it has ended by itself."""
        return self.process.wait(SECONDS)

    def _read(self):
        try:
            return os.read(self._master, 65536).decode("utf-8", "replace")
        except OSError:  # the other end is closed
            return ""


def _take_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_ctrl_c_ends_the_reply_and_its_request_and_ctrl_d_the_session(server):
    words = ["--url", server.url, "--max-tokens", "2000", "--temperature", "0"]
    with Terminal("complete", *words) as terminal:
        terminal.wait_for("tiny at http")
        terminal.wait_for("> ")
        terminal.type("Loop\n")
        terminal.wait_for("one two three")
        assert server.stats().num_running == 1
        terminal.type("\x03")
        terminal.wait_for(r"\[interrupted\]")
        server.wait_idle()
        terminal.wait_for("> ")
        terminal.type("half a line\x03")
        terminal.wait_for("Ctrl-D ends")
        terminal.wait_for("> ")
        terminal.type("ABC\n")
        terminal.wait_for("DEFGH ok")
        terminal.wait_for("tokens/s")
        terminal.wait_for("> ")  # before it waits for a line, the end would be lost
        terminal.type("\x04")
        assert terminal.end() == 0


def test_a_conversation_goes_to_the_server(server):
    with Terminal("chat", "--url", server.url, "--system", "Be brief.") as terminal:
        for line in ("Hi", "/reset", "Again"):
            terminal.wait_for("> ")
            terminal.type(f"{line}\n")
            terminal.wait_for("forgotten" if line == "/reset" else "Hello!")
        terminal.wait_for("> ")  # before it waits for a line, the end would be lost
        terminal.type("\x04")
        assert terminal.end() == 0


@pytest.mark.parametrize("words", [["chat", "Hi"], ["complete", "ABC"]])
def test_a_reply_in_a_pipe_is_the_text_alone(server, words):
    command = [sys.executable, "-m", "octavo", *words, "--url", server.url, "--temperature", "0"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "PYTHONPATH": "src"}
    )
    assert done.stdout.strip() in ("Hello!", "DEFGH ok")
    assert done.stderr == ""
