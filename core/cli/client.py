"""A running server, as `octavo chat`, `octavo complete` and `octavo bench serve` talk to it. Never imports torch.

    --url, --api-key, --model  ──►  Address  ──►  Client ──┬── models()              GET  /v1/models
                                                           └── stream(path, body)    POST, server-sent events

Any server that speaks OpenAI's API will do. What goes wrong is one line: nobody answers, the key, what the server says.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self
from urllib.parse import urlsplit

from octavo.core.base.errors import ConfigError, InvalidRequest, OctavoError, RequestFailed
from octavo.core.cli.interrupt import quiet_imports
from octavo.core.cli.sse import EventReader

if TYPE_CHECKING:
    import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "OCTAVO_API_KEY"
CONNECT_SECONDS = 10.0
MAX_MESSAGE_CHARS = 500

Json = dict[str, Any]


class Address(NamedTuple):
    """Where a server is and how to come in.

    Attributes:
        url: scheme, host and port, without the path /v1.
        key: None where the server wants none.
        model: what to ask for; None takes the first that the server names.
    """

    url: str
    key: str | None = None
    model: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What every request brings."""
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """Add --url, --api-key and --model."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", metavar="URL", default=DEFAULT_URL, help=f"where it is (default: {DEFAULT_URL})")
    group.add_argument("--api-key", metavar="KEY", help=f"the key to come in with (default: {KEY_VARIABLE})")
    group.add_argument("--model", metavar="NAME", help="what to ask for (default: the first of /v1/models)")


def address_of(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Address:
    """The server that the flags name.

    Raises:
        ConfigError: --url is no address of a server.
    """
    url = args.url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"--url is {args.url!r}; give an address such as {DEFAULT_URL}", field="url")
    # The server takes several keys from its variable, with commas between; any of them opens it.
    key = args.api_key or environ.get(KEY_VARIABLE, "").split(",")[0].strip() or None
    return Address(url, key, args.model)


def import_httpx() -> Any:
    """The module httpx.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        with quiet_imports():
            import httpx
    except ImportError as error:
        raise ConfigError("this command needs the extra client; pip install 'octavo[client]'") from error
    return httpx


def http_options(address: Address) -> Json:
    """Arguments for an httpx client of the server. A reply may take as long as it takes."""
    httpx = import_httpx()
    # A proxy from the environment can't know what listens on this machine.
    own = {f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")}
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    return {"base_url": address.url, "headers": address.headers, "timeout": timeout, "mounts": own}


class Client:
    """One server. Use it as a context manager."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._httpx = import_httpx()
        self._http: httpx.Client = self._httpx.Client(**http_options(address))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def model(self) -> str:
        """The model to ask for.

        Raises:
            UserError, RequestFailed: as `stream`.
        """
        return self._address.model or first_model(self.models())

    def models(self) -> Json:
        """What /v1/models says; errors as `stream`."""
        with self._told():
            response = self._http.get("/v1/models")
        if response.status_code != 200:
            refuse(response.status_code, response.text)
        try:
            return dict(response.json())
        except ValueError:
            raise RequestFailed(
                f"{self._address.url} answers, but not as OpenAI's API does; name another by --url"
            ) from None

    def stream(self, path: str, body: Json) -> Generator[Json, None, None]:
        """The chunks of a streamed reply, without the final [DONE]. Closing the generator ends the request.

        Raises:
            ConfigError: the server wants another key.
            InvalidRequest: the server refuses the request.
            RequestFailed: nobody answers, the server is busy or failing, or the reply breaks off.
        """
        reader, done = EventReader(), False
        with self._told(), self._http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                refuse(response.status_code, response.read().decode("utf-8", "replace"))
            for part in response.iter_bytes():
                for event in reader.feed(part):
                    done = done or event.data == "[DONE]"
                    if not done:
                        yield _chunk(event.data)
        if not done:
            raise RequestFailed("the server closed the connection before the reply was complete")

    @contextmanager
    def _told(self) -> Generator[None, None, None]:
        """What httpx raises, in our words."""
        try:
            yield
        except self._httpx.TransportError as error:
            raise RequestFailed(_words(self._httpx, error, self._address.url)) from error


def first_model(models: Json) -> str:
    """The first name of a reply of /v1/models.

    Raises:
        RequestFailed: there is none.
    """
    try:
        return str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise RequestFailed("the server names no model; name one by --model") from None


def refuse(status: int, text: str) -> NoReturn:
    """Raise what an answer other than 200 means.

    Args:
        text: its body.
    """
    message = _message(text) or f"the server answered {status}"
    if status in (401, 403):
        raise ConfigError(f"the server wants a key ({message}); give --api-key or {KEY_VARIABLE}", field="api_key")
    kind: type[OctavoError] = InvalidRequest if 400 <= status < 500 and status != 429 else RequestFailed
    raise kind(f"{message} (status {status})")


def _chunk(data: str) -> Json:
    try:
        chunk = json.loads(data)
    except ValueError:
        raise RequestFailed("the server sent an event that is not JSON") from None
    if not isinstance(chunk, dict):
        raise RequestFailed("the server sent an event that is no object")
    if chunk.get("error"):
        raise RequestFailed(_message(data) or "the server failed in the middle of the reply")
    return chunk


def _message(text: str) -> str:
    """The message of an error body, shortened; "" where there is none."""
    try:
        error = json.loads(text)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        message = text
    return " ".join(str(message).split())[:MAX_MESSAGE_CHARS]


def _words(httpx: Any, error: Exception, url: str) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        if "CERTIFICATE" in str(error).upper():
            return f"the certificate of {url} is not trusted ({error}); name its issuer's file in SSL_CERT_FILE"
        return (
            f"nobody answers at {url} ({error or 'no connection'}); "
            "start a server with `octavo serve MODEL`, or name another by --url"
        )
    return f"the connection to {url} broke off ({error or type(error).__name__})"
