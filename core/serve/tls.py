"""The certificate that HTTPS needs: checked before anything is loaded, and read again when its files change."""

from __future__ import annotations

import asyncio
import logging
import ssl

from octavo.core.base.config import ServeConfig
from octavo.core.base.errors import ConfigError
from octavo.core.serve.files import Stamp, stamp

RENEW_SECONDS = 5.0
"""How often it is looked whether the files have changed."""

logger = logging.getLogger(__name__)


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


async def renew_certificate(context: ssl.SSLContext, settings: ServeConfig) -> None:
    """Give new connections the certificate in the files as they are. Runs until it is cancelled.

    What does not fit together is told and passed over: the other half of a renewal comes with the next look.

    Args:
        context: that serves now.
    """
    assert settings.ssl_certfile is not None
    seen = _stamps(settings)
    while True:
        await asyncio.sleep(RENEW_SECONDS)
        found = _stamps(settings)
        if found == seen:
            continue
        seen = found
        try:
            check_certificate(settings)
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=_no_password)
            logger.info("the certificate was renewed")
        except (ConfigError, OSError) as error:
            logger.warning("the certificate was changed and can't be used yet: %s", error)


def _stamps(settings: ServeConfig) -> list[Stamp | None]:
    return [stamp(path) for path in (settings.ssl_certfile, settings.ssl_keyfile)]


def _no_password() -> str:
    """Fail rather than ask at the terminal."""
    raise ssl.SSLError("the key is encrypted")
