"""An encoder on the GPU backends, interpreted: attention in both directions over K and V in one piece, whole texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import LLM
from tests.fakes import tiny_encoders, tiny_models
from tests.pool.directories import flags, write_modules


@pytest.mark.parametrize("backend", ["cuda", "rocm"])
def test_embeddings_of_an_encoder(backend: str, tmp_path: Path) -> None:
    model = tiny_encoders.make_encoder("bert", num_hidden_layers=2)
    tiny_models.save(model, tmp_path)
    write_modules(tmp_path, flags("mean", 48))
    texts = [tiny_encoders.random_text(model.config, length) for length in (17, 1, 40)]
    with LLM(str(tmp_path), backend=backend, dtype="float32", max_num_seqs=4, progress=False) as llm:
        for text, output in zip(texts, llm.embed(texts), strict=True):
            expected = torch.nn.functional.normalize(tiny_encoders.rows_of(model, text).mean(0), dim=0)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0, atol=1e-5)
        assert {choice.implementation for choice in llm.op_choices()} == {"own"}
