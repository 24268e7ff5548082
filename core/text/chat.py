"""A conversation to the one string, and then the token ids, that a model was trained to read.

    messages ──content parts joined, checked──▶ template (jinja2, sandboxed) ──text──▶ ids with one BOS

Templates come with the model and are not trusted: they run in jinja2's immutable sandbox, see only what they are
given, and are bounded in size, output and time. Whatever goes wrong while one renders is the request's fault
(InvalidRequest), with the template's own words where it has any: a template may refuse a conversation.

Content given as a list of parts: a template that reads parts itself (it renders one text part exactly as it renders
the same plain string) gets the list; for all others the texts are joined with a line feed. The arguments of past calls
come as an object or as its text, whichever the template reads (call_history.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.core.base.errors import CheckpointError, InvalidRequest
from octavo.core.text.call_history import prepare_calls, reads_objects
from octavo.core.text.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 1_000_000
MAX_RENDERED_CHARS = 64_000_000
MAX_RENDER_SECONDS = 10.0
PART_SEPARATOR = "\n"
"""Put between the text parts of a message for templates that take plain strings."""

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")

OPEN_END = "\ufdd0end of the last message\ufdd0"
"""Stands, while a template renders, where a message that is to be continued ends; its first character is no text's."""

Message = Mapping[str, Any]
"""OpenAI's chat message: role, content (a string, None or a list of parts), and what the template knows besides."""


