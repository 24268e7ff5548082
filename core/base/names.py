"""Help with misspelt names: every "unknown X" error offers the nearest known one."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name most like `word`, or None when none is at least `cutoff` alike (1 is equal)."""
    import difflib  # only the error path pays for it

    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The tail of an error message about an unknown name.

    Args:
        word: what the user wrote.
        known: the names that exist.

    Returns:
        "; did you mean 'x'?" when a known name is near, otherwise the whole list, "; known: a, b, c".
    """
    names = sorted(known)
    if near := nearest(word, names):
        return f"; did you mean {near!r}?"
    return f"; known: {', '.join(names)}" if names else ""
