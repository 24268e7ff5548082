"""How each format writes a call: what a reply is held to where calls are demanded.

    before  call  between  call  between  call  after          call: marks and texts around a NAME and its ARGUMENTS

A format whose calls are no JSON (Qwen3-Coder's, Python's), and a model of no known format, write Llama's plain JSON
instead, which `ReplyFormat` is then told to read.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.core.serve.tools import deepseek, harmony, hermes, mistral
from octavo.core.serve.tools.registry import HARMONY, ReplyFormat
from octavo.core.text.tokenizer import Tokenizer


class Slot(enum.Enum):
    """What stands between the texts of a call."""

    NAME = enum.auto()
    ARGUMENTS = enum.auto()


Parts = tuple[str | Slot, ...]
NAME, ARGUMENTS = Slot.NAME, Slot.ARGUMENTS


@dataclass(frozen=True, slots=True)
class Writing:
    """How calls are written. A text that is a special token of the model's is written as that token.

    Attributes:
        call: one call.
        before, between, after: what stands around several.
        is_single: a reply has one call only.
        may_follow_text: its first text begins calls and nothing else, so that words may come before it.
    """

    call: Parts
    before: Parts = ()
    between: Parts = ()
    after: Parts = ()
    is_single: bool = False
    may_follow_text: bool = False


def _json_call(arguments: str) -> Parts:
    return ('{"name": "', NAME, f'", "{arguments}": ', ARGUMENTS, "}")


PLAIN_JSON = "llama3_json"

WRITINGS: Mapping[str, Writing] = {
    HARMONY: Writing(
        (
            harmony.CHANNEL, "commentary to=functions.", NAME, " ", harmony.CONSTRAIN, "json", harmony.MESSAGE,
            ARGUMENTS,
        ),
        is_single=True,
    ),
    "deepseek_v3": Writing(
        (deepseek.BEGIN, NAME, deepseek.SEPARATOR, ARGUMENTS, deepseek.END),
        (deepseek.ALL_BEGIN,), (), (deepseek.ALL_END,), may_follow_text=True,
    ),
    "mistral": Writing((mistral.OPEN, NAME, mistral.ARGS, ARGUMENTS), may_follow_text=True),
    "hermes": Writing(
        (hermes.OPEN, "\n", *_json_call("arguments"), "\n", hermes.CLOSE), between=("\n",), may_follow_text=True
    ),
    PLAIN_JSON: Writing(_json_call("parameters"), between=("; ",)),
    "gemma": Writing(("```json\n", *_json_call("parameters"), "\n```"), between=("\n",)),
}  # fmt: skip
"""By the name of the format."""

OLDER_MISTRAL = Writing(_json_call("arguments"), (mistral.OPEN, " ["), (", ",), ("]",), may_follow_text=True)
OLDER_DEEPSEEK = replace(
    WRITINGS["deepseek_v3"],
    call=(
        deepseek.BEGIN, "function", deepseek.SEPARATOR, NAME, f"\n{deepseek.FENCE}json\n", ARGUMENTS,
        f"\n{deepseek.FENCE}", deepseek.END,
    ),
    between=("\n",),
)  # fmt: skip


def writable(form: ReplyFormat) -> ReplyFormat:
    """The format itself, or where its calls can't be demanded, the same with calls in plain JSON."""
    if form.is_harmony or form.calls in WRITINGS:
        return form
    return replace(form, calls=PLAIN_JSON)


def writing_of(form: ReplyFormat, tokenizer: Tokenizer, template: str) -> Writing:
    """How a model writes calls in a format that is writable; its tokens and template tell which of two ages it is."""
    if form.is_harmony:
        return WRITINGS[HARMONY]
    assert form.calls is not None  # it is writable
    if form.calls == "mistral" and tokenizer.token_id(mistral.ARGS) is None:
        return OLDER_MISTRAL
    if form.calls == "deepseek_v3" and f"{deepseek.FENCE}json" in template:
        return OLDER_DEEPSEEK
    return WRITINGS[form.calls]
