"""Which tool is at fault where calls can't be held to their schemas: each schema is tried by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.structured import StructuredOutput
from octavo.core.grammar.compiler import FormTooSlow
from octavo.core.serve.tools.demand import arguments_json


def blame_schemas(
    tools: Sequence[Mapping[str, Any]], held: Collection[str], check: Callable[[StructuredOutput], None]
) -> None:
    """Try the schemas that a reply is held to, one after the other.

    Args:
        tools: of the request, known to be well-formed.
        held: names of those whose calls must fit their schemas.
        check: raises InvalidRequest for a form that can't be had.

    Raises:
        FormTooSlow: one takes too long; nothing more is tried.
        InvalidRequest: one can't be had; its field is tools[i].function.parameters.
    """
    for i, tool in enumerate(tools):
        function = tool["function"]
        if function["name"] not in held:
            continue
        try:
            # As a grammar, as the whole reply has it, so that nothing is judged differently.
            check(StructuredOutput(grammar=f"start: %json {arguments_json(function.get('parameters') or {})}"))
        except FormTooSlow:
            raise
        except InvalidRequest as error:
            place = f"tools[{i}].function.parameters"
            raise InvalidRequest(f"{place}: {error}", field=place) from error


def refuse_strict(tools: Sequence[Mapping[str, Any]], held: Collection[str]) -> None:
    """Refuse a strict tool of a reply that may call, in a format whose calls can't be held then.

    Raises:
        InvalidRequest: its field is tools[i].function.strict, of the first that is held.
    """
    i = next(i for i, tool in enumerate(tools) if tool["function"]["name"] in held)
    place = f"tools[{i}].function.strict"
    raise InvalidRequest(
        f"{place} can't be kept where the model itself chooses whether to call, in the way in which this model writes "
        "calls; give tool_choice required or the tool's name, or leave strict out",
        field=place,
    )
