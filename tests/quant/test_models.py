"""Models from quantised checkpoints give the logits of the float models of their dequantised weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.backends.cpu.device import CpuBackend
from octavo.core.backend import BackendConfig, PackedWeight, QuantScheme, ReferenceOps, Unsupported, WeightSpec
from octavo.core.base.errors import CheckpointError
from octavo.core.quant.onload import KINDS
from tests.fakes import tiny_models
from tests.fakes.families import FAMILIES
from tests.models import test_generic
from tests.models.rank_runner import RankRunner
from tests.models.step_runner import ReferenceBackend, StepRunner, load_model, relative_error
from tests.quant import packers, tiny_checkpoints
from tests.quant.packers import Packed
from tests.quant.test_formats import AWQ, GPTQ, group_config, integers
from tests.quant.tiny_checkpoints import LLAMA, Pack, float_model, open_directory

TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class KeepsCodes(ReferenceOps):
    """A device that packs every scheme itself, and multiplies float activations by it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.schemes: set[QuantScheme] = set()

    def supports(self, op: str, spec: Any) -> Unsupported | None:
        if getattr(getattr(spec, "weight", None), "scheme", None) is not None and spec.weight.scheme.activation:
            return Unsupported("activations stay float")
        return None

    def prepare_weight(self, spec: WeightSpec) -> PackedWeight:
        if spec.scheme is not None:
            self.schemes.add(spec.scheme)
        return super().prepare_weight(spec)


def code_backend() -> ReferenceBackend:
    made = ReferenceBackend()
    made.ops = KeepsCodes()
    return made


