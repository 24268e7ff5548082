"""The parts of `make gpu-check` that decide: rules for tokens, time of steps, and what becomes of one that fails."""

from __future__ import annotations

import json
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import check, models, summary, tokens

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check, "FOLDER", tmp_path)
    return tmp_path


def test_all_steps_together_take_eight_minutes_at_the_most() -> None:
    steps = check.steps("cuda", "8", small=False)
    assert [step.name for step in steps] == ["facts", "compile", "conform", "perf", "tokens", "throughput"]
    # Grace is conform's and perf's: their budgets begin once the backend is there, and cases under way may end.
    assert sum(step.budget_s for step in steps) + len(steps) * check.GRACE_S <= 480


def step(code: str, budget_s: float = 30.0) -> dict[str, Any]:
    return check.run(check.Step("facts", ["-c", code], budget_s), ENVIRONMENT)


def test_a_step_that_hangs_is_ended_and_one_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "GRACE_S", 0.2)
    began = time.monotonic()
    late = step("import time; print('at work', flush=True); time.sleep(600)", budget_s=1.0)
    assert time.monotonic() - began < 20
    assert (late["status"], late["said"]) == ("failed", "no end after 1 s: at work")
    failed = step("raise SystemExit('no such device')")
    assert (failed["status"], failed["said"]) == ("failed", "exit code 1: no such device")
    killed = step("import os; os.kill(os.getpid(), 11)")
    assert killed["said"].startswith("signal 11")


def test_a_step_without_a_report_is_not_ok() -> None:
    assert step("pass")["status"] == "failed"


def test_wheels_that_fit_are_put_on_the_path(folder: Path) -> None:
    wheels = folder / "wheels"
    wheels.mkdir()
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    for name, python in (("absent_one", tag), ("absent_two", "cp27"), ("json", tag)):
        with zipfile.ZipFile(wheels / f"{name}-1.0-{python}-{python}-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "")
    (path,) = check.unpacked(wheels, folder / "site")
    assert [file.name for file in Path(path).iterdir()] == ["absent_one.py"]
    assert check.unpacked(folder / "nothing", folder / "site") == []


def scored(*best: int, gap: float = 1.0, noise: float = 0.0) -> list[dict[int, float]]:
    """Positions with their likeliest token, which leads by the gap."""
    return [{t: -2.0 * t + (gap - 2.0 * (0 - t) if t == b else 0) + noise * (-1) ** t for t in range(8)} for b in best]


def test_equal_choices_pass_and_another_choice_beyond_the_error_fails() -> None:
    want = scored(1, 2, 3, 4)
    near = [{token: value + 0.001 * (token % 2) for token, value in at.items()} for at in want]
    assert tokens.judged(want, near)["faults"] == []
    other = [dict(at) for at in want]
    other[0][1], other[0][0] = other[0][0], other[0][1]
    assert "1 of" in tokens.judged(want * 50, near * 49 + [other[0], *near[1:]])["faults"][0]


def test_an_error_that_decides_nothing_is_a_fault() -> None:
    want = scored(1, 2, 3, 4, gap=0.01)
    off = [{token: value + 0.3 * (-1) ** token for token, value in at.items()} for at in want]
    said = " ".join(tokens.judged(want, off)["faults"])
    assert "logits are off" in said or "only 0 of 4" in said
    assert tokens.judged(want, [dict.fromkeys(at, float("nan")) for at in want])["faults"]


def test_where_replies_part() -> None:
    assert tokens.parting([1, 2, 3], [1, 2, 3]) is None
    assert tokens.parting([1, 2, 3], [1, 5, 3]) == 1


def test_a_model_made_on_the_spot_is_the_same_each_time(tmp_path: Path) -> None:
    import torch

    config = models.gemma3(**tokens.SMALL, sliding_window=8)
    files = [models.make(tmp_path / name, config, torch.bfloat16) / "model.safetensors" for name in ("a", "b")]
    assert files[0].read_bytes() == files[1].read_bytes()


CASE = {"id": "gemm/x", "op": "gemm", "status": "fail", "detail": "wrong", "rerun": "again", "share": "inf",
        "rms": None, "gain": 0.5, "seconds": 1.0, "figures": {}}  # fmt: skip


def conform_report(*, met: bool, not_run: list[str], reasons: list[str]) -> dict[str, Any]:
    run = {"device": {}, "software": {}, "seed": 1, "seconds": 2.0}
    verdict = {"is_met": met, "reasons": reasons}
    return {"run": run, "verdict": verdict, "cases": [CASE], "not_run": not_run}


def test_cut_short_is_told_from_failed() -> None:
    late = "1 cases were not run: the budget of 5 s was spent"
    assert summary.is_cut_only(conform_report(met=False, not_run=["b"], reasons=[late]))
    assert not summary.is_cut_only(conform_report(met=False, not_run=["b"], reasons=["a: fail", late]))
    assert not summary.is_cut_only({"faults": ["x"]})


def test_the_table_shows_every_step_and_its_faults() -> None:
    result = summary.shortened("conform", conform_report(met=False, not_run=["b"], reasons=["gemm/x: fail"]))
    rows = {
        "conform": {"status": "failed", "seconds": 3.0, "said": "", "result": result},
        "tokens": {"status": "failed", "seconds": 1.0, "said": "signal 11: gone", "result": None},
    }
    found = {"backend": "cuda", "started": "now", "seconds": 4.0, "steps": rows}
    lines = summary.table(found).splitlines()
    assert lines[2] == "conform  failed   3  1 fail; 1 not run; NOT met"
    assert lines[3] == "tokens   failed   1  signal 11: gone"
    assert lines[4] == "  conform: gemm/x: fail: wrong"
    assert json.loads(json.dumps(found))["steps"]["conform"]["result"]["ops"]["gemm"]["worst"] == "inf"
