"""Fused layers, skip lists, and files that contradict their config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.backend.quant import QuantFormat, QuantizedTensor, QuantScheme
from octavo.core.base.errors import CheckpointError, ConfigError
from tests.quant import packers
from tests.quant.packers import Packed
from tests.quant.test_formats import AWQ, GPTQ, NAME, group_config, integers, plain_of

QKV = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
PACKED_INT4 = group_config(integers(4, True, 16), format="pack-quantized")


def make(kind: str, seed: int = 0) -> Packed:
    if kind == "awq":
        return packers.awq(seed, 16, 32, 16)
    if kind == "gptq":
        return packers.gptq(seed, 32, 32, 16)
    return packers.compressed_int(seed, 8, 32, 16, bits=4, symmetric=True, packed=True)


KINDS = {
    "awq": (AWQ, "modules_to_not_convert"),
    "gptq": (GPTQ, "modules_to_not_convert"),
    "compressed": (PACKED_INT4, "ignore"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers_that_are_all_quantised(open_with: Callable[..., Any], kind: str) -> None:
    parts = {name: make(kind, seed) for seed, name in enumerate(QKV)}
    checkpoint, formats = open_with(merged(parts), KINDS[kind][0])
    format_ = formats.linear(QKV)
    assert format_.scheme is not None
    assert format_.scheme.group_size == 16
    for name, packed in parts.items():
        assert torch.equal(plain_of(checkpoint, format_, name), packed.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers_that_are_all_skipped_are_plain(open_with: Callable[..., Any], kind: str) -> None:
    config, field = KINDS[kind]
    skipped = {f"{name}.weight": torch.randn(4, 32) for name in QKV}
    checkpoint, formats = open_with(make(kind).named(NAME) | skipped, config | {field: QKV})
    assert formats.linear(QKV).scheme is None
    assert formats.linear([NAME]).scheme is not None
    for name, tensor in skipped.items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.stored_dtype(name) == "F32"


@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers_of_which_some_are_skipped_are_an_error(open_with: Callable[..., Any], kind: str) -> None:
    config, field = KINDS[kind]
    tensors = make(kind).named(QKV[0]) | make(kind, 1).named(QKV[1]) | {f"{QKV[2]}.weight": torch.randn(4, 32)}
    _, formats = open_with(tensors, config | {field: [QKV[2]]})
    with pytest.raises(CheckpointError) as caught:
        formats.linear(QKV)
    message = str(caught.value)
    assert f"{QKV[0]}, {QKV[1]} quantised and {QKV[2]} plain" in message
    assert "\n" not in message
    assert formats.linear(QKV[:2]).scheme is not None


def merged(parts: dict[str, Packed]) -> dict[str, torch.Tensor]:
    return {key: value for name, packed in parts.items() for key, value in packed.named(name).items()}


def test_parts_of_unlike_schemes_are_dequantised(open_with: Callable[..., Any]) -> None:
    parts = {QKV[0]: make("gptq"), QKV[1]: packers.gptq(1, 32, 32, 16, bits=8)}
    checkpoint, formats = open_with(merged(parts), GPTQ | {"dynamic": {".*k_proj": {"bits": 8}}})
    assert formats.linear(QKV[:2]).scheme is None
    for name, packed in parts.items():
        assert torch.equal(plain_of(checkpoint, formats.linear(QKV[:2]), name), packed.weight)


def test_parts_that_differ_in_their_activations_keep_them_float(open_with: Callable[..., Any]) -> None:
    parts = {name: packers.compressed_int(seed, 8, 32, 0, bits=8, symmetric=True, packed=False)
             for seed, name in enumerate(QKV[:2])}  # fmt: skip
    w8 = {"targets": ["re:.*q_proj"], "weights": integers(8, True, 0)}
    w8a8 = w8 | {"targets": ["Linear"], "input_activations": {"num_bits": 8, "type": "int", "strategy": "token"}}
    groups = {"a": w8, "b": w8a8}
    _, formats = open_with(
        merged(parts), {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    )
    assert formats.linear(QKV[1:2]).scheme == QuantScheme(QuantFormat.INT8, activation=QuantFormat.INT8)
    assert formats.linear(QKV[:2]).scheme == QuantScheme(QuantFormat.INT8)


@pytest.mark.parametrize("orders", ["equal", "unlike", "one"])
def test_act_order_of_fused_layers(open_with: Callable[..., Any], orders: str) -> None:
    groups = [packers.shuffled_groups(64, 16, seed=3), packers.shuffled_groups(64, 16, seed=3)]
    if orders == "unlike":
        groups[1] = packers.shuffled_groups(64, 16, seed=4)
    if orders == "one":
        groups[1] = np.arange(64) // 16
    parts = {name: packers.gptq(i, 32, 64, 16, groups_K=groups[i]) for i, name in enumerate(QKV[:2])}
    checkpoint, formats = open_with(merged(parts), GPTQ | {"desc_act": True})
    format_ = formats.linear(QKV[:2])
    assert (format_.scheme is not None) == (orders == "equal")
    assert (format_.input_order is not None) == (orders == "equal")
    for name, packed in parts.items():
        assert torch.equal(plain_of(checkpoint, format_, name), packed.weight)


@pytest.mark.parametrize(
    ("kind", "suffix", "change"),
    [
        ("awq", "scales", lambda t: t[:-1]),
        ("awq", "qzeros", lambda t: t[:, :-1]),
        ("awq", "qweight", lambda t: t.flatten()),
        ("awq", "qzeros", None),
        ("gptq", "scales", lambda t: t[:, :-1]),
        ("gptq", "qzeros", lambda t: t[:-1]),
        ("gptq", "g_idx", lambda t: t[:-1]),
        ("gptq", "scales", None),
        ("compressed", "weight_packed", lambda t: t[:, :-1]),
        ("compressed", "weight_scale", lambda t: t[:, :-1]),
        ("compressed", "weight_shape", lambda t: t[:1]),
        ("compressed", "weight_shape", lambda t: -t),
        ("compressed", "weight_shape", None),
    ],
)
def test_a_layer_with_a_tensor_of_another_shape_or_none(
    open_with: Callable[..., Any], kind: str, suffix: str, change: Callable[[torch.Tensor], torch.Tensor] | None
) -> None:
    tensors = make(kind).named(NAME)
    tensor = tensors.pop(f"{NAME}.{suffix}")
    if change is not None:
        tensors[f"{NAME}.{suffix}"] = change(tensor)
    with pytest.raises(CheckpointError, match=suffix) as caught:
        open_with(tensors, KINDS[kind][0])
    assert "\n" not in str(caught.value)


def test_groups_that_do_not_exist(open_with: Callable[..., Any]) -> None:
    tensors = make("gptq").named(NAME)
    tensors[f"{NAME}.g_idx"][3] = 2
    _, formats = open_with(tensors, GPTQ | {"desc_act": True})
    with pytest.raises(CheckpointError, match=r"names groups 0 \.\. 2 of 2"):
        formats.linear([NAME])


@pytest.mark.parametrize(
    ("scale", "config"),
    [
        (torch.ones(2, 2), {"weight_block_size": [128, 128]}),
        (torch.ones(2), {}),
        (torch.ones(10, 40), {}),
        (None, {}),
    ],
)
def test_fp8_scales_of_another_shape(
    open_with: Callable[..., Any], scale: torch.Tensor | None, config: dict[str, Any]
) -> None:
    tensors = {f"{NAME}.weight": packers.fp8_codes(0, 10, 40)}
    if scale is not None:
        tensors[f"{NAME}.weight_scale_inv"] = scale
    with pytest.raises(CheckpointError, match="weight_scale_inv"):
        open_with(tensors, {"quant_method": "fp8"} | config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({f"{NAME}.weight": t[f"{NAME}.weight"][:-1]}), "do not fill"),
        (lambda t: t.update({f"{NAME}.weight.absmax": t[f"{NAME}.weight.absmax"][:-1]}), "scales"),
        (lambda t: t.update({f"{NAME}.weight.absmax": t[f"{NAME}.weight.absmax"].half()}), "no nested_absmax"),
    ],
)
def test_nf4_of_another_size(open_with: Callable[..., Any], change: Callable[[Any], None], message: str) -> None:
    tensors = packers.four_bit(0, 8, 32).named(NAME)
    change(tensors)
    checkpoint, _ = open_with(tensors, {"quant_method": "bitsandbytes"})
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read(f"{NAME}.weight")


@pytest.mark.parametrize(
    "state", [b"{", b"{}", b'{"shape": [8], "blocksize": 64}', b'{"shape": [8, 32], "blocksize": 0}']
)
def test_nf4_with_a_broken_state(open_with: Callable[..., Any], state: bytes) -> None:
    tensors = packers.four_bit(0, 8, 32).named(NAME)
    tensors[f"{NAME}.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
    checkpoint, _ = open_with(tensors, {"quant_method": "bitsandbytes"})
    with pytest.raises(CheckpointError, match="no state"):
        checkpoint.shape(f"{NAME}.weight")


@pytest.mark.parametrize(
    ("kind", "change", "field"),
    [
        ("awq", {"version": "gemv"}, "version"),
        ("awq", {"bits": 3}, "bits"),
        ("awq", {"zero_point": False}, "zero_point"),
        ("awq", {"group_size": "big"}, "group_size"),
        ("awq", {"rotation": "hadamard"}, "rotation"),
        ("gptq", {"bits": 5}, "bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format"),
        ("gptq", {"desc_act": 1}, "desc_act"),
        ("gptq", {"adapter": {"rank": 4}}, "adapter"),
        ("gptq", {"dynamic": {"(": {}}}, "dynamic"),
        ("gptq", {"dynamic": {"-:.*up_proj": {}}}, "dynamic"),
        ("gptq", {"dynamic": {".*up": {"rotation": 1}}}, "rotation"),
        ("compressed", {"format": "nvfp4-pack-quantized"}, "format"),
        ("compressed", {"format": "int-quantized"}, "format"),
        ("compressed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format"),
        ("compressed", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ("compressed", {"ignore": "lm_head"}, "ignore"),
    ],
)
def test_a_config_with_mathematics_that_are_not_there(
    open_with: Callable[..., Any], kind: str, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_with(make(kind).named(NAME), KINDS[kind][0] | change)
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize("method", ["quark", "modelopt", 3, None])
def test_an_unknown_method_is_refused_with_the_known_ones(open_with: Callable[..., Any], method: Any) -> None:
    with pytest.raises(CheckpointError, match=r"awq, gptq, compressed-tensors, fp8"):
        open_with(make("awq").named(NAME), {"quant_method": method, "bits": 4})


def test_a_config_without_quantised_files_is_refused(open_with: Callable[..., Any]) -> None:
    with pytest.raises(CheckpointError, match="no tensor is stored so"):
        open_with({f"{NAME}.weight": torch.ones(2, 2)}, AWQ)


def test_quantised_files_without_a_config_are_refused_when_read(open_with: Callable[..., Any]) -> None:
    checkpoint, _ = open_with({f"{NAME}.weight": packers.fp8_codes(0, 4, 4)}, None)
    with pytest.raises(CheckpointError, match="names no quantisation"):
        checkpoint.read(f"{NAME}.weight")


def test_a_quantised_checkpoint_is_not_quantised_again(open_with: Callable[..., Any]) -> None:
    tensors = make("awq").named(NAME)
    checkpoint, _ = open_with(tensors, AWQ, "awq")
    assert isinstance(checkpoint.read(f"{NAME}.weight"), QuantizedTensor)
    with pytest.raises(ConfigError, match="quantised by awq"):
        open_with(tensors, AWQ, "int8")
