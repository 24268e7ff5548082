"""GGUF files of every family: written by llama.cpp's conventions, they give Hugging Face's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.load.checkpoint import Checkpoint, ModelSource, open_checkpoint
from octavo.core.load.gguf_names.table import ARCHITECTURES
from octavo.core.models.registry import FAMILIES as CLASSES
from octavo.core.quant.open import open_quantized
from tests.fakes import tiny_encoders, tiny_models
from tests.fakes.families import FAMILIES, FULL, LONGROPE, RMS, SIZES, SLIDING, YARN, TinyFamily
from tests.fakes.gguf_files import write_gguf_file
from tests.models.step_runner import ReferenceBackend, StepRunner, load_model, relative_error
from tests.models.text_runner import TextRunner

TOLERANCE = 1e-4
LENGTHS = (17, 90)
CHUNK = 40

# Rows of whole blocks of 32.
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
EXPERTS = WIDE | {"moe_intermediate_size": 32, "mlp_only_layers": []}
LATENT = WIDE | {"moe_intermediate_size": 32} | {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EQUAL_MSCALES = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
# Half of each of three families' config isn't in its files; these are what llama.cpp takes for granted.
ALTERNATING = {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING], "query_pre_attn_scalar": 16}
SIX_LAYERS = {
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 16,
    "layer_types": [*[SLIDING] * 5, FULL, SLIDING],
}
NOPE = {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}
FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": [SLIDING, SLIDING, SLIDING, FULL]}

GLM = TinyFamily(
    "GlmConfig",
    "GlmForCausalLM",
    RMS
    | {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    },
)
COHERE2 = TinyFamily(
    "Cohere2Config",
    "Cohere2ForCausalLM",
    SIZES | {"layer_norm_eps": 1e-3, "logit_scale": 0.3, "sliding_window": 8},
)

CASES: dict[str, tuple[str, TinyFamily, dict[str, Any]]] = {
    "llama": ("llama", FAMILIES["llama"], WIDE),
    "llama-biases": ("llama", FAMILIES["llama"], WIDE | {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("llama", FAMILIES["llama"], WIDE | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("llama", FAMILIES["mistral"], WIDE | {"sliding_window": None}),
    "mixtral": ("llama", FAMILIES["mixtral"], WIDE | {"sliding_window": None}),
    "qwen2": ("qwen2", FAMILIES["qwen2"], WIDE),
    "qwen2moe": ("qwen2moe", FAMILIES["qwen2_moe"], EXPERTS),
    "qwen3": ("qwen3", FAMILIES["qwen3"], WIDE),
    "qwen3-yarn": ("qwen3", FAMILIES["qwen3"], WIDE | {"rope_parameters": YARN}),
    "qwen3moe": ("qwen3moe", FAMILIES["qwen3_moe"], EXPERTS),
    "gemma": ("gemma", FAMILIES["gemma"], WIDE),
    "gemma2": ("gemma2", FAMILIES["gemma2"], WIDE | ALTERNATING),
    "gemma3": ("gemma3", FAMILIES["gemma3"], WIDE | SIX_LAYERS),
    "phi2": ("phi2", FAMILIES["phi"], WIDE),
    "phi3": ("phi3", FAMILIES["phi3"], WIDE | {"sliding_window": 8}),
    "phi3-longrope": (
        "phi3",
        FAMILIES["phi3"],
        WIDE
        | {
            "original_max_position_embeddings": 64,
            "rope_parameters": LONGROPE
            | {
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
                "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 13.0, 14.0],
            },
        },
    ),
    "starcoder2": ("starcoder2", FAMILIES["starcoder2"], WIDE | {"sliding_window": None}),
    "stablelm": ("stablelm", FAMILIES["stablelm"], WIDE),
    "stablelm-parallel": ("stablelm", FAMILIES["stablelm"], WIDE | dict(FAMILIES["stablelm"].variants["parallel"])),
    "command-r": ("command-r", FAMILIES["cohere"], WIDE),
    "command-r-normed": ("command-r", FAMILIES["cohere"], WIDE | {"use_qk_norm": True}),
    "cohere2": ("cohere2", COHERE2, WIDE | FOUR_LAYERS),
    "granite": ("granite", FAMILIES["granite"], WIDE),
    "olmo2": ("olmo2", FAMILIES["olmo2"], WIDE),
    "glm4": ("glm4", FAMILIES["glm4"], WIDE),
    "chatglm": ("chatglm", GLM, WIDE),
    "smollm3": ("smollm3", FAMILIES["smollm3"], WIDE | NOPE),
    "deepseek-v2": ("deepseek2", FAMILIES["deepseek_v2"], LATENT),
    "deepseek-v2-lite": (
        "deepseek2",
        FAMILIES["deepseek_v2"],
        LATENT | {"q_lora_rank": None, "topk_method": "greedy", "rope_parameters": EQUAL_MSCALES},
    ),
    "deepseek-v3": ("deepseek2", FAMILIES["deepseek_v3"], LATENT),
    "gpt-oss": ("gpt-oss", FAMILIES["gpt_oss"], WIDE),
}


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(ModelSource("tiny", path, "gguf"))


@pytest.mark.parametrize("how", ["f32", "q8_0", "q8_0-kept"])
@pytest.mark.parametrize("case", CASES)
def test_a_file_equals_hugging_face(case: str, how: str, tmp_path: Path) -> None:
    architecture, tiny, changes = CASES[case]
    model, quantised = tiny.make(**changes), how != "f32"
    checkpoint = opened(write_gguf_file(model, architecture, tmp_path / "tiny.gguf", quantised=quantised))
    # Without a window, which GGUF files of it never name, Mistral is Llama.
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM" if case == "mistral" else tiny.model]
    stored = {checkpoint.stored_dtype(name) for name in checkpoint.names()}
    assert stored == ({"F32", "Q8_0"} if quantised else {"F32"})
    backend = ReferenceBackend()
    # Blocks are kept as they are, or dequantised by the file's reader.
    checkpoint, formats = open_quantized(checkpoint, multiplies=(lambda _: True) if how == "q8_0-kept" else None)
    loaded, opset = load_model(checkpoint, backend, formats=formats)
    checkpoint.close()
    runner = StepRunner(loaded, backend, opset)
    for length in LENGTHS:
        prompt = tiny_models.random_prompt(runner.vocab_size, length)
        expected = tiny_models.logits_of(model, prompt)
        assert relative_error(runner.prompt("prompt", prompt, CHUNK), expected) < TOLERANCE, length
        runner.finish("prompt")


@pytest.mark.parametrize("quantised", [False, True], ids=["f32", "q8_0"])
def test_an_encoder_equals_hugging_face(quantised: bool, tmp_path: Path) -> None:
    model = tiny_encoders.make_encoder("bert", hidden_size=64, intermediate_size=96)
    path = write_gguf_file(model, "bert", tmp_path / "tiny.gguf", quantised=quantised)
    runner = TextRunner(path, ReferenceBackend())
    text = tiny_encoders.random_text(model.config, 30)
    assert relative_error(runner.rows([text])[0], tiny_encoders.rows_of(model, text)) < TOLERANCE


def test_every_architecture_is_covered() -> None:
    assert set(ARCHITECTURES) == {architecture for architecture, _, _ in CASES.values()} | {"bert"}


def test_every_decoder_with_a_gguf_architecture_is_read() -> None:
    # Llama 4's files hold its text model in another layout, which isn't read yet; encoders besides BERT's have its own.
    left_out = {"Llama4ForCausalLM"} | {name for name in CLASSES if "ForCausalLM" not in name}
    assert {tiny.model for _, tiny, _ in CASES.values()} == set(CLASSES) - left_out


def test_tensors_of_an_expert_are_read_alone(tmp_path: Path) -> None:
    _, tiny, changes = CASES["qwen3moe"]
    model = tiny.make(**changes)
    checkpoint = opened(write_gguf_file(model, "qwen3moe", tmp_path / "tiny.gguf", quantised=True))
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    assert checkpoint.shape(name) == (32, 64)
    assert checkpoint.stored_bytes(name) == 32 * 2 * 34
    assert checkpoint.read_stored(name).shape == (32, 2 * 34)
    stacked = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(checkpoint.read(name), stacked[3, 32:])
    checkpoint.close()