class ChatTemplate:
    """A model's chat template, compiled.

    Args:
        source: jinja source.
        special_tokens: role -> token; the template sees them as variables (`bos_token`, …).
        with_tools: the source for conversations with tools, of a model that has two.
        now: the clock behind `strftime_now`.

    Raises:
        CheckpointError: the source is too long or not valid jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        with_tools: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(
                f"the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE_CHARS}",
                field="chat_template",
            )
        try:
            self._template = _environment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"the chat template is not valid jinja, line {error.lineno}: {error.message}", field="chat_template"
            ) from error
        self._special_tokens = dict(special_tokens)
        self._with_tools = None if with_tools is None else ChatTemplate(with_tools, special_tokens, now=now)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Write out a conversation.

        Args:
            messages: oldest first, at least one.
            add_generation_prompt: end with the words that begin the assistant's turn.
            continue_final_message: end in the middle of the last message, behind the words it has.
            tools: OpenAI's tool definitions.
            variables: further variables of the template (`enable_thinking`, …).

        Raises:
            InvalidRequest: a message is malformed, or the template refuses or fails.
        """
        if tools and self._with_tools is not None:
            return self._with_tools.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=variables,
            )
        if not messages:
            raise InvalidRequest("messages is empty; give at least one message", field="messages")
        checked = [self._prepare(i, message) for i, message in enumerate(messages)]
        if continue_final_message:
            _leave_open(checked[-1], f"messages[{len(checked) - 1}]", add_generation_prompt=add_generation_prompt)
        given: dict[str, Any] = {
            **self._special_tokens,
            "messages": checked,
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) if tools else None,
        }
        for name in variables or {}:
            if name in given:
                raise InvalidRequest(
                    f"chat_template_kwargs may not set {name}, which the template gets anyway",
                    field="chat_template_kwargs",
                )
        text = self._run({**given, **(variables or {})})
        return _cut_open(text) if continue_final_message else text

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template reads lists of content parts itself."""
        probe = "content probe"
        try:
            plain, parts = (
                self._probe([{"role": "user", "content": content}])
                for content in (probe, [{"type": "text", "text": probe}])
            )
        except InvalidRequest:
            return False
        return plain == parts

    @cached_property
    def takes_objects(self) -> bool:
        """Whether the template reads the arguments of past calls as objects, and not as texts."""
        return reads_objects(self._probe)

    def _probe(self, messages: Sequence[Message]) -> str:
        """What a conversation becomes as it is. Raises InvalidRequest."""
        return self._run({**self._special_tokens, "messages": messages, "add_generation_prompt": False, "tools": None})

    def _prepare(self, index: int, message: Message) -> dict[str, Any]:
        """A message as the template gets it: a role, and content it can read."""
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(
                f"messages[{index}] has no role; give system, user, assistant or tool", field=f"messages[{index}].role"
            )
        if message["role"] == "function" or message.get("function_call"):
            raise InvalidRequest(
                f"messages[{index}] has the older form of calls; give tool_calls, and results with the role tool",
                field=f"messages[{index}]",
            )
        content = message.get("content")
        if content is None and message["role"] in ("system", "developer", "user"):
            raise InvalidRequest(
                f"messages[{index}] has no content; give a string or a list of text parts",
                field=f"messages[{index}].content",
            )
        if content is None:  # an assistant's turn that only called tools
            content = ""
        elif isinstance(content, (list, tuple)):
            texts = [_part_text(part, f"messages[{index}].content[{i}]") for i, part in enumerate(content)]
            if self.takes_parts:
                content = [{"type": "text", "text": text} for text in texts]
            else:
                content = PART_SEPARATOR.join(texts)
        elif not isinstance(content, str):
            raise InvalidRequest(
                f"messages[{index}].content is a {type(content).__name__}; give a string or a list of text parts",
                field=f"messages[{index}].content",
            )
        prepared = {**message, "content": content}
        if message.get("tool_calls"):
            where = f"messages[{index}].tool_calls"
            prepared["tool_calls"] = prepare_calls(message["tool_calls"], where, as_objects=self.takes_objects)
        elif "tool_calls" in message:  # none, which templates that ask whether the key is there would count
            del prepared["tool_calls"]
        _name_reasoning(prepared)
        return prepared

    def _run(self, variables: Mapping[str, Any]) -> str:
        deadline = time.monotonic() + MAX_RENDER_SECONDS
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED_CHARS or time.monotonic() > deadline:
                    raise InvalidRequest(
                        f"the chat template wrote more than {MAX_RENDERED_CHARS} characters or ran longer than "
                        f"{MAX_RENDER_SECONDS:g} s on these messages; shorten them",
                        field="messages",
                    )
        except InvalidRequest:
            raise
        except Exception as error:  # a template can fail in any way Python can
            cause = str(error).strip() or type(error).__name__
            raise InvalidRequest(f"the chat template rejected the messages: {cause}", field="messages") from error
        return "".join(pieces)


def chat_template_of(tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate:
    """The chat template of a model, or another one for its tokenizer.

    Raises:
        InvalidRequest: the model has none.
        CheckpointError: it has one that can't be used.
    """
    if source is not None:
        return ChatTemplate(source, tokenizer.special_tokens)
    if tokenizer.chat_template is None:
        raise InvalidRequest("this model has no chat template; use completions", field="messages")
    return ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens, with_tools=tokenizer.tool_chat_template)


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a rendered conversation, with exactly one BOS where the tokenizer adds one, however many
    the template wrote; a tokenizer that adds none takes the text as it is."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    if not tokenizer.adds_bos or bos is None:
        return ids
    start = next((i for i, token_id in enumerate(ids) if token_id != bos), len(ids))
    return [bos, *ids[start:]]


def _name_reasoning(message: dict[str, Any]) -> None:
    """Give what an assistant said to itself under every name that templates read, whichever a client has sent."""
    said = next((message[name] for name in REASONING_NAMES if isinstance(message.get(name), str)), None)
    if said is None:
        return
    for name in REASONING_NAMES:
        # gpt-oss's template takes words or thoughts beside calls, not both, and reads the words as thoughts
        if name != "thinking" or not (message.get("tool_calls") and message["content"]):
            message.setdefault(name, said)


def _leave_open(message: dict[str, Any], where: str, *, add_generation_prompt: bool) -> None:
    """Mark where the words of a prepared message end. Raises InvalidRequest."""
    if add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message goes on with the last message, add_generation_prompt begins one; give one of them",
            field="continue_final_message",
        )
    content = message["content"]
    if not content or message.get("tool_calls"):
        raise InvalidRequest(
            f"continue_final_message needs words to go on from, and no calls, in {where}",
            field="continue_final_message",
        )
    if isinstance(content, str):
        message["content"] = content + OPEN_END
    else:
        content[-1]["text"] += OPEN_END


def _cut_open(text: str) -> str:
    """A rendered conversation up to where the words of its last message end."""
    place = text.rfind(OPEN_END)
    if place < 0:
        raise InvalidRequest(
            "this model's chat template does not write the last message's words, so nothing can go on from them",
            field="continue_final_message",
        )
    return text[:place]


def _part_text(part: Any, where: str) -> str:
    """The text of one content part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    raise InvalidRequest(
        f"{where} is no text, and this model takes text only; give {{'type': 'text', 'text': …}}", field=where
    )


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """The environment that published chat templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda fmt: now().strftime(fmt)
    return environment


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words for training; here it only shows them."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
