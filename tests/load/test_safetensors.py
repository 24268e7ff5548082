"""Model directories: single and sharded files, and every way in which they can be incomplete or foreign."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.core.base.errors import CheckpointError
from octavo.core.load.safetensors import SafetensorsCheckpoint

WriteDirectory = Callable[..., Path]


def two_shards() -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model-00001-of-00002.safetensors": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)},
        "model-00002-of-00002.safetensors": {"c": torch.full((3,), 0.1, dtype=torch.bfloat16)},
    }


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsCheckpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("sharded", [False, True])
def test_reading(write_directory: WriteDirectory, sharded: bool) -> None:
    files = two_shards()
    everything = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    checkpoint = SafetensorsCheckpoint(write_directory(files if sharded else {"model.safetensors": everything}))
    assert set(checkpoint.names()) == {"a", "b", "c"}
    assert checkpoint.config["hidden_size"] == 8
    assert (checkpoint.generation_config, checkpoint.metadata, checkpoint.norm_weights_include_one) == ({}, {}, False)
    assert (checkpoint.shape("a"), checkpoint.stored_dtype("c"), checkpoint.stored_bytes("c")) == ((2, 3), "BF16", 6)
    assert checkpoint.total_bytes == 24 + 16 + 6
    for name, tensor in checkpoint.tensors(["c", "a", "b"]):
        assert tensor.dtype == everything[name].dtype
        assert torch.equal(tensor, everything[name])
    out = torch.empty(3)
    assert checkpoint.read("c", out=out) is out
    assert torch.equal(out, everything["c"].float())


def test_a_returned_tensor_outlives_its_checkpoint_and_is_not_the_file(write_directory: WriteDirectory) -> None:
    folder = write_directory({"model.safetensors": {"a": torch.zeros(4)}})
    checkpoint = SafetensorsCheckpoint(folder)
    kept = checkpoint.read("a")
    checkpoint.close()
    del checkpoint
    kept += 1
    assert torch.equal(kept, torch.ones(4))
    assert torch.equal(SafetensorsCheckpoint(folder).read("a"), torch.zeros(4))


def test_one_file_of_any_name_and_the_other_files(write_directory: WriteDirectory) -> None:
    folder = write_directory({"weights.safetensors": {"a": torch.zeros(4)}})
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "notes.txt"):
        (folder / name).write_text("{}")
    checkpoint = SafetensorsCheckpoint(folder)
    assert checkpoint.generation_config == {"eos_token_id": [2, 0]}
    assert set(checkpoint.tokenizer_files()) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert checkpoint.names() == ("a",)


def test_a_missing_shard(write_directory: WriteDirectory) -> None:
    folder = write_directory(two_shards())
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "lacks the shard model-00002-of-00002.safetensors" in refusal(folder)


def test_a_tensor_that_the_index_does_not_list(write_directory: WriteDirectory) -> None:
    folder = write_directory(two_shards())
    edit_index(folder, lambda weight_map: weight_map.pop("b"))
    assert "holds tensor b but model.safetensors.index.json does not list it" in refusal(folder)


def test_a_tensor_that_the_index_places_elsewhere(write_directory: WriteDirectory) -> None:
    folder = write_directory(two_shards())
    edit_index(folder, lambda weight_map: weight_map.update(b="model-00002-of-00002.safetensors"))
    assert "says it is in model-00002-of-00002.safetensors" in refusal(folder)


def test_a_tensor_that_only_the_index_has(write_directory: WriteDirectory) -> None:
    folder = write_directory(two_shards())
    edit_index(folder, lambda weight_map: weight_map.update(d="model-00002-of-00002.safetensors"))
    assert "lacks tensor d" in refusal(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", ""])
def test_an_index_that_leaves_its_directory(write_directory: WriteDirectory, name: str) -> None:
    folder = write_directory(two_shards())
    edit_index(folder, lambda weight_map: weight_map.update(b=name))
    assert "no file of its directory" in refusal(folder)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "{", "\xff"])
def test_a_broken_index(write_directory: WriteDirectory, index: str) -> None:
    folder = write_directory(two_shards())
    (folder / "model.safetensors.index.json").write_bytes(index.encode("latin-1"))
    assert "model.safetensors.index.json" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 3, 8, 40, -1, -20])
def test_a_truncated_file(write_directory: WriteDirectory, keep: int) -> None:
    folder = write_directory({"model.safetensors": {"a": torch.ones(16)}})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors is truncated or not a safetensors file" in refusal(folder)


@pytest.mark.parametrize(
    "content", [b"\xff" * 8 + b"{}", b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{x", b"PK\x03\x04 a zip file"]
)
def test_a_bad_header(write_directory: WriteDirectory, content: bytes) -> None:
    folder = write_directory({})
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors is truncated or not a safetensors file" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64, torch.float64])
def test_a_dtype_that_is_no_weight_is_refused_only_when_it_is_read(
    write_directory: WriteDirectory, dtype: torch.dtype
) -> None:
    folder = write_directory({"model.safetensors": {"a": torch.zeros(4), "odd": torch.zeros(8).to(dtype)}})
    checkpoint = SafetensorsCheckpoint(folder)
    assert checkpoint.read("a").dtype == torch.float32
    assert checkpoint.stored_bytes("odd") == 8 * dtype.itemsize
    with pytest.raises(CheckpointError, match="tensor odd is stored as") as caught:
        checkpoint.read("odd")
    assert caught.value.field == "odd"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "weights.pt"])
def test_pickled_weights_are_never_loaded(write_directory: WriteDirectory, name: str) -> None:
    folder = write_directory({})
    (folder / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    message = refusal(folder)
    assert name in message
    assert "save_pretrained" in message


def test_nothing_there(write_directory: WriteDirectory) -> None:
    folder = write_directory({})
    assert "no .safetensors file" in refusal(folder)


def test_several_files_without_an_index(write_directory: WriteDirectory) -> None:
    folder = write_directory(two_shards(), index=False)
    assert "2 .safetensors files but neither" in refusal(folder)


@pytest.mark.parametrize("config", [None, "", "{", "[1]", '"x"', "[" * 100_000])
def test_a_missing_or_broken_config(write_directory: WriteDirectory, config: str | None) -> None:
    folder = write_directory({"model.safetensors": {"a": torch.zeros(4)}})
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(config)
    assert "config.json" in refusal(folder)


def test_fingerprints_follow_the_content(write_directory: WriteDirectory, tmp_path: Path) -> None:
    folder = write_directory({"model.safetensors": {"a": torch.zeros(4)}})
    first, again = SafetensorsCheckpoint(folder).fingerprint, SafetensorsCheckpoint(folder).fingerprint
    save_file({"a": torch.ones(4)}, folder / "model.safetensors")
    assert first == again != SafetensorsCheckpoint(folder).fingerprint
