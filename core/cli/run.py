"""Answer a prompt, streaming, or chat in this terminal.

With PROMPT (or text piped in) it answers once; without, it holds a conversation. An instruct model's chat template is
applied unless --raw continues the text as it stands.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import ConfigError, InvalidRequest
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
    prompt = args.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
        if not prompt.strip():
            raise ConfigError("there is no prompt: give PROMPT, pipe text in, or run it in a terminal to chat")

    with quiet_imports():
        from octavo import LLM

    with LLM(**engine_keywords(config)) as llm:
        if prompt is None:
            _converse(llm, args, params)
        else:
            _show(_answer(llm, [*_system(args), _turn("user", prompt)], args.raw, params))
    return 0


def _answer(llm: LLM, messages: list[dict[str, str]], raw: bool, params: SamplingParams) -> Iterable[RequestOutput]:
    """The reply's pieces: to the last message's text alone when `raw`, otherwise to the whole conversation."""
    if raw:
        return llm.generate_stream(messages[-1]["content"], params)
    try:
        return llm.chat_stream(messages, params)
    except InvalidRequest as error:
        if error.field != "messages":
            raise
        raise InvalidRequest(f"{error}; --raw continues the text without a template", field=error.field) from None


def _show(pieces: Iterable[RequestOutput]) -> str:
    """Print pieces as they come and return the whole text; speed goes to stderr when someone is looking."""
    started, first, count, text = time.perf_counter(), 0.0, 0, []
    for piece in pieces:
        output = piece.outputs[0]
        first = first or time.perf_counter()
        count += len(output.token_ids)
        text.append(output.text)
        print(output.text, end="", flush=True)
    print()
    if sys.stderr.isatty() and count > 1:
        rate = (count - 1) / max(time.perf_counter() - first, 1e-9)
        print(f"[{count} tokens, first after {first - started:.2f} s, then {rate:.1f} tokens/s]", file=sys.stderr)
    return "".join(text)


def _converse(llm: LLM, args: argparse.Namespace, params: SamplingParams) -> None:
    """Ask, answer, remember; Ctrl-C ends a reply, Ctrl-D the conversation."""
    print("Ctrl-C ends a reply, Ctrl-D the conversation.", file=sys.stderr)
    messages = _system(args)
    while True:
        try:
            asked = input("> ")
        except EOFError:
            print()
            return
        if not asked.strip():
            continue
        messages.append(_turn("user", asked))
        try:
            reply = _show(_answer(llm, messages, args.raw, params))
        except KeyboardInterrupt:
            print(" [interrupted]")
            messages.pop()
            continue
        except InvalidRequest as error:
            print("octavo:", error, file=sys.stderr)
            messages.pop()
            continue
        messages.append(_turn("assistant", reply))


def _system(args: argparse.Namespace) -> list[dict[str, str]]:
    return [_turn("system", args.system)] if args.system else []


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
