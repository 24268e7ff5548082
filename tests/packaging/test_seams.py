"""The one seam, and the promises that can be read off the source: checked here where ruff can't.

ruff bans the names `torch.cuda`, `pickle` and the like; this reads what it does not see: comparisons with a device's
name, and imports that would make the command line slow.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEUTRAL = [path for folder in ("core", "conformance") for path in (ROOT / folder).rglob("*.py")]
DEVICE_WORDS = {"cuda", "rocm", "hip", "xpu", "mps"}


def device_names(tree):
    """Lines of code (docstrings and comments do not count) that ask which device this is."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            if isinstance(node.value, str) and node.value.split(":")[0] in DEVICE_WORDS:
                yield node.lineno
        elif isinstance(node, ast.Attribute) and node.attr in {"is_cuda", "is_hip", "is_rocm", "is_xpu", "is_mps"}:
            yield node.lineno
        elif isinstance(node, ast.Compare):
            if re.search(r"device\.type|backend\.name|backend_name", ast.unparse(node)):
                yield node.lineno


@pytest.mark.parametrize("path", NEUTRAL, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_outside_backends_names_a_device(path):
    assert list(device_names(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "code", ["x.is_cuda", "x.to('cuda:0')", "device.type == 'cpu'", "if engine.backend.name in ('a', 'b'): pass"]
)
def test_the_check_sees_what_it_is_for(code):
    assert list(device_names(ast.parse(code))) == [1]


def test_importing_octavo_loads_nothing_heavy():
    code = (
        "import sys, octavo, octavo.core.base.config, octavo.core.base.params\n"
        "sys.exit(bool({'torch', 'numpy', 'transformers', 'yaml', 'pluggy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, check=False)
    assert result.returncode == 0
