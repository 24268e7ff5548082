"""`octavo backends`: the list with every reason, and what ran each op of a model."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from octavo.core.backend.registry import Available, BackendInfo, BackendRegistry, Refusal
from octavo.core.cli.main import main
from tests.fakes.scripted_llm import scripted_llm


@dataclass(frozen=True)
class Spec:
    """Shaped like an op's spec: axes, some unset, and another spec inside."""

    width: int
    causal: bool = False
    gate: str | None = None
    weight: "Spec | None" = None


ANSWERS = {
    "fast": Refusal("no such device", "plug one in"),
    "slow": Available("2 cores"),
    "slower": Available("1 core"),
}


@pytest.fixture
def three_backends(monkeypatch):
    registry = BackendRegistry()
    for priority, name in enumerate(reversed(ANSWERS)):
        registry.add(
            BackendInfo(
                name=name, api_version=1, distribution=f"pkg-{name}", probe="a:b", factory="a:c", priority=priority
            )
        )
    monkeypatch.setattr(registry, "probe", ANSWERS.__getitem__)
    monkeypatch.setattr(BackendRegistry, "discover", lambda: registry)


def test_each_backend_is_listed_with_its_answer(three_backends, capsys):
    assert main(["backends"]) == 0
    fast, slow, slower = capsys.readouterr().out.splitlines()
    assert "refused" in fast
    assert "no such device; plug one in" in fast
    assert "pkg-fast" in fast
    assert "available" in slow
    assert "2 cores" in slow
    assert "<- auto" in slow
    assert "available" in slower
    assert "<- auto" not in slower


def test_an_emulated_backend_is_called_so_and_auto_passes_it_by(three_backends, monkeypatch, capsys):
    monkeypatch.setitem(ANSWERS, "fast", Available("a chip, emulated", is_emulated=True))
    assert main(["backends"]) == 0
    fast, slow, _ = capsys.readouterr().out.splitlines()
    assert fast.split() == ["fast", "emulated", "a", "chip,", "emulated", "[pkg-fast]"]
    assert "<- auto" in slow


def test_engine_flags_need_a_model(three_backends, capsys):
    assert main(["backends", "--dtype", "float32"]) == 2
    assert "--dtype needs --ops MODEL" in capsys.readouterr().err


def test_ops_of_a_model(monkeypatch, capsys):
    choices = [
        SimpleNamespace(op="gemm", implementation="own", spec=Spec(64, weight=Spec(8)), reason="", calls=0),
        SimpleNamespace(
            op="embed", implementation="fallback", spec=Spec(576, causal=True), reason="it has no embed", calls=5
        ),
    ]

    llm = scripted_llm(monkeypatch)
    llm.op_choices = lambda self: choices
    assert main(["backends", "--ops", "tiny"]) == 0
    assert llm.made[0].fields["model"] == "tiny"
    own, fallback = capsys.readouterr().out.splitlines()
    assert own.split() == ["gemm", "own", "width=64", "width=8"]
    assert "width=576 causal" in fallback
    assert "(it has no embed)" in fallback
    assert "5 calls" in fallback
