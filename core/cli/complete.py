"""Continue a text with a model that is being served, here or elsewhere, without a chat template.

With PROMPT (or text piped in) it is continued once; without, line after line, each by itself. The server may be any
that speaks OpenAI's API.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

from octavo.core.cli.client import Client, add_client_flags, address_of
from octavo.core.cli.conversation import Piece, ask, prompt_or_pipe, show, shown_or_told
from octavo.core.cli.sampling import add_sampling_fields, sampling_fields

MAX_TOKENS = 512
"""Where the flag is not given: the API's own default of 16 breaks off in the middle of a sentence."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """PROMPT, the server, and how to sample."""
    parser.add_argument("prompt", metavar="[PROMPT]", nargs="?", help="what to continue; piped in, or asked for")
    add_client_flags(parser)
    add_sampling_fields(parser)


def run(args: argparse.Namespace) -> int:
    """Continue once, or until there is no further line."""
    fields, address = {"max_tokens": MAX_TOKENS, **sampling_fields(args)}, address_of(args)
    prompt = prompt_or_pipe(args.prompt)
    with Client(address) as client:
        fields["model"] = client.model()
        if prompt is not None:
            show(_answer(client, prompt, fields))
            return 0
        print(f"{fields['model']} at {address.url}; Ctrl-C ends a reply, Ctrl-D everything.", file=sys.stderr)
        while (line := ask()) is not None:
            if line.strip():
                shown_or_told(partial(_answer, client, line, fields))
    return 0


def _answer(client: Client, prompt: str, fields: dict[str, Any]) -> Iterable[Piece]:
    body = {**fields, "prompt": prompt, "stream_options": {"include_usage": True}}
    for chunk in client.stream("/v1/completions", body):
        for choice in chunk.get("choices") or ():
            if choice.get("text"):
                yield Piece(choice["text"])
        if chunk.get("usage"):
            yield Piece("", chunk["usage"].get("completion_tokens") or 0)
