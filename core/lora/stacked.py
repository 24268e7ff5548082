"""Adapters of parameters that hold all experts of a layer, as PEFT writes them for target_parameters.

    …mlp.experts.base_layer.lora_A.weight  [E·r, M]   ┐ gate_up_proj     its shapes say which parameter a pair adapts;
    …mlp.experts.base_layer.lora_B.weight  [2I, r·E]  ┘                  the nesting follows no rule to rely on
    …mlp.experts.lora_A.weight             [E·r, I]   ┐ down_proj
    …mlp.experts.lora_B.weight             [M, r·E]   ┘

    A as [E, r, in], B as [out, r, E]: expert e has A[e], B[:, :, e], as if each were a module of its own
    B of gate_up_proj holds gate and up, in halves or in turn: two layers that share their A

So nothing behind the reading knows of stacked parameters. A pair whose layer has no experts (a router's weight) is that
of an ordinary product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from octavo.core.base.errors import CheckpointError
from octavo.core.lora.adapter import Adapter, AdapterLayer, MatrixPair
from octavo.core.lora.parts import LoraWeights


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The experts of one layer, as a model registers them.

    Attributes:
        gate, up, down: checkpoint layers of each expert, in order.
        inner, hidden: I and M.
        in_turn: gate_up_proj has rows of gate and up in turn, and not in halves.
    """

    gate: Sequence[str]
    up: Sequence[str]
    down: Sequence[str]
    inner: int
    hidden: int
    in_turn: bool


def unstacked(adapter: Adapter, stacks: Mapping[str, ExpertStack]) -> dict[str, AdapterLayer]:
    """The layers of an adapter's parameters by checkpoint layer.

    Args:
        stacks: the model's experts, by the name of the module that holds their parameters.

    Raises:
        CheckpointError: a pair fits no parameter, or has another rank than the config says; or one that
            target_parameters selects has no pair.
    """
    layers: dict[str, AdapterLayer] = {}
    for name, pairs in adapter.parameters.items():
        if name in stacks:
            layers.update(_experts(adapter, name, stacks[name], pairs))
        elif len(pairs) == 1:
            layers[name] = AdapterLayer(_checked(adapter, f"{name}.weight", pairs[0], 1), is_embedding=False)
        else:
            raise _error(adapter, name, f"has {len(pairs)} pairs of matrices, and no experts in this model")
    return layers


def _experts(
    adapter: Adapter, name: str, stack: ExpertStack, pairs: Sequence[MatrixPair]
) -> Iterator[tuple[str, AdapterLayer]]:
    shapes = {"gate_up_proj": (2 * stack.inner, stack.hidden), "down_proj": (stack.hidden, stack.inner)}
    found: dict[str, MatrixPair] = {}
    for pair in pairs:
        shape = (pair.b.shape[0], pair.a.shape[1])
        parameter = next((each for each, expected in shapes.items() if expected == shape), None)
        if parameter is None or parameter in found:
            raise _error(adapter, name, f"adapts a parameter of rows and columns {list(shape)}, which this model lacks")
        found[parameter] = pair
    for parameter in shapes:
        if adapter.settings.selects_parameter(f"{name}.{parameter}") is not (parameter in found):
            has = "has weights for" if parameter in found else "lacks"
            raise _error(adapter, name, f"{has} {parameter}, unlike target_parameters says; save the adapter again")
    for parameter, pair in found.items():
        yield from _unstack(adapter, f"{name}.{parameter}", stack, pair)


def _unstack(
    adapter: Adapter, parameter: str, stack: ExpertStack, pair: MatrixPair
) -> Iterator[tuple[str, AdapterLayer]]:
    num_experts = len(stack.down)
    weights = _checked(adapter, parameter, pair, num_experts)
    a_ERK = weights.a_RK.unflatten(0, (num_experts, -1))
    b_NRE = weights.b_NR.unflatten(1, (-1, num_experts))
    for expert in range(num_experts):
        a_RK, b_NR = a_ERK[expert], b_NRE[:, :, expert]
        if parameter.endswith("down_proj"):
            halves = [(stack.down[expert], b_NR)]
        elif stack.in_turn:
            halves = [(stack.gate[expert], b_NR[0::2]), (stack.up[expert], b_NR[1::2])]
        else:
            halves = [(stack.gate[expert], b_NR[: stack.inner]), (stack.up[expert], b_NR[stack.inner :])]
        for layer, rows_NR in halves:
            yield layer, AdapterLayer(LoraWeights(a_RK, rows_NR, weights.scale), is_embedding=False)


def _checked(adapter: Adapter, parameter: str, pair: MatrixPair, num_experts: int) -> LoraWeights:
    rank = adapter.settings.rank_of(parameter) * num_experts
    if (pair.a.shape[0], pair.b.shape[1]) != (rank, rank):
        raise _error(
            adapter,
            parameter,
            f"has A {list(pair.a.shape)} and B {list(pair.b.shape)}, but {num_experts} experts of rank "
            f"{rank // num_experts} by adapter_config.json",
        )
    return LoraWeights(pair.a, pair.b, adapter.settings.scale_of(parameter))


def _error(adapter: Adapter, layer: str, what: str) -> CheckpointError:
    return CheckpointError(f"adapter {adapter.path}: {layer} {what}", field=layer)
