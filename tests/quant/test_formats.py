"""Every format: what is read, dequantised, is what the format's own formula gives, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.backend.quant import QuantFormat, QuantizedTensor, QuantScheme
from octavo.core.base.errors import CheckpointError
from octavo.core.load.checkpoint import Checkpoint
from octavo.core.quant.formats import LinearFormat
from tests.quant import packers
from tests.quant.packers import Packed

INT4, INT8, FP8 = QuantFormat.INT4, QuantFormat.INT8, QuantFormat.FP8_E4M3FN
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "GEMM"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
NAME = "model.layers.0.mlp.up_proj"


def plain_of(checkpoint: Checkpoint, format_: LinearFormat, name: str) -> torch.Tensor:
    """A part as the product sees it, undone: dequantised, with the order of its inputs put back."""
    stored = format_.part(name, checkpoint.read(f"{name}.weight"))
    if isinstance(stored, torch.Tensor):
        return stored
    assert stored.scheme == format_.scheme
    plain = stored.dequantize()
    if format_.input_order is None:
        return plain
    restored = torch.full_like(plain, torch.nan)
    for stored_at, column in enumerate(format_.input_order.tolist()):
        restored[:, column] = plain[:, stored_at]
    return restored


def check(
    opened: tuple[Checkpoint, Any], packed: Packed, scheme: QuantScheme | None, name: str = NAME
) -> tuple[Checkpoint, LinearFormat]:
    checkpoint, formats = opened
    format_ = formats.linear([name])
    assert format_.scheme == scheme
    assert checkpoint.names() == (f"{name}.weight",)
    assert checkpoint.shape(f"{name}.weight") == tuple(packed.weight.shape)
    assert torch.equal(plain_of(checkpoint, format_, name), packed.weight)
    assert torch.equal(plain_of(checkpoint, format_.as_plain(), name), packed.weight)
    out = torch.full_like(packed.weight, torch.nan)
    assert checkpoint.read(f"{name}.weight", out=out) is out
    assert torch.equal(out, packed.weight)
    return checkpoint, format_


def test_awq(open_with: Callable[..., Any]) -> None:
    packed = packers.awq(0, 24, 64, 16)
    checkpoint, _ = check(open_with(packed.named(NAME), AWQ), packed, QuantScheme(INT4, 16, symmetric=False))
    assert "quantization_config" not in checkpoint.config
    assert checkpoint.stored_bytes(f"{NAME}.weight") == 24 * 64 // 2 + 4 * 24 // 2 + 4 * 24 * 2


def test_awq_with_one_group_per_row(open_with: Callable[..., Any]) -> None:
    packed = packers.awq(0, 16, 32, 32)
    check(open_with(packed.named(NAME), AWQ | {"group_size": -1}), packed, QuantScheme(INT4, 0, symmetric=False))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq(open_with: Callable[..., Any], bits: int, version: int, symmetric: bool) -> None:
    packed = packers.gptq(bits, 32, 64, 16, bits=bits, version=version, symmetric=symmetric)
    config = GPTQ | {"bits": bits, "sym": symmetric, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    held = INT8 if bits == 8 else INT4
    check(open_with(packed.named(NAME), config), packed, QuantScheme(held, 16, symmetric=symmetric))


def test_a_gptq_zero_point_of_0_does_not_wrap(open_with: Callable[..., Any]) -> None:
    packed = packers.gptq(0, 32, 32, 32, symmetric=False)
    checkpoint, _ = open_with(packed.named(NAME), GPTQ | {"group_size": 32})
    weight = checkpoint.read(f"{NAME}.weight")
    assert isinstance(weight, QuantizedTensor)
    assert weight.zero_points is not None
    assert int(weight.zero_points.min()) == 0  # the draw holds one; read without the wrap it would be 16
    assert int(weight.zero_points.max()) <= 15


@pytest.mark.parametrize("group", [8, 24, 64, 128])
def test_gptq_groups_of_any_size(open_with: Callable[..., Any], group: int) -> None:
    packed = packers.gptq(1, 32, 64, min(group, 64))
    check(
        open_with(packed.named(NAME), GPTQ | {"group_size": group}), packed, QuantScheme(INT4, group, symmetric=False)
    )


@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq_act_order_is_an_order_of_the_inputs(open_with: Callable[..., Any], symmetric: bool) -> None:
    groups = packers.shuffled_groups(64, 16, seed=3)
    packed = packers.gptq(2, 32, 64, 16, symmetric=symmetric, groups_K=groups)
    config = GPTQ | {"desc_act": True, "sym": symmetric}
    checkpoint, format_ = check(
        open_with(packed.named(NAME), config), packed, QuantScheme(INT4, 16, symmetric=symmetric)
    )
    assert format_.input_order is not None
    assert np.array_equal(groups[format_.input_order.numpy()], np.arange(64) // 16)
    weight = checkpoint.read(f"{NAME}.weight")
    assert isinstance(weight, QuantizedTensor)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    product = x[:, format_.input_order] @ weight.dequantize().T
    assert torch.allclose(product, x @ packed.weight.T, atol=1e-5)


def test_gptq_groups_of_unequal_size_are_dequantised(open_with: Callable[..., Any]) -> None:
    groups = packers.shuffled_groups(64, 16, seed=3)
    groups[np.flatnonzero(groups == 0)[:5]] = 1
    packed = packers.gptq(2, 32, 64, 16, groups_K=groups)
    check(open_with(packed.named(NAME), GPTQ | {"desc_act": True}), packed, None)


def test_gptq_that_orders_columns_against_its_config_is_refused(open_with: Callable[..., Any]) -> None:
    packed = packers.gptq(2, 32, 64, 16, groups_K=packers.shuffled_groups(64, 16, seed=3))
    checkpoint, _ = open_with(packed.named(NAME), GPTQ)
    with pytest.raises(CheckpointError, match="desc_act is false"):
        checkpoint.read(f"{NAME}.weight")


def test_gptq_that_calls_itself_symmetric_wrongly_is_refused(open_with: Callable[..., Any]) -> None:
    checkpoint, _ = open_with(packers.gptq(2, 32, 64, 16).named(NAME), GPTQ | {"sym": True})
    with pytest.raises(CheckpointError, match="not all 8"):
        checkpoint.read(f"{NAME}.weight")


def test_gptq_exceptions_for_some_layers(open_with: Callable[..., Any]) -> None:
    others = {
        "a.down_proj": packers.gptq(5, 32, 32, 32, bits=8, symmetric=True),
        "a.up_proj": packers.gptq(6, 32, 64, 16),
    }
    tensors = {key: value for name, packed in others.items() for key, value in packed.named(name).items()}
    tensors["a.gate_proj.weight"] = torch.ones(4, 4)
    dynamic = {"+:.*down": {"bits": 8, "group_size": 32, "sym": True}, "-:.*gate": {}}
    checkpoint, formats = open_with(tensors, GPTQ | {"dynamic": dynamic})
    assert formats.linear(["a.down_proj"]).scheme == QuantScheme(INT8, 32)
    assert formats.linear(["a.up_proj"]).scheme == QuantScheme(INT4, 16, symmetric=False)
    assert formats.linear(["a.gate_proj"]).scheme is None
    for name, packed in others.items():
        assert torch.equal(plain_of(checkpoint, formats.linear([name]), name), packed.weight)


def group_config(weights: dict[str, Any], activations: dict[str, Any] | None = None, **rest: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **rest}


def integers(bits: int, symmetric: bool, group: int) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, "observer": "minmax", **strategy}


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [0, 16])
def test_compressed_packed_integers(open_with: Callable[..., Any], bits: int, symmetric: bool, group: int) -> None:
    packed = packers.compressed_int(bits, 19, 48, group, bits=bits, symmetric=symmetric, packed=True)
    config = group_config(integers(bits, symmetric, group), format="pack-quantized", quantization_status="compressed")
    held = INT4 if bits <= 4 else INT8
    check(open_with(packed.named(NAME), config), packed, QuantScheme(held, group, symmetric=symmetric))


def test_compressed_act_order(open_with: Callable[..., Any]) -> None:
    groups = packers.shuffled_groups(64, 16, seed=3)
    packed = packers.compressed_int(1, 8, 64, 16, bits=4, symmetric=False, packed=True, groups_K=groups)
    config = group_config(integers(4, False, 16) | {"actorder": "group"}, format="pack-quantized")
    _, format_ = check(open_with(packed.named(NAME), config), packed, QuantScheme(INT4, 16, symmetric=False))
    assert format_.input_order is not None


@pytest.mark.parametrize("file_format", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_compressed_w8a8(open_with: Callable[..., Any], file_format: str, symmetric: bool) -> None:
    packed = packers.compressed_int(7, 8, 48, 0, bits=8, symmetric=symmetric, packed=False)
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    config = group_config(integers(8, symmetric, 0), activations, format=file_format)
    check(open_with(packed.named(NAME), config), packed, QuantScheme(INT8, 0, symmetric=symmetric, activation=INT8))


def test_compressed_activations_with_zero_points_stay_float(open_with: Callable[..., Any]) -> None:
    packed = packers.compressed_int(7, 8, 48, 0, bits=8, symmetric=True, packed=False)
    activations = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "token", "dynamic": True}
    config = group_config(integers(8, True, 0), activations, format="int-quantized")
    check(open_with(packed.named(NAME), config), packed, QuantScheme(INT8))


FP8_CASES = {
    "tensor": ({"strategy": "tensor"}, None, (1,), QuantScheme(FP8, -1, activation=FP8)),
    "channel": ({"strategy": "channel"}, None, (10, 1), QuantScheme(FP8, activation=FP8)),
    "block": (
        {"strategy": "block", "block_structure": [4, 16]}, (4, 16), (3, 3),
        QuantScheme(FP8, 16, block_rows=4, activation=FP8, activation_group_size=16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FP8_CASES)
@pytest.mark.parametrize("dynamic", [True, False])
def test_compressed_fp8(open_with: Callable[..., Any], case: str, dynamic: bool) -> None:
    strategy, blocks, grid, scheme = FP8_CASES[case]
    packed = packers.fp8(3, 10, 40, blocks=blocks, scale_name="weight_scale", grid=grid)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, **strategy}
    token = (
        {"strategy": "group", "group_size": 16} if case == "block" else {"strategy": "token" if dynamic else "tensor"}
    )
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": dynamic, **token}
    tensors = packed.named(NAME) | ({} if dynamic else {f"{NAME}.input_scale": torch.tensor([0.5])})
    check(open_with(tensors, group_config(weights, activations, format="float-quantized")), packed, scheme)


def test_compressed_groups_apply_by_name_before_pattern_before_class(open_with: Callable[..., Any]) -> None:
    layers = {
        "a.q_proj": (packers.compressed_int(1, 8, 32, 0, bits=8, symmetric=True, packed=True), QuantScheme(INT8)),
        "a.down_proj": (
            packers.compressed_int(2, 8, 32, 16, bits=4, symmetric=False, packed=True),
            QuantScheme(INT4, 16, symmetric=False),
        ),
        "b.up_proj": (packers.compressed_int(3, 8, 32, 0, bits=4, symmetric=True, packed=True), QuantScheme(INT4)),
    }
    groups = {
        "all": {"targets": ["Linear"], "weights": integers(4, True, 0)},
        "pattern": {"targets": ["re:.*down.*", "re:a.*"], "weights": integers(4, False, 16)},
        "name": {"targets": ["a.q_proj"], "weights": integers(8, True, 0)},
    }
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    tensors = {key: value for name, (packed, _) in layers.items() for key, value in packed.named(name).items()}
    checkpoint, formats = open_with(tensors | {"lm_head.weight": torch.ones(2, 2)}, config | {"ignore": ["lm_head"]})
    for name, (packed, scheme) in layers.items():
        assert formats.linear([name]).scheme == scheme
        assert torch.equal(plain_of(checkpoint, formats.linear([name]), name), packed.weight)
    assert formats.linear(["lm_head"]).scheme is None
    with pytest.raises(CheckpointError, match=r"ignore lists a\.q_proj, but the files hold it quantised"):
        open_with(tensors, config | {"ignore": [r"re:.*q_proj"]})
    del groups["all"]
    with pytest.raises(CheckpointError, match=r"no group for b\.up_proj"):
        open_with(tensors, config)


@pytest.mark.parametrize("activation_scheme", ["dynamic", "static"])
@pytest.mark.parametrize("grid", [(), (1,)])
def test_native_fp8_with_one_scale(
    open_with: Callable[..., Any], activation_scheme: str, grid: tuple[int, ...]
) -> None:
    packed = packers.fp8(3, 10, 40, blocks=None, scale_name="weight_scale", grid=grid)
    tensors = packed.named(NAME) | {f"{NAME}.input_scale": torch.tensor(0.5)}
    config = {"quant_method": "fp8", "activation_scheme": activation_scheme, "ignored_layers": ["lm_head"]}
    check(open_with(tensors, config), packed, QuantScheme(FP8, -1, activation=FP8))


@pytest.mark.parametrize(("rows", "columns"), [(256, 256), (200, 130)])
def test_native_fp8_in_blocks(open_with: Callable[..., Any], rows: int, columns: int) -> None:
    grid = (-(-rows // 128), -(-columns // 128))
    packed = packers.fp8(3, rows, columns, blocks=(128, 128), scale_name="weight_scale_inv", grid=grid)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    scheme = QuantScheme(FP8, 128, block_rows=128, activation=FP8, activation_group_size=128)
    check(open_with(packed.named(NAME), config), packed, scheme)


def test_fbgemm_fp8(open_with: Callable[..., Any]) -> None:
    packed = packers.fp8(3, 10, 40, blocks=None, scale_name="weight_scale", grid=(10, 1))
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    check(open_with(packed.named(NAME), config), packed, QuantScheme(FP8, activation=FP8))


def test_llm_int8(open_with: Callable[..., Any]) -> None:
    packed = packers.llm_int8(4, 10, 40)
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    check(open_with(packed.named(NAME), config), packed, QuantScheme(INT8))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [None, 4])
@pytest.mark.parametrize("columns", [64, 37])
def test_four_bit_tables(open_with: Callable[..., Any], kind: str, nested: int | None, columns: int) -> None:
    packed = packers.four_bit(5, 9, columns, kind=kind, nested=nested)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    check(open_with(packed.named(NAME), config), packed, None)


def test_mxfp4_experts(open_with: Callable[..., Any]) -> None:
    pairs, downs = packers.mxfp4(0, 3, 6, 2), packers.mxfp4(1, 3, 5, 1)
    prefix = "model.layers.1.mlp.experts"
    tensors = {f"{prefix}.{name}_{part}": tensor for name, packed in (("gate_up_proj", pairs), ("down_proj", downs))
               for part, tensor in packed.tensors.items()}  # fmt: skip
    tensors[f"{prefix}.gate_up_proj_bias"] = torch.ones(3, 6)
    checkpoint, formats = open_with(tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert set(checkpoint.names()) == {f"{prefix}.gate_up_proj_bias"} | {
        f"{prefix}.{e}.{name}.weight" for e in range(3) for name in ("gate_up_proj", "down_proj")
    }
    total = 0
    for name, packed in (("gate_up_proj", pairs), ("down_proj", downs)):
        for e in range(3):
            layer = f"{prefix}.{e}.{name}"
            assert formats.linear([layer]).scheme == QuantScheme(QuantFormat.MXFP4, 32)
            assert torch.equal(plain_of(checkpoint, formats.linear([layer]), layer), packed.weight[e])
            total += checkpoint.stored_bytes(f"{layer}.weight")
    assert total == sum(packed.tensors[part].nbytes for packed in (pairs, downs) for part in ("blocks", "scales"))


def test_mxfp4_scales_at_both_ends(open_with: Callable[..., Any]) -> None:
    packed = packers.mxfp4(0, 1, 3, 1)
    packed.tensors["scales"][0, :, 0] = torch.tensor([0, 254, 255], dtype=torch.uint8)
    name = "x.experts.down_proj"
    checkpoint, _ = open_with(
        {f"{name}_{part}": tensor for part, tensor in packed.tensors.items()}, {"quant_method": "mxfp4"}
    )
    weight = checkpoint.read("x.experts.0.down_proj.weight")
    assert isinstance(weight, QuantizedTensor)
    assert weight.scales[:2, 0].tolist() == [2.0**-127, 2.0**127]
    assert bool(weight.scales[2, 0].isnan())
