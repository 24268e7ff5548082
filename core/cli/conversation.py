"""What happens at the terminal: a reply as it comes, and a conversation, whoever answers.

    answer(messages) ──► Piece, Piece, …  ──show──►  the terminal, and the whole text
                                          converse   asks, answers, remembers

`octavo run` answers from a model in its own process, `octavo chat` from a server.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from octavo.core.base.errors import ConfigError, InvalidRequest, RequestFailed
from octavo.core.base.names import did_you_mean

Message = dict[str, str]

COMMANDS = {
    "/reset": "forget the conversation; the system message stays",
    "/system": "TEXT replaces the system message, nothing after it removes it",
    "/help": "this list",
}
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Piece(NamedTuple):
    """What one step added to a reply.

    Attributes:
        text: as it is shown.
        num_tokens: that it brought.
        is_thought: it is part of the model's reasoning, which only a terminal is shown and no conversation remembers.
    """

    text: str
    num_tokens: int = 0
    is_thought: bool = False


def turn(role: str, content: str) -> Message:
    """One message."""
    return {"role": role, "content": content}


def prompt_or_pipe(prompt: str | None) -> str | None:
    """What to answer: the argument, or what is piped in; None at a terminal, where one can ask.

    Raises:
        ConfigError: the pipe is empty.
    """
    if prompt is not None or sys.stdin.isatty():
        return prompt
    text = sys.stdin.read()
    if not text.strip():
        raise ConfigError("there is no prompt: give PROMPT, pipe text in, or run it in a terminal to chat")
    return text


def show(pieces: Iterable[Piece]) -> str:
    """Print pieces as they come and return the whole text; speed goes to stderr when someone is looking."""
    started, first, count, text, thinking = time.perf_counter(), 0.0, 0, [], False
    is_terminal = sys.stdout.isatty()
    try:
        for piece in pieces:
            first = first or time.perf_counter()
            count += piece.num_tokens
            if piece.is_thought and not is_terminal:
                continue
            if piece.is_thought != thinking and piece.text:
                thinking = piece.is_thought
                print(_DIM if thinking else f"{_PLAIN}\n", end="")
            if not thinking:
                text.append(piece.text)
            # A terminal obeys control characters; a file gets what the model wrote.
            print(_CONTROLS.sub("", piece.text) if is_terminal else piece.text, end="", flush=True)
    finally:
        if thinking:
            print(_PLAIN, end="")
    print()
    if sys.stderr.isatty() and count > 1:
        rate = (count - 1) / max(time.perf_counter() - first, 1e-9)
        print(f"[{count} tokens, first after {first - started:.2f} s, then {rate:.1f} tokens/s]", file=sys.stderr)
    return "".join(text)


def converse(answer: Callable[[list[Message]], Iterable[Piece]], system: str | None) -> None:
    """Ask, answer, remember; Ctrl-C ends a reply, Ctrl-D the conversation.

    A turn without a whole answer (interrupted, refused or failed) is forgotten; the conversation goes on.
    """
    _edit_lines()
    print("Ctrl-C ends a reply, Ctrl-D the conversation; /help lists commands.", file=sys.stderr)
    messages = _system(system)
    while (asked := ask()) is not None:
        if asked.startswith("/"):
            messages = _obey(asked, messages)
        elif asked.strip():
            messages = _take_turn(answer, [*messages, turn("user", asked)]) or messages


def ask() -> str | None:
    """One line from the terminal; None at its end. Ctrl-C gives the line up, and an empty one comes."""
    try:
        return input("> ")
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print("\n(Ctrl-D ends the conversation)", file=sys.stderr)
        return ""


def shown_or_told(answer: Callable[[], Iterable[Piece]]) -> str | None:
    """Show a reply; None, and a line that says why, where it was interrupted, refused or broke off."""
    try:
        return show(answer())
    except KeyboardInterrupt:
        print(" [interrupted]")
    except (InvalidRequest, RequestFailed) as error:
        print("octavo:", error, file=sys.stderr)
    return None


def _take_turn(answer: Callable[[list[Message]], Iterable[Piece]], messages: list[Message]) -> list[Message] | None:
    reply = shown_or_told(lambda: answer(messages))
    return None if reply is None else [*messages, turn("assistant", reply)]


def _obey(line: str, messages: list[Message]) -> list[Message]:
    """The conversation after a command."""
    name, _, rest = line.partition(" ")
    if name == "/reset":
        print("[forgotten]", file=sys.stderr)
        return [message for message in messages if message["role"] == "system"]
    if name == "/system":
        spoken = [message for message in messages if message["role"] != "system"]
        return _system(rest.strip()) + spoken
    if name == "/help":
        print("\n".join(f"{name:<10}{text}" for name, text in COMMANDS.items()), file=sys.stderr)
    else:
        hint = did_you_mean(name, COMMANDS)
        print(f"octavo: unknown command {name}{hint} (a space before it sends it)", file=sys.stderr)
    return messages


def _system(text: str | None) -> list[Message]:
    return [turn("system", text)] if text else []


def _edit_lines() -> None:
    """Arrow keys and the lines asked before, where Python was built with them."""
    try:
        import readline  # noqa: F401 - it changes what input() does
    except ImportError:
        return
