"""Every case of the chosen profile, on the chosen backend. See pytest_suite.py."""

from __future__ import annotations

import pytest

from octavo.conformance.case import Case
from octavo.conformance.gaps import Gap
from octavo.conformance.harness.result import Status
from octavo.conformance.harness.worker import Runner
from octavo.conformance.profiles import profile_named
from octavo.conformance.session import Settings, measured

GAPS = (Status.XFAIL, Status.WAIVED)


@pytest.mark.timeout(0)  # A case has a limit of its own, and the worker is ended when it passes it.
def test_case(case: Case, runner: Runner, gaps: dict[str, Gap], settings: Settings) -> None:
    shared = measured([runner], [case], settings, gaps=gaps)
    if not shared.results:
        pytest.skip(shared.inapplicable[case.name])
    (result,) = shared.results
    if not profile_named(settings.profile_name).accepts(result.status, result.ops):
        pytest.fail(f"{result.status}: {result.detail}\nagain: {result.rerun}", pytrace=False)
    if result.status in GAPS:
        pytest.xfail(result.detail)
