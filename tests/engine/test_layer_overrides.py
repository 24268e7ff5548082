"""A vendor replaces a whole layer by name; what it replaces is built wherever a model would build the core's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from octavo.core.backend.registry import BackendRegistry
from octavo.core.base.errors import BackendUnavailable
from octavo.core.base.params import SamplingParams
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
