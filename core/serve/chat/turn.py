"""One turn of a conversation, from messages and tools to what the engine is given and how its reply is read.

    messages ─┐                          ┌─▶ token_ids ──▶ engine
    tools ────┼─▶ read_turn ──▶ ChatTurn ┼─▶ params ─────▶ engine     with what the parsers need: visible markers,
    params ───┘                          │                            and a form where calls are demanded
                                         └─▶ open_parser() ─────────▶ one for each choice: text, reasoning, calls

Every API that talks (chat completions, Responses, Messages) reads its turns here, so that they agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.params import SamplingParams
from octavo.core.base.structured import FIELD, StructuredOutput
from octavo.core.engine.prompts import Message
from octavo.core.grammar.compiler import FormTooSlow
from octavo.core.serve.chat.schema import ChatCompletionRequest
from octavo.core.serve.serving import Serving
from octavo.core.serve.tools.blame import blame_schemas, refuse_strict
from octavo.core.serve.tools.calls import Tools
from octavo.core.serve.tools.choice import ToolChoice, ToolUse, read_choice
from octavo.core.serve.tools.deltas import ToolParser
from octavo.core.serve.tools.demand import Calls, can_hold_strict, demanded, framed, strict
from octavo.core.serve.tools.registry import ReplyFormat
from octavo.core.serve.tools.writing import writable, writing_of
from octavo.core.serve.wording import worded
from octavo.core.text.tokenizer import Tokenizer

END_TOKENS = 32
"""Of a prompt, whose text tells whether the reply begins as reasoning."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """See the module.

    Attributes:
        token_ids: of the prompt.
        params: what the engine is asked for.
        form: how the reply is written.
        tools: that the reply may call; None: nothing in it is a call.
        prompt_end: the last text of the prompt, or what stands for it where the reply goes on with a message.
    """

    token_ids: list[int]
    params: SamplingParams
    form: ReplyFormat
    tools: Tools | None
    prompt_end: str

    def open_parser(self) -> ToolParser:
        """A parser for one choice."""
        return self.form.open_parser(self.tools, self.prompt_end)


async def read_turn(
    serving: Serving,
    messages: Sequence[Message],
    params: SamplingParams,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: ToolChoice = None,
    parallel_tool_calls: bool = True,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> ChatTurn:
    """Read a conversation.

    Args:
        messages: in the form of OpenAI's chat completions.
        params: what the request asks of the sampler.
        tools, tool_choice: in the same form.
        parallel_tool_calls: with False, a reply that must call makes one call.
        add_generation_prompt, continue_final_message, variables: of `ChatTemplate.render`.
        chat_template: in place of the model's own, where the server allows it.

    Raises:
        InvalidRequest: naming the field.
    """
    variables = _defaults(serving.settings.chat_template_kwargs) | dict(variables or {})
    use = await asyncio.to_thread(read_choice, tools, tool_choice, parallel=parallel_tool_calls)
    _check_demand(use, params)
    source = _template_source(serving, chat_template, with_tools=bool(use.offered))
    _check_template(source, use, variables)
    token_ids = await serving.engine.read_chat(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template=chat_template,
        tools=use.offered,
        variables=variables,
    )
    said = _words(messages[-1]) if continue_final_message else None
    return await asyncio.to_thread(_checked_turn, serving, token_ids, params, use, source or "", said, tools or ())


def _checked_turn(
    serving: Serving,
    token_ids: list[int],
    params: SamplingParams,
    use: ToolUse,
    source: str,
    said: str | None,
    tools: Sequence[Mapping[str, Any]],
) -> ChatTurn:
    """The turn, whose form can be had. Raises InvalidRequest, which names the tool at fault."""
    settings = serving.settings
    form = ReplyFormat.of(settings.tool_call_parser, settings.reasoning_parser, source)
    is_loose = params.structured is None and not use.must_call
    held = (use.callable or {}).keys() - (use.loose if is_loose else set())
    if is_loose and held and not can_hold_strict(form):
        refuse_strict(tools, held)
    try:
        turn = _turn(serving, token_ids, params, use, source, said, form)
        if turn.params.structured is not None:
            serving.engine.check_form(turn.params.structured)
    except FormTooSlow:
        raise
    except InvalidRequest:
        blame_schemas(tools, held, serving.engine.check_form)
        raise
    return turn


def _turn(
    serving: Serving,
    token_ids: list[int],
    params: SamplingParams,
    use: ToolUse,
    source: str,
    said: str | None,
    form: ReplyFormat,
) -> ChatTurn:
    """The turn of a prompt; `said` is what the message has that it goes on with. Raises InvalidRequest."""
    tokenizer = serving.engine.tokenizer
    assert tokenizer is not None  # it has just read the chat
    form = _held(form, use, params)
    if said is None:
        prompt_end = tokenizer.decode(token_ids[-END_TOKENS:], skip_special_tokens=False)
    else:
        prompt_end = form.end_of(said)
    params = params.with_(
        visible_special_token_ids=(*params.visible_special_token_ids, *_visible_ids(tokenizer, form, use)),
        structured=_structured(params, form, use, tokenizer, source, prompt_end),
    )
    return ChatTurn(token_ids, params, form, use.callable, prompt_end)


async def turn_of(serving: Serving, body: ChatCompletionRequest) -> ChatTurn:
    """The turn that a body of chat completions asks for. Raises InvalidRequest."""
    body.refuse_unsupported()
    params = body.sampling_params()
    with worded({FIELD: body.form_field}):
        turn = await read_turn(
            serving,
            body.messages,
            params,
            tools=body.tools,
            tool_choice=body.tool_choice,
            parallel_tool_calls=body.allows_several_calls,
            add_generation_prompt=body.begins_turn,
            continue_final_message=bool(body.continue_final_message),
            chat_template=body.chat_template,
            variables=body.template_variables(),
        )
    cut = body.truncated(turn.token_ids, serving.engine.max_model_len, params.max_tokens)
    return replace(turn, token_ids=cut)


def _template_source(serving: Serving, given: str | None, *, with_tools: bool) -> str | None:
    """The template that a request is rendered by; None where the model has none."""
    if given is None:
        tokenizer = serving.engine.tokenizer
        if tokenizer is None or not with_tools or tokenizer.chat_template is None:
            return None if tokenizer is None else tokenizer.chat_template
        return tokenizer.tool_chat_template or tokenizer.chat_template
    if not serving.settings.trust_request_chat_template:
        raise InvalidRequest(
            "chat_template is taken only by a server that runs with --trust-request-chat-template; leave it out",
            field="chat_template",
        )
    return given


def _defaults(texts: Mapping[str, str]) -> dict[str, Any]:
    """The server's own variables of a template: JSON where a text is some, and the text itself otherwise."""
    values: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            values[name] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            values[name] = text
    return values


