"""Regular expressions that come with an adapter, matched within a time limit.

PEFT's settings may hold expressions of any kind, and some take longer than anyone lives on an ordinary layer's name. An
adapter is somebody else's file, read while others are served; so a match that takes longer than `SECONDS` is an error.
"""

from __future__ import annotations

from typing import Any

from octavo.core.base.errors import CheckpointError

SECONDS = 0.2
"""For one name. Sound expressions take microseconds."""


def check_pattern(pattern: str) -> str | None:
    """Why a text is no regular expression; None if it is one."""
    import regex

    try:
        regex.compile(pattern)
    except regex.error as error:
        return str(error)
    return None


def begins_with(pattern: str, text: str) -> Any:
    """The match of a pattern at the beginning of a text, as `re.match` gives it; None without one.

    Raises:
        CheckpointError: it takes too long.
    """
    import regex

    try:
        return regex.match(pattern, text, timeout=SECONDS)
    except TimeoutError:
        raise CheckpointError(
            f"adapter_config.json: the pattern {pattern[:100]!r} takes more than {SECONDS} s on the name "
            f"{text[:100]!r}; write it without repeats inside repeats, or give a list of names",
            field="target_modules",
        ) from None


def is_whole(pattern: str, text: str) -> bool:
    """Whether a pattern matches all of a text. Raises as `begins_with`."""
    return begins_with(rf"(?:{pattern})\Z", text) is not None
