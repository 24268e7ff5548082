"""docs/openai-compatibility.md, written from the bodies' models and from the tests that use their fields.

    python -m tests.serve.compatibility    writes the page; tests/serve/test_compatibility.py compares it

A field is refused where its model says so, and without effect where WITHOUT_EFFECT says so. A test counts where the
field stands in its source as a keyword, an attribute or a text of its own; tests of junk and of refusals do not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo.core.serve.chat.schema import ChatCompletionRequest
from octavo.core.serve.completions.schema import CompletionRequest
from octavo.core.serve.messages.schema import MessagesRequest
from octavo.core.serve.pooling_schema import EmbeddingRequest
from octavo.core.serve.responses.schema import ResponsesRequest
from octavo.core.serve.schema import CheckedBody, StreamOptions
from octavo.core.serve.token_schema import DetokenizeRequest, TokenizeRequest

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs/openai-compatibility.md"
MAX_TESTS = 2

BODIES: Mapping[str, type[CheckedBody]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}

BOTH = ("extensions", "structured", "refusals")
FILES: Mapping[str, tuple[str, ...]] = {
    "/v1/completions": ("completions", *BOTH),
    "/v1/chat/completions": ("chat", "tool", *BOTH),
    "/v1/responses": ("responses",),
    "/v1/messages": ("messages",),
    "/v1/embeddings": ("pooling",),
    "/tokenize": ("extensions",),
    "/detokenize": ("extensions",),
}
"""Path -> what stands in the names of the files that test it."""

WITHOUT_EFFECT = {
    "user", "store", "prediction", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "cache_control", "include_obfuscation",
}  # fmt: skip
"""Hints that change no answer."""

NOTES: Mapping[str, str] = {
    "best_of": "at least `n`; above it not in a stream",
    "logprobs": "completions: up to 1,024",
    "metadata": "chat, messages: without effect",
    "prompt_logprobs": "up to 1,024; not in a stream",
    "stream_options": "only with `stream`",
    "truncate_prompt_tokens": "keeps the end of the prompt; -1 leaves room for `max_tokens`",
    "functions": "give `tools`",
    "function_call": "give `tool_choice`",
}

HEAD = """# What of OpenAI's API is supported

Each parameter of each body: whether it is honoured, and tests in `tests/serve` that use it. Refused is a 400 that names
the field, unless its value asks for nothing. Any other field is ignored and named in the header
`x-octavo-ignored-fields`, or refused under `--strict-api`. What parameters mean, and what replies look
like: [http.md](http.md).

Written by `python -m tests.serve.compatibility` from the code; a test fails when they differ. Where the last column is
empty, no test uses the parameter.
"""


def page() -> str:
    """The whole page."""
    uses = sources_of_tests()
    return HEAD + "".join(_section(path, body, uses) for path, body in BODIES.items())


def rows(path: str, body: type[CheckedBody], uses: Mapping[str, set[str]]) -> Iterator[tuple[str, str, list[str]]]:
    """(field, whether it is supported, the tests that use it)."""
    for name in body.model_fields:
        yield name, "without effect" if name in WITHOUT_EFFECT else "yes", _first(path, name, uses)
        if name == "stream_options" and body.model_fields[name].annotation == StreamOptions | None:
            for inner in StreamOptions.model_fields:
                supported = "without effect" if inner in WITHOUT_EFFECT else "yes"
                yield f"{name}.{inner}", supported, _first(path, inner, uses)
    for name, harmless in body.UNSUPPORTED.items():
        allowed = f" (but for {', '.join(f'`{each}`' for each in harmless)})" if harmless else ""
        yield name, f"refused{allowed}", []


def _section(path: str, body: type[CheckedBody], uses: Mapping[str, set[str]]) -> str:
    lines = [f"\n## `POST {path}`\n", "| parameter | supported | tested by |", "|---|---|---|"]
    for name, supported, tests in rows(path, body, uses):
        note = f"; {NOTES[name]}" if name in NOTES else ""
        lines.append(f"| `{name}` | {supported}{note} | {', '.join(f'`{test}`' for test in tests)} |")
    return "\n".join(lines) + "\n"


def _first(path: str, name: str, uses: Mapping[str, set[str]]) -> list[str]:
    found = [test for test, names in uses.items() if name in names]
    return [test for word in FILES[path] for test in sorted(found) if word in test.partition("::")[0]][:MAX_TESTS]


def sources_of_tests() -> dict[str, set[str]]:
    """file::function -> the names in its source, for each test."""
    return dict(_tests())


def _tests() -> Iterator[tuple[str, set[str]]]:
    for path in sorted(HERE.glob("test_*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        values = {ast.unparse(node.target): node for node in body if isinstance(node, ast.AnnAssign)}
        for node in body:
            is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
            if is_test and not any(word in node.name for word in ("junk", "wrong", "refused", "no_error")):
                yield f"{path.stem}::{node.name}", set(_names(node, values))


def _names(node: ast.AST, values: Mapping[str, ast.AST]) -> Iterator[Any]:
    """The names in a node and in the module's values that it uses."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and each.id in values:
            yield from _names(values[each.id], {})
        if isinstance(each, ast.keyword):
            yield each.arg
        elif isinstance(each, ast.Attribute):
            yield each.attr
        elif isinstance(each, ast.Constant):
            yield each.value


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
