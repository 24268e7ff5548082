"""What an engine process and its front say to each other: tagged msgpack, over two local sockets.

    front  ── Submit · Abort · ResetPrefixCache · LoadAdapter · UnloadAdapter · ReadState · Stop ──>  engine process
    front  <── Ready · Outputs · Refused · AdaptersChanged · StateRead · Failed ──                    engine process

Every Outputs carries the scheduler's figures, so that metrics cost no question of their own. Start is said first, as
a line of JSON on the process's stdin, before either side needs the sockets.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
from msgspec import Struct

from octavo.core.base import errors
from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import EngineDead, InvalidRequest, UserError
from octavo.core.base.lora import AdapterInfo
from octavo.core.base.metrics import SchedulerStats
from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.base.pooling import PoolingJob
from octavo.core.engine.wire import EngineOutput, EngineRequest, StepFacts
from octavo.core.sched.block_map import BlockMap

FAREWELL = b"\n"
"""What the front writes to the process's stdin before it closes it by intent."""


class Start(Struct, frozen=True):
    """What to load, and the front's level and form of logging."""

    config: EngineConfig
    log_level: int
    log_form: str = "text"


class Submit(Struct, frozen=True, tag=True):
    """A new request. `params` holds what differs from the defaults; callables can't cross."""

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    priority: int
    cache_salt: str | None
    pooling: PoolingJob | None = None
    adapter: str | None = None


class Abort(Struct, frozen=True, tag=True):
    """End these (request id, choice) pairs."""

    choices: list[tuple[str, int]]
    reason: FinishReason
    stop_reason: str | None = None


class ResetPrefixCache(Struct, frozen=True, tag=True):
    """Forget all cached prefixes."""


class LoadAdapter(Struct, frozen=True, tag=True):
    """Read an adapter and give it a name; the answer brings back `call`."""

    call: int
    name: str
    path: str


class UnloadAdapter(Struct, frozen=True, tag=True):
    """Take an adapter's name away."""

    call: int
    name: str


class ReadState(Struct, frozen=True, tag=True):
    """Tell what the engine is doing."""


class Stop(Struct, frozen=True, tag=True):
    """End the process."""


class Connected(Struct, frozen=True, tag=True):
    """Both sockets are connected, so that their folder may go; the model is still to be loaded."""


class Ready(Struct, frozen=True, tag=True):
    """The model is loaded; max_model_len is what it came to."""

    vocab_size: int
    max_model_len: int
    stats: SchedulerStats
    adapters: list[AdapterInfo]


class Outputs(Struct, frozen=True, tag=True):
    """What a step, or what came between two steps, brought; perhaps nothing but new figures.

    step is None between two; fallback_calls, of each op that has fallbacks, are told now and then.
    """

    outputs: list[EngineOutput]
    stats: SchedulerStats
    step: StepFacts | None = None
    fallback_calls: dict[str, int] | None = None


class Refused(Struct, frozen=True, tag=True):
    """A request can't run here; nothing of it stays. `kind` is the error's class name."""

    request_id: str
    kind: str
    message: str
    field: str | None


class Failed(Struct, frozen=True, tag=True):
    """The process ends: why. `kind` is the error's class name, `field` what a UserError names."""

    kind: str
    message: str
    field: str | None


class AdaptersChanged(Struct, frozen=True, tag=True):
    """All adapters as they are after a call, and why it was refused."""

    call: int
    adapters: list[AdapterInfo]
    refused: Failed | None


class StateRead(Struct, frozen=True, tag=True):
    """What the engine is doing, between two steps."""

    stats: SchedulerStats
    kv: BlockMap


ToEngine = Submit | Abort | ResetPrefixCache | LoadAdapter | UnloadAdapter | ReadState | Stop
FromEngine = Connected | Ready | Outputs | Refused | AdaptersChanged | StateRead | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode

encode_start = msgspec.json.Encoder().encode
decode_start = msgspec.json.Decoder(Start).decode


def submit_of(request: EngineRequest) -> Submit:
    """The message that submits a request."""
    return Submit(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        params=_changed_fields(request.params),
        eos_token_ids=request.eos_token_ids,
        priority=request.priority,
        cache_salt=request.cache_salt,
        pooling=request.pooling,
        adapter=request.adapter,
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
        pooling=message.pooling,
        adapter=message.adapter,
    )


def refused_of(request_id: str, error: InvalidRequest) -> Refused:
    """The message that turns a request away."""
    return Refused(request_id, type(error).__name__, str(error), error.field)


def failed_of(error: BaseException) -> Failed:
    """The message that reports an error as the end of the process."""
    return Failed(type(error).__name__, str(error), getattr(error, "field", None))


def error_of(message: Refused | Failed) -> Exception:
    """The error behind a message: the same UserError as there, or EngineDead with the cause."""
    kind = getattr(errors, message.kind, None)
    if isinstance(kind, type) and issubclass(kind, UserError):
        return kind(message.message, field=message.field)
    return EngineDead(cause_of(message))


def cause_of(message: Refused | Failed) -> str:
    """Why the engine ended, in words; an EngineDead has said it already."""
    if message.kind == EngineDead.__name__:
        return message.message
    said = f"{message.kind}: {message.message}" if message.message else message.kind
    return f"the engine process failed: {said}"


def _changed_fields(params: SamplingParams) -> dict[str, Any]:
    default = SamplingParams()
    named = {f.name: getattr(params, f.name) for f in fields(params) if f.name != "logits_processors"}
    return {name: value for name, value in named.items() if value != getattr(default, name)}
