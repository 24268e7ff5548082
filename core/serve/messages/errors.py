"""Errors as Anthropic shapes them: {"type": "error", "error": {"type", "message"}}, made of OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PATH = "/v1/messages"
"""Everything at and below it speaks Anthropic's API."""

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""HTTP status -> type; the others are the request's fault below 500 and ours from there."""


def speaks_messages(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == PATH or path.startswith(f"{PATH}/")


def messages_error(status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an error in this form, of its HTTP status and its body in OpenAI's form."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}
