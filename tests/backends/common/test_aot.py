"""Ahead-of-time builds: what is listed, what is read from compiled kernels, and what counts as a fault."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.backends.common.aot.dots import Dot, widest_dot
from octavo.backends.common.aot.occupancy import Footprint, balance, programs_per_unit
from octavo.backends.common.aot.roofline import predict
from octavo.backends.cuda import chips as nvidia
from octavo.backends.cuda import read as cuda_read
from octavo.backends.rocm import chips as amd
from octavo.backends.rocm import read as rocm_read
from octavo.core.backend.workloads import Cost

TTIR = "%a = tt.dot %q, %k, %c : tensor<{rows}x64x{operand}> * tensor<64x128x{operand}> -> tensor<{rows}x128xf32>"


def test_the_product_of_most_rows_is_found() -> None:
    text = TTIR.format(rows=16, operand="bf16") + "\n" + TTIR.format(rows=64, operand="f8E4M3FN")
    assert widest_dot(text) == Dot(64, 64, 128, "f8E4M3FN")
    assert widest_dot("tt.load") is None
    assert not Dot(64, 64, 64, "f32").is_narrow


@pytest.mark.parametrize(
    ("chip", "footprint", "expected"),
    [
        (nvidia.H200, Footprint(4, 128, 0), 4),  # 65,536 registers / (128 x 128)
        (nvidia.H200, Footprint(8, 32, 100 * 1024), 2),  # 227 KiB / 100
        (nvidia.H200, Footprint(1, 16, 0), 32),  # as many programs as a unit takes
        (nvidia.H200, Footprint(4, 32, 300 * 1024), 0),
        (amd.MI300X, Footprint(4, 128, 16 * 1024), 4),  # 4 waves a SIMD, 4 SIMDs, 4 waves a program
        (amd.MI300X, Footprint(4, 256, 0), 2),
        (amd.MI300X, Footprint(4, 64, 40 * 1024), 1),  # 64 KiB of LDS
    ],
)
def test_programs_of_a_unit(chip: Any, footprint: Footprint, expected: int) -> None:
    assert programs_per_unit(chip, footprint) == expected


def test_the_last_round_may_be_thin() -> None:
    assert balance(nvidia.H200, 132) == 1
    assert balance(nvidia.H200, 133) == pytest.approx(133 / 264)
    assert balance(nvidia.H200, 0) == 0


def test_the_longer_of_memory_and_products_binds() -> None:
    chip = nvidia.H200
    memory = predict(chip, Cost(4.8e9, {"bfloat16": 1e9}), programs=132, bytes_in_flight=1e9)
    assert (memory.bound, memory.limit_us, memory.share) == ("memory", pytest.approx(1000), 1.0)
    products = predict(chip, Cost(1e6, {"bfloat16": 989e9}), programs=66, bytes_in_flight=0)
    assert (products.bound, products.limit_us, products.share) == ("bfloat16", pytest.approx(1000), 0.5)
    starved = predict(chip, Cost(4.8e9), programs=132, bytes_in_flight=chip.bandwidth_bytes_per_s * 0.4e-6)
    assert starved.share == pytest.approx(0.5)
    few = predict(chip, Cost(4.8e9), programs=16, bytes_in_flight=1e9)
    assert few.share < 0.4


def compiled(rows: int, operand: str = "bf16", ttgir: str = "") -> Any:
    return SimpleNamespace(asm={"ttir": TTIR.format(rows=rows, operand=operand), "ttgir": ttgir})


CUDA_FIT = {
    "registers": 90, "spill_bytes": 0, "shared_bytes": 1000, "warps": 4,
    "wgmma": 4, "mma": 0, "tma_copies": 0, "async_copies_16": 4, "loads_16": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "changes", "said"),
    [
        (64, {}, None),
        (16, {"wgmma": 0, "mma": 8}, None),
        (64, {"wgmma": 0, "mma": 8}, "64 rows without wgmma"),
        (16, {"wgmma": 0, "mma": 0}, "without tensor cores"),
        (64, {"spill_bytes": 8}, "8 bytes of registers spill"),
        (64, {"shared_bytes": 228 * 1024}, "shared memory; the chip has"),
        (64, {"async_copies_16": 0}, "no 16-byte loads"),
    ],
)
def test_faults_on_hopper(rows: int, changes: dict[str, float], said: str | None) -> None:
    found = cuda_read.faults(compiled(rows), CUDA_FIT | changes, nvidia.H200, wide_loads=True, may_spill=False)
    assert (not found) if said is None else (len(found) == 1 and said in found[0])


def test_full_fp32_products_need_no_tensor_cores() -> None:
    figures = CUDA_FIT | {"wgmma": 0}
    assert not cuda_read.faults(compiled(64, "f32"), figures, nvidia.H200, wide_loads=True, may_spill=False)


def test_spills_of_what_nobody_gets_unasked_are_no_fault() -> None:
    figures = CUDA_FIT | {"spill_bytes": 8}
    assert not cuda_read.faults(compiled(64), figures, nvidia.H200, wide_loads=True, may_spill=True)
    assert not rocm_read.faults(
        compiled(16), figures | {"mfma": 8, "loads_16": 4, "lds_direct": 0}, amd.MI300X, wide_loads=True, may_spill=True
    )


CDNA3_FIT = {"registers": 90, "spill_bytes": 0, "shared_bytes": 1000, "mfma": 8, "loads_16": 4, "lds_direct": 0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"mfma": 0}, "without MFMA"),
        ({"spill_bytes": 8}, "spill"),
        ({"shared_bytes": 65 * 1024}, "LDS; the chip has"),
        ({"loads_16": 0}, "no 16-byte loads"),
    ],
)
def test_faults_on_cdna3(changes: dict[str, float], said: str | None) -> None:
    found = rocm_read.faults(compiled(16), CDNA3_FIT | changes, amd.MI300X, wide_loads=True, may_spill=False)
    assert (not found) if said is None else (len(found) == 1 and said in found[0])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%x_5 = tt.load %pointers : tensor<64x128x!tt.ptr<bf16>>", None),
        ("%x_5 = amdg.buffer_load %x[%at], %mask : !tt.ptr<bf16> -> tensor<64x128xbf16>", None),
        ("%x_5 = amdg.buffer_load %scale_addresses[%at] : !tt.ptr<i64> -> tensor<2xi64>", None),
        ("%x_5 = amdg.buffer_load %scales[%at] : !tt.ptr<bf16> -> tensor<64xbf16>", "scales is read as if"),
        ("%x_5 = amdg.buffer_load_to_local %w[%at] into %lds : <bf16>[tensor<64x128xi32>]", "w is read as if"),
    ],
)
def test_experts_are_not_reached_by_distances_of_32_bits(line: str, said: str | None) -> None:
    arguments = ("x", "w", "scales", "w_addresses", "scale_addresses")
    head = f"tt.func public @grouped({', '.join(f'%{name}: !tt.ptr<bf16>' for name in arguments)}) {{"
    form = compiled(16, ttgir=f"{head}\n  {line}\n}}")
    found = rocm_read.faults(form, CDNA3_FIT, amd.MI300X, wide_loads=True, may_spill=False)
    assert (not found) if said is None else (len(found) == 1 and said in found[0])


NEAR = """
import sys, torch, triton, triton.language as tl
from octavo.backends.common.aot.compile import compile_launch
from octavo.backends.common.launch import LaunchRecord
from octavo.backends.rocm import chips, read

