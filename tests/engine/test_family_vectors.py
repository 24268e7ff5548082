"""Every family of decoders gives the hidden rows of Hugging Face's class when it is loaded without its head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.core.engine.llm import LLM
from tests.engine.vectors import OPTIONS, close, save, unit
from tests.fakes.families import FAMILIES
from tests.fakes.tiny_models import random_prompt

DECODERS = [name for name, family in FAMILIES.items() if not family.is_encoder]


@pytest.mark.parametrize("family", DECODERS)
def test_mean_of_the_rows_before_the_head(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family].make()
    save(model, tmp_path)
    text = random_prompt(model.config.vocab_size, 33)
    with torch.no_grad():
        rows = model.model(torch.tensor([text])).last_hidden_state[0]  # type: ignore[operator,union-attr]
    with LLM(str(tmp_path), pooling="mean", **OPTIONS) as llm:
        (output,) = llm.embed(text, normalize=False)
        close(output.outputs.embedding, rows.mean(0))
        close(llm.embed(text)[0].outputs.embedding, unit(rows.mean(0)))
