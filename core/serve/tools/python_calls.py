"""Calls that a model wrote as Python: `f(city="Rome", days=3)`. They are read, never run.

Only names with keyword arguments of plain values (texts, numbers, true, false, none, lists, dicts) are calls; JSON's
`true`, `false` and `null` are taken too.
"""

from __future__ import annotations

import ast
from collections.abc import Container
from typing import Any

from octavo.core.serve.tools.calls import Call, call_of

_NAMES = {"true": True, "false": False, "null": None}


def calls_of_list(text: str | None, among: Container[str] | None) -> list[Call] | None:
    """The calls in `[f(a=1), g()]`; None if it is anything else."""
    tree = None if text is None else _parse(text, "eval")
    if not isinstance(tree, ast.Expression) or not isinstance(tree.body, ast.List) or not tree.body.elts:
        return None
    return _calls(tree.body.elts, among)


def calls_of_code(text: str, among: Container[str]) -> list[Call] | None:
    """The calls in lines of code, each a call by itself, a list of calls, or a call in `print()`; None if there is
    anything else."""
    tree = _parse(text.strip(), "exec")
    if not isinstance(tree, ast.Module) or not tree.body:
        return None
    found: list[ast.expr] = []
    for line in tree.body:
        if not isinstance(line, ast.Expr):
            return None
        value = line.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "print" and len(value.args) == 1:
            value = value.args[0]
        found += value.elts if isinstance(value, ast.List) else [value]
    return _calls(found, among) if found else None


def _parse(text: str, mode: str) -> ast.AST | None:
    try:
        return ast.parse(text, mode=mode)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _calls(found: list[ast.expr], among: Container[str] | None) -> list[Call] | None:
    try:
        calls = [_call(each, among) for each in found]
    except (ValueError, RecursionError):
        return None
    return [call for call in calls if call is not None] if None not in calls else None


def _call(node: ast.expr, among: Container[str] | None) -> Call | None:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        return None
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            return None
        arguments[keyword.arg] = _value(keyword.value)
    return call_of(ast.unparse(node.func), arguments, among)


def _value(node: ast.expr | None) -> Any:
    """The plain value of a node. Raises ValueError."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    raise ValueError("no plain value")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("no text as key")
