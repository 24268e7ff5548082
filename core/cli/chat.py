"""Talk with a model that is being served, here or elsewhere.

With PROMPT (or text piped in) it is answered once; without, it is a conversation. The server may be any that speaks
OpenAI's API. What sampling flags do not say is left to the server.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

from octavo.core.cli.client import Client, add_client_flags, address_of
from octavo.core.cli.conversation import Message, Piece, converse, prompt_or_pipe, show, turn
from octavo.core.cli.sampling import add_sampling_fields, sampling_fields


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """PROMPT, the server, and how to sample."""
    parser.add_argument("prompt", metavar="[PROMPT]", nargs="?", help="what to answer; read from a pipe, or asked for")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    add_client_flags(parser)
    add_sampling_fields(parser)


def run(args: argparse.Namespace) -> int:
    """Answer once, or until the conversation ends."""
    fields, address = sampling_fields(args), address_of(args)
    prompt = prompt_or_pipe(args.prompt)
    with Client(address) as client:
        fields["model"] = client.model()
        if prompt is None:
            print(f"{fields['model']} at {address.url}", file=sys.stderr)
            converse(lambda messages: _answer(client, messages, fields), args.system)
        else:
            system = [turn("system", args.system)] if args.system else []
            show(_answer(client, [*system, turn("user", prompt)], fields))
    return 0


def _answer(client: Client, messages: list[Message], fields: dict[str, Any]) -> Iterable[Piece]:
    body = {**fields, "messages": messages, "stream_options": {"include_usage": True}}
    for chunk in client.stream("/v1/chat/completions", body):
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning") or delta.get("reasoning_content")
            if thought:
                yield Piece(thought, is_thought=True)
            if delta.get("content"):
                yield Piece(delta["content"])
        if chunk.get("usage"):
            yield Piece("", chunk["usage"].get("completion_tokens") or 0)
