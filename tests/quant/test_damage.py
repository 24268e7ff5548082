"""Damaged quantised checkpoints, through the door that users take: the same reply, or one error that names the part."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.core.base.errors import CheckpointError
from tests.fakes import damage, tiny_models
from tests.quant import tiny_checkpoints
from tests.quant.test_models import CASES
from tests.quant.tiny_checkpoints import LLAMA

PROMPT = [5, 17, 40, 2, 81]
LAYER = "model.layers.0.mlp.down_proj"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS[:2], torch.uint8, torch.int16, torch.int32, torch.bool, torch.float8_e4m3fn)
FLIPS = 40


def reply(path: Path) -> Any:
    return damage.reply(path, PROMPT)


def outcome(path: Path) -> tuple[Any, str]:
    return damage.outcome(path, PROMPT)


@dataclass
class Small:
    """A checkpoint of one layer, and a copy of it to damage."""

    path: Path
    whole: dict[str, torch.Tensor]
    expected: Any

    def damaged(self, **changes: torch.Tensor | None) -> Path:
        """With tensors of LAYER exchanged or, where None, left out."""
        tensors = self.whole | {f"{LAYER}.{part}": value for part, value in changes.items() if value is not None}
        absent = {f"{LAYER}.{part}" for part, value in changes.items() if value is None}
        kept = {name: tensor.contiguous() for name, tensor in tensors.items() if name not in absent}
        save_file(kept, self.path / "model.safetensors")
        return self.path

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.whole.items():
            if name.startswith(f"{LAYER}."):
                yield name.removeprefix(f"{LAYER}."), tensor


@pytest.fixture(params=CASES)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Small:
    pack, config = CASES[request.param]
    model = tiny_models.make_llama(**(LLAMA | {"num_hidden_layers": 1}))
    path = tiny_checkpoints.write(model, tmp_path, pack, config)
    return Small(path, load_file(path / "model.safetensors"), reply(path))


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        reply(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_part_of_another_dtype(small: Small) -> None:
    """Scales may be of any float; bytes of packed codes and of every other part mean nothing in another dtype."""
    for part, tensor in small.parts():
        alike = FLOATS if tensor.dtype in FLOATS else (tensor.dtype,)
        if "idx" in part or "shape" in part or part == "weight_format":
            alike = (torch.int32, torch.int64, torch.uint8, torch.int8)
        for dtype in DTYPES:
            same_bytes = part == "weight" and tensor.dtype == torch.uint8 and dtype.itemsize == 1  # nf4's storage
            if dtype not in alike and not same_bytes:
                assert LAYER in refusal(small.damaged(**{part: tensor.to(dtype)})), (part, dtype)


def test_a_part_that_is_missing(small: Small) -> None:
    """g_idx and weight_format may be left out where the config and the layer's other parts say as much."""
    for part, _ in small.parts():
        path = small.damaged(**{part: None})
        if part not in ("weight_format", "g_idx"):
            assert LAYER in refusal(path)
            continue
        found, message = outcome(path)
        assert found == small.expected or LAYER in message


def test_a_part_without_elements_or_axes(small: Small) -> None:
    for part, tensor in small.parts():
        for shape in ("empty", "scalar"):
            changed = tensor.reshape(-1)[:0] if shape == "empty" else tensor.reshape(-1)[0]
            if changed.shape != tensor.shape and not (part == "weight_format" and shape == "scalar"):
                assert LAYER in refusal(small.damaged(**{part: changed.clone()})), (part, shape)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers(small: Small, value: float) -> None:
    for part, tensor in small.parts():
        if tensor.dtype in FLOATS:
            changed = tensor.clone()
            changed.view(-1)[-1] = value
            assert part in refusal(small.damaged(**{part: changed}))


def test_flipped_bytes_of_the_header(small: Small) -> None:
    content = (small.path / "model.safetensors").read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    draw = random.Random(3)
    for _ in range(FLIPS):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 3))):
            changed[draw.randrange(header_bytes)] = draw.choice((draw.randrange(256), *b'0123456789"[],:'))
        (small.path / "model.safetensors").write_bytes(changed)
        found, message = outcome(small.path)
        assert found == small.expected or message


VALUES: tuple[Any, ...] = (None, -1, 7, 1 << 40, 1e308, "x", [], {"a": 1}, [1], True)


def test_fields_of_another_type(small: Small) -> None:
    """Every field of the quantization_config in turn; a value that is a field's own may change the reply."""
    whole = json.loads((small.path / "config.json").read_text())
    for place in _places(whole["quantization_config"]):
        for value in VALUES:
            changed = json.loads(json.dumps(whole))
            owner = changed["quantization_config"]
            for key in place[:-1]:
                owner = owner[key]
            owner[place[-1]] = value
            (small.path / "config.json").write_text(json.dumps(changed))
            _, message = outcome(small.path)
            assert "\n" not in message, (place, value)


def _places(value: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*above, key)
            yield from _places(inner, (*above, key))


def test_a_scale_beside_a_plain_weight(tmp_path: Path) -> None:
    """The weight was read plain, and its scale passed over."""
    pack, config = CASES["compressed-w8a8"]
    path = tiny_checkpoints.write(tiny_models.make_llama(**LLAMA), tmp_path, pack, config)
    tensors = load_file(path / "model.safetensors")
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].float()
    shutil.rmtree(tmp_path / "plain")
    save_file(tensors, path / "model.safetensors")
    assert "weight_scale belongs to a quantised layer" in refusal(path)


def write(tmp_path: Path, case: str, weights: dict[str, Any]) -> Path:
    pack, config = CASES[case]
    config = json.loads(json.dumps(config))
    config["config_groups"]["group_0"]["weights"] |= weights
    return tiny_checkpoints.write(tiny_models.make_llama(**LLAMA), tmp_path, pack, config)


def test_zero_points_beside_a_config_that_says_symmetric(tmp_path: Path) -> None:
    """They were passed over."""
    assert "weight_zero_point is not all 0" in refusal(write(tmp_path, "compressed-int8-zeros", {"symmetric": True}))


def test_zero_points_of_0_beside_a_config_that_says_symmetric(tmp_path: Path) -> None:
    path = write(tmp_path, "compressed-w8a8", {})
    expected = reply(path)
    tensors = load_file(path / "model.safetensors")
    for name in list(tensors):
        if name.endswith("weight_scale"):
            zeros = torch.zeros(tensors[name].shape, dtype=torch.int8)
            tensors[name.replace("weight_scale", "weight_zero_point")] = zeros
    save_file(tensors, path / "model.safetensors")
    assert reply(path) == expected


def test_codes_of_more_bits_than_the_config_tells(tmp_path: Path) -> None:
    """A word holds four codes of 7 bits as of 8, and codes that are not packed lie in bytes: no shape tells."""
    changes = {"num_bits": 7, "symmetric": False}
    assert "codes of more than the 7 bits" in refusal(write(tmp_path / "a", "compressed-int8-zeros", changes))
    assert "codes of more than the 4 bits" in refusal(write(tmp_path / "b", "compressed-w8a8", {"num_bits": 4}))
