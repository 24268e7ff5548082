"""What damaged checkpoints come to, through the door that users take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo import LLM, OctavoError, SamplingParams

OPTIONS: dict[str, Any] = {"backend": "cpu", "num_threads": 1, "progress": False, "num_kv_blocks": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2)


def reply(path: Path, prompt: list[int]) -> Any:
    """Tokens, their log probabilities and the error of a short reply."""
    llm = LLM(str(path), **OPTIONS)
    try:
        output = llm.generate([prompt], GREEDY)[0].outputs[0]
        return output.token_ids, output.logprobs, output.error
    finally:
        llm.close()


def outcome(path: Path, prompt: list[int]) -> tuple[Any, str]:
    """The reply, or the one line of the error that Octavo raised; any other error is a failure."""
    try:
        return reply(path, prompt), ""
    except OctavoError as error:
        lines = str(error).splitlines()
    assert len(lines) == 1, lines
    return None, lines[0]
