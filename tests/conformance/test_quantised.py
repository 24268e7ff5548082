"""The oracle of quantised weights, and that what the cases draw is what they promise."""

from __future__ import annotations

import gguf as gguf_package
import numpy as np
import pytest
import torch

from octavo.conformance.case import Case
from octavo.conformance.draw import Draw
from octavo.conformance.facts import Facts
from octavo.conformance.grid import gemm_quant, gguf_weights, grouped_quant
from octavo.conformance.grid.quant_weights import exact_weight, typical_weight
from octavo.conformance.harness.host import HostBackend
from octavo.conformance.harness.judge import judge
from octavo.conformance.harness.result import Status
from octavo.conformance.harness.worker import BackendChoice, make_backend
from octavo.conformance.mutants.gate import mutants
from octavo.conformance.oracle import gguf, quantise
from octavo.core.backend import QuantFormat, QuantizedTensor, QuantScheme

BLOCKS = [f for f in QuantFormat if f.block is not None]
FACTS = Facts.of(HostBackend().capabilities)
MUTANTS = ("gguf-minimum-ignored", "gguf-scale-stale", "gguf-high-bits-dropped", "mxfp4-sign-lost",
           "mxfp4-exponent-off-by-one", "block-scales-transposed", "block-scales-as-row-scales")  # fmt: skip


def draw(name: str) -> Draw:
    return Draw(7, name, "gemm", FACTS)


