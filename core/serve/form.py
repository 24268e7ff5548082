"""The form of a reply as a body asks for it: OpenAI's response_format, vLLM's structured_outputs, its older guided_*.

    response_format      {"type": "text" | "json_object" | "json_schema" | "structural_tag", ...}
    structured_outputs   {"json" | "json_object" | "regex" | "choice" | "grammar" | "structural_tag": ...}
    guided_json, guided_regex, guided_choice, guided_grammar

At most one of them may ask for something. A schema is enforced with and without `strict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.structured import StructuredOutput

_SPELLINGS = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""vLLM's name -> ours."""


def form_of(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None,
    guided: Mapping[str, Any],
) -> StructuredOutput | None:
    """The form that a body asks for; None for free text.

    Args:
        guided: what follows "guided_" -> its value.

    Raises:
        InvalidRequest: naming the field.
    """
    asked: dict[str, dict[str, Any]] = {}
    if response_format is not None and (wanted := _of_response_format(response_format)):
        asked["response_format"] = wanted
    if structured_outputs and (wanted := _of_structured_outputs(structured_outputs)):
        asked["structured_outputs"] = wanted
    for name, value in guided.items():
        if value is not None:
            asked[f"guided_{name}"] = {_SPELLINGS[name]: value}
    if not asked:
        return None
    if len(asked) > 1:
        raise InvalidRequest(f"{' and '.join(asked)} both set the form of the reply; give one", field=list(asked)[1])
    ((field, wanted),) = asked.items()
    try:
        return StructuredOutput(**wanted)
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}: {error}", field=field) from error


def _of_response_format(value: Mapping[str, Any]) -> dict[str, Any]:
    kind = value.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": dict(value)}
    if kind != "json_schema":
        raise InvalidRequest(
            "response_format.type must be text, json_object, json_schema or structural_tag", field="response_format"
        )
    named = value.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("schema"), (dict, bool)):
        raise InvalidRequest(
            "response_format.json_schema must be an object with a schema, which is an object", field="response_format"
        )
    unknown = set(named) - {"name", "description", "schema", "strict"}
    if unknown:
        raise InvalidRequest(
            "response_format.json_schema has a field that means nothing; give name, description, schema and strict",
            field="response_format",
        )
    return {"json_schema": named["schema"]}


def _of_structured_outputs(value: Mapping[str, Any]) -> dict[str, Any]:
    for name, inner in value.items():
        if name not in _SPELLINGS and inner not in (None, False):
            raise InvalidRequest(
                f"structured_outputs has a field that is not supported; give one of {', '.join(_SPELLINGS)}",
                field="structured_outputs",
            )
    return {_SPELLINGS[name]: inner for name, inner in value.items() if inner is not None and name in _SPELLINGS}
