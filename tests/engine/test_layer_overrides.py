"""A vendor replaces a whole layer by name; what it replaces is built wherever a model would build the core's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.backends.cpu.ops import CpuOps
from octavo.core.backend import Unsupported
from octavo.core.backend.registry import BackendRegistry
from octavo.core.base.errors import BackendUnavailable, UnsupportedOp
from octavo.core.base.params import SamplingParams
from octavo.core.cli.main import main
from tests.engine.worlds import TinyModels
from tests.fakes import tiny_models

HERE = __name__
calls: list[str] = []


def counted(core: type) -> type:
    class Counted(core):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> None:
            calls.append(core.__name__)
            super().__call__(*args, **kwargs)

    return Counted


def whole(core: type) -> type:
    """Computes by itself, and never calls the core's layer or its op."""

    class Whole(core):  # type: ignore[misc]
        def __call__(self, x: torch.Tensor, *, out: torch.Tensor, residual: Any = None) -> None:
            assert residual is None
            calls.append(core.__name__)
            out.copy_(torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight_M, self.eps))

    return Whole


def unrelated(core: type) -> type:
    return dict


def fails(core: type) -> type:
    raise RuntimeError("no driver")


@pytest.fixture
def override(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Makes the CPU backend's package override layers."""

    def set_to(layers: dict[str, str]) -> None:
        choose = BackendRegistry.choose

        def choose_with(self: BackendRegistry, name: str = "auto") -> Any:
            return replace(choose(self, name), layer_overrides=layers)

        monkeypatch.setattr(BackendRegistry, "choose", choose_with)

    monkeypatch.setattr(f"{HERE}.calls", [])
    return set_to


@pytest.fixture
def no_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the CPU's own rms_norm away."""
    supports = CpuOps.supports

    def supports_less(self: CpuOps, op: str, spec: Any) -> Unsupported | None:
        return Unsupported("no norm today") if op == "rms_norm" else supports(self, op, spec)

    monkeypatch.setattr(CpuOps, "supports", supports_less)


@pytest.mark.usefixtures("no_norm")
def test_an_op_that_a_replacement_never_calls_is_not_missed(
    tiny: TinyModels,
    override: Callable[[dict[str, str]], None],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    override({"RMSNorm": f"{HERE}:whole"})
    prompt = tiny_models.random_prompt(100, 5)
    with tiny.llm("llama", strict_backend=True) as llm:
        (reply,) = llm.generate([prompt], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
        assert "rms_norm" not in {choice.op for choice in llm.op_choices()}
    assert list(reply.outputs[0].token_ids) == tiny_models.greedy(tiny.reference("llama"), prompt, 3)
    assert calls
    model = str(tiny.directory("llama"))
    assert main(["backends", "--ops", model, "--backend", "cpu", "--strict-backend", "--num-kv-blocks", "64"]) == 0
    printed = capsys.readouterr()
    assert "paged_attention" in printed.out
    assert "rms_norm" not in printed.out + printed.err + caplog.text


@pytest.mark.usefixtures("no_norm")
def test_an_op_that_a_replacement_calls_counts_and_is_refused_where_fallbacks_are(
    tiny: TinyModels, override: Callable[[dict[str, str]], None]
) -> None:
    override({"RMSNorm": f"{HERE}:counted"})
    params = SamplingParams(max_tokens=1, temperature=0.0)
    with tiny.llm("llama") as llm:
        llm.generate([[1, 2, 3]], params)
        (norm,) = (choice for choice in llm.op_choices() if choice.op == "rms_norm")
        assert (norm.implementation, norm.reason, norm.calls) == ("fallback", "no norm today", len(calls))
    with tiny.llm("llama", strict_backend=True) as llm, pytest.raises(UnsupportedOp, match="rms_norm would fall back"):
        llm.generate([[1, 2, 3]], params)


@pytest.mark.usefixtures("no_norm")
def test_an_op_of_a_layer_that_stands_is_refused_at_the_start(
    tiny: TinyModels, override: Callable[[dict[str, str]], None]
) -> None:
    override({"Linear": f"{HERE}:counted"})
    with pytest.raises(BackendUnavailable, match=r"no kernel of its own for rms_norm \(no norm today\)"):
        tiny.llm("llama", strict_backend=True)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("layer", ["Attention", "Embedding", "Linear", "OutputHead", "RMSNorm"])
def test_a_layer_is_replaced_everywhere(
    tiny: TinyModels, override: Callable[[dict[str, str]], None], family: str, layer: str
) -> None:
    override({layer: f"{HERE}:counted"})
    model = tiny.reference(family)
    prompt = tiny_models.random_prompt(100, 5)
    with tiny.llm(family) as llm:
        (reply,) = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
    assert list(reply.outputs[0].token_ids) == tiny_models.greedy(model, prompt, 1)
    layers = {"llama": 3, "gemma3": 4}[family]
    a_layer_has = {"Attention": 1, "Linear": 4, "RMSNorm": {"llama": 2, "gemma3": 6}[family]}
    once = 0 if layer in ("Attention", "Linear") else 1
    assert calls == [layer] * (a_layer_has.get(layer, 0) * layers + once)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"RMSNrom": f"{HERE}:counted"}, "overrides layer 'RMSNrom', which there is not; did you mean 'RMSNorm'"),
        ({"RMSNorm": f"{HERE}:unrelated"}, "RMSNorm returned <class 'dict'>, which is no subclass"),
        ({"RMSNorm": f"{HERE}:fails"}, "failed: RuntimeError: no driver; upgrade octavo or report it"),
        ({"RMSNorm": f"{HERE}:missing"}, "layer_overrides.'RMSNorm'. .*missing of package octavo can't be imported"),
    ],
)
def test_an_override_that_can_not_be_names_the_package(
    tiny: TinyModels, override: Callable[[dict[str, str]], None], layers: dict[str, str], message: str
) -> None:
    override(layers)
    with pytest.raises(BackendUnavailable, match=message):
        tiny.llm("llama")
