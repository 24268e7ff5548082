"""Reading a layer takes no more memory than its stored bytes and its float32 form: the loader's promise."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.quant.test_formats import AWQ, GPTQ, group_config, integers

SIDE = 4096
NAME = "m.up_proj"
SRC = Path(__file__).parents[2] / "src"

READ = """
import sys, torch
from pathlib import Path
from octavo.core.load.checkpoint import ModelSource, open_checkpoint
from octavo.core.quant.open import open_quantized

def peak_kib():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

torch.set_num_threads(1)
checkpoint, _ = open_quantized(open_checkpoint(ModelSource("m", Path(sys.argv[1]), "safetensors")), sys.argv[2] or None)
checkpoint.read("m.small.weight")  # what is loaded of torch for these ops is not counted
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = peak_kib()
weight = checkpoint.read("m.up_proj.weight")
print(peak_kib() - before)
"""


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def scales(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float16)


def awq(side: int) -> dict[str, torch.Tensor]:
    groups = side // 16
    return {"qweight": words(side, side // 8), "qzeros": words(groups, side // 8), "scales": scales(groups, side)}


def gptq(side: int) -> dict[str, torch.Tensor]:
    groups = side // 16
    return {"qweight": words(side // 8, side), "qzeros": words(groups, side // 8), "scales": scales(groups, side)}


def compressed(side: int) -> dict[str, torch.Tensor]:
    shape = torch.tensor([side, side])
    return {"weight_packed": words(side, side // 8), "weight_scale": scales(side, side // 16), "weight_shape": shape}


def plain(side: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(side, side, dtype=torch.bfloat16)}


CASES: dict[str, tuple[Callable[[int], dict[str, torch.Tensor]], dict[str, Any] | None, str]] = {
    "awq": (awq, AWQ, ""),
    "gptq": (gptq, GPTQ, ""),
    "compressed": (compressed, group_config(integers(4, True, 16), format="pack-quantized"), ""),
    "int8": (plain, None, "int8"),
    "int4": (plain, None, "int4"),
    "fp8": (plain, None, "fp8"),
}


@pytest.mark.parametrize("case", CASES)
def test_reading_a_layer(case: str, tmp_path: Path) -> None:
    make, config, quantization = CASES[case]
    large = {f"{NAME}.{suffix}": tensor for suffix, tensor in make(SIDE).items()}
    small = {f"m.small.{suffix}": tensor for suffix, tensor in make(128).items()}
    save_file(large | small, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path), quantization],
        env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grown_bytes, stored_bytes = int(done.stdout) * 1024, sum(tensor.nbytes for tensor in large.values())
    assert SIDE * SIDE <= grown_bytes <= stored_bytes + SIDE * SIDE * 4
