"""What a reply of completions or chat tells besides its text: usage, token ids, logprobs of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.engine.outputs import Logprob, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a body asked for.

    Attributes:
        usage: a stream ends with a chunk of usage, and its other chunks have `usage: null`.
        running_usage: these hold the usage so far instead.
        token_ids: of prompts and choices.
        prompt_logprobs: how many alternatives for each prompt token; None: no logprobs of prompts.
    """

    usage: bool = False
    running_usage: bool = False
    token_ids: bool = False
    prompt_logprobs: int | None = None

    def of_prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None) -> dict[str, Any]:
        """The fields about a prompt, where any were asked for."""
        fields: dict[str, Any] = {"prompt_token_ids": token_ids} if self.token_ids else {}
        if self.prompt_logprobs is not None and logprobs is not None:
            fields["prompt_logprobs"] = [
                None if position is None else _by_id(best(position, self.prompt_logprobs)) for position in logprobs
            ]
        return fields

    def of_choice(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The fields about a choice, or a piece of one, where any were asked for."""
        return {"token_ids": token_ids} if self.token_ids else {}


def best(position: Mapping[int, Logprob], num_top: int) -> Mapping[int, Logprob]:
    """A position's own token and its `num_top` most likely ones, where more were computed for another field."""
    return {token_id: entry for i, (token_id, entry) in enumerate(position.items()) if i == 0 or entry.rank <= num_top}


def _by_id(position: Mapping[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {
        str(token_id): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token_id, entry in position.items()
    }
