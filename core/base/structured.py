"""What form a reply must have: one of six ways to say it.

The values are checked here for shape and size, at the door. Whether a schema or a grammar can be honoured, its
compiler says (core/grammar).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from octavo.core.base.errors import InvalidRequest

MAX_FORM_CHARS = 256 * 1024
"""Of a schema, regex, grammar, tag or of all choices together."""

MAX_FORM_DEPTH = 64
"""Of nested JSON in a schema or a tag."""

MAX_CHOICES = 1024

FIELD = "structured_outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The form of a reply. Exactly one of the fields is given.

    Attributes:
        json_schema: the reply is JSON that this schema allows; a schema, or its JSON text (kept as text).
        json_object: the reply is any JSON object.
        regex: the reply matches this regular expression as a whole.
        choice: the reply is one of these texts.
        grammar: the reply is what this grammar derives from its rule `start` (Lark) or `root` (EBNF with `::=`).
        structural_tag: free text in which certain words begin a part with a schema; JSON or its text:
            {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}.
        frame: besides one of these, a Lark grammar of the whole reply, in which `@form` stands for it.
    """

    json_schema: str | bool | dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    frame: str | None = None

    def __post_init__(self) -> None:
        forms = [each.name for each in fields(self) if each.name != "frame"]
        given = [name for name in forms if getattr(self, name) not in (None, False)]
        if self.json_schema is False and not given:
            raise InvalidRequest("json_schema is false, which allows no reply at all; give a schema", field=FIELD)
        if len(given) != 1:
            named = ", ".join(given) or "none"
            raise InvalidRequest(
                f"structured output takes exactly one of {', '.join(forms)}; given: {named}", field=FIELD
            )
        if self.frame is not None:
            _check_text("frame", self.frame)
        if given == ["choice"]:
            self._read_choice()
        elif given[0] in ("json_schema", "structural_tag"):
            object.__setattr__(self, given[0], _json_text(given[0], getattr(self, given[0])))
        elif given == ["json_object"]:
            if self.json_object is not True:
                raise InvalidRequest("json_object must be true or false", field=FIELD)
        else:
            _check_text(given[0], getattr(self, given[0]))

    def _read_choice(self) -> None:
        if not isinstance(self.choice, (list, tuple)) or not all(
            isinstance(each, str) and each for each in self.choice
        ):
            raise InvalidRequest("choice must be a list of texts that are not empty", field=FIELD)
        if not 0 < len(self.choice) <= MAX_CHOICES:
            raise InvalidRequest(f"choice has {len(self.choice)} texts; give between 1 and {MAX_CHOICES}", field=FIELD)
        object.__setattr__(self, "choice", tuple(self.choice))
        _check_chars("choice", "".join(self.choice))


StructuredOutputsParams = StructuredOutput
"""vLLM's name; `json` is spelled json_schema here."""


def _json_text(name: str, value: Any) -> str:
    """The JSON text of a value, or of a text that holds one, checked for size and depth."""
    if not isinstance(value, (str, bool, Mapping)):
        raise InvalidRequest(f"{name} must be a JSON object or its text", field=FIELD)
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        _check_chars(name, text)
        value = json.loads(text)
    except RecursionError as error:
        raise InvalidRequest(_too_deep(name), field=FIELD) from error
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error}", field=FIELD) from error
    if not isinstance(value, dict) and value is not True:
        raise InvalidRequest(f"{name} must be a JSON object", field=FIELD)
    level: list[Any] = [] if value is True else [value]
    for _ in range(MAX_FORM_DEPTH):
        level = [inner for each in level for inner in _inside(each) if isinstance(inner, (dict, list))]
        if not level:
            return text
    raise InvalidRequest(_too_deep(name), field=FIELD)


def _inside(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _too_deep(name: str) -> str:
    return f"{name} is nested deeper than {MAX_FORM_DEPTH} levels; flatten it, with $ref and $defs for example"


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(f"{name} must be a text that is not empty", field=FIELD)
    _check_chars(name, value)


def _check_chars(name: str, text: str) -> None:
    if len(text) > MAX_FORM_CHARS:
        raise InvalidRequest(
            f"{name} has {len(text)} characters, above the limit of {MAX_FORM_CHARS}; shorten it", field=FIELD
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} holds a lone surrogate, which is not valid Unicode", field=FIELD) from error
