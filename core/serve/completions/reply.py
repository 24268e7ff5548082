"""Engine outputs as the JSON of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.core.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from octavo.core.serve.completions.schema import CompletionRequest
from octavo.core.serve.logprobs import CompletionLogprobs
from octavo.core.serve.replies import DONE, Json, Usage, event, failed_chunks, head, usage_of
from octavo.core.text.tokenizer import Tokenizer


class CompletionReply:
    """Bodies and chunks of /v1/completions.

    Args:
        model: the served name.
        tokenizer: writes prompts and logprobs as text; None where token ids only are served.
        body: what was asked for; the choice i of prompt p has index p * n + i.
    """

    def __init__(self, model: str, tokenizer: Tokenizer | None, body: CompletionRequest) -> None:
        self._head = head("cmpl", "text_completion", model)
        self._tokenizer = tokenizer
        self._n = body.n or 1
        self._num_top = body.logprobs
        self._echo = bool(body.echo)
        self._extras = body.extras
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._prompt_logprobs: dict[int, Sequence[TokenLogprobs | None]] = {}
        self._usage = Usage()

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """See Reply."""
        choices = [
            self._choice(p, output, choice)
            for p, output in enumerate(outputs)
            for choice in likeliest(output.outputs, self._n)
        ]
        return {**self._head, "choices": choices, "usage": usage_of(outputs).json()}

    def events(self, prompt_index: int, piece: RequestOutput) -> bytes:
        """See Reply."""
        self._usage.add(prompt_index, piece)
        return b"".join(
            event({**self._head, "choices": [self._choice(prompt_index, piece, choice)], **self._running_usage()})
            for choice in piece.outputs
        )

    def end(self) -> bytes:
        """See Reply."""
        usage = {**self._head, "choices": [], "usage": self._usage.json()}
        return (event(usage) if self._extras.usage else b"") + DONE

    def failure(self, error: Exception) -> bytes:
        """See Reply."""
        return failed_chunks(error)

    def _choice(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> Json:
        index = prompt_index * self._n + choice.index
        is_first = index not in self._logprobs
        if is_first:
            self._logprobs[index] = CompletionLogprobs(self._tokenizer)
        return {
            "index": index,
            "text": self._prompt_text(output) + choice.text if is_first and self._echo else choice.text,
            "logprobs": None if self._num_top is None else self._scores(prompt_index, index, output, choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._extras.of_choice(choice.token_ids),
            **(self._extras.of_prompt(output.prompt_token_ids, output.prompt_logprobs) if is_first else {}),
        }

    def _running_usage(self) -> Json:
        if not self._extras.usage:
            return {}
        return {"usage": self._usage.json() if self._extras.running_usage else None}

    def _scores(self, prompt_index: int, index: int, output: RequestOutput, choice: CompletionOutput) -> Json:
        """The logprobs of a piece; before a choice's first tokens those of an echoed prompt."""
        logprobs = self._logprobs[index]
        if output.prompt_logprobs is not None:  # they come once, with whichever choice is first
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        if self._echo and not logprobs.started:
            assert self._num_top is not None
            logprobs.add_prompt(output, self._prompt_logprobs[prompt_index], self._num_top)
        return logprobs.take(choice)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


def likeliest(choices: Sequence[CompletionOutput], n: int) -> list[CompletionOutput]:
    """The n choices whose tokens are the likeliest on average, best first; all as they are where there are no more."""
    if len(choices) <= n:
        return list(choices)

    def mean(choice: CompletionOutput) -> float:
        return (choice.cumulative_logprob or 0.0) / max(len(choice.token_ids), 1)

    ranked = sorted(choices, key=mean, reverse=True)[:n]
    return [replace(choice, index=index) for index, choice in enumerate(ranked)]
