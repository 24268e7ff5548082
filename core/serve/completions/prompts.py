"""The prompts of a completion request as the engine is given them."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.engine.async_engine import AsyncEngine
from octavo.core.engine.prompts import Prompt
from octavo.core.serve.completions.schema import CompletionRequest


async def prompts_of(engine: AsyncEngine, body: CompletionRequest) -> Sequence[Prompt]:
    """A body's prompts: as they are, unless they are to be cut or read in another way than the engine reads them.

    Raises:
        InvalidRequest: naming the field.
    """
    prompts: Sequence[Prompt] = body.prompt
    if body.truncate_prompt_tokens is None and body.add_special_tokens:
        return prompts
    read: list[Prompt] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt = await engine.read_text(prompt, add_special_tokens=body.add_special_tokens)
        read.append(body.truncated(list(prompt), engine.max_model_len, body.max_tokens))
    return read
