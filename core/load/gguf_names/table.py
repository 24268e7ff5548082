"""The GGUF architectures that can be loaded: the one table that knows them all."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.base.errors import CheckpointError
from octavo.core.load.gguf_file import GGUFFile
from octavo.core.load.gguf_names import deepseek, gemma, llama_like, others, phi, qwen
from octavo.core.load.gguf_names.architecture import Architecture

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": llama_like.LLAMA,
    "granite": llama_like.GRANITE,
    "smollm3": llama_like.SMOLLM3,
    "olmo2": llama_like.OLMO2,
    "stablelm": llama_like.STABLELM,
    "starcoder2": llama_like.STARCODER2,
    "qwen2": qwen.QWEN2,
    "qwen2moe": qwen.QWEN2MOE,
    "qwen3": qwen.QWEN3,
    "qwen3moe": qwen.QWEN3MOE,
    "gemma": gemma.GEMMA,
    "gemma2": gemma.GEMMA2,
    "gemma3": gemma.GEMMA3,
    "phi2": phi.PHI2,
    "phi3": phi.PHI3,
    "command-r": others.COMMAND_R,
    "cohere2": others.COHERE2,
    "glm4": others.GLM4,
    "chatglm": others.CHATGLM,
    "gpt-oss": others.GPT_OSS,
    "deepseek2": deepseek.DEEPSEEK2,
    "bert": others.BERT,
}
"""`general.architecture` -> how it reads. Never written to."""


def architecture_of(file: GGUFFile) -> Architecture:
    """The file's architecture.

    Raises:
        CheckpointError: it is not one of `ARCHITECTURES`, or the file is one part of a split one.
    """
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(
            f"{file.path}: general.architecture is {name!r}; GGUF files of {known} can be loaded",
            field="general.architecture",
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{file.path} is one of {file.metadata['split.count']} parts; join them with `llama-gguf-split --merge`",
            field="split.count",
        )
    return ARCHITECTURES[name]
