"""`octavo tune`: what was found is in a file at once, whole, whatever ends the search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.core.backend import registry
from octavo.core.base.errors import ConfigError
from octavo.core.cli.main import main


def search_of(monkeypatch: pytest.MonkeyPatch, tune: Any) -> None:
    monkeypatch.setattr(registry, "load_tune", lambda info: tune)


def test_a_search_that_is_interrupted_leaves_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tune(open_device: Any, *, write: Any, **_: Any) -> None:
        write("gemm.toml", "first")
        assert (tmp_path / "gemm.toml").read_text() == "first"
        write("gemm.toml", "second")
        raise KeyboardInterrupt

    search_of(monkeypatch, tune)
    assert main(["tune", "--backend", "cpu", "--out", str(tmp_path)]) != 0
    assert [path.name for path in tmp_path.iterdir()] == ["gemm.toml"]
    assert (tmp_path / "gemm.toml").read_text() == "second"


def test_the_device_is_made_by_whoever_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tune(open_device: Any, *, only: str, **_: Any) -> None:
        assert only == "gemm"
        with pytest.raises(ConfigError, match="backend cpu takes no options; remove streams"):
            open_device()

    search_of(monkeypatch, tune)
    asked = ["tune", "--backend", "cpu", "--only", "gemm", "--backend-option", "streams=2", "--out", str(tmp_path)]
    assert main(asked) == 0
    assert "nothing faster was found; no file is written" in capsys.readouterr().out
