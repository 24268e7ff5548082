"""The profiles above the ops: tiny models' logits through the backend, greedy tokens through the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.conformance.harness.host import HostBackend, NoOps
from octavo.conformance.harness.result import Status
from octavo.conformance.harness.worker import BackendChoice
from octavo.conformance.levels.engine import Reply, compared
from octavo.conformance.mutants.gate import mutants
from octavo.conformance.session import Settings, conform
from octavo.core.backend import BackendRegistry, DeviceBackend
from octavo.core.cli.main import main

FAULTS = (
    "last-token-dropped",
    "gqa-not-power-of-two",
    "gemm-residual-dropped",
    "gemm-k-not-multiple-32",
    "window-off-by-one",
)


@pytest.mark.parametrize("level", ["model", "engine"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_cpu_backend_passes(level: str, seed: int) -> None:
    report = conform(Settings(backend="cpu", profile=level, seed=seed))
    assert report.verdict.reasons == []
    assert report.verdict.is_met
    assert report.verdict.is_claim
    assert {entry.op for entry in report.cases} == {level}
    assert {entry.parameters["family"] for entry in report.cases} == {"llama", "gemma3"}


def test_the_report_and_the_exit_code_are_those_of_any_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / name) for name in ("report.json", "report.html")]
    code = main(
        ["conform", "--backend", "cpu", "--profile", "model", "--seed", "7", "--json", files[0], "--html", files[1]]
    )
    assert code == 0
    assert capsys.readouterr().out.splitlines()[-1] == "profile model: met"
    report = json.loads(Path(files[0]).read_text())
    first = report["cases"][0]
    assert first["rerun"] == f"octavo conform --backend cpu --seed 7 --profile model --only {first['id']}"
    assert all(0 <= entry["share"] <= 1 for entry in report["cases"])
    assert first["id"] in Path(files[1]).read_text()
    assert main(first["rerun"].split()[1:]) == 0


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the model level on a given backend."""

    def run(backend: DeviceBackend, only: str) -> Any:
        def make(_: BackendChoice) -> DeviceBackend:
            return backend

        monkeypatch.setattr("octavo.conformance.session.make_backend", make)
        return conform(Settings(backend="reference", profile="model", seed=3, only=only))

    return run


@pytest.mark.parametrize("seed", range(3))
def test_the_reference_passes_in_every_dtype(seed: int) -> None:
    report = conform(Settings(backend="reference", profile="model", seed=seed))
    assert {entry.parameters["weight"] for entry in report.cases} == {"float32", "bfloat16", "float16"}
    assert report.verdict.reasons == []


def test_a_backend_without_kernels_is_right_and_does_not_meet_the_profile(on: Callable[..., Any]) -> None:
    report = on(HostBackend(NoOps()), only="model.llama/float32")
    assert {entry.status for entry in report.cases} == {Status.FALLBACK}
    assert not report.verdict.is_met


def test_a_device_of_fixed_shapes_passes(on: Callable[..., Any]) -> None:
    report = on(HostBackend(dynamic_shapes=False, token_buckets=(1, 8, 64)), only="model.gemma3/float32")
    assert report.verdict.reasons == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_backend_fails(on: Callable[..., Any], fault: str, dtype: str) -> None:
    family = "gemma3" if "window" in fault else "llama"
    report = on(mutants()[fault].make(), only=f"model.{family}/{dtype}-t200")
    assert {entry.status for entry in report.cases} == {Status.FAIL}, report.cases
    assert not report.verdict.is_met


def test_a_backend_that_raises_costs_its_own_checks(on: Callable[..., Any]) -> None:
    class Raising:
        def __getattr__(self, name: str) -> Any:
            return getattr(honest, name)

        def rope_write_kv(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no such kernel")

    honest = HostBackend().ops
    report = on(HostBackend(Raising()), only="model.llama/float32-t17")
    assert [entry.detail for entry in report.cases] == ["RuntimeError: no such kernel"] * 2


def reply(*token_ids: int, second: float = 0.5) -> Reply:
    """Tokens of one choice; at every position token 9 is the runner-up, `second` below the best."""
    return Reply(list(token_ids), [{token_id: 0.0, 9: second} for token_id in token_ids])


@pytest.mark.parametrize(
    ("found", "allowance", "share"),
    [
        (reply(1, 2, 3), 0.0, 0.0),
        (reply(1, 9, 3), 0.0, float("inf")),  # batch invariant: never another token
        (reply(1, 9, 7), 1.0, 0.5),  # a near tie; what follows it is another reply
        (reply(1, 9, 3), 0.25, 2.0),  # no tie
        (reply(1, 8, 3), 1.0, float("inf")),  # a token that was not near the best
        (reply(1, 2), 1.0, float("inf")),  # a token too few
    ],
)
def test_tokens_are_compared_up_to_a_near_tie(found: Reply, allowance: float, share: float) -> None:
    measured = compared({("5", 0): reply(1, 2, 3)}, {("5", 1): found}, allowance, [])
    assert measured.share == share
    assert measured.compared == (3 if share == 0 else 2 if found.token_ids == [1, 2] else 1)


@pytest.fixture
def engine_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[DeviceBackend], dict[str, Status]]:
    """Runs the engine level of the llama on a given backend, which goes by the name of cpu: how each check ended."""

    def run(backend: DeviceBackend) -> dict[str, Status]:
        def create(*_: Any, **__: Any) -> DeviceBackend:
            return backend

        monkeypatch.setattr(BackendRegistry, "create", create)
        report = conform(Settings(backend="cpu", profile="engine", seed=5, only="engine.llama/"))
        return {entry.parameters["how"]: entry.status for entry in report.cases}

    return run


def test_an_engine_on_a_backend_that_is_not_batch_invariant(engine_on: Callable[..., Any]) -> None:
    assert set(engine_on(HostBackend()).values()) == {Status.PASS}


@pytest.mark.parametrize(
    ("fault", "shows_in"),
    [("causal-top-left", "chunks"), ("causal-top-left", "cache"), ("last-token-dropped", "chunks")],
)
def test_an_engine_on_a_broken_backend_fails(engine_on: Callable[..., Any], fault: str, shows_in: str) -> None:
    assert engine_on(mutants()[fault].make())[shows_in] is Status.FAIL


def test_copies_that_go_nowhere_show_in_requests_of_four_choices(engine_on: Callable[..., Any]) -> None:
    def nothing(*_: Any, **__: Any) -> None:
        return

    ops = HostBackend().ops
    ops.copy_blocks = nothing  # type: ignore[method-assign]
    ended = engine_on(HostBackend(ops))
    assert ended["choices"] is Status.FAIL
    assert ended["batch"] is Status.PASS


def test_profiles_of_ops_import_nothing_of_the_engine() -> None:
    code = """
import sys
from octavo.core.cli.main import main
assert main(["conform", "--backend", "reference", "--in-process", "--profile", "tiny", "--only", "rms_norm"]) == 0
assert main(["conform", "list", "--profile", "full"]) == 0
above = ("octavo.core.engine", "octavo.core.models", "octavo.core.serve", "octavo.conformance.levels")
print([name for name in sys.modules if name.startswith(above)], file=sys.stderr)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_what_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "--backend", "cpu", "--profile", "model", "--only", "model.opt/"]) == 2
    assert "no check of profile model fits model.opt/" in capsys.readouterr().err
    assert main(["conform", "list", "--profile", "engine"]) == 2
    assert "octavo conform --profile engine" in capsys.readouterr().err
