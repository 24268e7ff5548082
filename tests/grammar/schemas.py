"""Small random schemas, and a validator of our own for the keywords that they use."""

from __future__ import annotations

import random
from typing import Any


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema of bounded texts, so that every walk through it ends."""
    kinds = ["string", "integer", "boolean", "null", "enum"] + (["object", "array", "anyOf"] if depth else [])
    kind = rng.choice(kinds)
    if kind == "string":
        low = rng.randrange(3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(4)}
    if kind == "integer":
        low = rng.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(100)}
    if kind == "enum":
        return {"enum": rng.sample(["a", "b c", 1, -2, None, True, 'é\n"', "😀"], 3)}
    if kind == "array":
        low = rng.randrange(2)
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": low, "maxItems": low + 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    if kind == "object":
        names = rng.sample(["a", "b", "long name", "ü", '"'], rng.randrange(1, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": names[: rng.randrange(len(names) + 1)],
            "additionalProperties": False,
        }
    return {"type": kind}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is what one of these schemas allows."""
    if "anyOf" in schema:
        return any(is_valid(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(each) and value == each for each in schema["enum"])
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
        case "array":
            fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return fits and all(is_valid(each, schema["items"]) for each in value)
        case "object":
            known = schema["properties"]
            fits = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(known)
            return fits and all(is_valid(each, known[name]) for name, each in value.items())
    raise AssertionError(schema)
