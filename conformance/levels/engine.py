"""Engine level: each request's greedy tokens are those that it gets alone, whatever the engine does with it.

    alone     one request at a time, prompt in as few steps as possible, no prefix cache
      ║       equal, token by token
    batch     all requests at once                         chunks      prompts cut into pieces of 7 tokens
    cache     all requests again, their prefixes cached    preemption  KV blocks for little more than one request
    choices   every request with n = 4

A check that means to preempt, or to hit the cache, and does not, fails. A backend that declares itself batch invariant
must give equal tokens always. Any other may round differently in another batch: there a token of the lone run may give
way to one whose logit is below its own by no more than twice what a logit may be off (tolerance.py), and the rest of
that reply, which follows another token, is not compared. Of the dtypes that the backend has, the finest is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.conformance.facts import dtype_name
from octavo.conformance.levels.check import Check, Measured, ran
from octavo.conformance.levels.tiny import CONFIGS, SPREAD, TinyCheckpoint, prompt
from octavo.conformance.levels.tolerance import allowed, kv_dtype_for
from octavo.conformance.session import Settings
from octavo.core.backend import Capabilities, DeviceBackend
from octavo.core.base.config import EngineConfig
from octavo.core.base.params import SamplingParams
from octavo.core.engine.engine import Engine
from octavo.core.engine.wire import EngineRequest
from octavo.core.engine.worker import scheduler_groups
from octavo.core.layers.kv_groups import group_layers
from octavo.core.models.registry import read_config
from octavo.core.sched.kv_groups import peak_blocks

PROMPT_LENGTHS = (1, 17, 33, 47, 64, 90)
SHARED = 32
"""Tokens with which every longer prompt begins: two whole blocks."""
MAX_TOKENS = 24
CHUNK = 7
TOP = 20
"""Tokens of a position that are told apart; any other is too far below the best to win."""

BLOCK_SIZE = 16
LONGEST = max(PROMPT_LENGTHS) + MAX_TOKENS


@dataclass
class Reply:
    """One choice: its tokens, and of each position how far the likeliest tokens are below the best."""

    token_ids: list[int] = field(default_factory=list)
    behind: list[dict[int, float]] = field(default_factory=list)


Replies = dict[tuple[str, int], Reply]
"""(request id, choice) -> Reply."""


def checks(backend: DeviceBackend, settings: Settings) -> list[Check]:
    """Every check. `backend` is only asked what it declares: the engine makes its own."""
    made = []
    for family in CONFIGS:
        world = _World(family, backend.capabilities, settings)
        measures: dict[str, Callable[[], Measured]] = {
            "batch": world.batch,
            "chunks": world.chunks,
            "cache": world.cache,
            "preemption": world.preemption,
            "choices": world.choices,
        }
        for how, measure in measures.items():
            check = Check(
                name=f"engine.{family}/{how}",
                level="engine",
                axes={"family": family, "how": how},
                lane="exact",
                output="tokens",
                measure=measure,
            )
            made.append(check)
    return made


class _World:
    """The requests of one family, and the engines that they run on."""

    def __init__(self, family: str, capabilities: Capabilities, settings: Settings) -> None:
        self._family = family
        self._capabilities = capabilities
        self._settings = settings
        computes_in = capabilities.activation_dtype
        self._dtype = min(computes_in, key=lambda dtype: allowed(computes_in[dtype]))
        self._kv_dtype = kv_dtype_for(computes_in[self._dtype], capabilities)

    def batch(self) -> Measured:
        return self._compare(lambda engine: _run(engine, self._requests()), enable_prefix_caching=False)

    def chunks(self) -> Measured:
        return self._compare(
            lambda engine: _run(engine, self._requests()), enable_prefix_caching=False, long_prefill_threshold=CHUNK
        )

    def cache(self) -> Measured:
        def twice(engine: Engine) -> Replies:
            _run(engine, self._requests())
            return _run(engine, self._requests())

        return self._compare(twice, happened=lambda engine: engine.stats().prefix_hit_tokens, what="prefix hit")

    def preemption(self) -> Measured:
        specs = read_config(self._checkpoint.config).kv_specs(self._kv_dtype, BLOCK_SIZE)
        one = peak_blocks(scheduler_groups(group_layers(specs)), LONGEST)
        return self._compare(
            lambda engine: _run(engine, self._requests()),
            happened=lambda engine: engine.stats().preemptions,
            what="preemption",
            num_kv_blocks=1 + one + one // 2,
        )

    def choices(self) -> Measured:
        return self._compare(lambda engine: _run(engine, self._requests(n=4)))

    @functools.cached_property
    def _checkpoint(self) -> TinyCheckpoint:
        return TinyCheckpoint(self._family, self._settings.seed, self._dtype)

    @functools.cached_property
    def _alone(self) -> Replies:
        engine = self._engine(enable_prefix_caching=False)
        try:
            return {key: reply for one in self._requests() for key, reply in _run(engine, [one]).items()}
        finally:
            engine.close()

    def _compare(
        self,
        drive: Callable[[Engine], Replies],
        *,
        happened: Callable[[Engine], int] | None = None,
        what: str = "",
        **options: Any,
    ) -> Measured:
        alone = self._alone
        engine = self._engine(**options)
        try:
            replies = drive(engine)
            missed = happened is not None and not happened(engine)
            ops = ran(engine.op_choices())
        finally:
            engine.close()
        problem = f"no {what} came about, so that nothing was tested" if missed else ""
        return compared(alone, replies, self._allowance, ops, problem)

    @property
    def _allowance(self) -> float:
        """By how much a token that wins in another batch may be below the best of the lone run."""
        if self._capabilities.batch_invariant:
            return 0.0
        return 2 * allowed(self._capabilities.activation_dtype[self._dtype], self._kv_dtype) * SPREAD

    def _engine(self, **options: Any) -> Engine:
        settings = self._settings
        config = EngineConfig(
            model=f"tiny-{self._family}",
            backend=settings.backend,
            backend_options=settings.options,
            strict_backend=settings.strict,
            progress=False,
            dtype=dtype_name(self._dtype),
            kv_cache_dtype=dtype_name(self._kv_dtype),
            block_size=BLOCK_SIZE,
            max_model_len=LONGEST,
            max_num_seqs=4 * len(PROMPT_LENGTHS),
            **({"num_kv_blocks": 1000} | options),
        )
        return Engine.from_checkpoint(config, self._checkpoint)

    def _requests(self, n: int = 1) -> list[EngineRequest]:
        shared = prompt(self._family, SHARED, self._settings.seed)
        params = SamplingParams(n=n, temperature=0.0, max_tokens=MAX_TOKENS, logprobs=TOP)
        requests = []
        for length in PROMPT_LENGTHS:
            own = prompt(self._family, length, self._settings.seed)
            token_ids = own if length <= SHARED else shared + own[SHARED:]
            requests.append(EngineRequest(request_id=str(length), prompt_token_ids=token_ids, params=params))
        return requests


def compared(
    alone: Mapping[tuple[str, int], Reply],
    replies: Mapping[tuple[str, int], Reply],
    allowance: float,
    ops: list[str],
    problem: str = "",
) -> Measured:
    """Replies against the lone ones, which have one choice; index: prompt length, choice, place of the worst token."""
    count, share = 0, 0.0
    index: tuple[int, ...] = ()
    for (request_id, choice), reply in replies.items():
        wanted = alone[request_id, 0]
        pairs = list(zip(reply.token_ids, wanted.token_ids, strict=False))
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        count += place
        if place == len(wanted.token_ids) == len(reply.token_ids):
            continue
        behind = wanted.behind[place].get(reply.token_ids[place], math.inf) if place < len(pairs) else math.inf
        worse = behind / allowance if allowance else math.inf
        if worse > share:
            share, index = worse, (int(request_id), choice, place)
    return Measured(compared=count, share=share, index=index, ops=ops, problem=problem)


def _run(engine: Engine, requests: Sequence[EngineRequest]) -> Replies:
    """All at once, to the end."""
    for request in requests:
        engine.add_request(request)
    replies: Replies = {
        (request.request_id, choice): Reply() for request in requests for choice in range(request.params.n)
    }
    while engine.has_work():
        for output in engine.step():
            if output.error:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
            reply = replies[output.request_id, output.index]
            reply.token_ids += output.token_ids
            for position in output.logprobs or ():
                best = position.top[0][1]
                reply.behind.append({token_id: best - logprob for token_id, logprob in position.top})
    return replies
