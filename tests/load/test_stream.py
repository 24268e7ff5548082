"""Streaming weights into a model: order, fused places, complaints, and how much memory it takes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo.core.base.errors import CheckpointError
from octavo.core.load.checkpoint import Checkpoint
from octavo.core.load.gguf import GGUFCheckpoint
from octavo.core.load.safetensors import SafetensorsCheckpoint
from octavo.core.load.stream import WeightTarget, load_weights

WriteDirectory = Callable[..., Path]


def ignore(tensor: torch.Tensor) -> None:
    """A place that keeps nothing."""


@pytest.fixture
def checkpoint(write_directory: WriteDirectory) -> SafetensorsCheckpoint:
    tensors = {
        "q": torch.arange(8.0).reshape(4, 2),
        "k": torch.arange(4.0).reshape(2, 2) + 100,
        "norm": torch.ones(2, dtype=torch.bfloat16),
        "inv_freq": torch.zeros(3),
    }
    return SafetensorsCheckpoint(write_directory({"model.safetensors": tensors}))


def test_tensors_are_placed_in_the_models_order(checkpoint: SafetensorsCheckpoint) -> None:
    placed: list[str] = []
    targets = {name: WeightTarget(checkpoint.shape(name), lambda _, name=name: placed.append(name)) for name in "kq"}
    targets["lm_head"] = WeightTarget((9, 2), ignore, required=False)
    report = load_weights(checkpoint, targets)
    assert placed == ["k", "q"]
    assert (report.placed, report.absent, set(report.unused)) == (("k", "q"), ("lm_head",), {"norm", "inv_freq"})
    assert report.stored_bytes == (8 + 4) * 4


def test_unused_tensors_are_named_in_the_log(
    checkpoint: SafetensorsCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load_weights(checkpoint, {"q": WeightTarget((4, 2), ignore)})
    assert len(caplog.records) == 1
    assert all(name in caplog.text for name in ("k", "norm", "inv_freq"))


def test_a_missing_tensor_is_named_before_anything_is_placed(checkpoint: SafetensorsCheckpoint) -> None:
    placed: list[torch.Tensor] = []
    targets = {
        "q": WeightTarget((4, 2), placed.append),
        "v": WeightTarget((2, 2), ignore),
        "o": WeightTarget((1,), ignore),
    }
    with pytest.raises(CheckpointError, match=r"no tensor v of shape \[2, 2\] \(and 1 more\)") as caught:
        load_weights(checkpoint, targets)
    assert (caught.value.field, placed) == ("v", [])


@pytest.mark.parametrize("shape", [(2, 4), (8,), (4, 2, 1), (4, 3)])
def test_a_wrong_shape_is_named_with_both_shapes(checkpoint: SafetensorsCheckpoint, shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_weights(checkpoint, {"q": WeightTarget(shape, ignore)})
    message = str(caught.value)
    assert "tensor q" in message
    assert "[4, 2]" in message
    assert str(list(shape)) in message


def test_an_optional_tensor_of_a_wrong_shape_is_an_error_too(checkpoint: SafetensorsCheckpoint) -> None:
    with pytest.raises(CheckpointError, match="tensor q has shape"):
        load_weights(checkpoint, {"q": WeightTarget((1, 1), ignore, required=False)})


def test_the_progress_bar_shows_only_where_it_is_wanted(
    checkpoint: SafetensorsCheckpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = {"q": WeightTarget((4, 2), ignore)}
    load_weights(checkpoint, targets)
    load_weights(checkpoint, targets, progress=False)
    assert capsys.readouterr().err == ""
    load_weights(checkpoint, targets, progress=True)
    assert "Loading" in capsys.readouterr().err


def anonymous_bytes() -> int:
    """Resident memory of this process that is not a file's."""
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("file_format", ["gguf", "safetensors"])
def test_memory_peaks_at_the_weights_and_the_largest_tensor(
    tmp_path: Path,
    gguf_writer: Callable[..., Path],
    write_directory: WriteDirectory,
    llama_keys: dict[str, Any],
    file_format: str,
) -> None:
    rows, columns, count = 4096, 2048, 8  # 32 MiB each in float32
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(count)]
    checkpoint: Checkpoint
    if file_format == "gguf":
        kind = gguf.GGMLQuantizationType.Q8_0
        packed = np.zeros((rows, columns // 32 * 34), np.uint8)
        weights: dict[str, Any] = {"token_embd.weight": np.zeros((4, 64), np.float32)}
        weights |= {f"blk.{i}.ffn_up.weight": (packed, kind) for i in range(count)}
        keys = llama_keys | {"llama.block_count": count}
        checkpoint = GGUFCheckpoint(gguf_writer(tmp_path / "m.gguf", keys, weights), num_threads=2)
        del weights, packed
    else:
        shards = {f"model-{name}.safetensors": {name: torch.zeros(rows, columns)} for name in names}
        checkpoint = SafetensorsCheckpoint(write_directory(shards))
        del shards
    tensor_bytes = rows * columns * 4
    kept: list[torch.Tensor] = []
    peak_bytes = 0

    def pack(tensor: torch.Tensor) -> None:
        nonlocal peak_bytes
        kept.append(tensor.float() + 1)  # the model's own copy
        peak_bytes = max(peak_bytes, anonymous_bytes())

    before = anonymous_bytes()
    load_weights(checkpoint, {name: WeightTarget((rows, columns), pack) for name in names})
    slack_bytes = 8 << 20
    assert peak_bytes - before <= (count + 1) * tensor_bytes + slack_bytes