def _check_template(source: str | None, use: ToolUse, variables: Mapping[str, Any] | None) -> None:
    """Refuse what the template would pass over. A model without a template is refused where it is asked for."""
    asked = {"tools": bool(use.offered), "documents": bool((variables or {}).get("documents"))}
    for name, is_asked in asked.items():
        if is_asked and source is not None and name not in source:
            raise InvalidRequest(
                f"this model's chat template takes no {name}, so the model would never hear of them; leave {name} out",
                field=name,
            )


def _check_demand(use: ToolUse, params: SamplingParams) -> None:
    if use.must_call and params.structured is not None:
        raise InvalidRequest(
            "tool_choice demands calls, and another field sets the form of the reply; leave one of them out",
            field="tool_choice",
        )


def _held(form: ReplyFormat, use: ToolUse, params: SamplingParams) -> ReplyFormat:
    """How a reply is written that may call: in a way to which it can be held, where it is held to any."""
    is_held = use.callable is not None and (use.must_call or params.structured is not None)
    return writable(form) if is_held else form


def _structured(
    params: SamplingParams, form: ReplyFormat, use: ToolUse, tokenizer: Tokenizer, source: str, prompt_end: str
) -> StructuredOutput | None:
    """The form of the whole reply, of calls, reasoning and the form that was asked for; None for free text."""
    is_strict = use.callable is not None and not use.callable.keys() <= use.loose
    if params.structured is None and not use.must_call and not is_strict:
        return None

    def special_id(text: str) -> int | None:
        token_id = tokenizer.token_id(text)
        return token_id if token_id in tokenizer.special_ids else None

    calls = None
    if use.callable is not None:
        calls = Calls(use.callable, writing_of(form, tokenizer, source), use.is_single)
    inside = form.begins_inside(prompt_end)
    if params.structured is not None:
        return framed(params.structured, calls, form, special_id, inside=inside)
    assert calls is not None  # they are demanded, or must be right
    if use.must_call:
        return demanded(calls, form, special_id, inside=inside)
    return strict(replace(calls, loose=use.loose), form, special_id, inside=inside)


def _visible_ids(tokenizer: Tokenizer, form: ReplyFormat, use: ToolUse) -> list[int]:
    """Special tokens that the parser must see."""
    found = map(tokenizer.token_id, form.markers(with_calls=use.callable is not None))
    return [token_id for token_id in found if token_id in tokenizer.special_ids]


def _words(message: Message) -> str:
    """What a message that is to be continued says."""
    content = message.get("content")
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())