@triton.jit
def by_distance(w, w_addresses, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, tl.load(w + tl.load(w_addresses + tl.program_id(0)) + tl.arange(0, N)))

w, table, out = (torch.empty(512, dtype=d, device="meta") for d in (torch.float16, torch.int64, torch.float16))
form = compile_launch(LaunchRecord(by_distance, (2,), (w, table, out), {"N": 256}), chips.DEFAULT)
print(read.faults(form, read.read(form), chips.DEFAULT, wide_loads=False, may_spill=False))
"""


def test_a_kernel_that_counts_from_the_first_expert_is_found(tmp_path: Path) -> None:
    script = tmp_path / "near.py"
    script.write_text(NEAR)
    assert "w is read as if all experts lay within 2 GiB" in on_a_compiler(str(script))


BUILD = """
import json, sys
from octavo.core.backend.registry import BackendRegistry, load_builds
builds = load_builds(BackendRegistry.discover().info(sys.argv[1]))
names = [build.name for build in builds]
assert len(set(names)) == len(names), "names are not unique"
build = next(b for b in builds if b.op == "rms_norm")
result = build.build()
print(json.dumps([names, build.target, result.figures, result.faults]))
"""


def on_a_compiler(*arguments: str) -> str:
    """What a Python process prints in which kernels are compiled, not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("vendor", "target"), [("cuda", "sm_90"), ("rocm", "gfx942")])
def test_a_kernel_is_compiled_for_a_chip_that_is_not_here(vendor: str, target: str) -> None:
    names, arch, figures, faults = json.loads(on_a_compiler("-c", BUILD, vendor))
    assert arch == target
    assert not faults
    assert figures["registers"] > 0
    assert figures["loads_16"] > 0
    assert 0 < figures["expected_share"] <= 1
    ops = {name.partition(".")[0] for name in names}
    assert {"gemm", "rms_norm", "grouped_gemm"} <= ops
    assert len(names) <= 150


PAIRS = """
import json
from octavo.backends.common.aot.compile import compile_launch
from octavo.backends.rocm.builds import builds
of_pools = {b.name: b for b in builds("gfx942") if b.op in ("paged_attention", "mla_attention", "rope_write_kv")}
print(json.dumps([list(of_pools), [
    [name, b.workload.wide_loads, compile_launch(b.record, b.chip).asm["ttgir"].count("buffer_load %k")]
    for name, b in of_pools.items() if "llama8b-decode" in name and "fp8" not in name and "fixed" not in name
]]))
"""


def test_a_kv_pool_s_kernels_are_built_for_pools_of_either_size() -> None:
    """AMD's compiler reads a tensor of 2 GiB and more by other instructions: pools of a device, not of a test."""
    names, forms = json.loads(on_a_compiler("-c", PAIRS))
    large = {name for name in names if "-small-pool" not in name and "merge_splits" not in name}
    assert large
    assert {name.replace("-small-pool", "") for name in names if "-small-pool" in name} == large
    assert {("small-pool" in name, bool(buffer_loads)) for name, _, buffer_loads in forms} == {
        (True, True),
        (False, False),
    }
    assert all(is_judged for _, is_judged, _ in forms)  # both forms must load 16 bytes at a time


def test_chips_differ_where_the_kernels_ask() -> None:
    for chip in (*nvidia.BUILDABLE, *amd.BUILDABLE):
        assert all(getattr(chip, field.name) for field in dataclasses.fields(chip)), chip.name
        assert {"bfloat16", "float16", "float8", "int8", "float32"} <= chip.flops.keys()
