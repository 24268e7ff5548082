"""Which parser reads a model's replies: by name, or by what its chat template holds.

    name, or "auto" + the template's text ──▶ format ──▶ open_parser(request's tools, end of the prompt) ──▶ ToolParser

Auto takes the first format, in the order of the tables, whose signs all stand in the template; none of them may fit.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from octavo.core.serve.tools import deepseek, gemma, harmony, hermes, llama3_json, mistral, pythonic, qwen3_coder
from octavo.core.serve.tools.calls import Tools
from octavo.core.serve.tools.cursor import Cursor, CursorParser, Steps
from octavo.core.serve.tools.deltas import Chain, PlainText, ToolParser
from octavo.core.serve.tools.thinking import Thinking

AUTO = "auto"
HARMONY = "gpt_oss"
"""Text, reasoning and calls in one format: chosen for either, it reads all."""


def long_id() -> str:
    """An id of a call, in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """An id of a call as Mistral's templates want it."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes calls.

    Attributes:
        syntax: reads a reply.
        markers: that may be special tokens, and must then stay in the text.
        signs: what the family's templates hold.
        new_id: makes the id of a call.
    """

    syntax: Callable[[Cursor, Tools], Steps[None]]
    markers: tuple[str, ...]
    signs: tuple[str, ...]
    new_id: Callable[[], str] = long_id


_HARMONY_MARKERS = (harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.CONSTRAIN, *harmony.ENDS)
_DEEPSEEK_MARKERS = (deepseek.ALL_BEGIN, deepseek.ALL_END, deepseek.BEGIN, deepseek.SEPARATOR, deepseek.END)

CALL_FORMATS: Mapping[str, CallFormat] = {
    HARMONY: CallFormat(harmony.harmony, _HARMONY_MARKERS, (harmony.CHANNEL, harmony.MESSAGE)),
    "deepseek_v3": CallFormat(deepseek.deepseek_v3, _DEEPSEEK_MARKERS, (deepseek.BEGIN,)),
    "qwen3_coder": CallFormat(
        qwen3_coder.qwen3_coder, (qwen3_coder.OPEN, qwen3_coder.CLOSE), (qwen3_coder.FUNCTION, qwen3_coder.PARAMETER)
    ),
    "mistral": CallFormat(
        mistral.mistral, (mistral.OPEN, mistral.ARGS, mistral.CALL_ID), (mistral.OPEN,), new_id=short_id
    ),
    "hermes": CallFormat(hermes.hermes, (hermes.OPEN, hermes.CLOSE), (hermes.OPEN,)),
    "pythonic": CallFormat(pythonic.pythonic, (pythonic.OPEN, pythonic.CLOSE), ("<|header_start|>", "tools")),
    "llama3_json": CallFormat(llama3_json.llama3_json, (llama3_json.TAG,), ("<|start_header_id|>", "tools")),
    "gemma": CallFormat(gemma.gemma, (), ("<start_of_turn>", "tools")),
}
"""By the name of `--tool-call-parser`."""

REASONING_FORMATS: Mapping[str, tuple[Thinking | None, tuple[str, ...]]] = {
    HARMONY: (None, (harmony.CHANNEL, harmony.MESSAGE)),
    "mistral": (Thinking(("[THINK]",), ("[/THINK]",), anywhere=True), ("[THINK]",)),
    "deepseek_r1": (Thinking(("<think>",), ("</think>",), always=True), ("</think>", "<｜Assistant｜>")),
    "qwen3": (Thinking(("<think>",), ("</think>",)), ("</think>",)),
    "granite": (
        Thinking(
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
        ),
        ("Here is my thought process:",),
    ),
}
"""By the name of `--reasoning-parser`: the marks, and what the family's templates hold."""


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How one model's replies are read.

    Attributes:
        calls, reasoning: names in the tables; None: there are none to look for.
    """

    calls: str | None
    reasoning: str | None

    @classmethod
    def of(cls, calls: str, reasoning: str, template: str | None) -> ReplyFormat:
        """The format of a model with a chat template. Names are those of the tables, "auto" or "none"."""
        signs = {name: each.signs for name, each in CALL_FORMATS.items()}
        reasoning_signs = {name: each[1] for name, each in REASONING_FORMATS.items()}
        return cls(_chosen(calls, signs, template or ""), _chosen(reasoning, reasoning_signs, template or ""))

    def __str__(self) -> str:
        """In words, for the log."""
        calls, reasoning = (HARMONY, HARMONY) if self.is_harmony else (self.calls, self.reasoning)
        read = [
            f"{what} {'left in the text' if name is None else f'read as {name}'}"
            for what, name in (("calls of tools are", calls), ("reasoning is", reasoning))
        ]
        return ", ".join(read)

    @property
    def thinking(self) -> Thinking | None:
        """How reasoning is marked; None where it is not, or where one parser reads all."""
        return None if self.reasoning is None else REASONING_FORMATS[self.reasoning][0]

    def markers(self, *, with_calls: bool) -> tuple[str, ...]:
        """What must stay in the text though it be a special token."""
        thinking = self.thinking
        marks = () if thinking is None else (*thinking.opens, *thinking.closes)
        name = HARMONY if self.is_harmony else self.calls if with_calls else None
        return marks if name is None else (*marks, *CALL_FORMATS[name].markers)

    @property
    def is_harmony(self) -> bool:
        """Whether one parser reads all."""
        return HARMONY in (self.calls, self.reasoning)

    def begins_inside(self, prompt_end: str) -> bool:
        """Whether a reply to a prompt begins as reasoning; prompt_end is its last text."""
        return self.thinking is not None and self.thinking.begins_inside(prompt_end)

    def end_of(self, said: str) -> str:
        """What stands for the end of a prompt that ends in the middle of a reply, of which `said` is there."""
        return "" if self.thinking is None else self.thinking.end_of(said)

    def open_parser(self, tools: Tools | None, prompt_end: str) -> ToolParser:
        """A parser for one choice.

        Args:
            tools: the request's; None when it may call none.
            prompt_end: the last text of the prompt, special tokens included.
        """
        if self.is_harmony:
            return CursorParser(lambda cursor: harmony.harmony(cursor, tools), long_id)
        found: list[ToolParser] = []
        thinking = self.thinking
        if thinking is not None:
            found.append(CursorParser(partial(thinking.split, inside=thinking.begins_inside(prompt_end)), long_id))
        if tools is not None and self.calls is not None:
            form = CALL_FORMATS[self.calls]
            found.append(CursorParser(lambda cursor: form.syntax(cursor, tools), form.new_id))
        return Chain(*found) if len(found) == 2 else found[0] if found else PlainText()


def _chosen(name: str, signs: Mapping[str, tuple[str, ...]], template: str) -> str | None:
    if name != AUTO:
        return None if name == "none" else name
    return next((each for each, wanted in signs.items() if all(sign in template for sign in wanted)), None)
