"""Strict reading of a checkpoint's `quantization_config`.

    fields a format reads          -> type and range checked
    fields known to change nothing -> the format's own list, each with its reason
    any other field                -> refused, unless it says "not used" (null, false, empty)

So a variant whose mathematics are not known here fails at the door and not in its replies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from octavo.core.base.errors import CheckpointError


class Settings:
    """Reads the fields of one JSON object and remembers which; `finish` judges the rest.

    Args:
        values: the object.
        where: prefix of field names in messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "quantization_config.") -> None:
        self._values = values
        self._where = where
        self._seen: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the field is there and not null. This alone does not count as reading it."""
        return self._values.get(name) is not None

    def any_of(self, name: str) -> Any:
        """The field's value as it is; None where absent."""
        self._seen.add(name)
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None, *, low: int = 1) -> int:
        """An integer of at least `low`; `default` where absent or null, and required without one."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.refuse(name, f"give an integer of at least {low}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """true or false; `default` where absent or null."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "give true or false")
        return value

    def choice(self, name: str, known: Collection[str], default: str | None = None) -> str:
        """One of the known strings, whatever its case; `default` where absent or null, and required without one."""
        value = self._take(name, default)
        if not isinstance(value, str) or value.lower() not in known:
            raise self.refuse(name, f"{', '.join(known)} can be loaded")
        return value.lower()

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty where absent or null."""
        value = self._take(name, ())
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.refuse(name, "give a list of names")
        return tuple(value)

    def section(self, name: str) -> Settings | None:
        """An object inside this one; None where absent, null or empty."""
        value = self.any_of(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.refuse(name, "give an object")
        return Settings(value, f"{self._where}{name}.") if value else None

    def sections(self, name: str) -> dict[str, Settings]:
        """An object of objects, by key; empty where absent or null."""
        value = self._take(name, {})
        if not isinstance(value, Mapping) or not all(isinstance(item, Mapping) for item in value.values()):
            raise self.refuse(name, "give an object of objects")
        return {key: Settings(item, f"{self._where}{name}.{key}.") for key, item in value.items()}

    def refuse(self, name: str, reason: str) -> CheckpointError:
        """An error about a field's value."""
        return CheckpointError(f"config.json: {self._where}{name} is {self._values.get(name)!r}; {reason}", field=name)

    def finish(self, inert: Collection[str] = ()) -> None:
        """Refuse what was not read, is not inert and does not say "not used".

        Raises:
            CheckpointError: naming the field.
        """
        for name, value in self._values.items():
            if name not in self._seen and name not in inert and value not in (None, False, "", [], {}):
                raise self.refuse(name, "it is not implemented and may change the weights' meaning")

    def _take(self, name: str, default: Any) -> Any:
        self._seen.add(name)
        if self.has(name):
            return self._values[name]
        if default is None:
            raise CheckpointError(f"config.json: {self._where}{name} is missing", field=name)
        return default
