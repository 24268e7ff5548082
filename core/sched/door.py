"""What a request may ask for: checked once, before it waits, so that nothing behind it can find out too late.

A request computes the KV of its prompt and of every output but the last, so prompt + max_tokens - 1 tokens must fit
the KV pool when it runs alone. max_tokens given and too large is refused; max_tokens None takes what is left. Only
the Scheduler asks.
"""

from __future__ import annotations

from octavo.core.base.errors import InvalidRequest, NeverFits
from octavo.core.sched.block_manager import BlockManager
from octavo.core.sched.policy import SchedulerLimits
from octavo.core.sched.request import Request


class Door:
    """Limits of single requests.

    Args:
        limits: for max_model_len.
        block_manager: for the size of the pool; only asked.
    """

    def __init__(self, limits: SchedulerLimits, block_manager: BlockManager) -> None:
        self._max_model_len = limits.max_model_len
        self._rotary_switch_tokens = limits.rotary_switch_tokens
        self._blocks = block_manager
        self._longest_in_kv = block_manager.longest_request(limits.max_model_len)

    def max_tokens(self, request: Request) -> int:
        """How many tokens the request may generate.

        Raises:
            InvalidRequest: an empty prompt, or longer than max_model_len with its reply.
            NeverFits: more KV blocks than the pool has.
        """
        num_prompt, sampling = request.num_prompt_tokens, request.sampling
        if num_prompt == 0:
            raise InvalidRequest("the prompt has no tokens; give at least one", field="prompt")
        if num_prompt > self._max_model_len:
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens, above max_model_len {self._max_model_len}; shorten it",
                field="prompt",
            )
        asked = sampling.max_tokens
        if asked is not None and num_prompt + asked > self._max_model_len:
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens and max_tokens is {asked}, together above max_model_len "
                f"{self._max_model_len}; give max_tokens at most {self._max_model_len - num_prompt}",
                field="max_tokens",
            )
        self._check_fits(num_prompt, asked)
        if asked is not None:
            return asked
        room = min(self._max_model_len - num_prompt, self._longest_in_kv - num_prompt + 1)
        if sampling.min_tokens > room:
            raise InvalidRequest(
                f"min_tokens is {sampling.min_tokens}, but {num_prompt} prompt tokens leave room for {room}; lower it",
                field="min_tokens",
            )
        return room

    def rotary_offset(self, request: Request) -> int:
        """What is added to all positions of the request: where in the rotary tables the rows of its kind begin.

        A request is long when it may compute more tokens than the switch. That is known when it is added, and is a
        property of the request alone, so its cache never holds keys of both kinds, whatever runs beside it.
        """
        if self._rotary_switch_tokens is None:
            return 0
        asked = request.sampling.max_tokens
        most = self._max_model_len if asked is None else request.num_prompt_tokens + asked
        computed = max(request.num_prompt_tokens, most - 1)  # the last token drawn is never computed
        return self._rotary_switch_tokens if computed > self._rotary_switch_tokens else 0

    def _check_fits(self, num_prompt: int, asked: int | None) -> None:
        needed_tokens = num_prompt + max(0, (asked or 0) - 1)
        if needed_tokens <= self._longest_in_kv:
            return
        raise NeverFits(
            f"{num_prompt} prompt tokens and max_tokens {'open' if asked is None else asked} need "
            f"{self._blocks.peak_blocks(needed_tokens)} KV blocks, but the pool has {self._blocks.num_usable_blocks}; "
            f"at most {self._longest_in_kv} tokens fit: shorten the request or enlarge the KV cache",
            field="prompt" if num_prompt > self._longest_in_kv else "max_tokens",
        )
