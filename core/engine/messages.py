"""What an engine process and its front say to each other: tagged msgpack, over two local sockets.

    front  ── Submit · Abort · ResetPrefixCache · Stop ──>  engine process
    front  <── Ready · Outputs · Failed ──                  engine process

Every Outputs carries the scheduler's figures, so that metrics cost no question of their own.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
from msgspec import Struct

from octavo.core.base import errors
from octavo.core.base.errors import EngineDead, UserError
from octavo.core.base.metrics import SchedulerStats
from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.engine.wire import EngineOutput, EngineRequest


class Submit(Struct, frozen=True, tag=True):
    """A new request. `params` holds what differs from the defaults; callables can't cross."""

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    priority: int
    cache_salt: str | None


class Abort(Struct, frozen=True, tag=True):
    """End these (request id, choice) pairs."""

    choices: list[tuple[str, int]]
    reason: FinishReason
    stop_reason: str | None = None


class ResetPrefixCache(Struct, frozen=True, tag=True):
    """Forget all cached prefixes."""


class Stop(Struct, frozen=True, tag=True):
    """End the process."""


class Ready(Struct, frozen=True, tag=True):
    """The model is loaded. Sizes are the resolved ones; `ops` tells which implementation runs what, in words."""

    vocab_size: int
    max_model_len: int
    num_kv_blocks: int
    block_size: int
    stats: SchedulerStats


class Outputs(Struct, frozen=True, tag=True):
    """What a step brought."""

    outputs: list[EngineOutput]
    stats: SchedulerStats


class Failed(Struct, frozen=True, tag=True):
    """The process ends: why. `kind` is the error's class name, `field` what a UserError names."""

    kind: str
    message: str
    field: str | None = None


ToEngine = Submit | Abort | ResetPrefixCache | Stop
FromEngine = Ready | Outputs | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def submit_of(request: EngineRequest) -> Submit:
    """The message that submits a request."""
    return Submit(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        params=_changed_fields(request.params),
        eos_token_ids=request.eos_token_ids,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def request_of(message: Submit) -> EngineRequest:
    """The request that a message submits."""
    return EngineRequest(
        request_id=message.request_id,
        prompt_token_ids=message.prompt_token_ids,
        params=SamplingParams(**message.params),
        eos_token_ids=message.eos_token_ids,
        priority=message.priority,
        cache_salt=message.cache_salt,
    )


def failed_of(error: BaseException) -> Failed:
    """The message that reports an error as the end of the process."""
    return Failed(type(error).__name__, str(error) or type(error).__name__, getattr(error, "field", None))


def error_of(message: Failed) -> Exception:
    """The error a Failed reports: the same UserError as there, or EngineDead with the cause."""
    kind = getattr(errors, message.kind, None)
    if isinstance(kind, type) and issubclass(kind, UserError):
        return kind(message.message, field=message.field)
    return EngineDead(f"the engine process failed: {message.kind}: {message.message}")


def _changed_fields(params: SamplingParams) -> dict[str, Any]:
    default = SamplingParams()
    named = {f.name: getattr(params, f.name) for f in fields(params) if f.name != "logits_processors"}
    return {name: value for name, value in named.items() if value != getattr(default, name)}
