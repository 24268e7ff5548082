"""A model directory that replies from a script: the last word of the conversation chooses which.

    ... user Say loop   ──▶ token of "loop" ──▶ "tick " ──▶ "tock " ──▶ ...

Each piece of a script is one token, whose successor is the next piece (chain_model.py). The chat template writes tools,
reasoning and calls the way Qwen's does, so that servers find its parsers by themselves; nothing follows the last word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import WordLevel

from tests.fakes.chain_model import save_chain_model

UNKNOWN, END = "<unk>", "</s>"

TEMPLATE = """\
{%- if tools %}Tools {% for tool in tools %}{{ tool | tojson }} {% endfor %}{% endif -%}
{%- for message in messages %}{{ message.role }} \
{% if message.reasoning_content %}<think> {{ message.reasoning_content }} </think> {% endif %}\
{{ message.content }} \
{% for call in message.tool_calls or [] %}<tool_call> {{ call.function | tojson }} </tool_call> {% endfor %}\
{%- endfor -%}"""


def save_scripted_chat(directory: Path, scripts: Mapping[str, Sequence[str]]) -> Path:
    """Write the model, its tokenizer and its template.

    Args:
        scripts: a word -> the pieces of the reply to a conversation that ends with it. A piece may stand in one place
            only, unless it comes last: then the reply goes round for ever. All others end.
    """
    chains = []
    vocabulary = {UNKNOWN: 0, END: 1}
    for word, pieces in scripts.items():
        endless = bool(pieces) and pieces[-1] in pieces[:-1]
        tokens = [word, *map(_spelled, pieces), *([] if endless else [END])]
        chains.append([vocabulary.setdefault(token, len(vocabulary)) for token in tokens])
    save_chain_model(directory, chains, len(vocabulary), vocabulary[END])
    backend = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    backend.save(str(directory / "tokenizer.json"))
    facts = {"eos_token": END, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(facts))
    return directory


def _spelled(piece: str) -> str:
    """A piece in the alphabet in which byte-level vocabularies are written."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(piece)
    return "".join(part for part, _ in split)
