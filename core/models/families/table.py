"""Which family reads and builds each architecture: the one table that knows them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.models.base import Model
from octavo.core.models.decoder.model import DecoderModel
from octavo.core.models.encoder import EncoderModel
from octavo.core.models.families import (
    bert,
    cohere,
    deepseek,
    gemma,
    glm,
    gpt_oss,
    granite,
    llama,
    llama4,
    mistral,
    olmo2,
    phi,
    qwen,
    smollm3,
    stablelm,
    starcoder2,
)


@dataclass(frozen=True, slots=True)
class Family:
    """How to read and build one architecture.

    Attributes:
        model_type: Hugging Face's name of its config.
        read: config.json's content -> config. Raises CheckpointError.
        build: config, context, KV dtype, block size -> model; with has_head=False, one that gives hidden rows.
    """

    model_type: str
    read: Callable[[Mapping[str, Any]], Any]
    build: Callable[..., Model] = DecoderModel


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", llama.read_llama),
    "Llama4ForCausalLM": Family("llama4_text", llama4.read_llama4),
    "MistralForCausalLM": Family("mistral", mistral.read_mistral),
    "MixtralForCausalLM": Family("mixtral", mistral.read_mixtral),
    "Qwen2ForCausalLM": Family("qwen2", qwen.read_qwen2),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", qwen.read_qwen2_moe),
    "Qwen3ForCausalLM": Family("qwen3", qwen.read_qwen3),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", qwen.read_qwen3_moe),
    "GemmaForCausalLM": Family("gemma", gemma.read_gemma),
    "Gemma2ForCausalLM": Family("gemma2", gemma.read_gemma2),
    "Gemma3ForCausalLM": Family("gemma3_text", gemma.read_gemma3),
    "Phi3ForCausalLM": Family("phi3", phi.read_phi3),
    "PhiForCausalLM": Family("phi", phi.read_phi),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", deepseek.read_deepseek_v2),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", deepseek.read_deepseek_v3),
    "GptOssForCausalLM": Family("gpt_oss", gpt_oss.read_gpt_oss),
    "GlmForCausalLM": Family("glm", glm.read_glm),
    "Glm4ForCausalLM": Family("glm4", glm.read_glm4),
    "GraniteForCausalLM": Family("granite", granite.read_granite),
    "Olmo2ForCausalLM": Family("olmo2", olmo2.read_olmo2),
    "StableLmForCausalLM": Family("stablelm", stablelm.read_stablelm),
    "SmolLM3ForCausalLM": Family("smollm3", smollm3.read_smollm3),
    "Starcoder2ForCausalLM": Family("starcoder2", starcoder2.read_starcoder2),
    "CohereForCausalLM": Family("cohere", cohere.read_cohere),
    "Cohere2ForCausalLM": Family("cohere2", cohere.read_cohere2),
    "BertModel": Family("bert", bert.read_bert, EncoderModel),
    "BertForSequenceClassification": Family("bert", bert.read_bert, EncoderModel),
    "RobertaModel": Family("roberta", bert.read_roberta, EncoderModel),
    "RobertaForSequenceClassification": Family("roberta", bert.read_roberta, EncoderModel),
    "XLMRobertaModel": Family("xlm-roberta", bert.read_roberta, EncoderModel),
    "XLMRobertaForSequenceClassification": Family("xlm-roberta", bert.read_roberta, EncoderModel),
}
"""Architecture, as in config.json, to family. Never written to."""
