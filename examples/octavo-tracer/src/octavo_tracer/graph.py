"""A step as a graph: traced once at one bucket's shapes without computing anything, then run as a whole.

    with Graph(buffers) as graph:
        step(buffers) ── ops of the contract ──► record               shapes checked by the meta functions
                     └── torch's own ops ──────► __torch_dispatch__   shapes by torch's meta device
    graph.run(buffers)                                                every node in order, on that step's buffers

    values   │ inputs: token ids, positions, … of a step │ result of node 0 │ result of node 1 │ …

A node's argument is a constant (a weight, an activation buffer, a number) or a Value. A real compiler would now fuse,
place and schedule the nodes; this one replays them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import octavo.core.backend as api


@dataclass(frozen=True)
class Value:
    """What stands at an index of the picture's row."""

    index: int


def inputs(buffers: api.StepBuffers) -> list[Any]:
    """Whatever changes from step to step."""
    slots = [plan.meta.slot_mapping for plan in buffers.plans]
    tensors = [buffers.token_ids_T, buffers.positions_T, buffers.logit_rows_R, buffers.logits_RV, buffers.adapter_T]
    return [*(x for x in tensors if x is not None), *buffers.plans, *slots]


def replaced(arguments: Any, change: Callable[[Any], Any]) -> Any:
    """`change` applied to each argument of an op, those inside its prologue and epilogue too."""

    def each(x: Any) -> Any:
        if isinstance(x, api.Epilogue | api.NormPrologue):
            return replace(x, **{item.name: change(getattr(x, item.name)) for item in fields(x)})
        return change(x)

    return pytree.tree_map(each, arguments)


class Graph(TorchDispatchMode):
    """The nodes of one step, in order; an api.Program. Entered, it takes torch's own ops as nodes."""

    def __init__(self, buffers: api.StepBuffers) -> None:
        super().__init__()
        self._nodes: list[tuple[Callable[..., Any], Any, Any]] = []
        self._values = inputs(buffers)  # while tracing: stand-ins of the right shapes, kept alive for their ids
        self._known = {id(x): Value(index) for index, x in enumerate(self._values)}

    def run(self, buffers: api.StepBuffers) -> None:
        """The whole step."""
        values = inputs(buffers)
        for function, args, kwargs in self._nodes:
            args, kwargs = replaced((args, kwargs), lambda x: values[x.index] if isinstance(x, Value) else x)
            values.append(function(*args, **kwargs))

    def record(self, op: str, function: Callable[..., None], args: Any, kwargs: Any) -> None:
        """An op of the contract: it writes its outputs, whose shapes are known from those of its inputs."""
        for name, wanted in api.output_shapes(op, *args, **kwargs).items():
            out = kwargs.get(name)
            if out is not None and tuple(out.shape) != wanted.shape:
                raise ValueError(f"{op} writes {name} {list(wanted.shape)} and was given {list(out.shape)}")
        self._add(function, args, kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One of torch's own ops: a stand-in of its result's shape, or the tensor that it would write."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise TypeError("a number is read on the host: the step can't be traced; make that op one of your own")
        if func.is_view:
            part = func(*args, **kwargs)  # of a constant it is a constant
            return self._add(func, args, kwargs, part) if id(args[0]) in self._known else part
        if func._schema.is_mutable:
            self._add(func, args, kwargs)
            return kwargs.get("out", args[0])
        meta_args, meta_kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))
        return self._add(func, args, kwargs, torch.empty_like(func(*meta_args, **meta_kwargs), device="cpu"))

    def _add(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any = None) -> Any:
        """Add a node; while the rest is traced, `result` stands for what it gives."""
        self._nodes.append((function, *replaced((args, kwargs), lambda x: self._known.get(id(x), x))))
        if result is not None:
            self._known[id(result)] = Value(len(self._values))
        self._values.append(result)
        return result
