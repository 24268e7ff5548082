"""Token ids to replies: one RequestState per live request, one choice state per choice.

    EngineOutput ──> OutputProcessor ──> RequestOutput (a piece, for streams)
                          │   └────────> Stop: a choice that ended by a stop string, to be ended in the engine too
                          └── result(request_id): all of it, once finished

Text lives here and nowhere else: stop strings are found in it, and a choice that ended by one takes no further
tokens, though the engine may have drawn some before it heard of it. Owned by the front (LLM or AsyncEngine).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octavo.core.base.params import FinishReason
from octavo.core.engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from octavo.core.engine.wire import EngineOutput, EngineRequest
from octavo.core.sample.logprobs import PositionLogprobs
from octavo.core.text.output import OutputText
from octavo.core.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Stop:
    """A choice that ended by a stop string."""

    request_id: str
    index: int
    stop_string: str


@dataclass(slots=True)
class _Choice:
    text: OutputText | None
    total: CompletionOutput


@dataclass(slots=True)
class _RequestState:
    request: EngineRequest
    prompt: str | None
    choices: list[_Choice]
    open_choices: int
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    pooled: bytes | None = None


@dataclass(slots=True)
class Processed:
    """What a batch of engine outputs became."""

    pieces: list[RequestOutput] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)


class OutputProcessor:
    """The replies of all live requests.

    Args:
        tokenizer: None serves token ids only; texts stay empty.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, _RequestState] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def __len__(self) -> int:
        return len(self._states)

    def add(self, request: EngineRequest, prompt: str | None) -> None:
        """Expect outputs of a request; prompt is its text, where text was given."""
        params = request.params
        self._states[request.request_id] = _RequestState(
            request=request,
            prompt=prompt,
            choices=[
                _Choice(
                    text=OutputText(self._tokenizer, params) if self._tokenizer is not None else None,
                    total=CompletionOutput(
                        index=index,
                        logprobs=None if params.logprobs is None else [],
                        cumulative_logprob=None if params.logprobs is None else 0.0,
                    ),
                )
                for index in range(params.n)
            ],
            open_choices=params.n,
        )

    def open_choices(self, request_id: str) -> list[tuple[str, int]]:
        """The choices of a request that have not ended; none for an unknown one."""
        state = self._states.get(request_id)
        if state is None:
            return []
        return [(request_id, c.total.index) for c in state.choices if c.total.finish_reason is None]

    def process(self, outputs: Iterable[EngineOutput]) -> Processed:
        """Take in what a step brought. Outputs of unknown requests and ended choices are dropped."""
        done = Processed()
        pieces: dict[str, RequestOutput] = {}
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None or state.choices[output.index].total.finish_reason is not None:
                continue
            piece = pieces.get(output.request_id)
            if piece is None:
                piece = pieces[output.request_id] = _piece(state)
            self._take_prompt(state, output, piece)
            gained = self._take_tokens(state, state.choices[output.index], output)
            if gained.finish_reason is not None:
                state.open_choices -= 1
            if isinstance(gained.stop_reason, str) and output.finish_reason is None:
                done.stops.append(Stop(output.request_id, output.index, gained.stop_reason))
            piece.outputs.append(gained)
            piece.finished = state.open_choices == 0
        done.pieces.extend(pieces.values())
        return done

    def result(self, request_id: str) -> RequestOutput:
        """Everything a finished request brought; forgets it."""
        state = self._states.pop(request_id)
        return RequestOutput(
            request_id=request_id,
            prompt=state.prompt,
            prompt_token_ids=state.request.prompt_token_ids,
            outputs=[choice.total for choice in state.choices],
            finished=state.open_choices == 0,
            prompt_logprobs=state.prompt_logprobs,
            num_cached_tokens=state.num_cached_tokens,
            pooled=state.pooled,
        )

    def discard(self, request_id: str) -> None:
        """Forget a request; what still comes for it is dropped."""
        self._states.pop(request_id, None)

    def _take_prompt(self, state: _RequestState, output: EngineOutput, piece: RequestOutput) -> None:
        if output.index == 0:
            state.num_cached_tokens = output.num_cached_tokens
            state.pooled = output.pooled
        piece.num_cached_tokens, piece.pooled = state.num_cached_tokens, state.pooled
        if output.prompt_logprobs is not None:
            state.prompt_logprobs = [None, *map(self._readable, output.prompt_logprobs)]
            piece.prompt_logprobs = state.prompt_logprobs

    def _take_tokens(self, state: _RequestState, choice: _Choice, output: EngineOutput) -> CompletionOutput:
        """Add an output's tokens to its choice; returns what the choice gained."""
        token_ids = list(output.token_ids)
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        text = ""
        if choice.text is not None:
            ended_by_id = finish_reason is FinishReason.STOP and token_ids
            before = choice.text.num_tokens
            text = choice.text.push(token_ids[:-1] if ended_by_id else token_ids)
            if choice.text.stop_string is not None:
                finish_reason, stop_reason = FinishReason.STOP, choice.text.stop_string
                token_ids = token_ids[: choice.text.num_tokens - before]
            elif finish_reason is not None:
                text += choice.text.finish()
                if choice.text.stop_string is not None:
                    finish_reason, stop_reason = FinishReason.STOP, choice.text.stop_string
        gained = CompletionOutput(
            index=output.index,
            text=text,
            token_ids=token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            error=output.error,
        )
        if state.request.params.logprobs is not None:
            self._take_logprobs(choice.total, gained, (output.logprobs or [])[: len(token_ids)])
        _extend(choice.total, gained)
        return gained

    def _take_logprobs(
        self, total: CompletionOutput, gained: CompletionOutput, logprobs: Sequence[PositionLogprobs]
    ) -> None:
        gained.logprobs = [self._readable(position) for position in logprobs]
        chosen = sum(
            position[token_id].logprob for token_id, position in zip(gained.token_ids, gained.logprobs, strict=True)
        )
        gained.cumulative_logprob = (total.cumulative_logprob or 0.0) + chosen

    def _readable(self, position: PositionLogprobs) -> TokenLogprobs:
        chosen = Logprob(position.logprob, position.rank, self._text(position.token_id))
        readable = {position.token_id: chosen}
        for rank, (token_id, logprob) in enumerate(position.top, start=1):
            readable.setdefault(token_id, Logprob(logprob, rank, self._text(token_id)))
        return readable

    def _text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)


def _piece(state: _RequestState) -> RequestOutput:
    return RequestOutput(
        request_id=state.request.request_id,
        prompt=state.prompt,
        prompt_token_ids=state.request.prompt_token_ids,
        outputs=[],
        finished=False,
    )


def _extend(total: CompletionOutput, gained: CompletionOutput) -> None:
    total.text += gained.text
    total.token_ids.extend(gained.token_ids)
    if total.logprobs is not None:
        total.logprobs.extend(gained.logprobs or [])
        total.cumulative_logprob = gained.cumulative_logprob
    total.finish_reason, total.stop_reason, total.error = gained.finish_reason, gained.stop_reason, gained.error
