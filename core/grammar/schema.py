"""Which JSON Schemas can be honoured: every keyword is enforced, says nothing about the form, or is refused by name.

The compiler passes over keywords that it has never heard of. Nothing may be passed over, so all keywords are looked at
here first.
"""

from __future__ import annotations

from typing import Any

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.structured import FIELD

ENFORCED = frozenset({
    "type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf", "properties", "required", "additionalProperties",
    "patternProperties", "minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "minItems",
    "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf",
})  # fmt: skip
"""Keywords that the compiler turns into a grammar, or refuses where a combination is beyond it."""

NOTES = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id",
    "$anchor", "$defs", "definitions", "discriminator",
})  # fmt: skip
"""Keywords that say nothing about what is valid."""

SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
ONE_SCHEMA = ("additionalProperties", "items", "additionalItems")


def check_keywords(schema: Any) -> None:
    """Refuse a schema with a keyword that can't be honoured.

    Args:
        schema: parsed JSON, of bounded depth.

    Raises:
        InvalidRequest: naming the keyword.
    """
    if not isinstance(schema, dict):
        return  # true and false are schemas; anything else the compiler refuses
    for keyword in schema:
        if keyword not in ENFORCED and keyword not in NOTES:
            raise InvalidRequest(f"the schema's keyword {keyword[:80]!r} can't be honoured; leave it out", field=FIELD)
    for keyword in SCHEMAS_BY_NAME:
        if isinstance(named := schema.get(keyword), dict):
            for inner in named.values():
                check_keywords(inner)
    for keyword in (*LISTS_OF_SCHEMAS, *ONE_SCHEMA):
        inner = schema.get(keyword)
        for each in inner if isinstance(inner, list) else [inner]:
            check_keywords(each)


def allows_any_value(schema: Any) -> bool:
    """Whether a schema asks for JSON and nothing more."""
    return schema is True or (isinstance(schema, dict) and not set(schema) - NOTES)


def allows_any_object(schema: Any) -> bool:
    """Whether a schema asks for an object and nothing more."""
    return isinstance(schema, dict) and schema.get("type") == "object" and not set(schema) - NOTES - {"type"}
