"""A certificate that is renewed while the server runs."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from pathlib import Path

import pytest
import uvicorn

from octavo.core.base.config import ServeConfig
from octavo.core.serve import tls
from octavo.core.serve.launch import listen, renewing, web_server

DATA = Path(__file__).parents[1] / "data" / "tls"


def test_new_connections_get_the_certificate_in_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "RENEW_SECONDS", 0.02)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(DATA / "cert.pem", cert)
    shutil.copy(DATA / "key.pem", key)
    settings = ServeConfig(port=0, ssl_certfile=str(cert), ssl_keyfile=str(key))

    async def app(scope: object, receive: object, send: object) -> None:
        """Only handshakes matter here."""

    async def scenario() -> None:
        with listen(settings) as listener:
            web: uvicorn.Server = web_server(app, settings)
            web.config.lifespan = "off"
            serving = asyncio.create_task(web.serve(sockets=[listener]))
            address = listener.getsockname()[:2]

            async def shown() -> str:
                return await asyncio.to_thread(ssl.get_server_certificate, address)

            async with renewing(web, settings):
                assert (await shown()).strip() == (DATA / "cert.pem").read_text().strip()
                shutil.copy(DATA / "next.pem", cert)  # half of it: the old pair goes on
                while "can't be used yet" not in caplog.text:
                    await asyncio.sleep(0.01)
                assert (await shown()).strip() == (DATA / "cert.pem").read_text().strip()
                shutil.copy(DATA / "next-key.pem", key)
                while (await shown()).strip() != (DATA / "next.pem").read_text().strip():
                    await asyncio.sleep(0.01)
            web.should_exit = True
            await serving

    asyncio.run(scenario())


def test_without_https_nothing_is_watched() -> None:
    async def scenario() -> None:
        before = asyncio.all_tasks()
        async with renewing(web_server(None, ServeConfig()), ServeConfig()):
            assert asyncio.all_tasks() == before

    asyncio.run(scenario())
