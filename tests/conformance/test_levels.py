"""The profiles above the ops: tiny models' logits through the backend, greedy tokens through the engine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from octavo.conformance import suite
from octavo.conformance.gaps import parse_gaps
from octavo.conformance.harness.host import HostBackend, NoOps
from octavo.conformance.harness.result import Status
from octavo.conformance.harness.worker import BackendChoice
from octavo.conformance.levels.engine import NO_TOKEN, compared
from octavo.conformance.levels.tiny import CONFIGS
from octavo.conformance.mutants.gate import mutants
from octavo.conformance.session import Settings, conform, known_cases
from octavo.conformance.verify import verify
from octavo.core.backend import BackendRegistry, DeviceBackend
from octavo.core.base.errors import ConfigError
from octavo.core.cli.main import main
from octavo.core.models import registry

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
    assert report.run.isolated
    assert {entry.op for entry in report.cases} == {level}
    assert {entry.parameters["family"] for entry in report.cases} == set(CONFIGS)


def test_each_tiny_model_is_of_a_family_and_both_levels_run_them_all() -> None:
    """Families are compared with Hugging Face in tests/models; here a few stand for the ops that a backend runs."""
    covered = [name for config in CONFIGS.values() for name in config["architectures"]]
    assert set(covered) <= set(registry.FAMILIES)
    for level, modules in suite.LEVEL_FAMILIES.items():
        families = {case.axes["family"] for case in suite.families((modules,)).values()}
        assert families == set(CONFIGS), level


def test_the_report_and_the_exit_code_are_those_of_any_profile(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / name) for name in ("report.json", "report.html")]
    code = main(
        ["conform", "--backend", "cpu", "--profile", "model", "--seed", "7", "--json", files[0], "--html", files[1]]
    )
    assert code == 0
    assert capfd.readouterr().out.splitlines()[-1] == "profile model: met"
    report = json.loads(Path(files[0]).read_text())
    first = report["cases"][0]
    assert first["rerun"] == f"octavo conform --backend cpu --seed 7 --only {first['id']}"
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
        return conform(Settings(backend="reference", profile="model", seed=3, only=only, in_process=True))

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


VOCABULARY = 10


def tokens(*ids: int) -> torch.Tensor:
    """Those of one reply, [T]; what is missing of three is no token."""
    return torch.tensor([*ids, *[NO_TOKEN] * (3 - len(ids))])


@pytest.mark.parametrize(
    ("found", "allowance", "share", "count"),
    [
        (tokens(1, 2, 3), 0.0, 0.0, 3),
        (tokens(1, 9, 3), 0.0, math.inf, 1),  # batch invariant: never another token
        (tokens(1, 9, 7), 1.0, 0.5, 1),  # a near tie; what follows it is another reply
        (tokens(1, 9, 3), 0.25, 2.0, 1),  # no tie
        (tokens(1, 8, 3), 1.0, math.inf, 1),  # a token that was not near the best
        (tokens(1, 99, 3), 1.0, math.inf, 1),  # no token of the vocabulary
        (tokens(1, 2), 1.0, math.inf, 2),  # a token too few
    ],
)
def test_tokens_are_compared_up_to_a_near_tie(found: torch.Tensor, allowance: float, share: float, count: int) -> None:
    alone, behind = tokens(1, 2, 3), torch.full((1, 3, VOCABULARY), torch.inf)
    behind[..., 9] = 0.5  # Everywhere the runner-up.
    finding = compared(found.view(1, 1, 3), alone.view(1, 3), behind, allowance)
    assert (finding.share, finding.compared) == (share, count)
    assert finding.index == (() if share == 0 else (0, 0, count))


def test_replies_without_a_token_are_not_equal() -> None:
    finding = compared(tokens().view(1, 1, 3), tokens().view(1, 3), torch.zeros(1, 3, VOCABULARY), 1.0)
    assert not finding.ok


def test_a_report_is_verified_and_what_was_touched_is_found() -> None:
    report = conform(
        Settings(backend="reference", profile="model", seed=5, only="model.llama/float32", in_process=True)
    )
    assert verify(report, 1.0, in_process=True).holds
    cases = [msgspec.structs.replace(report.cases[0], share=0.9), *report.cases[1:]]
    outcome = verify(msgspec.structs.replace(report, cases=cases), 1.0, in_process=True)
    assert [line.partition(":")[0] for line in outcome.differences] == [report.cases[0].id]


def test_a_case_may_take_its_time_and_no_more() -> None:
    report = conform(Settings(backend="cpu", only="model.llama/float32-t1", seed=5, timeout_s=1e-6))
    assert {entry.status for entry in report.cases} == {Status.TIMEOUT}
    assert not report.verdict.is_met


GAPS = """
[[gap]]
op = "engine"
kind = "notyet"
reason = "no copies"

[[gap]]
case = "model.llama/float32-t1-whole"
kind = "never"
reason = "no llamas"
"""


def test_gaps_reach_the_levels_when_they_are_run() -> None:
    assert parse_gaps(GAPS, known_cases("core")) == {}
    assert set(parse_gaps(GAPS, known_cases("model"))) == {"model.llama/float32-t1-whole"}
    assert len(parse_gaps(GAPS, known_cases("engine"))) == len(suite.select("engine"))
    with pytest.raises(ConfigError, match=r"case 'model.llama/nonesuch' is none of the suite"):
        parse_gaps('[[gap]]\ncase = "model.llama/nonesuch"\nkind = "never"\nreason = "r"', known_cases("model"))


def test_a_declared_gap_spoils_a_level_as_it_does_core(monkeypatch: pytest.MonkeyPatch) -> None:
    def gaps(_: Any, cases: Any) -> Any:
        return parse_gaps('[[gap]]\nop = "model"\nkind = "notyet"\nreason = "slow"', cases)

    monkeypatch.setattr("octavo.conformance.session.load_gaps", gaps)
    report = conform(Settings(backend="reference", only="model.llama/float32-t1-", seed=5, in_process=True))
    assert [entry.status for entry in report.cases] == [Status.XPASS]
    assert not report.verdict.is_met


def test_an_engine_has_no_backend_of_the_suite_s_own() -> None:
    with pytest.raises(ConfigError, match="knows none named reference; run profile model"):
        conform(Settings(backend="reference", profile="engine", in_process=True))


@pytest.fixture
def engine_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[DeviceBackend], dict[str, Status]]:
    """Runs the engine level of the llama on a given backend, which goes by the name of cpu: how each check ended."""

    def run(backend: Any) -> dict[str, Status]:
        backend.name = "cpu"

        def create(*_: Any, **__: Any) -> DeviceBackend:
            return backend

        monkeypatch.setattr(BackendRegistry, "create", create)
        report = conform(Settings(backend="cpu", profile="engine", seed=5, only="engine.llama/", in_process=True))
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


def test_levels_are_listed_and_narrowed_as_profiles_of_ops_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "list", "--only", "engine.llama/"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[0] == "engine.llama/batch  engine  exact  engine"
    assert main(["conform", "--backend", "cpu", "--profile", "model", "--only", "model.lama/"]) == 2
    assert "no case of profile model fits name model.lama/; did you mean 'model.llama/'?" in capsys.readouterr().err
    assert main(["conform", "--backend", "cpu", "--profile", "core", "--only", "engine"]) == 2
    assert "it is of the profile engine" in capsys.readouterr().err
