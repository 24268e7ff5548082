"""What the scripted model of these tests replies, by the last word of the conversation."""

from __future__ import annotations

from typing import Any

SCRIPTS = {
    "plain": ["Hello", " wor", "ld", "!"],
    "hush": [],
    "loop": ["tick ", "tock ", "tick "],
    "think": ["<think>", "\nHm", ", four?", "\n</think>", "\n\nFour", "."],
    "call": [
        "I", "'ll look.", "\n<tool_call>\n", '{"name": "time", ', '"arguments": {"zone": "CET"}}', "\n</tool_call>\n",
        '<tool_call>{"name": "city", "arguments": {}}', "</tool_call>",
    ],
}  # fmt: skip

ZONE: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"enum": ["CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
"""The schema of the one argument of `time`."""

NOTHING: dict[str, Any] = {"type": "object", "additionalProperties": False}
"""The schema of the arguments of `city`, which has none."""
