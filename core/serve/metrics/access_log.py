"""A line of the log for each request: what was asked where, and what came of it. Never what it says, nor its keys."""

from __future__ import annotations

import logging
from typing import Any

from octavo.core.serve.metrics.watch import Exchange

logger = logging.getLogger("octavo.access")


def note(exchange: Exchange) -> None:
    """Log a request. Those that only look, and come every few seconds, are for the level debug."""
    level = logging.DEBUG if exchange.only_looks else logging.INFO
    if logger.isEnabledFor(level):
        fields = fields_of(exchange)
        logger.log(level, "%s", _sentence(exchange, fields), extra={"fields": fields})


def fields_of(exchange: Exchange) -> dict[str, Any]:
    """What is known of a request; of several choices the longest times."""
    ends = exchange.report.ends
    fields: dict[str, Any] = {
        "request_id": exchange.request_id,
        "method": exchange.method,
        "path": exchange.path,
        "status": exchange.status,
        "seconds": round(exchange.seconds, 4),
    }
    if ends:
        fields |= {
            "prompt_tokens": exchange.report.prompt_tokens,
            "generated_tokens": sum(end.generated_tokens for end in ends),
            "finish_reasons": [end.reason.value for end in ends],
        }
    for name in ("queue_seconds", "first_token_seconds", "prefill_seconds", "decode_seconds"):
        if known := [seconds for end in ends if (seconds := getattr(end, name)) is not None]:
            fields[name] = round(max(known), 4)
    return fields


def _sentence(exchange: Exchange, fields: dict[str, Any]) -> str:
    text = f"{exchange.method} {exchange.path} {exchange.status} in {exchange.seconds:.3f} s"
    if exchange.report.ends:
        reasons = ",".join(sorted(set(fields["finish_reasons"])))
        text += f", {fields['prompt_tokens']} + {fields['generated_tokens']} tokens, {reasons}"
    return f"{text} [{exchange.request_id}]"
