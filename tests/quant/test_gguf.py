"""GGUF files: blocks are kept where the device has products for them, and mean what the file's own reader reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo.core.backend.quant import QuantFormat, QuantizedTensor, QuantScheme
from octavo.core.load.checkpoint import Checkpoint, ModelSource, open_checkpoint
from octavo.core.quant.open import open_quantized
from tests.fakes import tiny_models
from tests.load.conftest import LLAMA_KEYS, llama_tensors, write_gguf
from tests.models.step_runner import ReferenceBackend, StepRunner, load_model, relative_error
from tests.quant.test_models import KeepsCodes, code_backend

Q8_0, Q4_0, Q4_1 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "Q4_1"))
TYPES = {"attn_q": Q8_0, "attn_k": Q8_0, "attn_v": Q8_0, "attn_output": Q4_0, "ffn_gate": Q4_1, "ffn_up": Q8_0,
         "ffn_down": Q4_0, "token_embd": Q8_0, "output": Q8_0}  # fmt: skip
LAYER = "model.layers.0"


def always(scheme: QuantScheme) -> bool:
    del scheme
    return True


def write_quantised(path: Path) -> Path:
    """A llama of one layer, its matrices in several types."""
    tensors: dict[str, Any] = dict(llama_tensors())
    tensors["output.weight"] = np.random.default_rng(9).normal(size=(40, 64)).astype(np.float32)
    for name, values in tensors.items():
        kind = TYPES.get(name.removesuffix(".weight").split(".")[-1])
        if kind is not None:
            tensors[name] = (gguf.quantize(values * 0.2, kind), kind)
    return write_gguf(path, LLAMA_KEYS, tensors)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_quantised(tmp_path / "llama.gguf")


@pytest.fixture
def files(path: Path) -> Iterator[Checkpoint]:
    checkpoint = open_checkpoint(ModelSource("tiny", path, "gguf"))
    yield checkpoint
    checkpoint.close()


def test_blocks_mean_what_the_reader_reads(files: Checkpoint) -> None:
    checkpoint, formats = open_quantized(files, multiplies=always)
    assert checkpoint.names() == files.names()
    kept = 0
    for name in files.names():
        found, expected = checkpoint.read(name), files.read(name)
        assert isinstance(expected, torch.Tensor)
        if isinstance(found, QuantizedTensor):
            kept += 1
            assert formats.linear([name.removesuffix(".weight")]).scheme == found.scheme
            found = found.dequantize()
        assert torch.equal(found, expected), name
    assert kept == 9  # the embedding among them; all but what is no matrix


def test_only_what_the_device_multiplies_is_kept(files: Checkpoint) -> None:
    _, formats = open_quantized(files, multiplies=lambda scheme: scheme.format is QuantFormat.GGUF_Q8_0)
    assert formats.linear([f"{LAYER}.self_attn.o_proj"]).scheme is None
    assert formats.linear([f"{LAYER}.mlp.up_proj"]).scheme == QuantScheme(QuantFormat.GGUF_Q8_0)
    for nothing in (open_quantized(files), open_quantized(files, multiplies=lambda _: False)):
        assert nothing[0] is files


def test_a_file_can_be_quantised_again(files: Checkpoint) -> None:
    checkpoint, formats = open_quantized(files, "int8", multiplies=always)
    name = f"{LAYER}.mlp.up_proj"
    assert formats.linear([name]).scheme == QuantScheme(QuantFormat.INT8)
    stored, plain = checkpoint.read(f"{name}.weight"), files.read(f"{name}.weight")
    assert isinstance(stored, QuantizedTensor)
    assert isinstance(plain, torch.Tensor)
    assert (stored.dequantize() - plain).norm() / plain.norm() < 0.01


def test_logits_are_those_of_the_dequantised_file(path: Path) -> None:
    logits = {}
    prompt = tiny_models.random_prompt(40, 17)
    for kept in (True, False):
        backend = code_backend() if kept else ReferenceBackend()
        files = open_checkpoint(ModelSource("tiny", path, "gguf"))
        checkpoint, formats = open_quantized(files, multiplies=always if kept else None)
        model, opset = load_model(checkpoint, backend, formats=formats, max_model_len=128)
        checkpoint.close()
        logits[kept] = StepRunner(model, backend, opset).prompt("a", prompt)
        if isinstance(backend.ops, KeepsCodes):
            # gate (Q4_1) and up (Q8_0) are one product, and stored unlike: they are dequantised
            kept_formats = {scheme.format for scheme in backend.ops.schemes}
            assert kept_formats == {QuantFormat.GGUF_Q8_0, QuantFormat.GGUF_Q4_0}
    assert relative_error(logits[True], logits[False]) < 1e-5


def test_a_product_of_kept_and_other_types_is_plain(tmp_path: Path) -> None:
    """Each tensor of a file has a type of its own: of q, k and v some may be such as no device multiplies."""
    tensors: dict[str, Any] = dict(llama_tensors())
    for name, kind in (("blk.0.attn_q.weight", Q8_0), ("blk.0.attn_output.weight", Q8_0)):
        tensors[name] = (gguf.quantize(tensors[name], kind), kind)
    files = open_checkpoint(ModelSource("tiny", write_gguf(tmp_path / "mixed.gguf", LLAMA_KEYS, tensors), "gguf"))
    checkpoint, formats = open_quantized(files, multiplies=always)
    assert formats.linear([f"{LAYER}.self_attn.o_proj"]).scheme == QuantScheme(QuantFormat.GGUF_Q8_0)
    qkv = [f"{LAYER}.self_attn.{part}_proj" for part in "qkv"]
    mixed = formats.linear(qkv)
    assert mixed.scheme is None
    for name in qkv:
        part = mixed.part(name, checkpoint.read(f"{name}.weight"))
        assert isinstance(part, torch.Tensor)
    backend = code_backend()
    model, opset = load_model(checkpoint, backend, formats=formats, max_model_len=128)
    assert StepRunner(model, backend, opset).prompt("a", tiny_models.random_prompt(40, 17)).isfinite().all()
    checkpoint.close()
