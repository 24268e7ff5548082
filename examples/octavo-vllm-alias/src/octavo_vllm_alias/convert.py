"""Values of vLLM's flags as Octavo's flags take them.

A converter gives None where nothing is to be said, and a word that begins with -- where it is another flag's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def count(text: str) -> str | None:
    """32k is 32,000 and 32K is 32,768; -1 and auto leave the number open."""
    if text == "-1" or text.lower() == "auto":
        return None
    match = _COUNT.fullmatch(text)
    if match is None:
        return text  # Octavo says what is wrong with it
    number, unit = match.groups()
    base = 1000 if unit.islower() else 1024
    return str(int(float(number) * base ** _POWERS.get(unit.lower(), 0)))


def fraction(text: str) -> str:
    """A share of the memory, at most what Octavo may take."""
    try:
        return str(min(float(text), 0.95))
    except ValueError:
        return text


def positive(text: str) -> str | None:
    """0 says nothing."""
    return None if text == "0" else text


def json_list(text: str) -> list[str]:
    """A JSON list as its words."""
    try:
        words = json.loads(text)
    except ValueError:
        words = [text]
    return [str(word) for word in words] if isinstance(words, list) else [str(words)]


def adapter(text: str) -> list[str]:
    """NAME=PATH, or one or several objects with name and path."""
    try:
        found = json.loads(text)
    except ValueError:
        return [text]
    found = found if isinstance(found, list) else [found]
    return [f"{each['name']}={each['path']}" if isinstance(each, dict) and {"name", "path"} <= set(each) else text
            for each in found]  # fmt: skip


def variables(text: str) -> list[str]:
    """An object as NAME=VALUE, the values in JSON."""
    try:
        found = json.loads(text)
    except ValueError:
        return [text]
    return [f"{name}={json.dumps(value)}" for name, value in found.items()] if isinstance(found, dict) else [text]


def slo(text: str) -> str:
    """ttft:500 as ttft=500."""
    name, _, limit = text.partition(":")
    return f"{'e2e' if name == 'e2el' else name}={limit}"


def kv_events(text: str) -> list[str]:
    """vLLM's object as Octavo's flags; nothing where it switches events off."""
    try:
        found = json.loads(text)
    except ValueError:
        return [text]
    if not isinstance(found, dict) or not found.get("enable_kv_cache_events") or found.get("publisher") == "null":
        return []
    found = {"endpoint": "tcp://*:5557", **found}
    names = ("endpoint", "replay_endpoint", "topic", "buffer_steps", "hwm")
    return [f"--kv-events-{name.replace('_', '-')}={found[name]}" for name in names if found.get(name)]


def speculation(text: str) -> str:
    """The guesses of a step from vLLM's object; the object itself, which Octavo refuses, where a model makes them."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    if not isinstance(found, dict) or found.get("method", found.get("model")) not in ("ngram", "[ngram]"):
        return text
    return str(found.get("num_speculative_tokens", text))


CONVERTERS: Mapping[str, Callable[[str], str | list[str] | None]] = {
    "count": count,
    "bytes": count,
    "fraction": fraction,
    "lower": str.lower,
    "positive": positive,
    "json-list": json_list,
    "adapter": adapter,
    "variables": variables,
    "kv-events": kv_events,
    "speculation": speculation,
    "slo": slo,
}
"""By the name in the table."""
