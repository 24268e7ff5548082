"""Short ways to make what scheduler tests need."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from octavo.core.base.params import SamplingParams
from octavo.core.sched.kv_groups import KVGroupSpec
from octavo.core.sched.policy import SchedulerLimits
from octavo.core.sched.request import Request
from tests.sched.simulator import EOS, Harness


def groups_of(*specs: tuple[int, int | None]) -> tuple[KVGroupSpec, ...]:
    """Groups from (block size, window) pairs."""
    return tuple(KVGroupSpec(i, block_size, window, 1) for i, (block_size, window) in enumerate(specs))


def limits_of(**changes: Any) -> SchedulerLimits:
    values: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "admission_headroom": 0.0,
    }
    return SchedulerLimits(**{**values, **changes})


def harness_of(
    num_blocks: int = 65,
    *,
    groups: Sequence[KVGroupSpec] = (KVGroupSpec(0, 16, None, 1),),
    caching: bool = True,
    **limits: Any,
) -> Harness:
    """A scheduler over num_blocks blocks (the null block included) and a simulated runner."""
    return Harness(groups, num_blocks, limits_of(**limits), enable_prefix_caching=caching)


def request_of(request_id: str, prompt: Sequence[int] | int = 5, max_tokens: int | None = 4, **fields: Any) -> Request:
    """A request that runs to max_tokens. An int prompt means so many tokens that no other id begins with."""
    if isinstance(prompt, int):
        prompt = [1000 * zlib.crc32(request_id.encode()) + i for i in range(prompt)]
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, **fields.pop("sampling", {})}
    return Request(request_id, prompt, SamplingParams(**sampling), eos_token_ids=frozenset({EOS}), **fields)


def choices_of(parent_id: str, n: int, prompt: Sequence[int] | int = 5, max_tokens: int | None = 4, **fields: Any):
    """The n requests of one request's choices, first to last."""
    if isinstance(prompt, int):
        prompt = list(request_of(parent_id, prompt).prompt_token_ids)
    return [
        request_of(f"{parent_id}#{i}", prompt, max_tokens, choice_index=i, parent_id=parent_id, **fields)
        for i in range(n)
    ]
