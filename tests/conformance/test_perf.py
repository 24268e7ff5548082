"""Profile `perf`: shares of limits that were measured in the same run, and what vouches for them."""

from __future__ import annotations

import msgspec
import pytest

from octavo.conformance import perf
from octavo.conformance.harness.host import HostBackend, NoOps
from octavo.conformance.harness.result import Status
from octavo.conformance.perf import Limits
from octavo.conformance.report.json import Report
from octavo.conformance.session import Settings, conform
from octavo.core.backend.workloads import Cost
from octavo.core.base.errors import ConfigError


def test_the_limit_that_binds_sets_the_least_time() -> None:
    limits = Limits(1e9, {"bfloat16": 1e12})
    assert limits.seconds(Cost(2e9, {"bfloat16": 1e12})) == 2
    assert limits.seconds(Cost(1e9, {"bfloat16": 3e12})) == 3
    assert limits.seconds(Cost(1e9, {"int8": 1})) is None


def test_a_workload_is_timed_against_the_devices_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf, "measured_limits", lambda _: Limits(1e9, {"float32": 1e10}))
    (result,), _ = perf.time_all(HostBackend(), "perf.act_mul/silu-m64")
    assert result.status is Status.PASS
    figures = result.figures
    moved = 64 * 3 * 14336 * 4
    assert figures["gigabytes_per_s"] == pytest.approx(moved / figures["us"] * 1e-3, rel=0.05, abs=0.1)
    assert figures["share_of_limit"] == pytest.approx(moved / 1e9 / (figures["us"] * 1e-6), rel=0.02)


def test_a_fallback_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf, "measured_limits", lambda _: Limits(1e9, {"float32": 1e10}))
    (result,), _ = perf.time_all(HostBackend(NoOps()), "perf.act_mul/silu-m64")
    assert (result.status, result.implementation, result.figures) == (Status.FALLBACK, "fallback", {})


def test_an_unknown_selection_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no workload fits perf\.gemm/none"):
        perf.time_all(HostBackend(), "perf.gemm/none")


@pytest.fixture(scope="module")
def core() -> Report:
    """A core report, whole but for its cases."""
    run = conform(Settings(backend="reference", profile="core", only="gemm.exact/float32-m1", in_process=True, seed=1))
    judged = msgspec.structs.replace(run.verdict, is_met=True, is_claim=True)
    clean = msgspec.structs.replace(run.run, plug_in=msgspec.structs.replace(run.run.plug_in, dirty=False))
    return msgspec.structs.replace(run, verdict=judged, run=clean)


def test_only_a_core_pass_of_the_same_plug_in_and_device_vouches(core: Report) -> None:
    run = core.run
    assert perf.fault_of(core, run) == ""
    assert "no core report" in perf.fault_of(None, run)
    failed = msgspec.structs.replace(core, verdict=msgspec.structs.replace(core.verdict, is_met=False))
    assert "no pass of the whole profile core" in perf.fault_of(failed, run)
    plug_in = msgspec.structs.replace(run.plug_in, git="another")
    assert "another plug-in or commit" in perf.fault_of(core, msgspec.structs.replace(run, plug_in=plug_in))
    device = msgspec.structs.replace(run.device, name="another")
    assert "another device" in perf.fault_of(core, msgspec.structs.replace(run, device=device))


def test_a_budget_that_is_spent_times_nothing_and_names_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf, "measured_limits", lambda _: Limits(1e9, {"float32": 1e10}))
    results, not_run = perf.time_all(HostBackend(), "act_mul", budget_s=0.0)
    assert results == []
    assert "perf.act_mul/silu-m64" in not_run
