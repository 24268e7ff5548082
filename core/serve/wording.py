"""Errors in the words of the API that was spoken: what chat completions call a field, others call something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from octavo.core.base.errors import InvalidRequest


@contextmanager
def worded(words: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields of whatever is refused inside.

    Args:
        words: part of a field's name -> what it is called here; replaced in this order.

    Raises:
        InvalidRequest: as inside, with other names.
    """
    try:
        yield
    except InvalidRequest as error:
        message, field = str(error), error.field
        for theirs, ours in words.items():
            message = message.replace(theirs, ours)
            field = None if field is None else field.replace(theirs, ours)
        raise type(error)(message, field=field) from error
