"""docs/models.md from the registry and from what the tests run over: `python -m tests.models.table --write`.

A mark stands for a test that runs: columns are made from the very lists by which the tests are parametrised.
"""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.core.load.gguf_names.table import ARCHITECTURES
from octavo.core.models.decoder.model import DecoderModel
from octavo.core.models.families.table import FAMILIES
from tests.fakes import families, tiny_encoders
from tests.lora.test_families import DECODERS as WITH_ADAPTERS
from tests.models.test_generic import MODELS as GENERIC
from tests.models.test_tensor_parallel import DECODERS as OVER_RANKS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

HEAD = """\
# Models

Made by `python -m tests.models.table --write` from the registry and from the lists that the tests run over: a ✓ is a
test that runs. A family is how its `config.json` reads; the mathematics is one decoder's ([decision
16](decisions/0016-one-decoder-from-options.md)).

- **Parity**: logits at every position equal Hugging Face's eager ones in fp32 within 1e-4 of their spread, whole and
  in chunks, then 24 greedy tokens; the number counts the variants of the config. Every field of every config is
  changed in turn: the logits are equal again, or the field is refused.
- **Ranks**: the same over two ranks. **Adapters**: logits equal merged weights. **GGUF**: files of that architecture
  give the logits of the model they were made from.
- Every decoder also gives vectors ([embeddings](embeddings.md)) and takes [quantised weights](quantization.md), whose
  formats are tested on llama and, for experts, on qwen3_moe and gpt_oss.

| architecture | `model_type` | parity | ranks | adapters | GGUF |
|---|---|---|---|---|---|
"""

FOOT = """
GGUF files of Mistral and Mixtral call themselves `llama`, those of DeepSeek V3 `deepseek2`. Classifiers' heads are
tested with the [models that give vectors](embeddings.md).

Llama 4 is read for positions below its attention chunk (8,192): longer contexts are refused. DeepSeek's latent
attention is plain for prompts up to their first chunk, where steps may have any shape, and absorbed otherwise
([why](decisions/0019-plain-latent-attention-for-fresh-requests.md)).

## Others

Any other decoder that transformers implements over its attention interface runs on that modelling with our paged
attention, and says so at start: slower, on one device, without adapters. Tested: {generic}. What does not call the
interface as decoders do (ALiBi, mixtures whose tensors are rearranged while they load, state spaces) is refused with
the reason; an architecture that nobody knows is refused with the nearest names.
"""


def page() -> str:
    """The whole document."""
    rows = "".join(_row(name) for name in FAMILIES)
    generic = ", ".join(name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") for name in GENERIC)
    return HEAD + rows + FOOT.format(generic=generic)


def _row(architecture: str) -> str:
    family = FAMILIES[architecture]
    variants = _variants(architecture)
    tiny = [name for name, each in families.FAMILIES.items() if each.model == architecture]
    is_decoder = family.build is DecoderModel
    cells = [
        f"`{architecture}`",
        f"`{family.model_type}`",
        f"✓ {variants}" if variants else "",
        "✓" if any(name in OVER_RANKS for name in tiny) else "" if is_decoder else "—",
        "✓" if any(name in WITH_ADAPTERS for name in tiny) else "" if is_decoder else "—",
        ", ".join(f"`{name}`" for name, each in ARCHITECTURES.items() if each.name == architecture),
    ]
    return f"| {' | '.join(cells)} |\n"


def _variants(architecture: str) -> int:
    """How many configs of it are compared with Hugging Face."""
    decoders = sum(1 + len(tiny.variants) for tiny in families.FAMILIES.values() if tiny.model == architecture)
    encoders = sum(1 + len(tiny.variants) for tiny in tiny_encoders.ENCODERS.values() if tiny.model == architecture)
    return decoders + encoders


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.models.table --write")
    PAGE.write_text(page(), encoding="utf-8")
