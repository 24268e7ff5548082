"""The certificate that HTTPS needs, checked before anything is loaded."""

from __future__ import annotations

import ssl

from octavo.core.base.config import ServeConfig
from octavo.core.base.errors import ConfigError


def check_certificate(settings: ServeConfig) -> None:
    """Raise ConfigError unless the files hold a certificate and its key, or none are named."""
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise ConfigError("ssl_keyfile is given without ssl_certfile; give both", field="ssl_certfile")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.ssl_certfile, settings.ssl_keyfile, password=_no_password
        )
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"ssl_certfile {settings.ssl_certfile} with ssl_keyfile {settings.ssl_keyfile} can't be used ({error}); "
            "give a PEM certificate and its unencrypted key",
            field="ssl_certfile",
        ) from error


def _no_password() -> str:
    """Fail rather than ask at the terminal."""
    raise ssl.SSLError("the key is encrypted")
