"""Which tools a reply may call, and whether it must: the `tools` and `tool_choice` of a request, read together.

    tools      tool_choice                                              offered      callable   must call
    none       none, "none" or "auto"                                   -            -          no
    some       "none"                                                   -            -          no
    some       "auto", or left out                                      all          all        no
    some       "required"                                               all          all        yes
    some       {"type": "function", "function": {"name": f}}            all          f          yes
    some       {"type": "allowed_tools", "allowed_tools": {mode, …}}    those        those      as mode says

Tools that are not offered stay out of the prompt, so that the model does not try to call them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from octavo.core.base.errors import InvalidRequest
from octavo.core.serve.tools.calls import Tools
from octavo.core.serve.tools.request import read_tools

ToolChoice = str | Mapping[str, Any] | None

_FORMS = (
    "tool_choice must be none, auto, required, {'type': 'function', 'function': {'name': …}}, or "
    "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': […]}}"
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a reply may do with tools.

    Attributes:
        offered: what the prompt tells of, as the request has them; empty for nothing.
        callable: those that may be called; None: nothing in the reply is a call.
        must_call: the reply consists of calls.
        is_single: it may hold one call at most.
    """

    offered: Sequence[Mapping[str, Any]] = ()
    callable: Tools | None = None
    must_call: bool = False
    is_single: bool = False

    @property
    def loose(self) -> Set[str]:
        """Names of the tools that are not strict: unless calls are demanded, their arguments need not fit a schema."""
        functions = [tool["function"] for tool in self.offered]
        return {function["name"] for function in functions if function.get("strict") is not True}


def read_choice(tools: Sequence[Mapping[str, Any]] | None, choice: ToolChoice, *, parallel: bool = True) -> ToolUse:
    """What a request allows.

    Args:
        parallel: with False, a reply holds one call at most.

    Raises:
        InvalidRequest: a tool is malformed, or the choice is, or it names a tool that is not there.
    """
    known = read_tools(tools or ())
    kind = choice.get("type") if isinstance(choice, Mapping) else "auto" if choice is None else choice
    if not known:
        if kind in ("auto", "none"):
            return ToolUse()
        raise InvalidRequest("tool_choice needs tools to choose from; give tools, or leave it out", field="tool_choice")
    if kind == "none":
        return ToolUse()
    if kind in ("auto", "required"):
        return ToolUse(tools or (), known, kind == "required", not parallel)
    if kind == "function" and isinstance(choice, Mapping):
        name = _named(choice, known, "tool_choice")
        return ToolUse(tools or (), {name: known[name]}, must_call=True, is_single=True)
    if kind == "allowed_tools" and isinstance(choice, Mapping):
        return replace(_allowed(tools or (), choice.get("allowed_tools"), known), is_single=not parallel)
    raise InvalidRequest(_FORMS, field="tool_choice")


def _allowed(tools: Sequence[Mapping[str, Any]], allowed: Any, known: Tools) -> ToolUse:
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise InvalidRequest(_FORMS, field="tool_choice")
    names = {_named(each, known, f"tool_choice.allowed_tools.tools[{i}]") for i, each in enumerate(listed)}
    offered = [tool for tool in tools if tool["function"]["name"] in names]
    return ToolUse(offered, {name: known[name] for name in names}, mode == "required")


def _named(choice: Any, known: Tools, where: str) -> str:
    """The name of a tool in {"type": "function", "function": {"name": …}}."""
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequest(
            f"{where} must be {{'type': 'function', 'function': {{'name': …}}}}", field=f"{where}.function.name"
        )
    if name not in known:
        raise InvalidRequest(f"{where} names none of the tools", field=f"{where}.function.name")
    return name
