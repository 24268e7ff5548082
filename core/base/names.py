"""Help with misspelt names: every "unknown X" error offers the nearest known one."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The tail of an error message about an unknown name.

    Args:
        word: what the user wrote.
        known: the names that exist.

    Returns:
        "; did you mean 'x'?" when a known name is near, otherwise the whole list, "; known: a, b, c".
    """
    import difflib  # only the error path pays for it

    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(names)}" if names else ""
