"""What every route needs: the engine, the names it is served under, and the server's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.base.config import ServeConfig
from octavo.core.base.errors import InvalidRequest, ModelNotFound
from octavo.core.base.lora import LoRARequest
from octavo.core.engine.async_engine import AsyncEngine
from octavo.core.serve.answers import plain
from octavo.core.serve.failures import MAX_FIELD_CHARS
from octavo.core.serve.schema import CheckedBody, CheckedRequest


@dataclass(frozen=True, slots=True)
class Serving:
    """One started engine as the API shows it. Routes read it; nobody writes to it.

    Attributes:
        engine: started.
        names: of the model; replies are signed with the one that the request asked for.
        settings: limits and keys.
        version: Octavo's.
        started: Unix time of the start, in seconds.
    """

    engine: AsyncEngine
    names: Sequence[str]
    settings: ServeConfig
    version: str
    started: int

    def admit(self, body: CheckedRequest) -> LoRARequest | None:
        """The adapter that a body asks for; None for the model itself.

        Raises:
            ModelNotFound: nothing of that name is served.
            InvalidRequest: a field of the body is unknown, and the server is strict.
        """
        adapter = self.adapter_of(body.model)
        self.check_fields(body)
        return adapter

    def check_fields(self, body: CheckedBody) -> None:
        """Raise InvalidRequest for an unknown field, where the server is strict."""
        if self.settings.strict_api and (unknown := body.ignored_fields()):
            name = plain(unknown[0])[:MAX_FIELD_CHARS]
            raise InvalidRequest(f"{name} is no field that this server knows; leave it out", field=name)

    def adapter_of(self, name: str) -> LoRARequest | None:
        """The adapter that a name asks for; None for the model itself.

        Raises:
            ModelNotFound: nothing of that name is served.
        """
        if name not in self.names and any(info.name == name for info in self.engine.list_adapters()):
            return LoRARequest(name)
        self.check_model(name)
        return None

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound for a name that is not the model's."""
        if name not in self.names:
            raise ModelNotFound(
                f"this model is not served here; ask for {' or '.join(map(repr, self.names))}", field="model"
            )
