"""A model directory that replies from a script: the last word of the conversation chooses which.

    ... user Say loop   ──▶ token of "loop" ──▶ "tick " ──▶ "tock " ──▶ ...

Each piece of a script is one token, whose successor is the next piece (chain_model.py); other text is a token a byte.
The chat template writes tools, reasoning and calls the way Qwen's does, so that servers find its parsers by
themselves; nothing follows the last word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE

from tests.fakes.chain_model import save_chain_model

END = "</s>"

TEMPLATE = """\
{%- if tools %}Tools {% for tool in tools %}{{ tool | tojson }} {% endfor %}{% endif -%}
{%- for message in messages %}{% if not loop.first %} {% endif %}{{ message.role }}\
{% if message.reasoning_content %} <think> {{ message.reasoning_content }} </think>{% endif %} {{ message.content }}\
{% for call in message.tool_calls or [] %} <tool_call> {{ call.function | tojson }} </tool_call>{% endfor %}\
{%- endfor -%}"""


def save_scripted_chat(
    directory: Path,
    scripts: Mapping[str, Sequence[str]],
    *,
    template: str = TEMPLATE,
    special: Sequence[str] = (),
) -> Path:
    """Write the model, its tokenizer and its template.

    Args:
        scripts: a word -> the pieces of the reply to a conversation that ends with it. A piece may stand in one place
            only, unless it comes last: then the reply goes round for ever. All others end.
        special: pieces that are special tokens.
    """
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, *special])
    chains = []
    for word, pieces in scripts.items():
        endless = bool(pieces) and pieces[-1] in pieces[:-1]
        chain = [word, *pieces, *([] if endless else [END])]
        ordinary = [token for token in chain if token not in (END, *special)]
        backend.add_tokens([AddedToken(token, normalized=False) for token in ordinary])
        chains.append([backend.token_to_id(token) for token in chain])
    save_chain_model(directory, chains, backend.get_vocab_size(), backend.token_to_id(END))
    backend.save(str(directory / "tokenizer.json"))
    facts = {"eos_token": END, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(facts))
    return directory
