"""Answer a prompt, streaming, or chat in this terminal.

With PROMPT (or text piped in) it answers once; without, it holds a conversation. An instruct model's chat template is
applied unless --raw continues the text as it stands.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import ConfigError, InvalidRequest
from octavo.core.cli.conversation import Message, Piece, converse, prompt_or_pipe, show, turn
from octavo.core.cli.flags import add_config_flags, add_model, engine_config, engine_keywords
from octavo.core.cli.interrupt import quiet_imports
from octavo.core.cli.sampling import add_sampling_flags, sampling_params

if TYPE_CHECKING:
    from octavo import LLM, RequestOutput, SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, PROMPT, how to sample, and every setting of the engine."""
    add_model(parser, required=True)
    parser.add_argument("prompt", metavar="[PROMPT]", nargs="?", help="what to answer; read from a pipe, or asked for")
    parser.add_argument("--raw", action="store_true", help="continue PROMPT as it stands, without a chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message for the chat template")
    add_sampling_flags(parser, max_tokens=512, temperature=0.0)
    add_config_flags(parser, EngineConfig, skip=("seed",))  # --seed is the request's here


def run(args: argparse.Namespace) -> int:
    """Answer once, or until the conversation ends."""
    config, params = engine_config(args), sampling_params(args)
    if args.raw and args.system:
        raise ConfigError("--system needs the chat template that --raw leaves out; give one of them")
    prompt = prompt_or_pipe(args.prompt)
    with quiet_imports():
        from octavo import LLM

    with LLM(**engine_keywords(config)) as llm:
        if prompt is None:
            converse(lambda messages: _answer(llm, messages, args.raw, params), args.system)
        else:
            system = [turn("system", args.system)] if args.system else []
            show(_answer(llm, [*system, turn("user", prompt)], args.raw, params))
    return 0


def _answer(llm: LLM, messages: list[Message], raw: bool, params: SamplingParams) -> Iterable[Piece]:
    """The reply's pieces: to the last message's text alone when `raw`, otherwise to the whole conversation."""
    if raw:
        return _pieces(llm.generate_stream(messages[-1]["content"], params))
    try:
        return _pieces(llm.chat_stream(messages, params))
    except InvalidRequest as error:
        if error.field != "messages":
            raise
        raise InvalidRequest(f"{error}; --raw continues the text without a template", field=error.field) from None


def _pieces(outputs: Iterable[RequestOutput]) -> Iterable[Piece]:
    for output in outputs:
        yield Piece(output.outputs[0].text, len(output.outputs[0].token_ids))
