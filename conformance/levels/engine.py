"""Engine level: each request's greedy tokens are those that it gets alone, whatever the engine does with it.

    alone     one request at a time, prompt in as few steps as possible, no prefix cache
      ║       equal, token by token
    batch     all requests at once                         chunks      prompts cut into pieces of 7 tokens
    cache     all requests again, their prefixes cached    preemption  KV blocks for little more than one request
    choices   every request with n = 4

A case that means to preempt, or to hit the cache, and does not, fails. A backend that declares itself batch invariant
must give equal tokens always. Any other may round differently in another batch: there a token of the lone run may give
way to one whose logit is below its own by no more than twice what a logit may be off (tolerance.py), and the rest of
that reply, which follows another token, is not compared. Of the dtypes that the backend has, the finest is taken.

The backend is compared with itself, so both runs are the candidate's; what is compared leaves it as plain tensors:

    tokens [R, n, T]    of every choice, -1 where there is none       alone [R, T]   the lone run's
    behind [R, T, V]    how far each token of a lone position is below the best; inf for the least likely
    happened [1]        prefix hits, or preemptions
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.conformance.case import Case
from octavo.conformance.draw import Draw
from octavo.conformance.facts import Facts, dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.harness.bench import Bench
from octavo.conformance.levels.tiny import CONFIGS, SPREAD, TinyCheckpoint, drawn_seed, prompt
from octavo.conformance.levels.tolerance import activation_dtype, allowed, kv_dtype_for, stored_dtypes
from octavo.conformance.trial import Outputs, Trial, wanted
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
NO_TOKEN = -1


@dataclass
class Reply:
    """One choice: its tokens, and of each position how far the likeliest tokens are below the best."""

    token_ids: list[int] = field(default_factory=list)
    behind: list[dict[int, float]] = field(default_factory=list)


Replies = dict[tuple[str, int], Reply]
"""(request id, choice) -> Reply."""


@dataclass(frozen=True)
class How:
    """What the engine does with the requests.

    Attributes:
        options: of EngineConfig.
        n: choices per request.
        rounds: how often all requests are sent; the last replies count.
        happened: reads off the engine whether it did what it should.
        what: that, in a word.
        is_tight: KV blocks for one and a half requests.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    rounds: int = 1
    happened: Callable[[Engine], int] | None = None
    what: str = ""
    is_tight: bool = False


HOWS = {
    "batch": How({"enable_prefix_caching": False}),
    "chunks": How({"enable_prefix_caching": False, "long_prefill_threshold": CHUNK}),
    "cache": How(rounds=2, happened=lambda engine: engine.stats().prefix_hit_tokens, what="prefix hit"),
    "preemption": How(is_tight=True, happened=lambda engine: engine.stats().preemptions, what="preemption"),
    "choices": How(n=4),
}
"""By name. Never written to."""


def cases() -> Iterable[Case]:
    for family in CONFIGS:
        for how in HOWS:
            yield Case(
                name=f"engine.{family}/{how}",
                op="engine",
                spec=None,
                axes={"family": family, "how": how},
                lanes=("exact",),
                build=functools.partial(build, family, how),
                profiles=frozenset({"engine"}),
            )


def build(family: str, name: str, draw: Draw) -> Trial:
    how, world = HOWS[name], _World(family, drawn_seed(draw), draw.facts)
    count, vocab = len(PROMPT_LENGTHS), CONFIGS[family]["vocab_size"]

    def run(bench: Bench) -> None:
        alone = world.alone(bench)
        replies, happened = world.run(bench, how)
        results = {
            "tokens": _tokens(replies, how.n),
            "alone": _tokens(alone, 1)[:, 0],
            "behind": _behind(alone, vocab),
            "happened": torch.tensor([happened]),
        }
        for output, x in results.items():
            bench.backend.from_host(x, out=bench[output])

    def check(outputs: Outputs) -> list[Finding]:
        if how.happened is not None and not outputs["happened"].item():
            message = f"no {how.what} came about, so that nothing was tested"
            return [Finding(lane="exact", output="tokens", compared=1, share=math.inf, message=message)]
        return [compared(outputs["tokens"], outputs["alone"], outputs["behind"], world.allowance)]

    tensors = (
        wanted("tokens", (count, how.n, MAX_TOKENS), torch.int64),
        wanted("alone", (count, MAX_TOKENS), torch.int64),
        wanted("behind", (count, MAX_TOKENS, vocab), torch.float32, is_finite=False),
        wanted("happened", (1,), torch.int64, may_be_zero=True),
    )
    return Trial(tensors, run, check)


