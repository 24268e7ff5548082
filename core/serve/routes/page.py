"""GET /: a page to chat with the model and to watch the engine (core/serve/page), and the files it is made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response

from octavo.core.serve.page import HEADERS, PATHS, PageFile, read_file
from octavo.core.serve.serving import Serving


def install(app: FastAPI, serving: Serving) -> None:
    """Add the routes to an app, unless the page is switched off."""
    if not serving.settings.page:
        return
    for path, name in PATHS.items():
        app.add_route(path, _answer(read_file(name)), methods=["GET"], include_in_schema=False)


def _answer(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**HEADERS, "ETag": file.etag}

    async def answer(request: Request) -> Response:
        """The file; 304 for who has it."""
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)

    return answer
