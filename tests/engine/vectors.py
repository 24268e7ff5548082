"""What tests of vectors share: tiny models as directories, sentence-transformers' pooling rule, a small tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.fakes import tiny_encoders, tiny_models

OPTIONS: dict[str, Any] = {"backend": "cpu", "num_threads": 2, "progress": False, "block_size": 4}
LENGTHS = (17, 1, 90, 5, 33)
WIDTH = 48


def pooled(rows_TM: torch.Tensor, mode: str) -> torch.Tensor:
    """Sentence-transformers' rule."""
    return {"mean": rows_TM.mean(0), "cls": rows_TM[0], "lasttoken": rows_TM[-1]}[mode]


def unit(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


def texts_of(model: torch.nn.Module, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [tiny_encoders.random_text(model.config, length) for length in lengths]


def save(model: torch.nn.Module, path: Path) -> Path:
    tiny_models.save(model, path)
    return path


def close(found: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def write_tokenizer(path: Path, *, around: bool = True) -> None:
    """Words w0, w1, …, `around` them [CLS] and [SEP]; in a pair the second text has type 1."""
    vocab = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3} | {f"w{i}": 4 + i for i in range(60)}
    vocab |= {"query:": 64, "text:": 65}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[UNK]"])
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    backend.save(str(path / "tokenizer.json"))