class _World:
    """The requests of one family, and the engines that they run on."""

    def __init__(self, family: str, seed: int, facts: Facts) -> None:
        self._family = family
        self._seed = seed
        self._is_invariant = facts.batch_invariant
        self._dtype = min(stored_dtypes(facts), key=lambda dtype: allowed(activation_dtype(facts, dtype)))
        self._computes_in = activation_dtype(facts, self._dtype)
        self._kv_dtype = kv_dtype_for(self._computes_in, facts)

    @property
    def allowance(self) -> float:
        """By how much a token that wins in another batch may be below the best of the lone run."""
        return 0.0 if self._is_invariant else 2 * allowed(self._computes_in, self._kv_dtype) * SPREAD

    def alone(self, bench: Bench) -> Replies:
        engine = self._engine(bench, {"enable_prefix_caching": False})
        try:
            return {key: reply for one in self._requests() for key, reply in _run(engine, [one]).items()}
        finally:
            engine.close()

    def run(self, bench: Bench, how: How) -> tuple[Replies, int]:
        """The replies, and how often it happened that was to happen."""
        engine = self._engine(bench, {**how.options, **({"num_kv_blocks": self._few_blocks()} if how.is_tight else {})})
        try:
            for _ in range(how.rounds):
                replies = _run(engine, self._requests(how.n))
            bench.ran.extend(engine.op_choices())
            return replies, 0 if how.happened is None else how.happened(engine)
        finally:
            engine.close()

    def _few_blocks(self) -> int:
        specs = read_config(self._checkpoint.config).kv_specs(self._kv_dtype, BLOCK_SIZE)
        one = peak_blocks(scheduler_groups(group_layers(specs)), LONGEST)
        return 1 + one + one // 2

    @functools.cached_property
    def _checkpoint(self) -> TinyCheckpoint:
        return TinyCheckpoint(self._family, self._seed, self._dtype)

    def _engine(self, bench: Bench, options: Mapping[str, Any]) -> Engine:
        config = EngineConfig(
            model=f"tiny-{self._family}",
            backend=bench.backend.name,
            backend_options=bench.options,
            strict_backend=bench.strict,
            progress=False,
            dtype=dtype_name(self._dtype),
            kv_cache_dtype=dtype_name(self._kv_dtype),
            block_size=BLOCK_SIZE,
            max_model_len=LONGEST,
            max_num_seqs=4 * len(PROMPT_LENGTHS),
            **({"num_kv_blocks": 1000} | dict(options)),
        )
        return Engine.from_checkpoint(config, self._checkpoint)

    def _requests(self, n: int = 1) -> list[EngineRequest]:
        shared = prompt(self._family, SHARED, self._seed)
        params = SamplingParams(n=n, temperature=0.0, max_tokens=MAX_TOKENS, logprobs=TOP)
        requests = []
        for length in PROMPT_LENGTHS:
            own = prompt(self._family, length, self._seed)
            token_ids = own if length <= SHARED else shared + own[SHARED:]
            requests.append(EngineRequest(request_id=str(length), prompt_token_ids=token_ids, params=params))
        return requests


def compared(tokens_RNT: torch.Tensor, alone_RT: torch.Tensor, behind_RTV: torch.Tensor, allowance: float) -> Finding:
    """Replies against the lone ones; index: request, choice, place of the worst token."""
    count, share = 0, 0.0
    index: tuple[int, ...] = ()
    for r, choices in enumerate(tokens_RNT.tolist()):
        wanted_T = alone_RT[r].tolist()
        for c, found_T in enumerate(choices):
            pairs = zip(found_T, wanted_T, strict=True)
            place = next((t for t, (a, b) in enumerate(pairs) if a != b or a == NO_TOKEN), len(wanted_T))
            count += place
            if place == len(wanted_T):
                continue
            token = found_T[place]
            is_token = 0 <= token < behind_RTV.shape[2] and wanted_T[place] != NO_TOKEN
            behind = behind_RTV[r, place, token].item() if is_token else math.inf
            worse = behind / allowance if allowance else math.inf
            if worse > share:
                share, index = worse, (r, c, place)
    return Finding(lane="exact", output="tokens", compared=count, share=share, index=index)


def _tokens(replies: Replies, n: int) -> torch.Tensor:
    """[R, n, T]."""
    tokens_RNT = torch.full((len(PROMPT_LENGTHS), n, MAX_TOKENS), NO_TOKEN)
    for (request_id, choice), reply in replies.items():
        row = PROMPT_LENGTHS.index(int(request_id))
        ids = reply.token_ids[:MAX_TOKENS]
        tokens_RNT[row, choice, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return tokens_RNT


def _behind(alone: Replies, vocab_size: int) -> torch.Tensor:
    """[R, T, V]."""
    behind_RTV = torch.full((len(PROMPT_LENGTHS), MAX_TOKENS, vocab_size), torch.inf)
    for (request_id, _), reply in alone.items():
        for place, top in enumerate(reply.behind[:MAX_TOKENS]):
            ids = torch.tensor(list(top), dtype=torch.int64)
            behind_RTV[PROMPT_LENGTHS.index(int(request_id)), place, ids] = torch.tensor(list(top.values()))
    return behind_RTV


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
