"""truncation "auto" of /v1/responses: where a conversation is too long, its oldest turns are left out.

    system │ user  assistant  tool  assistant │ user  assistant │ user
    always │ left out first                   │ then these      │ the last turn stays

A turn begins with the user's message, so that no result is kept whose call is gone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from octavo.core.base.errors import NeverFits
from octavo.core.serve.chat.turn import ChatTurn

Messages = Sequence[dict[str, Any]]


async def read_newest(read: Callable[[Messages], Awaitable[ChatTurn]], chat: Messages, max_tokens: int) -> ChatTurn:
    """The turn of a conversation, of which as much is kept as a prompt of `max_tokens` holds.

    Raises:
        InvalidRequest: as `read`, also where the last turn alone does not fit.
    """

    first = next((i for i, message in enumerate(chat) if message["role"] != "system"), len(chat))
    starts = [first, *(i for i, message in enumerate(chat) if i > first and message["role"] == "user")]

    async def try_from(start: int) -> ChatTurn | None:
        try:
            turn = await read([*chat[:first], *chat[start:]])
        except NeverFits:
            return None
        return turn if len(turn.token_ids) <= max_tokens else None

    if (whole := await try_from(first)) is not None:
        return whole
    newest: ChatTurn | None = None
    low, high = 1, len(starts) - 1
    while low <= high:
        middle = (low + high) // 2
        turn = await try_from(starts[middle])
        if turn is None:
            low = middle + 1
        else:
            newest, high = turn, middle - 1
    return newest or await read([*chat[:first], *chat[starts[-1] :]])