BACKENDS: dict[str, Callable[[], Any]] = {
    "codes": code_backend,
    "dequantised": ReferenceBackend,
    "cpu": lambda: CpuBackend(BackendConfig(num_threads=2)),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = BACKENDS[request.param]()
    yield made
    made.close()


def act_order(layer: str, columns: int) -> Any:
    """q, k and v share an order, as they share their inputs; every other layer has its own."""
    kind = "qkv" if layer.endswith(("q_proj", "k_proj", "v_proj")) else layer
    return packers.shuffled_groups(columns, 16, seed=len(kind) + columns + sum(map(ord, kind)))


def packed_int(bits: int, *, packed: bool, group: int = 16, symmetric: bool = True) -> Pack:
    return lambda _, shape, seed: packers.compressed_int(
        seed, *shape, group, bits=bits, symmetric=symmetric, packed=packed
    )


def fp8_blocks(layer: str, shape: tuple[int, int], seed: int) -> Packed:
    grid = (-(-shape[0] // 32), -(-shape[1] // 32))
    return packers.fp8(seed, *shape, blocks=(32, 32), scale_name="weight_scale_inv", grid=grid)


TOKEN_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
CASES: dict[str, tuple[Pack, dict[str, Any]]] = {
    "awq": (lambda _, shape, seed: packers.awq(seed, *shape, 16), AWQ),
    "gptq": (lambda _, shape, seed: packers.gptq(seed, *shape, 32), GPTQ | {"group_size": 32}),
    "gptq-act-order": (
        lambda layer, shape, seed: packers.gptq(seed, *shape, 16, groups_K=act_order(layer, shape[1])),
        GPTQ | {"desc_act": True},
    ),
    "gptq-8-bit": (
        lambda _, shape, seed: packers.gptq(seed, *shape, 32, bits=8, symmetric=True),
        GPTQ | {"bits": 8, "group_size": 32, "sym": True},
    ),
    "gptq-3-bit": (lambda _, shape, seed: packers.gptq(seed, *shape, 16, bits=3), GPTQ | {"bits": 3}),
    "compressed-int4": (packed_int(4, packed=True), group_config(integers(4, True, 16), format="pack-quantized")),
    "compressed-int8-zeros": (
        packed_int(8, packed=True, group=0, symmetric=False),
        group_config(integers(8, False, 0), format="pack-quantized"),
    ),
    "compressed-w8a8": (
        packed_int(8, packed=False, group=0),
        group_config(integers(8, True, 0), TOKEN_INT8, format="int-quantized"),
    ),
    "compressed-fp8": (
        lambda _, shape, seed: packers.fp8(seed, *shape, blocks=None, scale_name="weight_scale", grid=(shape[0], 1)),
        group_config({"num_bits": 8, "type": "float", "strategy": "channel"}, format="float-quantized"),
    ),
    "fp8-blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "fp8-tensor": (
        lambda _, shape, seed: packers.fp8(seed, *shape, blocks=None, scale_name="weight_scale", grid=()),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "llm-int8": (lambda _, shape, seed: packers.llm_int8(seed, *shape), {"quant_method": "bitsandbytes"}),
    "nf4": (lambda _, shape, seed: packers.four_bit(seed, *shape, nested=8), {"quant_method": "bitsandbytes"}),
}  # fmt: skip


def check(runner: Any, model: torch.nn.Module) -> None:
    for length in (1, 17, 60):
        prompt = tiny_models.random_prompt(97, length)
        expected = tiny_models.logits_of(model, prompt)
        for chunk in (length, 9):
            assert relative_error(runner.prompt("prompt", prompt, chunk), expected) < TOLERANCE, (length, chunk)
            runner.finish("prompt")
    prompt = tiny_models.random_prompt(97, 5)
    assert runner.greedy("greedy", prompt, 8) == tiny_models.greedy(model, prompt, 8)


def run(path: Path, backend: Any, quantization: str | None = None) -> StepRunner:
    checkpoint, formats = open_directory(path, quantization)
    model, opset = load_model(checkpoint, backend, formats=formats)
    checkpoint.close()
    return StepRunner(model, backend, opset)


@pytest.mark.parametrize("case", CASES)
def test_llama(case: str, backend: Any, tmp_path: Path) -> None:
    pack, config = CASES[case]
    path = tiny_checkpoints.write(tiny_models.make_llama(**LLAMA), tmp_path, pack, config)
    check(run(path, backend), float_model(tmp_path))
    if isinstance(backend.ops, KeepsCodes):
        assert bool(backend.ops.schemes) == (case != "nf4")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("make_backend", [code_backend, ReferenceBackend])
def test_llama_over_two_ranks(case: str, make_backend: Callable[[], ReferenceBackend], tmp_path: Path) -> None:
    pack, config = CASES[case]
    path = tiny_checkpoints.write(tiny_models.make_llama(**LLAMA), tmp_path, pack, config)
    checkpoint, formats = open_directory(path)
    runner = RankRunner(checkpoint, 2, make_backend=make_backend, formats=formats)
    try:
        check(runner, float_model(tmp_path))
    finally:
        runner.close()


SKIPPING = {
    "awq": (lambda shape, seed: packers.awq(seed, *shape, 8), AWQ | {"group_size": 8}, "modules_to_not_convert"),
    "gptq": (lambda shape, seed: packers.gptq(seed, *shape, 8), GPTQ | {"group_size": 8}, "modules_to_not_convert"),
    "compressed": (
        lambda shape, seed: packers.compressed_int(seed, *shape, 8, bits=4, symmetric=True, packed=True),
        group_config(integers(4, True, 8), format="pack-quantized"),
        "ignore",
    ),
}  # fmt: skip
SKIPPED_QKV = tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
SKIPPED_MOE = "model.layers.1.mlp"


@pytest.mark.parametrize("case", SKIPPING)
def test_a_mixture_with_skipped_layers(case: str, backend: Any, tmp_path: Path) -> None:
    """vllm#9894: one layer's q, k and v and one whole mixture are listed as not quantised."""
    make, config, field = SKIPPING[case]
    tiny = FAMILIES["qwen3_moe"].make(
        **(LLAMA | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2})
    )

    def pack(layer: str, shape: tuple[int, int], seed: int) -> Packed | None:
        return None if layer in SKIPPED_QKV or layer.startswith(SKIPPED_MOE) else make(shape, seed)

    path = tiny_checkpoints.write(tiny, tmp_path, pack, config | {field: [*SKIPPED_QKV, SKIPPED_MOE]})
    check(run(path, backend), float_model(tmp_path))


def test_a_mixture_with_act_order(backend: Any, tmp_path: Path) -> None:
    """Every expert has an order of its own, which no one gather of the rows can serve."""
    tiny = FAMILIES["qwen3_moe"].make(
        **(LLAMA | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2})
    )
    pack, config = CASES["gptq-act-order"]
    check(run(tiny_checkpoints.write(tiny, tmp_path, pack, config), backend), float_model(tmp_path))


def test_a_model_without_a_family_of_its_own(tmp_path: Path) -> None:
    """Hugging Face's own modelling holds plain weights: codes are undone as they are placed, act-order included."""
    model = test_generic.make("OlmoForCausalLM", vocab_size=97)

    def pack(_: str, shape: tuple[int, int], seed: int) -> Packed:
        groups = packers.shuffled_groups(shape[1], 16, seed)
        return packers.compressed_int(seed, *shape, 16, bits=4, symmetric=False, packed=True, groups_K=groups)

    config = group_config(integers(4, False, 16), format="pack-quantized")
    check(run(tiny_checkpoints.write(model, tmp_path, pack, config), ReferenceBackend()), float_model(tmp_path))


def test_a_fused_layer_that_is_half_skipped(tmp_path: Path) -> None:
    pack, config = CASES["gptq"]
    skipped = "model.layers.1.mlp.up_proj"
    path = tiny_checkpoints.write(
        tiny_models.make_llama(**LLAMA),
        tmp_path,
        lambda layer, shape, seed: None if layer == skipped else pack(layer, shape, seed),
        config | {"modules_to_not_convert": [skipped]},
    )
    with pytest.raises(CheckpointError, match=rf"gate_proj quantised and {skipped} plain"):
        run(path, ReferenceBackend())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("make_backend", [code_backend, ReferenceBackend])
def test_mxfp4_experts_of_gpt_oss(ranks: int, make_backend: Callable[[], ReferenceBackend], tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 97}
    plain = tiny_models.save(FAMILIES["gpt_oss"].make(**sizes), tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for seed, name in enumerate(tensors):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensors[name]
            continue
        experts, columns, rows = tensors[name].shape  # transposed in the plain form
        packed = packers.mxfp4(seed, experts, rows, columns // 32, exponents_of=(122, 125))
        stored |= {f"{name}_{part}": tensor for part, tensor in packed.tensors.items()}
        tensors[name] = packed.weight.transpose(1, 2).contiguous()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    path = tiny_checkpoints.write_beside(plain, tmp_path / "quantised", stored, {"quant_method": "mxfp4"})
    checkpoint, formats = open_directory(path)
    if ranks == 1:
        check(run(path, make_backend()), float_model(tmp_path))
        return
    runner = RankRunner(checkpoint, ranks, make_backend=make_backend, formats=formats)
    try:
        check(runner, float_model(tmp_path))
    finally:
        runner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_checkpoint_quantised_at_load(kind: str, backend: Any, tmp_path: Path) -> None:
    """The logits of the float model whose layers are replaced by what quantisation at load makes of them."""
    plain = tiny_models.save(tiny_models.make_llama(**LLAMA), tmp_path / "plain")
    checkpoint, _ = open_directory(plain, kind)
    tensors = load_file(plain / "model.safetensors")
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        checkpoint.read(name, out=tensor)
    changed = {name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name, tensor in before.items() if tiny_checkpoints.is_linear(name, tensor)}
    runner = run(plain, backend, kind)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    check(runner, float_model(tmp_path))
