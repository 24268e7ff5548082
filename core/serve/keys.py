"""The keys that open the door: given as settings, and in a file that may change while the server runs.

    settings.api_key ──────────────┐
    settings.api_key_file ── look ─┴─► digests ◄── compared, all of them, in constant time ── a request's key

The file is looked at when a request comes, at most once in LOOK_SECONDS; what can't be used of a new one is told, and
the keys stay as they were.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.core.base.config import ServeConfig
from octavo.core.base.errors import ConfigError
from octavo.core.serve.files import stamp

if TYPE_CHECKING:
    from starlette.datastructures import Headers

LOOK_SECONDS = 1.0
_KEY = re.compile(r"[!-~]+")
_WANTED = "give letters, digits and signs of ASCII, without spaces"

logger = logging.getLogger(__name__)


class Keys:
    """Who has one.

    Args:
        settings: the keys and the file's name.

    Raises:
        ConfigError: the file can't be read, or holds none; or a key is none that a header could bring.
    """

    def __init__(self, settings: ServeConfig) -> None:
        self._settings = settings
        self._seen = stamp(settings.api_key_file)
        self._looked = time.monotonic()
        self._digests = list(map(_digest, read_keys(settings)))

    def open_for(self, headers: Headers) -> bool:
        """Whether a request may come in: it brings a key, or there are none."""
        self._look()
        if not self._digests:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", ""))
        # Every key is compared, so that time tells nothing of which one was near.
        return sum(hmac.compare_digest(given, known) for known in self._digests) > 0

    def _look(self) -> None:
        """Take the file's keys as they are now."""
        if self._settings.api_key_file is None or time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        found = stamp(self._settings.api_key_file)
        if found == self._seen:
            return
        self._seen = found
        try:
            self._digests = list(map(_digest, read_keys(self._settings)))
            logger.info("the keys in api_key_file were read again")
        except ConfigError as error:
            logger.warning("api_key_file was changed and can't be used yet; its old keys go on: %s", error)


def read_keys(settings: ServeConfig) -> tuple[str, ...]:
    """All keys that open the door; none: it stands open.

    Raises:
        ConfigError: the file can't be read, or holds none; or a key is none that a header could bring.
    """
    for number, key in enumerate(settings.api_key, 1):
        if not _KEY.fullmatch(key):
            raise ConfigError(f"api_key: key {number} is empty or can't stand in a header; {_WANTED}", field="api_key")
    if settings.api_key_file is None:
        return settings.api_key
    try:
        lines = Path(settings.api_key_file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"  # the error would quote the file
        raise ConfigError(f"api_key_file can't be read ({reason}); name another file", field="api_key_file") from error
    keys = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if not _KEY.fullmatch(line):
            message = f"api_key_file: the key in line {number} can't stand in a header; {_WANTED}"
            raise ConfigError(message, field="api_key_file")
        keys.append(line)
    if not keys:
        raise ConfigError("api_key_file holds no key; write one a line", field="api_key_file")
    return (*settings.api_key, *keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