def random_blocks(quant_format: QuantFormat, count: int = 400) -> torch.Tensor:
    size = gguf.layouts()[quant_format].num_bytes
    return torch.randint(0, 256, (count, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("quant_format", BLOCKS)
def test_the_oracle_decodes_as_the_formats_own_package_does(quant_format: QuantFormat) -> None:
    blocks = random_blocks(quant_format)
    with np.errstate(all="ignore"):
        kind = gguf_package.GGMLQuantizationType[quant_format.name.removeprefix("GGUF_")]
        want = torch.from_numpy(gguf_package.dequantize(blocks.numpy(), kind))
    got = gguf.decode(quant_format, blocks)
    finite = want.isfinite()
    assert float(finite.float().mean()) > 0.9
    assert torch.equal(got.float()[finite], want[finite])  # the package rounds once, as this does here


@pytest.mark.parametrize("quant_format", BLOCKS)
def test_encoding_puts_every_bit_back(quant_format: QuantFormat) -> None:
    layout, blocks = gguf.layouts()[quant_format], random_blocks(quant_format)
    numbers = gguf.fields(layout, blocks)
    finite = (numbers.d.isfinite() & (numbers.d if numbers.dmin is None else numbers.dmin).isfinite()).flatten()
    assert torch.equal(gguf.encode(layout, numbers)[finite], blocks[finite])


@pytest.mark.parametrize("quant_format", BLOCKS)
def test_the_sizes_of_terms_are_those_of_a_value_and_no_less(quant_format: QuantFormat) -> None:
    layout = gguf.layouts()[quant_format]
    numbers = gguf_weights.typical_fields(layout, 5, 1, draw("sizes"))
    weight = QuantizedTensor.of_blocks(quant_format, gguf.encode(layout, numbers))
    sizes = quantise.term_sizes(weight)
    assert bool((sizes >= quantise.dequantise(weight).abs()).all())
    if not layout.bias and layout.dmin is None:
        assert torch.equal(sizes, quantise.dequantise(weight).abs())


@pytest.mark.parametrize("quant_format", BLOCKS)
def test_narrow_values_fit_bf16_and_wide_ones_need_more(quant_format: QuantFormat) -> None:
    scheme = QuantScheme(quant_format)
    narrow = exact_weight(scheme, 16, 512, draw("narrow"), dtype=torch.bfloat16).dense()
    assert torch.equal(narrow.to(torch.bfloat16).double(), narrow)
    wide = exact_weight(scheme, 16, 512, draw("wide"), dtype=torch.float32)
    assert torch.equal(wide.dense() / gguf_weights.UNIT, (wide.dense() / gguf_weights.UNIT).round())
    assert float(wide.dense().abs().max()) / gguf_weights.UNIT <= wide.largest


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("quant_format", [f for f in BLOCKS if f.name.endswith("_K")])
def test_neighbouring_groups_share_neither_scale_nor_minimum(quant_format: QuantFormat, is_narrow: bool) -> None:
    layout = gguf.layouts()[quant_format]
    numbers = gguf_weights.exact_fields(layout, 8, 3, draw("fields"), is_narrow=is_narrow)
    for grid in (numbers.scales, numbers.minimums):
        if grid is not None:
            assert bool((grid[:, 1:] != grid[:, :-1]).any(dim=1).all())
            assert float((grid[:, 1:] != grid[:, :-1]).double().mean()) > 0.8
    d = numbers.d.reshape(8, 3)
    assert bool((d[:, 1:] != d[:, :-1]).all())
    assert bool((d[1:] != d[:-1]).all())


def test_mxfp4_cases_hold_all_sixteen_codes_and_a_range_of_exponents() -> None:
    weight = exact_weight(gemm_quant.MXFP4, 48, 512, draw("mxfp4"), dtype=torch.float32)
    codes = torch.cat([part.codes_NK for part, _ in weight.parts])
    assert codes.unique().tolist() == list(range(16))
    exponents = torch.cat([part.scales for part, _ in weight.parts]).log2()
    assert float(exponents.max() - exponents.min()) > 100
    assert torch.equal(exponents, exponents.round())


def test_block_scales_differ_from_every_neighbours_and_from_their_transposition() -> None:
    scheme = QuantScheme(QuantFormat.FP8_E4M3FN, 128, block_rows=128)
    part = exact_weight(scheme, 328, 320, draw("blocks"), dtype=torch.float32).parts[1][0]
    scales = part.scales
    assert scales.shape == (2, 3)
    assert bool((scales[:, 1:] != scales[:, :-1]).all())
    assert bool((scales[1:] != scales[:-1]).all())
    assert not torch.equal(scales, scales.flatten().view(3, 2).T)


def test_parts_of_a_tensor_scheme_have_scales_of_their_own() -> None:
    parts = exact_weight(QuantScheme(QuantFormat.INT8, -1), 8, 64, draw("tensor"), dtype=torch.float32).parts
    assert [part.scales.shape for part, _ in parts] == [(1, 1), (1, 1)]
    assert float(parts[0][0].scales) != float(parts[1][0].scales)


@pytest.mark.parametrize("scheme", [QuantScheme(f) for f in BLOCKS] + [gemm_quant.MXFP4], ids=lambda s: str(s.format))
def test_typical_weights_are_of_a_weights_size(scheme: QuantScheme) -> None:
    spread = float(typical_weight(scheme, 24, 512, draw("typical")).dense().std()) * 512**0.5
    assert 0.3 < spread < 5


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_seen_in_bf16_too_where_values_are_narrow(name: str) -> None:
    fault = mutants()[name]
    named = {c.axes["weight"] for c in gemm_quant.cases() if name in c.faults}
    cases = [c for c in gemm_quant.cases() if _is_dense(c, "bfloat16") and c.axes["weight"] in named]
    if name.startswith("block-"):
        cases = [c for c in cases if "x" in c.axes["group"]]
    assert cases
    for case in cases:
        assert judge(case, fault.make(), 3).status is Status.FAIL, case.name


def _is_dense(case: Case, dtype: str) -> bool:
    wanted = ("exact",), dtype, "3"
    return (case.lanes, case.axes["dtype"], case.axes["m"]) == wanted


def test_the_cpu_computes_every_scheme() -> None:
    """By its own product over weights that it unpacked, unless activations are quantised."""
    cpu = make_backend(BackendChoice(name="cpu", num_threads=2))
    facts = Facts.of(cpu.capabilities)
    for case in (*gemm_quant.cases(), *grouped_quant.cases()):
        if case.requires(facts) is not None or case.axes.get("m") in {"64", "65"}:
            continue
        result = judge(case, cpu, 5)
        expected = Status.PASS if case.axes["activation"] == "plain" else Status.FALLBACK
        assert result.status is expected, (case.name, result.detail)
    cpu.close()
