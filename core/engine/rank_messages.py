"""What an engine and its ranks say to each other: tagged msgpack, one message a frame.

    engine ── Begin · Step · ReportOps · LoadAdapter · ForgetAdapter ──> each rank
    engine <── Loaded · Stepped · OpsReport · AdapterRead · AdapterForgotten · Failed ── each rank

Every rank is told the same and answers once. A Step brings what rank 0 drew in the step before: it alone samples, so
that the ranks can't come to differ by a bit of rounding.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from msgspec import Struct

from octavo.core.backend import specs
from octavo.core.backend.opset import OpChoice
from octavo.core.base.config import EngineConfig
from octavo.core.engine.messages import Failed
from octavo.core.engine.resolve import EngineSizes
from octavo.core.lora.slots import AdapterFacts
from octavo.core.parallel.mesh import Place
from octavo.core.sample.logprobs import PositionLogprobs
from octavo.core.sched.kv_groups import KVGroupSpec
from octavo.core.sched.output import ModelRunnerOutput, SampledTokens, SchedulerOutput

Drawn = dict[str, tuple[int, ...]]
"""Request id -> the tokens that rank 0 drew for it."""


class Begin(Struct, frozen=True, tag=True):
    """What to load, at which place of the group, and from which level on to log."""

    config: EngineConfig
    place: Place
    log_level: int
    log_form: str = "text"


class Step(Struct, frozen=True, tag=True):
    """Run one step, after taking in what was drawn in the one before."""

    scheduled: SchedulerOutput
    drawn: Drawn


class ReportOps(Struct, frozen=True, tag=True):
    """Say which implementation runs each op."""


class LoadAdapter(Struct, frozen=True, tag=True):
    """Read a low-rank adapter."""

    path: str


class ForgetAdapter(Struct, frozen=True, tag=True):
    """Drop an adapter that no live request needs."""

    adapter_id: str


class Loaded(Struct, frozen=True, tag=True):
    """The rank is ready, and came to these sizes and adapters: the same on all."""

    sizes: EngineSizes
    vocab_size: int
    kv_groups: tuple[KVGroupSpec, ...]
    num_kv_blocks: int
    first_adapters: dict[str, AdapterFacts]


class Stepped(Struct, frozen=True, tag=True):
    """A step's ModelRunnerOutput, which is empty from all ranks but the first."""

    output: msgspec.Raw


class OpsReport(Struct, frozen=True, tag=True):
    """The choices of a rank: the name of each spec's class, and the choice."""

    choices: list[tuple[str, msgspec.Raw]]


class AdapterRead(Struct, frozen=True, tag=True):
    """What the rank found in an adapter, or why it can't use it."""

    facts: AdapterFacts | None
    refused: Failed | None


class AdapterForgotten(Struct, frozen=True, tag=True):
    """The rank has dropped an adapter."""


ToRank = Begin | Step | ReportOps | LoadAdapter | ForgetAdapter
FromRank = Loaded | Stepped | OpsReport | AdapterRead | AdapterForgotten | Failed


class _SampledTokens(Struct, frozen=True):
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None


class _Output(Struct, frozen=True):
    """A ModelRunnerOutput with the types of what it holds, which the scheduler does not know."""

    sampled: dict[str, _SampledTokens]
    prompt_logprobs: dict[str, list[PositionLogprobs]]
    pooled: dict[str, Any]
    failed: dict[str, str]


def _to_wire(value: object) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise NotImplementedError(f"{type(value).__name__} can't cross to another process")


def _from_wire(kind: type, value: Any) -> Any:
    if kind is torch.dtype:
        return getattr(torch, value)
    raise NotImplementedError(f"{kind.__name__} can't cross to another process")


encode = msgspec.msgpack.Encoder(enc_hook=_to_wire).encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank, dec_hook=_from_wire).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank, dec_hook=_from_wire).decode
_decode_output = msgspec.msgpack.Decoder(_Output, dec_hook=_from_wire).decode


def stepped_of(output: ModelRunnerOutput) -> Stepped:
    """The message that brings a step's result."""
    return Stepped(msgspec.Raw(encode(output)))


def output_of(message: Stepped) -> ModelRunnerOutput:
    """The result that a message brings."""
    found = _decode_output(message.output)
    return ModelRunnerOutput(
        sampled={name: SampledTokens(each.token_ids, each.logprobs) for name, each in found.sampled.items()},
        prompt_logprobs=found.prompt_logprobs,
        pooled=found.pooled,
        failed=found.failed,
    )


def report_of(choices: tuple[OpChoice, ...]) -> OpsReport:
    """The message that tells a rank's choices."""
    return OpsReport([(type(choice.spec).__name__, msgspec.Raw(encode(choice))) for choice in choices])


def choices_of(message: OpsReport) -> tuple[OpChoice, ...]:
    """The choices that a message tells."""
    return tuple(_choice(kind, choice) for kind, choice in message.choices)


def _choice(kind: str, choice: msgspec.Raw) -> OpChoice:
    values = msgspec.msgpack.decode(choice)
    spec = msgspec.convert(values["spec"], getattr(specs, kind), dec_hook=_from_wire)
    return OpChoice(values["op"], spec, values["implementation"], values["reason"], values["calls"])
