"""A step as a graph: traced once at one bucket's shapes without computing anything, then run as a whole.

    step(buffers) ── ops of the contract ──► Graph.record      shapes checked by the meta functions (`output_shapes`)
                 └── torch's own ops ──────► Trace             shapes by torch's meta device
    Graph.run(buffers)                                         every node in order, on that step's buffers

A node's argument is a constant (a weight, an activation buffer, a number), an Input, found in each step's StepBuffers,
or a Value, what an earlier node gave. A real compiler would now fuse, place and schedule the nodes; this one replays
them. What needs numbers on the host while it is traced can't be part of a graph, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import octavo.core.backend as api


@dataclass(frozen=True)
class Input:
    """A part of a step's buffers."""

    read: Callable[[api.StepBuffers], Any]


@dataclass(frozen=True)
class Value:
    """The result of node `index`."""

    index: int


class Graph:
    """The nodes of one step, in order."""

    def __init__(self, buffers: api.StepBuffers) -> None:
        self._nodes: list[tuple[Callable[..., Any], Any, Any]] = []
        self._known: dict[int, Input | Value] = {}
        self._alive: list[Any] = []  # what is known by its id must not be collected while tracing
        for name in ("token_ids_T", "positions_T", "logit_rows_R", "logits_RV"):
            self._know(getattr(buffers, name), Input(lambda b, name=name: getattr(b, name)))
        for g, plan in enumerate(buffers.plans):
            self._know(plan, Input(lambda b, g=g: b.plans[g]))
            self._know(plan.meta.slot_mapping, Input(lambda b, g=g: b.plans[g].meta.slot_mapping))

    def __len__(self) -> int:
        return len(self._nodes)

    def record(self, op: str, function: Callable[..., None], args: Any, kwargs: Any) -> None:
        """An op of the contract: it writes its outputs, whose shapes are known from those of its inputs."""
        inputs = {name: value for name, value in kwargs.items() if name not in ("out", "out_q", "out_k", "lse")}
        for name, wanted in api.output_shapes(op, *args, **inputs).items():
            out = kwargs.get(name)
            if out is not None and tuple(out.shape) != wanted.shape:
                raise ValueError(f"{op} writes {name} {list(wanted.shape)} and was given {list(out.shape)}")
        self._add(function, args, kwargs)

    def record_torch(self, function: Any, args: Any, kwargs: Any) -> Any:
        """One of torch's own ops. Returns a stand-in of the right shape, or the tensor that the op would write."""
        if function is torch.ops.aten._local_scalar_dense.default:
            raise TypeError("a number is read on the host: the step can't be traced; make that op one of your own")
        leaves = pytree.tree_leaves((args, kwargs))
        if function.is_view and not any(id(x) in self._known for x in leaves):
            return function(*args, **kwargs)  # a part of a constant is a constant
        node = self._add(function, args, kwargs)
        if function._schema.is_mutable:
            return kwargs.get("out", args[0])
        if function.is_view:
            return self._know(function(*args, **kwargs), node)
        shaped = function(*pytree.tree_map_only(torch.Tensor, _meta, args), **kwargs)
        return self._know(torch.empty_strided(shaped.size(), shaped.stride(), dtype=shaped.dtype), node)

    def run(self, buffers: api.StepBuffers) -> None:
        """The whole step."""
        values: list[Any] = []

        def bound(x: Any) -> Any:
            return x.read(buffers) if isinstance(x, Input) else values[x.index] if isinstance(x, Value) else x

        for function, args, kwargs in self._nodes:
            values.append(function(*pytree.tree_map(bound, args), **pytree.tree_map(bound, kwargs)))

    def _add(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Value:
        symbols = pytree.tree_map(lambda x: self._known.get(id(x), x), (args, kwargs))
        self._nodes.append((function, *symbols))
        return Value(len(self._nodes) - 1)

    def _know(self, thing: Any, symbol: Input | Value) -> Any:
        self._known[id(thing)] = symbol
        self._alive.append(thing)
        return thing


class Trace(TorchDispatchMode):
    """While active, torch's own ops become nodes of a graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._graph.record_torch(func, args, kwargs or {})


def _meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
