"""What an engine process sends for one call of its front, until all requests of the call have finished."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from octavo.core.base.errors import OctavoError
from octavo.core.engine.outputs import RequestOutput


class CallStream:
    """What comes for the requests of one call, until all of them have finished.

    Args:
        places: request id -> its place among the call's prompts.
        every_piece: False keeps only the last piece of each request.
    """

    def __init__(self, places: Mapping[str, int], *, every_piece: bool) -> None:
        self.places = places
        self._every_piece = every_piece
        self._num_open = len(places)
        self._arrived: asyncio.Queue[RequestOutput | OctavoError] = asyncio.Queue()

    def put(self, piece: RequestOutput) -> None:
        """Take in a piece of one of the requests."""
        if self._every_piece or piece.finished:
            self._arrived.put_nowait(piece)

    def fail(self, error: OctavoError) -> None:
        """End the stream with an error."""
        self._arrived.put_nowait(error)

    async def next(self) -> tuple[int, RequestOutput] | None:
        """The next (place, piece); None once all requests have finished."""
        if not self._num_open:
            return None
        item = await self._arrived.get()
        if isinstance(item, OctavoError):
            raise item
        self._num_open -= item.finished
        return self.places[item.request_id], item
