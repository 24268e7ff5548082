"""The committed summary of an interpreted run: small, and whole where something is wrong."""

from __future__ import annotations

import json
from typing import Any

from tests.interpret import SLOWEST, summary


def case(number: int, **changes: Any) -> dict[str, Any]:
    return {"id": f"gemm/{number}", "op": "gemm", "status": "pass", "implementation": "own", "detail": "", "share": 0.1,
            "rms": None, "gain": None, "seconds": float(number)} | changes  # fmt: skip


def report(*cases: dict[str, Any]) -> dict[str, Any]:
    run = {"profile": "tiny", "backend": "cuda", "device": {"name": "x"}, "plug_in": {"git": "abc", "dirty": False},
           "software": {"torch": "2", "triton": "3"}, "started": "now", "seed": 1, "seconds": 9.0,
           "must_pass": {"tiny": "f00"}}  # fmt: skip
    return {"run": run, "verdict": {"is_met": False}, "cases": list(cases), "not_applicable": {"a": "b"}}


def test_faults_and_what_is_not_the_backends_own_are_named() -> None:
    bad = case(1, status="fail", detail="2 of its bound", share=2.0)
    other = case(2, op="sample", status="fallback", implementation="fallback", detail="cuda has no sample")
    found = summary(report(bad, other, case(3)))
    assert found["faults"] == {"gemm/1": "fail: 2 of its bound"}
    assert found["not_own"] == ["sample: cuda has no sample"]
    assert found["ops"]["gemm"] == {
        "cases": 2, "status": {"fail": 1, "pass": 1}, "worst": 2.0, "worst_case": "gemm/1", "seconds": 4.0,
    }  # fmt: skip
    assert (found["met"], found["must_pass"], found["not_applicable"]) == (False, "f00", 1)


def test_two_thousand_cases_stay_a_page() -> None:
    found = summary(report(*(case(number) for number in range(2000))))
    assert len(json.dumps(found, indent=1)) < 5000
    assert next(iter(found["slowest_s"])) == "gemm/1999"
    assert len(found["slowest_s"]) == SLOWEST
