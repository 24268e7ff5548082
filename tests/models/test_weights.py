"""Where checkpoint tensors go: tied and untied heads, missing tensors, norms that hold the 1."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.core.base.errors import CheckpointError
from octavo.core.load.checkpoint import ModelSource, open_checkpoint
from octavo.core.load.weight_bytes import weight_bytes
from tests.fakes import tiny_models
from tests.models.step_runner import StepRunner, load_model, relative_error

TOLERANCE = 1e-4


def edit(directory: Path, **changes: torch.Tensor | None) -> None:
    """Change or remove tensors of a saved model; "__" in a name stands for "."."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


def load(directory: Path, backend, *, include_one: bool | None = None):
    checkpoint = open_checkpoint(ModelSource("tiny", directory, "safetensors"))
    if include_one is not None:
        checkpoint.norm_weights_include_one = include_one
    model, opset = load_model(checkpoint, backend)
    return StepRunner(model, backend, opset)


def hugging_face_logits(directory: Path, prompt: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    return tiny_models.logits_of(model, prompt)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tensor", ["absent", "same", "different"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_output_head_is_the_one_hugging_face_uses(family, tied, tensor, backend, tmp_path):
    make = tiny_models.make_llama if family == "llama" else tiny_models.make_gemma3
    directory = tiny_models.save(make(tie_word_embeddings=tied), tmp_path)
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    other = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(5)) * 0.2
    edit(directory, lm_head__weight={"absent": None, "same": embedding.clone(), "different": other}[tensor])
    if not tied and tensor == "absent":
        with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
            load(directory, backend)
        return
    prompt = tiny_models.random_prompt(150, 20)
    found = load(directory, backend).prompt("a", prompt)
    assert relative_error(found, hugging_face_logits(directory, prompt)) < TOLERANCE


def test_tied_head_of_other_values_is_told_in_the_log(backend, tmp_path, caplog):
    directory = tiny_models.save(tiny_models.make_llama(tie_word_embeddings=True), tmp_path)
    edit(directory, lm_head__weight=torch.ones(199, 48))
    load(directory, backend)
    assert any("lm_head" in record.getMessage() and "ties" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"],
)
def test_missing_tensor_is_named(name, backend, tmp_path):
    directory = tiny_models.save(tiny_models.make_llama(), tmp_path)
    edit(directory, **{name.replace(".", "__"): None})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(directory, backend)


def test_every_tensor_has_a_target_of_its_shape(backend, tmp_path):
    for make in (tiny_models.make_llama, tiny_models.make_gemma3):
        for biases in (False, True):
            directory = tiny_models.save(make(attention_bias=biases), tmp_path / f"{make.__name__}-{biases}")
            checkpoint = open_checkpoint(ModelSource("tiny", directory, "safetensors"))
            model, _ = load_model(checkpoint, backend)
            targets = model.weight_targets()
            found = {name: tuple(target.shape) for name, target in targets.items() if target.required}
            assert found == {name: checkpoint.shape(name) for name in checkpoint.names()}


def test_gemma_norms_that_hold_the_one_already(backend, tmp_path):
    model = tiny_models.make_gemma3()
    directory = tiny_models.save(model, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    norms = {name.replace(".", "__"): value + 1.0 for name, value in tensors.items() if name.endswith("norm.weight")}
    edit(directory, **norms)
    prompt = tiny_models.random_prompt(200, 20)
    found = load(directory, backend, include_one=True).prompt("a", prompt)
    assert relative_error(found, tiny_models.logits_of(model, prompt)) < TOLERANCE


def test_weight_bytes_are_what_the_file_holds(tmp_path):
    for make in (tiny_models.make_llama, tiny_models.make_gemma3):
        for tied in (False, True):
            directory = tiny_models.save(
                make(tie_word_embeddings=tied, attention_bias=tied), tmp_path / f"{make.__name__}-{tied}"
            )
            tensors = load_file(directory / "model.safetensors")
            matrices = sum(tensor.numel() for tensor in tensors.values() if tensor.dim() == 2)
            vectors = sum(tensor.numel() for tensor in tensors.values() if tensor.dim() == 1)
            checkpoint = open_checkpoint(ModelSource("tiny", directory, "safetensors"))
            assert weight_bytes(checkpoint, torch.bfloat16) == 2 * matrices + 4 * vectors
            checkpoint.close()
