"""The example packages, built as wheels and used from an environment of their own, as a vendor's customers use them.

octavo-acme     found → a model runs and is served on it → conformance
octavo-tracer   found → a model runs on whole traced steps of fixed shapes
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import tiny_models
from tests.packaging.isolated import ROOT, Environment

EXAMPLES = ROOT / "examples"
NIGHTLY = os.environ.get("OCTAVO_NIGHTLY") == "1"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Both examples, installed from wheels."""
    root = tmp_path_factory.mktemp("examples")
    environment = Environment(root)
    for name in ("octavo-acme", "octavo-tracer"):
        shutil.copytree(EXAMPLES / name, root / name, ignore=shutil.ignore_patterns("build", "*.egg-info"))
        environment.checked(f"pip wheel -q --no-build-isolation -w {root}/wheels {root}/{name}")
    environment.checked(f"pip install -q {root}/wheels/*.whl")
    return environment


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama, without a tokenizer."""
    return tiny_models.save(tiny_models.make_llama(), tmp_path_factory.mktemp("model"))


def generated(environment: Environment, model: Path, backend: str, *options: str) -> list[list[int]]:
    """Greedy tokens of two prompts, from a process of the environment."""
    code = (
        "import json, octavo, sys\n"
        "options = dict(word.split('=') for word in sys.argv[3:])\n"
        "chosen = {'backend': sys.argv[2], 'backend_options': options}\n"
        "with octavo.LLM(sys.argv[1], **chosen, progress=False, num_kv_blocks=64) as llm:\n"
        "    params = octavo.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)\n"
        "    replies = llm.generate([[1, 2, 3], list(range(40))], params)\n"
        "print('tokens', json.dumps([list(reply.outputs[0].token_ids) for reply in replies]))\n"
    )
    (environment.folder / "generate.py").write_text(code)
    printed = environment.checked(f"python generate.py {model} {backend} {' '.join(options)}")
    (line,) = [line for line in printed.splitlines() if line.startswith("tokens ")]
    tokens: list[list[int]] = json.loads(line.removeprefix("tokens "))
    return tokens


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """What Hugging Face's model says to the same prompts."""
    reference = tiny_models.make_llama()
    return [tiny_models.greedy(reference, prompt, 6) for prompt in ([1, 2, 3], list(range(40)))]


def test_they_are_found(environment: Environment) -> None:
    printed = environment.checked("octavo backends")
    assert "one simulated accelerator  [octavo-acme]" in printed
    assert "whole steps, traced at fixed shapes  [octavo-tracer]" in printed
    assert printed.count("<- auto") == 1
    assert "<- auto" in next(line for line in printed.splitlines() if line.startswith("cpu "))


def test_a_model_runs_on_acme(environment: Environment, model: Path, wanted: list[list[int]]) -> None:
    """Every kernel starts late: nobody reads before the device has written."""
    assert generated(environment, model, "acme", "latency_ms=1") == wanted


def test_acmes_own_norm_is_no_gap(environment: Environment, model: Path) -> None:
    """The layer that acme replaces never calls the core's op, so nothing is said of it, in strict mode either."""
    command = f"octavo backends --ops {model} --backend acme --num-kv-blocks 64"
    printed = environment.checked(command)
    assert "paged_attention" in printed
    assert "embed runs on the reference" in printed
    assert "rms_norm" not in printed
    strict = environment.run(f"{command} --strict-backend")
    assert strict.returncode != 0
    assert "--strict-backend: backend acme of package octavo-acme has no kernel of its own for" in strict.stdout
    assert "act_mul" in strict.stdout
    assert "rms_norm" not in strict.stdout


def test_a_model_runs_in_traced_steps(environment: Environment, model: Path, wanted: list[list[int]]) -> None:
    assert generated(environment, model, "tracer") == wanted


@pytest.fixture
def server(environment: Environment, model: Path) -> Iterator[str]:
    """`octavo serve --backend acme`, as the address that it prints."""
    process = environment.start(
        "octavo", "serve", str(model), "--backend", "acme", "--port", "0", "--num-kv-blocks", "64"
    )
    try:
        deadline = time.monotonic() + 120
        assert process.stdout is not None
        for line in process.stdout:
            if "http://" in line:
                yield "http://" + line.split("http://")[1].split()[0].rstrip("/,;.")
                break
            assert time.monotonic() < deadline
        else:
            raise AssertionError("the server ended")
    finally:
        process.terminate()
        process.wait(30)


def test_it_is_served(server: str, wanted: list[list[int]]) -> None:
    import httpx

    body = {"model": "x", "prompt": [1, 2, 3], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    body["model"] = httpx.get(f"{server}/v1/models").json()["data"][0]["id"]
    reply = httpx.post(f"{server}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == len(wanted[0])


@pytest.mark.timeout(1800)
def test_acme_earns_core(environment: Environment) -> None:
    """All of it, by its README's command: 979 cases in 105 s on two idle cores, 610 s beside ten busy processes."""
    command = "octavo conform --backend acme --profile core --timeout 600 --json acme.json"
    done = environment.run(command, timeout_s=1800)
    assert done.returncode == 0, done.stdout
    assert done.stdout.rstrip().endswith("profile core: met")
    report = json.loads((environment.folder / "acme.json").read_text())
    assert (report["run"]["profile"], report["run"]["plug_in"]["distribution"]) == ("core", "octavo-acme")
    cases = report["cases"]
    assert {case["status"] for case in cases} == {"pass", "fallback"}
    assert {case["status"] for case in cases if case["op"] in ("gemm", "paged_attention")} == {"pass"}


@pytest.mark.skipif(not NIGHTLY, reason="minutes; `make nightly`")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["acme --backend-option latency_ms=2", "tracer"])
def test_core_again_with_late_kernels_and_on_the_tracer(environment: Environment, backend: str) -> None:
    environment.checked(f"octavo conform --backend {backend} --profile core --timeout 600", timeout_s=3600)


def test_a_device_that_does_not_wait_is_found_out(environment: Environment) -> None:
    """Acme with a to_host that forgets the queue: with late kernels its numbers are not there yet."""
    code = (
        "import sys\n"
        "from octavo_acme.device import AcmeBackend\n"
        "from octavo.core.cli.main import main\n"
        "AcmeBackend.to_host = lambda self, x: x.raw.clone()\n"
        "AcmeBackend.synchronize = lambda self: None\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    (environment.folder / "forgets.py").write_text(code)
    case = "gemm.exact/float32-m17-n48-k100"
    command = f"conform --backend acme --in-process --backend-option latency_ms=20 --only {case}"
    done = environment.run(f"python forgets.py {command}")
    assert done.returncode != 0, done.stdout
    environment.checked(f"octavo {command}")


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_they_use_the_public_surface_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert {name for name in names if name.split(".")[0] == "octavo"} <= {"octavo.core.backend"}


@pytest.mark.parametrize(("name", "limit"), [("octavo-acme", 400), ("octavo-tracer", 200)])
def test_they_stay_small(name: str, limit: int) -> None:
    files = [path for suffix in ("py", "toml") for path in (EXAMPLES / name).rglob(f"*.{suffix}")]
    assert sum(len(path.read_text().splitlines()) for path in files if "build" not in path.parts) <= limit
