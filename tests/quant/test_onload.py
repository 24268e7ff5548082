"""Plain checkpoints quantised while they load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo.core.backend.quant import QuantFormat, QuantizedTensor, QuantScheme
from octavo.core.base.errors import ConfigError
from octavo.core.quant.onload import KINDS, quantise

LAYER = "model.layers.0.mlp.up_proj"


def normal(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def by_formula(weight: torch.Tensor, kind: str, group: int) -> torch.Tensor:
    """What each value becomes, one at a time; group 0: the row."""
    found = torch.zeros_like(weight)
    columns = weight.shape[1]
    for n in range(weight.shape[0]):
        for start in range(0, columns, group or columns):
            end = min(start + (group or columns), columns)
            values = weight[n, start:end]
            if kind == "int8":
                scale = values.abs().max() / 127
                found[n, start:end] = torch.round(values / scale) * scale
            elif kind == "fp8":
                scale = values.abs().max() / 448
                found[n, start:end] = (values / scale).to(torch.float8_e4m3fn).float() * scale
            else:
                low, high = values.min().clamp(max=0), values.max().clamp(min=0)
                scale = (high - low) / 15
                zero = torch.round(-low / scale)
                found[n, start:end] = ((torch.round(values / scale) + zero).clamp(0, 15) - zero) * scale
    return found


@pytest.mark.parametrize(
    ("kind", "columns", "scheme", "error"),
    [
        ("int8", 100, QuantScheme(QuantFormat.INT8), 0.01),
        ("fp8", 100, QuantScheme(QuantFormat.FP8_E4M3FN, activation=QuantFormat.FP8_E4M3FN), 0.03),
        ("int4", 256, QuantScheme(QuantFormat.INT4, 128, symmetric=False), 0.11),
        ("int4", 192, QuantScheme(QuantFormat.INT4, 64, symmetric=False), 0.10),
        ("int4", 96, QuantScheme(QuantFormat.INT4, 32, symmetric=False), 0.09),
        ("int4", 50, QuantScheme(QuantFormat.INT4, 32, symmetric=False), 0.09),
    ],
)
def test_each_kind(open_with: Callable[..., Any], kind: str, columns: int, scheme: QuantScheme, error: float) -> None:
    weight = normal(7, columns)
    checkpoint, formats = open_with({f"{LAYER}.weight": weight}, None, kind)
    assert formats.linear([LAYER]).scheme == scheme
    stored = checkpoint.read(f"{LAYER}.weight")
    assert isinstance(stored, QuantizedTensor)
    assert stored.scheme == scheme
    plain = stored.dequantize()
    assert torch.equal(plain, by_formula(weight, kind, scheme.group_size))
    assert (plain - weight).norm() / weight.norm() < error


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_and_of_tiny_numbers(kind: str) -> None:
    weight = normal(4, 64)
    weight[1] = 0
    weight[2] *= 1e-38
    plain = quantise(weight, kind).dequantize()
    assert torch.equal(plain[1], torch.zeros(64))
    assert bool(plain.isfinite().all())
    assert torch.equal(plain[3], quantise(weight[3:], kind).dequantize()[0])


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_rows_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(9, 64).bfloat16()
    whole = quantise(weight, kind)
    monkeypatch.setattr("octavo.core.quant.onload._CHUNK_ELEMENTS", 128)
    assert torch.equal(quantise(weight, kind).dequantize(), whole.dequantize())


def test_what_stays_plain(open_with: Callable[..., Any]) -> None:
    plain = ["model.embed_tokens", "lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate",
             "model.layers.0.mlp.router", "model.layers.0.self_attn.q_norm", "classifier.out_proj",
             "bert.pooler.dense", "score", "transformer.wte", "bert.embeddings.word_embeddings"]  # fmt: skip
    quantised = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.experts.3.w1", "model.layers.0.self_attn.o_proj",
                 "encoder.layer.0.attention.output.dense", "model.layers.0.mlp.shared_expert.up_proj"]  # fmt: skip
    tensors = {f"{name}.weight": normal(8, 32) for name in (*plain, *quantised)}
    tensors |= {"model.norm.weight": torch.ones(32), f"{LAYER}.bias": torch.ones(8)}
    checkpoint, formats = open_with(tensors, None, "int8")
    assert set(checkpoint.names()) == set(tensors)
    for name in plain:
        assert formats.linear([name]).scheme is None
        assert torch.equal(checkpoint.read(f"{name}.weight"), tensors[f"{name}.weight"])
    for name in quantised:
        assert formats.linear([name]).scheme == QuantScheme(QuantFormat.INT8)
    for name in ("model.norm.weight", f"{LAYER}.bias"):
        assert torch.equal(checkpoint.read(name), tensors[name])


def test_the_fingerprint_tells_the_kinds_apart(open_with: Callable[..., Any]) -> None:
    tensors = {f"{LAYER}.weight": normal(8, 32)}
    prints = {kind: open_with(tensors, None, kind)[0].fingerprint for kind in (None, *KINDS)}
    assert len(set(prints.values())) == 4


def test_an_unknown_kind_is_refused(open_with: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="int8, int4, fp8"):
        open_with({f"{LAYER}.weight": normal(8, 32)}, None, "int3")
